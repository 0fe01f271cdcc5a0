"""Pytest fixtures of real servers: `pytest_plugins = ["ec_s3.testing.servers.fixtures"]`.

`real_servers("ceph")` gives a server that is started once for the session, `real_server` is one of
them, `real_bucket` a fresh bucket on it. A test picks its kinds with

    @pytest.mark.parametrize("real_server", ["ceph", "seaweedfs"], indirect=True)

and runs with every kind otherwise. A kind that this machine lacks is a skip; with
`REQUIRE_INTEROP=1` in the environment it is a failure, except for those that the file named by
`INTEROP_UNOBTAINABLE` lists, one `kind: reason` a line.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ec_s3.testing.servers import KINDS, RealServer, missing, running

if TYPE_CHECKING:
    from collections.abc import Iterator


class RealServers:
    """The servers of a session, each started when it is first asked for; not thread-safe.

    Attributes:
        started: what runs, by kind.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.started: dict[str, RealServer] = {}
        self._folder = folder
        self._stack = stack

    def __call__(self, kind: str) -> RealServer:
        """The server of a kind; skips or fails the test where there is none."""
        if kind not in self.started:
            require(kind)
            if kind == "ceph-https":
                self.started[kind] = self("ceph").secure()
            else:
                server = running(kind, self._folder / kind)
                self.started[kind] = self._stack.enter_context(server)
        return self.started[kind]


def require(kind: str) -> None:
    """Skip the test where this kind is missing; fail it where `REQUIRE_INTEROP` demands it."""
    reason = missing(kind)
    if reason is None:
        return
    if os.environ.get("REQUIRE_INTEROP") == "1" and kind not in unobtainable():
        pytest.fail(f"{kind}: {reason}", pytrace=False)
    pytest.skip(f"{kind}: {unobtainable().get(kind, reason)}")


def unobtainable() -> dict[str, str]:
    """Kinds that the installation could not get here, with its reasons."""
    path = os.environ.get("INTEROP_UNOBTAINABLE", "")
    if not path or not Path(path).exists():
        return {}
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(": ") for line in lines if line)
    return {kind: reason for kind, _, reason in pairs}


@pytest.fixture(scope="session")
def real_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServers]:
    """The session's servers, by kind; they end with the session."""
    with ExitStack() as stack:
        yield RealServers(tmp_path_factory.mktemp("servers"), stack)


@pytest.fixture(scope="session", params=KINDS)
def real_server(request: pytest.FixtureRequest, real_servers: RealServers) -> RealServer:
    """One server of each kind, or of those that the test names."""
    kind: str = request.param
    return real_servers(kind)


@pytest.fixture
def real_bucket(real_server: RealServer) -> str:
    """A bucket of its own for each test."""
    return real_server.new_bucket()
