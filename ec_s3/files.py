"""`Folder`: whole files under keys in one directory; the blocking half of the directory store.

Owns the files below the directory and, with a size bound, the LRU index over them. A file is
written under a temporary name, synchronised and renamed: a reader sees a whole file or none. Runs
on any thread but an event loop's. It never follows a symbolic link below the directory, opens only
regular files, and trusts nothing that it finds there: what is not a key's file is left alone.

Locking: one lock guards the index and the moment of replacement; bodies are read and written
outside it. Between processes only "if absent" is atomic.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import stat
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from ec_s3.errors import RemoteUnavailableError
from ec_s3.types import ObjectInfo, PutOutcome
from ec_s3.url import is_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger(__name__)

_STEP_BYTES = 1 << 20
_ENGINES = 64
_TEMPORARY = ".tmp-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO would block the open
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class StoppedError(Exception):
    """The operation was told to stop before it was done."""


class Folder:
    """Files under keys; thread-safe.

    Args:
        path: the directory; made with mode 0700 when it is missing.
        max_bytes: most bytes of all files together, None for no bound.
        exclusive: take the directory for this object alone; while another has it, a
            sub-directory of it is used.
        prefix: of its files' keys; what else lies in the directory is not counted or removed.

    Raises:
        OSError: the directory cannot be made or read.
    """

    def __init__(self, path: Path, *, max_bytes: int | None, exclusive: bool, prefix: str) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path.resolve()
        self._owner = -1
        self._lock = threading.Lock()
        self._serial = itertools.count()
        self._index = None if max_bytes is None else _Index(max_bytes)
        try:
            if exclusive:
                self.path, self._owner = _take(self.path)
                _remove_temporaries(self.path / prefix)
            if self._index is not None:
                files = sorted(_scan(self.path, prefix), key=lambda found: found[2])
                for key, _ in self._index.load((key, size) for key, size, _ in files):
                    self._unlink(key)
        except BaseException:
            self.close()  # else the next try finds the directory held by another engine
            raise

    def close(self) -> None:
        """Give the directory back; idempotent."""
        owner, self._owner = self._owner, -1
        if owner >= 0:
            os.close(owner)

    def open(self, key: str) -> tuple[int, ObjectInfo] | None:
        """A descriptor to read a file from, None when there is none; the caller closes it."""
        try:
            with self._parent(key) as (parent, name):
                descriptor = os.open(name, _READ, dir_fd=parent)
        except OSError as exc:
            if exc.errno not in _ABSENT:
                raise
            self._forget(key)
            return None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            return None
        if self._index is not None:
            self._touch(key, descriptor, status)
        return descriptor, _info(key, status)

    def head(self, key: str) -> ObjectInfo | None:
        """Describe a file, None when there is none."""
        try:
            with self._parent(key) as (parent, name):
                status = _status(parent, name)
        except OSError as exc:
            if exc.errno not in _ABSENT:
                raise
            return None
        return _info(key, status) if _regular(status) else None

    def write(
        self,
        key: str,
        views: Sequence[memoryview],
        *,
        if_absent: bool,
        if_match: str | None,
        stop: threading.Event,
    ) -> PutOutcome:
        """Write one file, whole or not at all.

        Raises:
            StoppedError: `stop` was set; nothing is left.
            RemoteUnavailableError: every file that could make room is being written.
        """
        nbytes = sum(view.nbytes for view in views)
        with self._parent(key, create=True) as (parent, name):
            if if_absent and if_match is None and _regular(_status(parent, name)):
                return PutOutcome.EXISTS
            self._make_room(key, nbytes)
            outcome = None
            temporary = f"{_TEMPORARY}{os.getpid()}-{next(self._serial)}-{time.time_ns():x}"
            try:
                _write_file(parent, temporary, views, stop)
                outcome = self._place(
                    key, parent, temporary, name, if_absent=if_absent, if_match=if_match
                )
            finally:
                self._settle(key, nbytes, written=outcome is PutOutcome.WRITTEN)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=parent)
        return outcome

    def delete(self, key: str) -> None:
        """Remove a file, if there is one."""
        self._forget(key)
        self._unlink(key)

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        """Files whose key starts with the prefix, in key order, without foreign ones."""
        return (_info(key, status) for key, status in _walk(self.path, "", prefix))

    @contextlib.contextmanager
    def _parent(self, key: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """A descriptor of the directory that holds a key's file, and the file's name in it."""
        *folders, name = key.split("/")
        current = os.open(self.path, _DIRECTORY)
        try:
            for folder in folders:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(folder, 0o700, dir_fd=current)
                inner = os.open(folder, _DIRECTORY, dir_fd=current)
                os.close(current)
                current = inner
            yield current, name
        finally:
            os.close(current)

    def _place(
        self,
        key: str,
        parent: int,
        temporary: str,
        name: str,
        *,
        if_absent: bool,
        if_match: str | None,
    ) -> PutOutcome:
        with self._lock:
            status = _status(parent, name)
            if if_match is not None:
                if not _regular(status) or _info(key, status).etag != if_match:
                    return PutOutcome.CHANGED
            elif if_absent and _regular(status):
                return PutOutcome.EXISTS
            elif if_absent and status is None:
                try:
                    os.link(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
                except FileExistsError:
                    return PutOutcome.EXISTS
                except OSError as exc:
                    if exc.errno not in _NO_LINKS:
                        raise
                else:
                    return PutOutcome.WRITTEN
            os.replace(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            return PutOutcome.WRITTEN

    def _make_room(self, key: str, nbytes: int) -> None:
        if self._index is None:
            return
        with self._lock:
            victims = self._index.reserve(nbytes)
        if victims is None:
            raise RemoteUnavailableError("put failed: no room now", operation="put", key=key)
        failure: OSError | None = None
        for victim, size in victims:
            try:
                self._unlink(victim)
            except OSError as exc:
                failure = exc
                with self._lock:
                    self._index.use(victim, size)  # it still takes its room; others go before it
        if failure is not None:
            self._settle(key, nbytes, written=False)
            raise failure

    def _settle(self, key: str, nbytes: int, *, written: bool) -> None:
        if self._index is not None:
            with self._lock:
                self._index.settle(key, nbytes, written=written)

    def _forget(self, key: str) -> None:
        if self._index is not None:
            with self._lock:
                self._index.forget(key)

    def _touch(self, key: str, descriptor: int, status: os.stat_result) -> None:
        """Note the use; a file's access time carries it over a restart."""
        assert self._index is not None
        with self._lock:
            self._index.use(key, status.st_size)
        with contextlib.suppress(OSError):  # only the order after a restart depends on it
            os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))

    def _unlink(self, key: str) -> None:
        try:
            with self._parent(key) as (parent, name):
                if _regular(_status(parent, name)):
                    os.unlink(name, dir_fd=parent)
        except OSError as exc:
            if exc.errno not in _ABSENT:
                raise


class _Index:
    """Sizes of the files in order of use; the caller holds the lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._files = 0
        self._reserved = 0

    def load(self, files: Iterator[tuple[str, int]]) -> list[tuple[str, int]]:
        """Take over files found at start, oldest first; returns those that must go."""
        for key, size in files:
            self.use(key, size)
        return self.reserve(0) or []

    def reserve(self, nbytes: int) -> list[tuple[str, int]] | None:
        """Set bytes aside; the files to remove for it, with sizes; None if that is not enough."""
        if self._reserved + nbytes > self._max_bytes:
            return None
        self._reserved += nbytes
        victims = []
        while self._files + self._reserved > self._max_bytes:
            key, size = self._sizes.popitem(last=False)
            self._files -= size
            victims.append((key, size))
        return victims

    def settle(self, key: str, nbytes: int, *, written: bool) -> None:
        """Turn a reservation into a file, or give it back."""
        self._reserved -= nbytes
        if written:
            self.use(key, nbytes)

    def use(self, key: str, size: int) -> None:
        """Make a file the most recently used; also one whose size was changed by hand."""
        self.forget(key)
        self._sizes[key] = size
        self._files += size

    def forget(self, key: str) -> None:
        """Drop a file that is gone."""
        self._files -= self._sizes.pop(key, 0)


def read_into(descriptor: int, view: memoryview, start: int, stop: threading.Event) -> int:
    """Fill a buffer from a file; returns the bytes read, fewer only when the file was cut short.

    Raises:
        StoppedError: `stop` was set; the buffer is no longer written to.
    """
    done = 0
    while done < view.nbytes:
        if stop.is_set():
            raise StoppedError
        count = os.preadv(descriptor, [view[done : done + _STEP_BYTES]], start + done)
        if count == 0:
            break
        done += count
    return done


def _write_file(parent: int, name: str, views: Sequence[memoryview], stop: threading.Event) -> None:
    descriptor = os.open(name, _CREATE, 0o600, dir_fd=parent)
    try:
        for view in views:
            done = 0
            while done < view.nbytes:
                if stop.is_set():
                    raise StoppedError
                done += os.write(descriptor, view[done : done + _STEP_BYTES])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _status(parent: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _regular(status: os.stat_result | None) -> TypeGuard[os.stat_result]:
    return status is not None and stat.S_ISREG(status.st_mode)


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    etag = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return ObjectInfo(key, status.st_size, etag, status.st_mtime)


def _walk(folder: Path, above: str, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """Keys and states below a directory in key order: a directory sorts as its name and a slash."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            key = f"{above}{entry.name}/" if is_folder else above + entry.name
            if not is_key(key.rstrip("/")):
                continue
            if key.startswith(prefix) or (is_folder and prefix.startswith(key)):
                found.append((key, entry))
    for key, entry in sorted(found, key=lambda pair: pair[0]):
        if key.endswith("/"):
            yield from _walk(folder / entry.name, key, prefix)
        elif entry.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):
                yield key, entry.stat(follow_symlinks=False)


def _scan(root: Path, prefix: str) -> Iterator[tuple[str, int, int]]:
    """Key, size and time of last use in nanoseconds of every file."""
    for key, status in _walk(root, "", prefix):
        yield key, status.st_size, max(status.st_atime_ns, status.st_mtime_ns)


def _take(root: Path) -> tuple[Path, int]:
    """The first of a directory and its sub-directories that no other engine holds, and its lock.

    Raises:
        BlockingIOError: all are held.
    """
    for number in range(_ENGINES):
        path = root / f".engine-{number}" if number else root
        path.mkdir(mode=0o700, exist_ok=True)
        owner = os.open(path / ".lock", _LOCK, 0o600)
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(owner)
            if isinstance(exc, BlockingIOError):
                continue
            raise
        if number:
            logger.warning("another engine holds %s; using %s of it", root, path.name)
        return path, owner
    raise BlockingIOError(errno.EAGAIN, "every sub-directory is held by another engine", str(root))


def _remove_temporaries(root: Path) -> None:
    """Remove what writers that were killed left behind; other engines' folders are hidden."""
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".")]
        for name in names:
            if name.startswith(_TEMPORARY):
                Path(folder, name).unlink(missing_ok=True)
