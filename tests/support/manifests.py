"""The files of `deploy/` as a cluster would see them: rendered overlays, and the pods in them.

Runs `kubectl kustomize`, which needs no cluster and no network; kubectl comes with the dev extra.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from ec_s3.config import ECConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SERVERS = ("eks", "eks-disaggregated", "minio", "minio-disaggregated")
OVERLAYS = (*SERVERS, "eks-prewarm", "minio-prewarm")

_REFERENCE = re.compile(r"\$\((\w+)\)")


def documents(path: Path) -> list[Json]:
    """All documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


@cache
def rendered(overlay: str) -> tuple[Json, ...]:
    """What `kubectl apply -k` would send for an overlay; not to be changed."""
    here = shutil.which("kubectl", path=str(Path(sys.executable).parent))
    program = here or shutil.which("kubectl")
    assert program is not None, "no kubectl: install the dev extra"
    command = [program, "kustomize", str(KUBERNETES / "overlays" / overlay)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert not run.stderr, "kustomize warns"
    return tuple(yaml.safe_load_all(run.stdout))


def of_kind(overlay: str, *kinds: str) -> list[Json]:
    """Objects of an overlay."""
    return [document for document in rendered(overlay) if document["kind"] in kinds]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template with one container, and what its ConfigMaps make of its environment.

    Attributes:
        kind: of the object that it belongs to.
        name: of that object.
        labels: of the pods.
        spec: of the pods.
        environment: of the container; what a controller adds is not in it.
    """

    kind: str
    name: str
    labels: Mapping[str, str]
    spec: Json
    environment: Mapping[str, str]

    @property
    def container(self) -> Json:
        """The container."""
        (found,) = self.spec["containers"]
        return dict(found)

    @property
    def uses_bucket(self) -> bool:
        """Whether it runs ec_s3, and not only the proxy."""
        return "EC_S3_FLUSH_TIMEOUT" in self.environment

    def arguments(self, **more: str) -> list[str]:
        """The container's arguments, expanded as the kubelet does."""
        known = {**self.environment, **more}
        return [_REFERENCE.sub(lambda m: known[m[1]], text) for text in self.container["args"]]

    def volume(self, name: str) -> Json:
        """One of its volumes."""
        (found,) = [volume for volume in self.spec["volumes"] if volume["name"] == name]
        return dict(found)


def template_of(document: Json) -> Json:
    """The pod template of a Deployment, Job or CronJob."""
    spec = document["spec"]
    spec = spec["jobTemplate"]["spec"] if document["kind"] == "CronJob" else spec
    return dict(spec["template"])


@cache
def pods(overlay: str) -> tuple[Pod, ...]:
    """The pods of an overlay; jobs find the ConfigMaps that the servers' overlay has applied."""
    maps = {
        document["metadata"]["name"]: document["data"]
        for name in dict.fromkeys((overlay.removesuffix("-prewarm"), overlay))
        for document in of_kind(name, "ConfigMap")
    }
    return tuple(_pods(overlay, maps))


def _pods(overlay: str, maps: Mapping[str, Mapping[str, str]]) -> Iterator[Pod]:
    for document in of_kind(overlay, "Deployment", "Job", "CronJob"):
        template = template_of(document)
        (container,) = template["spec"]["containers"]
        environment: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            environment |= maps[source["configMapRef"]["name"]]
        for entry in container.get("env", ()):
            environment[entry["name"]] = entry["value"]
        yield Pod(
            document["kind"],
            document["metadata"]["name"],
            template["metadata"]["labels"],
            template["spec"],
            environment,
        )


def transfer_config(arguments: list[str]) -> Json:
    """What a server's command line says about the connector."""
    name = "--ec-transfer-config="
    (text,) = [argument for argument in arguments if argument.startswith(name)]
    return dict(json.loads(text.removeprefix(name)))


def option(arguments: list[str], name: str) -> str:
    """The value of `--name=value`."""
    (text,) = [argument for argument in arguments if argument.startswith(f"--{name}=")]
    return text.partition("=")[2]


def compose() -> Json:
    """The compose file."""
    (document,) = documents(DEPLOY / "compose.yaml")
    return document


ALL_PODS = [(overlay, pod) for overlay in OVERLAYS for pod in pods(overlay)]
USING_BUCKET = [(overlay, pod) for overlay, pod in ALL_PODS if pod.uses_bucket]
SERVING = [(overlay, pod) for overlay, pod in USING_BUCKET if pod.kind == "Deployment"]
JOBS = [(overlay, pod) for overlay, pod in USING_BUCKET if pod.kind != "Deployment"]


def each(which: list[tuple[str, Pod]]) -> pytest.MarkDecorator:
    """Runs a test for each of these pods."""
    names = [f"{overlay}-{pod.kind}-{pod.name}" for overlay, pod in which]
    return pytest.mark.parametrize(("overlay", "pod"), which, ids=names)


def read_settings(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> ECConfig:
    """What ec_s3 makes of an environment; an unknown setting is an error."""
    for name, value in environment.items():
        if name.startswith("EC_S3_"):
            monkeypatch.setenv(name, value)
    return ECConfig(strict=True)
