"""Terraform itself, run on a copy of the modules; for `make terraform-check` alone.

`TF_PLUGINS` names a folder with providers, for machines that reach no registry.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from terraform_files import TERRAFORM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ec_s3.testing.moto import S3Server

_DEADLINE = 420  # seconds; the provider waits a minute for a lifecycle rule by itself


def environment() -> dict[str, str]:
    """Nothing of the user's: no configuration of Terraform, no credentials."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TF_", "AWS_"))}
    return {**kept, "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1"}


class Workspace:
    """A folder with a copy of the modules below `terraform/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(
            TERRAFORM, folder / "terraform", ignore=shutil.ignore_patterns(".terraform*")
        )

    def run(self, where: str, *arguments: str) -> str:
        done = self._run(where, *arguments)
        assert done.returncode == 0, f"terraform {arguments[0]}: {done.stdout}{done.stderr}"
        return done.stdout

    def fails(self, where: str, *arguments: str) -> str:
        """What a command says that is expected to fail."""
        done = self._run(where, *arguments, "-no-color")
        assert done.returncode != 0, f"terraform {arguments[0]} noticed nothing"
        return done.stdout + done.stderr

    def _run(self, where: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [os.environ.get("TERRAFORM", "terraform"), *arguments],
            cwd=self.folder / where,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=_DEADLINE,
            check=False,
        )

    def init(self, where: str) -> None:
        plugins = os.environ.get("TF_PLUGINS")
        given = [f"-plugin-dir={plugins}"] if plugins else []
        self.run(where, "init", "-input=false", "-no-color", *given)

    def apply(self, where: str, **variables: object) -> dict[str, Any]:
        """The outputs, by name."""
        chosen = [
            f"-var={name}={value if isinstance(value, str) else json.dumps(value)}"
            for name, value in variables.items()
        ]
        self.run(where, "apply", "-auto-approve", "-input=false", "-no-color", *chosen)
        outputs = json.loads(self.run(where, "output", "-json"))
        return {name: output["value"] for name, output in outputs.items()}


def remember_lifecycles(server: S3Server) -> dict[str, bytes]:
    """Answer each bucket's lifecycle as it was put; by path of the bucket.

    moto forgets the sizes in filters, and Terraform waits until what it put is there.
    """
    bodies: dict[str, bytes] = {}
    inner = server._wsgi.app

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if "lifecycle" in environ.get("QUERY_STRING", ""):
            if environ["REQUEST_METHOD"] == "PUT":
                body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
                environ["wsgi.input"] = io.BytesIO(body)
                bodies[path] = body
            elif environ["REQUEST_METHOD"] == "GET" and path in bodies:
                start_response(
                    "200 OK",
                    [
                        ("Content-Type", "application/xml"),
                        (
                            "x-amz-transition-default-minimum-object-size",
                            "all_storage_classes_128K",
                        ),
                    ],
                )
                return [bodies[path]]
            elif environ["REQUEST_METHOD"] == "DELETE":
                bodies.pop(path, None)
        answer: Iterable[bytes] = inner(environ, start_response)
        return answer

    server._wsgi.app = app
    return bodies
