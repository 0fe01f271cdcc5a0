from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import stat
import sys
from typing import TYPE_CHECKING

import pytest

from ec_s3.directory import DirectoryStore
from ec_s3.errors import (
    CapacityError,
    RemoteChangedError,
    RemoteDeniedError,
    RemoteError,
    RemoteUnavailableError,
)
from ec_s3.testing.conformance import buffer, keys, read
from ec_s3.types import PutOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


async def fill(store: DirectoryStore, names: Sequence[str], nbytes: int = 100) -> None:
    for name in names:
        assert await store.put(name, [name[-1:].encode() * nbytes]) is PutOutcome.WRITTEN


async def test_directories_and_files_are_private(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "new" / "store")
    await store.put("a/b/k", [b"x"])
    for path in ("", "a", "a/b"):
        assert stat.S_IMODE((tmp_path / "new" / "store" / path).stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new/store/a/b/k").stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "new/store/a/b") == ["k"]
    await store.aclose()


async def test_strangers_are_not_listed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    await fill(store, ["a/k"])
    (tmp_path / "a" / ".tmp-1-0").write_bytes(b"half")
    (tmp_path / "a" / "not a key").touch()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "k").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a" / "k")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert await keys(store) == ["a/k"]
    await store.aclose()


async def test_symbolic_links_are_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "k").write_bytes(b"secret")
    root = tmp_path / "store"
    root.mkdir()
    (root / "k").symlink_to(outside / "k")
    (root / "a").symlink_to(outside)
    store = DirectoryStore(root)
    for key in ("k", "a/k"):
        assert await read(store, key) is None
        assert await store.head(key) is None
    with pytest.raises(RemoteError):
        await store.put("a/new", [b"x"])
    assert (await store.delete(["a/k"])).deleted == ("a/k",)
    assert await store.put("k", [b"mine"]) is PutOutcome.WRITTEN
    assert await read(store, "k") == b"mine"
    assert (outside / "k").read_bytes() == b"secret"
    assert os.listdir(outside) == ["k"]
    await store.aclose()


async def test_files_changed_by_hand_are_misses_or_named_errors(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, max_bytes=10_000)
    await fill(store, ["a/deleted", "a/folder", "a/short", "a/pipe", "b/all"])
    (tmp_path / "a/deleted").unlink()
    (tmp_path / "a/folder").unlink()
    (tmp_path / "a/folder").mkdir()
    (tmp_path / "a/pipe").unlink()
    os.mkfifo(tmp_path / "a/pipe")
    os.truncate(tmp_path / "a/short", 5)
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "b").write_bytes(b"a file now")
    for key in ("a/deleted", "a/folder", "a/pipe", "b/all"):
        assert await read(store, key) is None
        assert await store.head(key) is None
    assert await read(store, "a/short") == b"t" * 5
    with pytest.raises(RemoteUnavailableError):
        await store.put("a/folder", [b"x"])
    with pytest.raises(RemoteUnavailableError):
        await store.put("b/all", [b"x"])
    assert await store.put("a/deleted", [b"again"]) is PutOutcome.WRITTEN
    await store.aclose()


async def test_a_file_cut_while_it_is_read_is_a_changed_one(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    await fill(store, ["k"])

    def into(nbytes: int) -> memoryview:
        os.truncate(tmp_path / "k", 10)
        return buffer(nbytes)

    with pytest.raises(RemoteChangedError):
        await store.get("k", into=into)
    await store.aclose()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, RemoteUnavailableError),
        (errno.EDQUOT, RemoteUnavailableError),
        (errno.EIO, RemoteUnavailableError),
        (errno.EROFS, RemoteDeniedError),
        (errno.EACCES, RemoteDeniedError),
    ],
)
async def test_failures_of_the_file_system_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[RemoteError]
) -> None:
    store = DirectoryStore(tmp_path, max_bytes=1000)
    await fill(store, ["old"])

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        for _ in range(20):  # a failed put gives its room back
            with pytest.raises(kind, match=os.strerror(number)) as caught:
                await store.put("a/k", [b"x" * 200])
    assert (caught.value.operation, caught.value.key) == ("put", "a/k")
    assert isinstance(caught.value.__cause__, OSError)
    assert os.listdir(tmp_path / "a") == []
    assert await store.put("a/k", [b"x" * 200]) is PutOutcome.WRITTEN
    await store.aclose()


async def test_a_file_that_cannot_be_removed_costs_a_put_and_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path, max_bytes=1000)
    await fill(store, ["old", "new"], nbytes=400)
    remove = os.unlink

    def fail(path: str, *, dir_fd: int | None = None) -> None:
        if path in ("old", "new"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        remove(path, dir_fd=dir_fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", fail)
        for _ in range(10):
            with pytest.raises(RemoteDeniedError, match="Read-only"):
                await store.put("k", [b"x" * 900])
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]
    assert await store.put("k", [b"x" * 900]) is PutOutcome.WRITTEN
    assert os.listdir(tmp_path) == ["k"]
    await store.aclose()


async def test_a_directory_that_cannot_be_opened_at_first_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path, max_bytes=1000, exclusive=True)

    def fail(*_: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", fail)
        for _ in range(3):
            with pytest.raises(RemoteDeniedError):
                await store.connect()
    await store.put("k", [b"x"])
    assert sorted(os.listdir(tmp_path)) == [".lock", "k"]
    await store.aclose()


async def test_file_systems_without_hard_links_still_keep_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", fail)
    store = DirectoryStore(tmp_path)
    assert await store.put("k", [b"1"]) is PutOutcome.WRITTEN
    assert await store.put("k", [b"2"]) is PutOutcome.EXISTS
    assert os.listdir(tmp_path) == ["k"]
    await store.aclose()


async def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, max_bytes=400)
    await fill(store, ["a/1", "a/2", "a/3", "a/4"])
    await read(store, "a/1")
    await fill(store, ["b/5", "b/6"])
    assert await keys(store) == ["a/1", "a/4", "b/5", "b/6"]
    with pytest.raises(CapacityError):
        await store.put("c", [b"x" * 401])
    assert await keys(store) == ["a/1", "a/4", "b/5", "b/6"]
    assert await store.put("a/1", [b"y" * 390], if_absent=False) is PutOutcome.WRITTEN
    assert await keys(store) == ["a/1"]
    await store.aclose()


async def test_the_bound_and_the_order_of_use_survive_a_restart(tmp_path: Path) -> None:
    first = DirectoryStore(tmp_path, max_bytes=1000, exclusive=True)
    await fill(first, ["a/1", "a/2", "a/3", "a/4"])
    await read(first, "a/1")
    await first.aclose()
    (tmp_path / "a" / ".tmp-99-0").write_bytes(b"left by a killed writer")
    second = DirectoryStore(tmp_path, max_bytes=250, exclusive=True)
    assert await read(second, "a/1") == b"1" * 100
    assert await keys(second) == ["a/1", "a/4"]
    assert sorted(os.listdir(tmp_path / "a")) == ["1", "4"]
    await fill(second, ["b/5"])
    assert await keys(second) == ["a/1", "b/5"]
    await second.aclose()


async def test_a_second_engine_takes_a_directory_of_its_own(tmp_path: Path) -> None:
    first = DirectoryStore(tmp_path, exclusive=True)
    second = DirectoryStore(tmp_path, exclusive=True)
    await fill(first, ["a/1"])
    await fill(second, ["a/2"])
    assert await keys(first) == ["a/1"]
    assert await keys(second) == ["a/2"]
    await first.aclose()
    third = DirectoryStore(tmp_path, exclusive=True)
    assert await keys(third) == ["a/1"]
    await second.aclose()
    await third.aclose()


async def test_a_bounded_directory_never_grows_beyond_its_bound(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, max_bytes=1000)

    async def put(n: int) -> None:
        with contextlib.suppress(RemoteUnavailableError):  # no room while others are written
            await store.put(f"k/{n}", [b"x" * (n * 37 % 400)])

    for batch in range(5):
        await asyncio.gather(*(put(n) for n in range(batch * 10, batch * 10 + 10)))
        total = sum(entry.stat().st_size for entry in os.scandir(tmp_path / "k"))
        assert 0 < total <= 1000
    await store.aclose()


async def test_a_cancelled_read_leaves_the_buffer_alone(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    body = bytes(8 << 20)
    await store.put("k", [body])
    space = bytearray(b"\1" * len(body))
    for _ in range(5):
        task = asyncio.create_task(store.get("k", into=lambda _: memoryview(space)))
        await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        space[:] = b"\1" * len(body)
        await asyncio.sleep(0.005)
        assert space.count(1) == len(body)
    await store.aclose()
    assert not [name for name in os.listdir("/proc/self/fd") if _points_to(name, tmp_path)]


def _points_to(descriptor: str, folder: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(folder))
    except OSError:
        return False


_KILLED_WRITER = """
import asyncio, sys
from ec_s3.directory import DirectoryStore
async def main():
    store = DirectoryStore(sys.argv[1])
    print("go", flush=True)
    for n in range(100_000):
        await store.put(f"k/{n}", [bytes([n % 251]) * 300_000])
asyncio.run(main())
"""


async def test_a_killed_writer_leaves_only_whole_files(tmp_path: Path) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _KILLED_WRITER, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    await child.stdout.readline()
    store = DirectoryStore(tmp_path)
    while len(await keys(store)) < 5:  # noqa: ASYNC110  # the writer is another process
        await asyncio.sleep(0.01)
    child.kill()
    await child.wait()
    for key in await keys(store):
        body = await read(store, key)
        assert body is not None
        assert body == bytes([int(key[2:]) % 251]) * 300_000
    await store.aclose()


def test_a_forked_child_takes_a_directory_of_its_own(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, exclusive=True)
    asyncio.run(fill(store, ["a/1"]))
    pid = os.fork()
    if pid == 0:
        found = asyncio.run(keys(store))
        os._exit(0 if found == [] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert asyncio.run(keys(store)) == ["a/1"]
    asyncio.run(store.aclose())
