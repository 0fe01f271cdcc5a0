"""The manifests are what Kubernetes takes, and speak of settings and options that exist."""

from __future__ import annotations

import os
import re
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import manifests
import pytest
import typer
from manifests import (
    ALL_PODS,
    DEPLOY,
    JOBS,
    KUBERNETES,
    OVERLAYS,
    ROOT,
    SERVERS,
    SERVING,
    USING_BUCKET,
    Json,
    Pod,
    compose,
    each,
    of_kind,
    option,
    pods,
    read_settings,
)
from terraform_files import TERRAFORM, Module

from ec_s3.cli.app import app
from ec_s3.cli.output import ExitCode
from ec_s3.config import ECConfig
from ec_s3.metric_table import METRICS
from ec_s3.prewarm.shard import Shard
from ec_s3.sources import parse_size
from ec_s3.url import S3Location, parse_url

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VERSIONS = ("1.33", "1.37")
"""Releases of Kubernetes: the first that has all that is used, and the newest."""

OF_OPERATORS: dict[str, dict[str, set[str]]] = {
    "PodMonitor": {
        "selector": {"matchLabels"},
        "podMetricsEndpoints": {"port", "path", "interval"},
    },
    "PolicyBinding": {"application": {"namespace", "serviceaccount"}, "policies": set()},
}
"""Fields of kinds that are not Kubernetes' own, as far as they are used."""

GIB = 1 << 30
VLLM_BYTES = 12 * GIB
"""What vLLM's own processes are given at least, beside everything that can be counted."""

COMMANDS: Any = typer.main.get_command(app)


def check_fields(document: Json, version: str) -> None:
    known = OF_OPERATORS.get(document["kind"])
    if known is None:
        kubernetes_validate.validate(document, version, strict=True)
        return
    assert document["spec"].keys() == known.keys()
    for name, inner in document["spec"].items():
        for item in inner if isinstance(inner, list) else [inner]:
            assert not isinstance(item, dict) or item.keys() == known[name]


def command_line(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """What `ec-s3` reads from its arguments: the command, and its options."""
    name, *rest = arguments
    with COMMANDS.commands[name].make_context(name, rest) as context:
        return name, context.params


class TestForm:
    @pytest.mark.parametrize("version", VERSIONS)
    @pytest.mark.parametrize("overlay", OVERLAYS)
    def test_kubernetes_knows_every_field(self, overlay: str, version: str) -> None:
        for document in manifests.rendered(overlay):
            check_fields(document, version)

    @pytest.mark.parametrize("path", ["namespace.yaml", "minio/policy-bindings.yaml"])
    def test_what_is_applied_by_itself_has_the_right_form(self, path: str) -> None:
        for document in manifests.documents(KUBERNETES / path):
            check_fields(document, VERSIONS[-1])

    @pytest.mark.parametrize("kind", ["Deployment", "PodMonitor"])
    def test_misspelt_field_is_found(self, kind: str) -> None:
        (document,) = of_kind("eks", kind)
        wrong = {**document, "spec": {**document["spec"], "replica": 1}}
        with pytest.raises((kubernetes_validate.ValidationError, AssertionError)):
            check_fields(wrong, VERSIONS[-1])

    def test_every_file_is_used(self) -> None:
        used = {KUBERNETES / "namespace.yaml", KUBERNETES / "minio/policy-bindings.yaml"}
        for path in KUBERNETES.rglob("kustomization.yaml"):
            (document,) = manifests.documents(path)
            names = [*document.get("resources", ()), *document.get("components", ())]
            names += [patch["path"] for patch in document.get("patches", ())]
            for generator in document.get("configMapGenerator", ()):
                names += generator.get("envs", ())
            used |= {path, *((path.parent / name).resolve() for name in names)}
        files = {path for path in KUBERNETES.rglob("*") if path.is_file()}
        assert {path for path in used if path.is_file()} == files
        folders = {KUBERNETES / "overlays" / name for name in OVERLAYS}
        assert {path.parent for path in files if path.name == "kustomization.yaml"} == folders | {
            path for path in used if path.is_dir()
        }

    def test_copies_are_alike(self) -> None:
        (job,), (cron_job,) = (of_kind("eks-prewarm", kind) for kind in ("Job", "CronJob"))
        templates = [deepcopy(manifests.template_of(document)) for document in (job, cron_job)]
        for template in templates:
            del template["spec"]["containers"][0]["args"]
        assert templates[0] == templates[1]
        patches = [KUBERNETES / "minio" / name for name in ("pod-template.yaml", "cron-job.yaml")]
        of_jobs, of_cron_jobs = (
            [line for line in path.read_text().splitlines() if not line.startswith("#")]
            for path in patches
        )
        at = "path: /spec/jobTemplate/spec/template/"
        assert [line.replace(at, "path: /spec/template/") for line in of_cron_jobs] == of_jobs


class TestReferences:
    @each(ALL_PODS)
    def test_pod_names_what_is_there(self, overlay: str, pod: Pod) -> None:
        accounts = {account["metadata"]["name"] for account in of_kind(overlay, "ServiceAccount")}
        if pod.uses_bucket:
            assert pod.spec["serviceAccountName"] in accounts
        mounted = {mount["name"] for mount in pod.container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod.spec["volumes"]}
        assert re.fullmatch(r"registry\.example/ec-s3:v[\d.]+", pod.container["image"])

    @pytest.mark.parametrize("overlay", SERVERS)
    def test_services_and_monitor_find_their_pods(self, overlay: str) -> None:
        def chosen(selector: Mapping[str, str]) -> list[Pod]:
            return [pod for pod in pods(overlay) if selector.items() <= pod.labels.items()]

        for service in of_kind(overlay, "Service"):
            ports = {port["targetPort"] for port in service["spec"]["ports"]}
            (pod,) = chosen(service["spec"]["selector"])
            assert ports == {port["name"] for port in pod.container["ports"]}
        (monitor,) = of_kind(overlay, "PodMonitor")
        monitored = chosen(monitor["spec"]["selector"]["matchLabels"])
        assert monitored == [pod for pod in pods(overlay) if pod.uses_bucket]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert {pod.container["ports"][0]["name"] for pod in monitored} == {endpoint["port"]}

    @pytest.mark.parametrize("overlay", ["eks-disaggregated", "minio-disaggregated"])
    def test_only_the_proxy_speaks_to_encoder_and_decoder(self, overlay: str) -> None:
        (proxy,) = [pod for pod in pods(overlay) if not pod.uses_bucket]
        addresses = {
            f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}": service
            for service in of_kind(overlay, "Service")
        }
        asked = [addresses[option(proxy.arguments(), name)] for name in ("producer", "consumer")]
        roles = [service["spec"]["selector"]["app.kubernetes.io/component"] for service in asked]
        assert roles == ["encoder", "decoder"]
        (policy,) = of_kind(overlay, "NetworkPolicy")
        (expression,) = policy["spec"]["podSelector"]["matchExpressions"]
        assert expression["values"] == roles
        ((rule),) = policy["spec"]["ingress"]
        assert rule["from"][0]["podSelector"]["matchLabels"].items() <= proxy.labels.items()
        assert proxy.container["command"][1].startswith("/opt/ec_s3/")

    def test_accounts_are_those_that_terraform_gives_rights_to(self) -> None:
        text = (ROOT / "terraform/examples/eks/main.tf").read_text()
        accounts = {
            (account["metadata"]["namespace"], account["metadata"]["name"])
            for overlay in ("eks", "eks-prewarm")
            for account in of_kind(overlay, "ServiceAccount")
        }
        pattern = r'namespace\s*=\s*"([^"]+)"\s*service_account\s*=\s*"([^"]+)"'
        assert set(re.findall(pattern, text)) == accounts

    @pytest.mark.parametrize("overlay", SERVERS)
    def test_place_is_the_one_that_terraform_gives_rights_to(self, overlay: str) -> None:
        """Elsewhere in the bucket every request is denied."""
        made = "minio" if overlay.startswith("minio") else "eks"
        (call,) = (
            call
            for call in Module(TERRAFORM / "examples" / made).named("module").values()
            if "bucket_name" in call
        )
        module = Module(TERRAFORM / "examples" / made / call["source"])
        prefix = call.get("prefix", module.named("variable")["prefix"]["default"])
        (settings,) = (
            found["data"]
            for found in of_kind(overlay, "ConfigMap")
            if found["metadata"]["name"] == "ec-s3-settings"
        )
        location = parse_url(settings["EC_S3_URL"])
        assert isinstance(location, S3Location)
        assert (location.bucket, location.prefix) == (call["bucket_name"], prefix)

    def test_accounts_are_those_that_minio_is_told_of(self) -> None:
        bindings = manifests.documents(KUBERNETES / "minio/policy-bindings.yaml")
        bound = {tuple(binding["spec"]["application"].values()) for binding in bindings}
        assert bound == {
            (account["metadata"]["namespace"], account["metadata"]["name"])
            for overlay in ("minio", "minio-disaggregated", "minio-prewarm")
            for account in of_kind(overlay, "ServiceAccount")
        }


class TestSettings:
    @each(USING_BUCKET)
    def test_every_setting_exists_and_can_be_used(
        self, overlay: str, pod: Pod, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = read_settings(monkeypatch, pod.environment)
        assert config.strict
        assert isinstance(config.location(), S3Location)
        given = {name for name in ECConfig.model_fields if config.source(name) != "default"}
        named = {name for name, value in pod.environment.items() if value}
        assert {f"EC_S3_{name.upper()}" for name in given - {"strict"}} < named
        renews = config.object_lifetime is not None
        assert renews == (pod.kind == "Deployment" and "disaggregated" not in overlay)

    @each(ALL_PODS)
    def test_names_of_services_become_no_settings(self, overlay: str, pod: Pod) -> None:
        assert pod.spec["enableServiceLinks"] is False

    def test_misspelt_setting_stops_the_server(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match=r"did you mean flush_timeout\?"):
            read_settings(monkeypatch, {"EC_S3_FLUSH_TIMOUT": "1s"})

    @pytest.mark.parametrize(
        "path",
        [
            *(path for path in DEPLOY.rglob("*") if path.suffix in {".yaml", ".env"}),
            DEPLOY / "Dockerfile",
            ROOT / "docs/how-to/kubernetes.md",
        ],
        ids=lambda path: path.relative_to(ROOT).as_posix(),
    )
    def test_whatever_is_named_exists(self, path: Path) -> None:
        text = path.read_text()
        settings = {f"EC_S3_{name.upper()}" for name in ECConfig.model_fields}
        # The variable that a Service of that name would make: named as what must not happen.
        assert set(re.findall(r"\bEC_S3_[A-Z0-9_]+", text)) <= settings | {"EC_S3_PORT"}
        suffixes = r"(?:_total|_bucket|_sum|_count)?"
        metrics = re.findall(r"vllm:ec_s3_([a-z_]+)", text)
        for name in metrics:
            assert any(re.fullmatch(f"{known}{suffixes}", name) for known in METRICS), name
        commands = re.findall(r"`(?:ec-s3 |kubectl exec [^`]*-- ec-s3 )([a-z]+)", text)
        assert set(commands) <= COMMANDS.commands.keys()


class TestServers:
    @each(SERVING)
    def test_connector_has_the_role_of_the_server(self, overlay: str, pod: Pod) -> None:
        transfer = manifests.transfer_config(pod.arguments())
        component = pod.labels.get("app.kubernetes.io/component", "")
        roles = {"": "ec_both", "encoder": "ec_producer", "decoder": "ec_consumer"}
        assert transfer == {
            "ec_connector": "ECS3Connector",
            "ec_connector_module_path": "ec_s3.connector",
            "ec_role": roles[component],
        }
        assert ("disaggregated" in overlay) == bool(component)

    @pytest.mark.vllm
    @pytest.mark.filterwarnings("ignore")  # vLLM's own, as it is imported
    def test_vllm_knows_every_option(self) -> None:
        if not os.environ.get("REQUIRE_VLLM"):
            pytest.importorskip("vllm", exc_type=ImportError)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
        lines = [["--model", *pod.arguments()] for _, pod in SERVING]
        lines += [["--model", *compose()["services"]["vllm"]["command"]]]
        for _, pod in JOBS:
            _, options = command_line(pod.arguments(JOB_COMPLETION_INDEX="0"))
            lines.append([f"--model={options['model']}", *options["options"]])
        for line in lines:
            assert parser.parse_known_args(line)[1] == []

    @each(SERVING)
    def test_uploads_are_finished_before_the_pod_ends(
        self, overlay: str, pod: Pod, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = read_settings(monkeypatch, pod.environment)
        shutdown = int(option(pod.arguments(), "shutdown-timeout"))
        assert shutdown >= config.flush_timeout + 5
        pause = int(pod.container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod.spec["terminationGracePeriodSeconds"] >= pause + shutdown + 10

    @pytest.mark.parametrize("overlay", ["eks-disaggregated", "minio-disaggregated"])
    def test_proxy_may_finish_its_requests(self, overlay: str) -> None:
        (proxy,) = [pod for pod in pods(overlay) if not pod.uses_bucket]
        text = (ROOT / "examples/disaggregated/proxy.py").read_text()
        drain = float(re.findall(r"^DRAIN_SECONDS = (.+)$", text, re.MULTILINE)[0])
        pause = int(proxy.container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert proxy.spec["terminationGracePeriodSeconds"] >= pause + drain + 5

    @pytest.mark.parametrize("overlay", ["eks-disaggregated", "minio-disaggregated"])
    def test_no_single_request_takes_the_proxys_memory(self, overlay: str) -> None:
        (proxy,) = [pod for pod in pods(overlay) if not pod.uses_bucket]
        text = (ROOT / "examples/disaggregated/proxy.py").read_text()
        shift = re.findall(r"^MAX_BODY = 1 << (\d+)$", text, re.MULTILINE)[0]
        copies = 6  # as read, as bytes, decoded, parsed, for the producer as text and as bytes
        limit = parse_size(proxy.container["resources"]["limits"]["memory"])
        assert copies << int(shift) < limit

    @each(SERVING)
    def test_health_is_what_probes_ask_for(self, overlay: str, pod: Pod) -> None:
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert pod.container[name]["httpGet"] == {"path": "/health", "port": "http"}
        assert pod.container["command"] == ["vllm", "serve"]
        assert "--port" not in " ".join(pod.arguments())
        assert pod.container["ports"] == [{"name": "http", "containerPort": 8000}]

    @each(SERVING + JOBS)
    def test_memory_limit_holds_what_the_pod_takes(
        self, overlay: str, pod: Pod, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = read_settings(monkeypatch, pod.environment)
        resources = pod.container["resources"]
        limit = parse_size(resources["limits"]["memory"])
        assert parse_size(resources["requests"]["memory"]) == limit
        shared = pod.volume("shm")["emptyDir"]
        assert shared["medium"] == "Memory"
        counted = config.max_local_cpu_size + config.upload_queue_size
        counted += parse_size(shared["sizeLimit"])
        counted += (8 if pod.kind == "Deployment" else 4) * GIB  # processed inputs
        assert counted + VLLM_BYTES <= limit

    def test_sum_in_the_comment_is_the_limit(self) -> None:
        text = (KUBERNETES / "vllm/deployment.yaml").read_text()
        summands = [int(number) for number in re.findall(r"^ +# +(\d+)  \S", text, re.MULTILINE)]
        assert f"memory: {sum(summands)}Gi" in text
        assert len(summands) == 5


class TestPrewarm:
    @each(JOBS)
    def test_command_line_is_understood(self, overlay: str, pod: Pod) -> None:
        arguments = pod.arguments(JOB_COMPLETION_INDEX="3")
        assert pod.container["command"] == ["ec-s3"]
        name, options = command_line(arguments)
        assert name == "prewarm"
        assert Shard.parse(options["shard"]) == (Shard(3, 8) if pod.kind == "Job" else Shard(0, 1))

    def test_shares_leave_nothing_out(self) -> None:
        (job,) = of_kind("eks-prewarm", "Job")
        (pod,) = [pod for _, pod in JOBS[:2] if pod.kind == "Job"]
        count = job["spec"]["completions"]
        assert job["spec"]["completionMode"] == "Indexed"
        lines = [pod.arguments(JOB_COMPLETION_INDEX=str(index)) for index in range(count)]
        shards = [Shard.parse(command_line(line)[1]["shard"]) for line in lines]
        assert shards == [Shard(index, count) for index in range(count)]

    @pytest.mark.parametrize("overlay", ["eks-prewarm", "minio-prewarm"])
    def test_schedule_is_a_time_that_comes(self, overlay: str) -> None:
        (job,) = of_kind(overlay, "CronJob")
        limits = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
        given = job["spec"]["schedule"].split()
        for field, (least, most) in zip(given, limits, strict=True):
            assert field == "*" or least <= int(field) <= most

    def test_same_model_as_the_servers(self) -> None:
        for platform in ("eks", "minio"):
            found = {
                tuple(pod.environment[name] for name in ("MODEL", "REVISION", "DTYPE"))
                for overlay, pod in USING_BUCKET
                if overlay.startswith(platform)
            }
            assert len(found) == 1

    def test_only_what_may_go_well_the_next_time_is_tried_again(self) -> None:
        for document in of_kind("eks-prewarm", "Job", "CronJob"):
            spec = document["spec"]
            spec = spec["jobTemplate"]["spec"] if document["kind"] == "CronJob" else spec
            rules = [rule.get("onExitCodes") for rule in spec["podFailurePolicy"]["rules"]]
            final = {code for rule in rules if rule for code in rule["values"]}
            assert final == {ExitCode.FINDING, ExitCode.USAGE, ExitCode.NOTHING}
            assert spec["template"]["spec"]["restartPolicy"] == "Never"
