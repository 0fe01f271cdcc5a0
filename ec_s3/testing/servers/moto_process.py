"""moto's server in a process of its own, so that it can be killed and paused like a real one.

It is a mock: it checks neither secrets nor digests, and what it holds is gone after `kill`. For a
mock in this process, with a log of its requests, see `ec_s3.testing.moto`.
"""

from __future__ import annotations

import sys
from importlib import metadata, util
from typing import TYPE_CHECKING, ClassVar

from ec_s3.testing.servers.base import RealServer
from ec_s3.testing.servers.processes import free_ports

if TYPE_CHECKING:
    from pathlib import Path


class Moto(RealServer):
    """moto over http."""

    kind = "moto"
    programs: ClassVar = {}
    front = "moto"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._port = 0

    @classmethod
    def missing(cls) -> str | None:
        if util.find_spec("moto") and util.find_spec("flask"):
            return None
        return "no moto here; install with: pip install 'moto[s3,server]'"

    @property
    def version(self) -> str:
        return metadata.version("moto")

    def launch(self) -> None:
        self._port = free_ports()[0]
        self.endpoint = f"http://127.0.0.1:{self._port}"
        self.launch_front()

    def launch_front(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self.processes.spawn("moto", command, folder=self.folder)
