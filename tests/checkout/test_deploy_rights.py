"""Pods, image and compose file of `deploy/` have no more rights than they need, and no secrets."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import manifests
from manifests import (
    ALL_PODS,
    DEPLOY,
    KUBERNETES,
    OVERLAYS,
    ROOT,
    Pod,
    compose,
    each,
    of_kind,
    option,
    pods,
    read_settings,
)

from ec_s3.url import S3Location, parse_url

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from ec_s3.s3 import S3Store
    from ec_s3.testing.moto import S3Server


class TestSecurity:
    @each(ALL_PODS)
    def test_pod_meets_the_restricted_standard(self, overlay: str, pod: Pod) -> None:
        (namespace,) = manifests.documents(KUBERNETES / "namespace.yaml")
        (level,) = namespace["metadata"]["labels"].values()
        assert level == "restricted"
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        kinds = {kind for volume in pod.spec["volumes"] for kind in volume} - {"name"}
        assert kinds <= {"emptyDir", "ephemeral", "projected"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()

    @each(ALL_PODS)
    def test_credentials_come_from_the_service_account_alone(self, overlay: str, pod: Pod) -> None:
        assert of_kind(overlay, "Secret") == []
        assert pod.spec["automountServiceAccountToken"] is False
        secret = re.compile(r"KEY|SECRET|PASSWORD|SALT|TOKEN$")
        assert [name for name in pod.environment if secret.search(name)] == []
        tokens = [volume["name"] for volume in pod.spec["volumes"] if "projected" in volume]
        assert tokens == (["minio"] if overlay.startswith("minio") and pod.uses_bucket else [])

    async def test_token_of_the_account_opens_the_bucket(
        self,
        s3_server: S3Server,
        bucket: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        open_store: Callable[..., S3Store],
    ) -> None:
        (pod,) = pods("minio")
        (mount,) = [m for m in pod.container["volumeMounts"] if m["name"] == "minio"]
        environment = {k: v for k, v in pod.environment.items() if k.startswith("AWS_")}
        sources = pod.volume("minio")["projected"]["sources"]
        files = {f"{mount['mountPath']}/{sources[0]['serviceAccountToken']['path']}"}
        files |= {
            f"{mount['mountPath']}/{item['path']}" for item in sources[1]["configMap"]["items"]
        }
        assert files == {environment["AWS_WEB_IDENTITY_TOKEN_FILE"], environment["AWS_CA_BUNDLE"]}

        token = tmp_path / "token"
        token.write_text("of the service account")
        environment |= {
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
            "AWS_ENDPOINT_URL_STS": s3_server.url,
        }
        del environment["AWS_CA_BUNDLE"]  # the server here speaks plain HTTP
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        asked = s3_server.count("POST", "/")
        location = parse_url(f"s3://{bucket}/x?endpoint={s3_server.url}")
        assert isinstance(location, S3Location)
        store = open_store(location)
        try:
            await store.put("v1/key", [memoryview(b"content")])
        finally:
            await store.aclose()
        assert s3_server.count("PUT", f"{bucket}/x/v1/key") == 1
        assert s3_server.count("POST", "/") > asked


class TestCompose:
    def test_settings_can_be_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        service = compose()["services"]["vllm"]
        config = read_settings(monkeypatch, service["environment"])
        location = config.location()
        assert isinstance(location, S3Location)
        assert location.bucket in compose()["services"]["bucket"]["command"][-1]
        assert location.endpoint == "http://minio:9000"
        shutdown = int(option(service["command"], "shutdown-timeout"))
        assert shutdown >= config.flush_timeout + 5
        assert int(service["stop_grace_period"].removesuffix("s")) >= shutdown + 10
        assert manifests.transfer_config(service["command"])["ec_role"] == "ec_both"

    def test_password_is_not_in_the_file(self) -> None:
        for service in compose()["services"].values():
            for name, value in service.get("environment", {}).items():
                if re.search(r"SECRET|PASSWORD|MC_HOST", name):
                    assert "${MINIO_PASSWORD:?" in value

    def test_services_and_volumes_that_are_named_exist(self) -> None:
        document = compose()
        assert document.keys() == {"name", "services", "volumes"}
        for service in document["services"].values():
            assert service.get("depends_on", {}).keys() <= document["services"].keys()
            for volume in service.get("volumes", ()):
                assert volume.partition(":")[0] in document["volumes"]
            for condition in service.get("depends_on", {}).values():
                assert condition["condition"] in {
                    "service_healthy",
                    "service_completed_successfully",
                }
            for port in service.get("ports", ()):
                assert port.startswith("127.0.0.1:")
            build = service.get("build")
            if build:
                assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


class TestImage:
    def lines(self) -> list[str]:
        text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
        return [line for line in text.splitlines() if line and not line.startswith("#")]

    def test_is_vllms_own_of_a_version_that_was_tested(self) -> None:
        lines = self.lines()
        assert lines[0].startswith("ARG VLLM_VERSION=v")
        version = lines[0].partition("=v")[2]
        table = (ROOT / "docs/reference/compatibility.md").read_text()
        assert f"\n| {version} |" in table
        images = [line.split()[1] for line in lines if line.startswith("FROM ")]
        assert set(images) == {"vllm/vllm-openai:${VLLM_VERSION}"}
        for overlay in OVERLAYS:
            assert {pod.container["image"] for pod in pods(overlay)} == {
                f"registry.example/ec-s3:v{version}"
            }

    def test_is_made_of_files_that_exist(self) -> None:
        copied = [line.split()[1:-1] for line in self.lines() if line.startswith("COPY ")]
        names = [name for line in copied for name in line]
        assert all((ROOT / name).exists() for name in names)
        assert {"pyproject.toml", "README.md", "LICENSE", "ec_s3"} <= set(names)

    def test_runs_as_the_user_of_the_manifests(self) -> None:
        user, group = self.lines()[-1].removeprefix("USER ").split(":")
        for _, pod in ALL_PODS:
            context = pod.spec["securityContext"]
            assert (context["runAsUser"], context["runAsGroup"]) == (int(user), int(group))
        assert compose()["services"]["vllm"]["tmpfs"][1].startswith(
            f"/home/vllm:uid={user},gid={group}"
        )
