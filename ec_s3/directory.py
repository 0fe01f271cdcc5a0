"""`DirectoryStore`: the store protocol over a folder, for `file://` and as the disk tier.

Owns the threads that do the file operations of `ec_s3.files`, and what their errors mean. Runs on
any event loop and never touches a file on it. A cancelled call ends only when its thread has let
go of the caller's buffers, at most one step of 1 MiB later. After a fork the child holds nothing,
and opens the folder anew if it uses the store.

Locking: one thread lock guards opening the folder.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ec_s3.errors import (
    CapacityError,
    ClosedError,
    RemoteChangedError,
    RemoteDeniedError,
    RemoteError,
    RemoteUnavailableError,
)
from ec_s3.files import Folder, StoppedError, read_into
from ec_s3.store import GetResult, progress_of
from ec_s3.types import DeleteReport, ObjectInfo, PutOutcome
from ec_s3.url import check_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from ec_s3.store import Buffer

T = TypeVar("T")

_THREADS = 4
_LIST_BATCH = 1000
_CLOSE_SECONDS = 1.0
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DirectoryStore:
    """One folder as a store; see `ec_s3.store.Store` for what the methods promise.

    `if_match` holds among the users of one store object, `if_absent` among all processes.

    Args:
        path: the folder; made with mode 0700 at first use when it is missing.
        max_bytes: most bytes of all files together; the least recently used make room for new
            ones. None for no bound.
        exclusive: take the folder for this store alone; while another engine holds it, a
            sub-directory of it is used instead.
        prefix: beginning of all keys that are put. Other files in the folder are not the store's:
            they do not count for `max_bytes`, and are not removed to make room.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_bytes: int | None = None,
        exclusive: bool = False,
        prefix: str = "",
    ) -> None:
        self._path = Path(path)
        self._max_bytes = max_bytes
        self._exclusive = exclusive
        self._prefix = prefix
        self._lock = threading.Lock()
        self._folder: Folder | None = None
        self._pid = os.getpid()
        self._threads: ThreadPoolExecutor | None = None
        self._running: set[asyncio.Future[Any]] = set()
        self._closed = False
        _stores.add(self)

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self._path)!r})"

    async def get(
        self,
        key: str,
        *,
        into: Callable[[int], memoryview],
        start: int = 0,
        length: int | None = None,
        if_match: str | None = None,
        if_none_match: str | None = None,
    ) -> GetResult | None:
        """Read a file or a range of it."""
        opened = await self._run("get", key, lambda folder, _: folder.open(key), undo=_close)
        if opened is None:
            return None
        descriptor, info = opened
        try:
            if if_match is not None and info.etag != if_match:
                raise _changed(key)
            if info.etag == if_none_match:
                return GetResult(memoryview(b""), start, info)
            rest = max(0, info.size - start)
            count = rest if length is None else max(0, min(rest, length))
            if (progress := progress_of(into)) is not None:
                progress.answered(info)
            view = into(count)[:count]
            if view.nbytes != count:
                raise ValueError(f"the buffer for {key!r} is smaller than {count} bytes")
            done = await self._run(
                "get", key, lambda _, stop: read_into(descriptor, view, start, stop)
            )
        finally:
            os.close(descriptor)
        if done != count:
            raise _changed(key)
        return GetResult(view, start, info)

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        if_match: str | None = None,
    ) -> PutOutcome:
        """Write one file.

        Raises:
            CapacityError: larger than `max_bytes`; nothing made room for it.
        """
        views = [memoryview(part).cast("B") for part in parts]
        nbytes = sum(view.nbytes for view in views)
        if self._max_bytes is not None and nbytes > self._max_bytes:
            raise CapacityError(f"{nbytes} bytes never fit into {self._max_bytes} on disk")
        return await self._run(
            "put",
            key,
            lambda folder, stop: folder.write(
                key, views, if_absent=if_absent, if_match=if_match, stop=stop
            ),
        )

    async def head(self, key: str) -> ObjectInfo | None:
        """Describe a file, None when there is none."""
        return await self._run("head", key, lambda folder, _: folder.head(key))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Files whose key starts with the prefix, in key order, without foreign ones."""
        found = await self._run("list", prefix, lambda folder, _: folder.walk(prefix))
        while batch := await self._run(
            "list", prefix, lambda *_: tuple(itertools.islice(found, _LIST_BATCH))
        ):
            for info in batch:
                yield info

    async def delete(self, keys: Sequence[str]) -> DeleteReport:
        """Delete files; one that does not exist counts as deleted."""
        failed: dict[str, str] = {}
        for key in map(check_key, keys):
            try:
                await self._run("delete", key, lambda folder, _, k=key: folder.delete(k))  # type: ignore[misc]  # mypy infers no lambda with a default
            except RemoteError as exc:
                failed[key] = str(exc)
        return DeleteReport(tuple(key for key in keys if key not in failed), failed)

    async def connect(self) -> None:
        """Open the folder; of a bounded one, find out what it holds."""
        await self._run("connect", "", lambda _, stop: stop)

    async def aclose(self) -> None:
        """Give the folder back; waits at most a second for running calls."""
        if self._closed:
            return
        self._closed = True
        self._claim()
        if self._running:
            await asyncio.wait(self._running, timeout=_CLOSE_SECONDS)
        if self._threads is not None:
            self._threads.shutdown(wait=False)
        if self._folder is not None:
            self._folder.close()

    async def _run(
        self,
        operation: str,
        key: str,
        work: Callable[[Folder, threading.Event], T],
        *,
        undo: Callable[[T], object] | None = None,
    ) -> T:
        """Do file operations on a thread; a cancelled one is told to stop and waited for."""
        if self._closed:
            raise ClosedError("the store is closed")
        if operation not in ("list", "connect"):
            check_key(key)
        stop = threading.Event()
        future = asyncio.get_running_loop().run_in_executor(
            self._claim(), lambda: work(self._open(), stop)
        )
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError as exc:
                stop.set()
                cancelled = exc
        if cancelled is not None:
            if future.exception() is None and undo is not None:
                undo(future.result())
            raise cancelled
        try:
            return future.result()
        except (RemoteError, StoppedError):
            raise
        except OSError as exc:
            raise _map_error(exc, operation=operation, key=key) from exc

    def _claim(self) -> ThreadPoolExecutor:
        """The threads of this process: those of its parent did not survive the fork."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.Lock()
            self._threads, self._folder, self._running = None, None, set()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="ec-s3-disk")
        return self._threads

    def close_in_child(self) -> None:
        """Drop the folder's lock, which a fork copied: here it would outlast its owner."""
        if self._folder is not None:
            self._folder.close()

    def _open(self) -> Folder:
        with self._lock:
            if self._folder is None:
                self._folder = Folder(
                    self._path,
                    max_bytes=self._max_bytes,
                    exclusive=self._exclusive,
                    prefix=self._prefix,
                )
            return self._folder


def _close_in_child() -> None:
    for store in list(_stores):
        store.close_in_child()


_stores: weakref.WeakSet[DirectoryStore] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)


def _close(opened: tuple[int, ObjectInfo] | None) -> None:
    if opened is not None:
        os.close(opened[0])


def _changed(key: str) -> RemoteChangedError:
    return RemoteChangedError("get failed: the file was replaced", operation="get", key=key)


def _map_error(exc: OSError, *, operation: str, key: str) -> RemoteError:
    """Our error for one of the file system's; the caller raises it `from` the original."""
    reason = os.strerror(exc.errno) if exc.errno else str(exc)
    kind: type[RemoteError] = RemoteUnavailableError
    remedy = "check the directory"
    if exc.errno in _DENIED:
        kind, remedy = RemoteDeniedError, "check owner, mode and mount of the directory"
    elif exc.errno in _FULL:
        remedy = "free space or lower the size limit of the disk tier"
    return kind(f"{operation} failed: {reason}; {remedy}", operation=operation, key=key)
