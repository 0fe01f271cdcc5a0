"""The disk tier as settings make it: whose files it takes for its own, and what failures leave."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
from typing import TYPE_CHECKING

import pytest

from ec_s3.config import ECConfig
from ec_s3.errors import ConfigError, RemoteDeniedError, RemoteUnavailableError
from ec_s3.keys import Namespace
from ec_s3.remote import open_disk
from ec_s3.types import PutOutcome

if TYPE_CHECKING:
    from pathlib import Path

    from ec_s3.store import Store

KEYS = [Namespace(model="org/model").object_key(name) for name in ("a", "b")]
ROOM = 1 << 20


def tier(path: Path) -> Store:
    store = open_disk(ECConfig(local_disk=path, max_local_disk_size=ROOM))
    assert store is not None
    return store


def descriptors(path: Path) -> int:
    """How many descriptors of this process lead below a folder."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith(str(path))
        except OSError:
            continue
    return found


async def test_other_files_in_the_folder_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    films = tmp_path / "films"
    films.mkdir()
    (films / "holiday.mp4").touch()
    os.truncate(films / "holiday.mp4", 4 * ROOM)
    (films / ".tmp-cut").touch()
    store = tier(tmp_path)
    await store.connect()
    assert await store.put(KEYS[0], [b"x" * (ROOM // 2)]) is PutOutcome.WRITTEN
    assert await store.put(KEYS[1], [b"x" * (ROOM // 2)]) is PutOutcome.WRITTEN
    assert await store.head(KEYS[0]) is not None
    await store.aclose()
    assert sorted(os.listdir(films)) == [".tmp-cut", "holiday.mp4"]


async def test_a_folder_that_cannot_be_locked_costs_no_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    store = tier(tmp_path)
    for _ in range(3):
        with pytest.raises(RemoteUnavailableError, match=os.strerror(errno.ENOLCK)):
            await store.head(KEYS[0])
    assert descriptors(tmp_path) == 0
    await store.aclose()


async def test_a_disk_that_was_read_only_for_a_while_takes_items_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tier(tmp_path)
    await store.put(KEYS[0], [b"x" * 1000])

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    real = os.open
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", lambda *a, **k: fail() if a[1] & os.O_CREAT else real(*a, **k))
        patched.setattr(os, "unlink", fail)
        for _ in range(10):
            with pytest.raises(RemoteDeniedError):
                await store.put(KEYS[1], [b"x" * (ROOM // 4)])
    assert await store.put(KEYS[1], [b"x" * (ROOM // 2)]) is PutOutcome.WRITTEN
    assert await store.head(KEYS[0]) is not None
    await store.aclose()


def test_the_bucket_is_no_folder_for_the_disk_tier(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    config = ECConfig(url=f"file://{tmp_path}", local_disk=tmp_path / "link")
    with pytest.raises(ConfigError, match="local_disk"):
        open_disk(config)


def test_a_forked_child_does_not_keep_the_folder_from_the_next_engine(tmp_path: Path) -> None:
    store = tier(tmp_path)
    asyncio.run(store.connect())
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        theirs.send(b"!")
        theirs.recv(1)
        os._exit(0)
    theirs.close()
    try:
        assert ours.recv(1) == b"!"
        asyncio.run(store.aclose())
        following = tier(tmp_path)
        asyncio.run(following.connect())
        asyncio.run(following.aclose())
    finally:
        ours.close()
        os.waitpid(pid, 0)
    assert os.listdir(tmp_path) == [".lock"]
