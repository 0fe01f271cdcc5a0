"""Real S3 servers on loopback, for the tests of `ec_s3` and of software that embeds it.

    with running("ceph", folder) as server:
        bucket = server.new_bucket()
        client = server.client()

A server keeps everything in the folder it is given, listens on free loopback ports, so that two of
a kind run side by side, and ends with the block or with this process, whatever ends it. `fixtures`
holds the same as pytest fixtures. Importing this package imports neither pytest nor an SDK.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ec_s3.testing.servers.base import Keys, RealServer
from ec_s3.testing.servers.processes import ServerError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["KINDS", "Keys", "RealServer", "ServerError", "missing", "running", "server_class"]

_MODULES = {
    "ceph": "ceph:Ceph",
    "ceph-https": "ceph:CephHTTPS",
    "seaweedfs": "seaweedfs:SeaweedFS",
    "juicefs": "juicefs:JuiceFS",
    "swift": "swift:Swift",
    "moto": "moto_process:Moto",
}

KINDS = tuple(_MODULES)


def server_class(kind: str) -> type[RealServer]:
    """The class of a kind of server.

    Raises:
        ValueError: no such kind.
    """
    if kind not in _MODULES:
        raise ValueError(f"{kind!r} is no kind of server; known: {', '.join(KINDS)}")
    module, _, name = _MODULES[kind].partition(":")
    found: type[RealServer] = getattr(
        importlib.import_module(f"ec_s3.testing.servers.{module}"), name
    )
    return found


def missing(kind: str) -> str | None:
    """Why this kind cannot run on this machine, naming the packages to install; None if it can."""
    return server_class(kind).missing()


@contextmanager
def running(kind: str, folder: Path, **options: object) -> Iterator[RealServer]:
    """A server for the time of a block.

    Args:
        kind: one of `KINDS`.
        folder: for its data, configuration and logs; made when absent. Nothing of it is removed.
        **options: of the kind; see `ceph.Ceph`, the others take none.

    Raises:
        ServerError: it is not installed or does not start; the message ends with its logs.
    """
    made = server_class(kind)
    if reason := made.missing():
        raise ServerError(f"{kind} cannot run here: {reason}")
    server = made(folder, **options)
    try:
        server.start()
        yield server
    finally:
        server.stop()
