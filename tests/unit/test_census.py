"""A census sees what a session's processes hold, and that it is gone with them."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ec_s3.testing.census import (
    census,
    group_processes,
    named_like,
    rank_sockets,
    slab_users,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_HOLDER = """
import socket, sys
from ec_s3.pages import Slab
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0ec_s3-census")
listener.listen()
memory = Slab.create(1 << 20)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def _holder() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child.pid


def test_counts_memory_sockets_and_processes_of_one_group() -> None:
    with _holder() as pid:
        counted = census(pid)
        assert counted.processes == (pid,)
        assert (counted.slabs, counted.sockets) == (1, 1)
        assert counted.threads >= 1
        assert counted.descriptors >= 4
        assert counted.resident_bytes > 1 << 20
        assert pid in slab_users()
        (inode,) = rank_sockets(pid)
        assert inode in rank_sockets()
        assert named_like(pid, "ec_s3-census") == [pid]
        assert named_like(pid, "no such thing") == []
    assert list(group_processes(pid)) == []
    assert pid not in slab_users()
    assert inode not in rank_sockets()
