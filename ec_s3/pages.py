"""One slab of host memory, and which of its pages are free.

`Slab` is a sealed memfd that its creator owns and that other processes of the host may map;
`PageAllocator` hands out runs of its pages. Created and closed by whichever thread owns them;
`populate` and `pin` block and belong on a background thread. Never on `/dev/shm`, never a named
file, never one allocation per entry: the memory is gone with the last process that maps it.

Locking: a slab's lock guards its one-time work (tensor, pinning, closing); `view` takes none.
`PageAllocator` is not thread-safe: `local.LocalTier` calls it under its own lock.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import warnings
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from ec_s3 import memfd
from ec_s3.cgroup import headroom
from ec_s3.errors import ClosedError, ConfigError
from ec_s3.types import Extent

if TYPE_CHECKING:
    from collections.abc import Iterable
    from mmap import mmap
    from typing import Self

    import torch

PAGE_BYTES = 256 << 10
"""Unit of allocation in a slab."""

POPULATE_STEP = 64 << 20
"""Memory is populated in steps of this size: a stop waits for one step at most."""

_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process

_log = logging.getLogger(__name__)


class Slab:
    """A run of host memory, shared between the processes that map its file descriptor.

    Views and tensors stay valid after `close`: the memory goes when the last of them does.

    Attributes:
        fd: the memfd, for passing to another process; -1 once closed.
        nbytes: size, a multiple of `PAGE_BYTES`.
    """

    def __init__(self, fd: int, nbytes: int, *, owner: bool) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._owner = owner
        self._populated = 0
        self._lock = threading.Lock()
        self._tensor: torch.Tensor | None = None
        self._pinned: bool | None = None
        self._mapping: mmap | None = memfd.map_shared(fd, nbytes)
        _slabs.add(self)

    @classmethod
    def create(cls, nbytes: int) -> Self:
        """Make a slab of at least `nbytes`, rounded up to whole pages, with nothing populated.

        Raises:
            ConfigError: the machine or the cgroup does not have that much memory left.
        """
        size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        _check_size(nbytes, size)
        fd = -1
        try:
            fd = memfd.create(size)
            return cls(fd, size, owner=True)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise ConfigError(
                f"max_local_cpu_size={nbytes}: the system refuses to map that much memory "
                f"({error}); lower max_local_cpu_size or raise the limit (ulimit -v, ulimit -f)"
            ) from error

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Self:
        """Map a slab of another process; takes ownership of `fd`, also when it fails.

        Raises:
            ValueError: `fd` is no memfd of this size that is sealed against resizing.
            OSError: the mapping failed.
        """
        try:
            memfd.check(fd, nbytes)
            return cls(fd, nbytes, owner=False)
        except (OSError, ValueError):
            os.close(fd)
            raise

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or this is a forked child's copy."""
        return self._mapping is None

    @property
    def populated_bytes(self) -> int:
        """Length of the leading part that is backed by memory."""
        return self._populated

    def populate(self, *, step: int = POPULATE_STEP) -> None:
        """Back the slab with memory, front to back; blocks, without the GIL.

        Ends early when the slab is closed or memory runs out; the latter is logged, and
        `populated_bytes` then stays where it is. One call at a time.
        """
        # Held for the whole call: close() must not unmap the pages under the kernel's hands.
        mapping, huge = self._mapping, self._owner
        while mapping is not None and self._populated < self.nbytes and not self.closed:
            start = self._populated
            length = min(step, self.nbytes - start)
            huge = huge and memfd.enlarge(mapping, start, length)  # a refusal stays one
            code = memfd.populate(mapping, start, length, write=self._owner)
            if code == errno.EINVAL:  # a kernel before 5.14
                code = self._touch(mapping, start, length)
            if code:
                _log.warning(
                    "host memory populated up to %d of %d bytes, the rest stays unused: %s",
                    start,
                    self.nbytes,
                    os.strerror(code),
                )
                return
            self._populated = start + length

    def _touch(self, mapping: mmap, start: int, nbytes: int) -> int:
        with self._lock:  # close() must not take the descriptor away
            return 0 if self.closed else memfd.touch(mapping, self.fd, start, nbytes)

    def view(self, extent: Extent) -> memoryview:
        """Writable bytes of an extent.

        Raises:
            ValueError: the extent lies outside the slab.
            ClosedError: after `close`.
        """
        mapping = self._open()
        end = extent.offset + extent.nbytes
        if extent.offset < 0 or extent.nbytes < 0 or end > self.nbytes:
            raise ValueError(f"{extent} lies outside a slab of {self.nbytes} bytes")
        return memoryview(mapping)[extent.offset : end]

    def tensor(self) -> torch.Tensor:
        """All bytes as one `[nbytes]` uint8 tensor; the same object each time.

        Never an inference tensor, so any thread may copy into it, whatever mode the caller is in.

        Raises:
            ClosedError: after `close`.
        """
        import torch

        with self._lock:
            mapping = self._open()
            if self._tensor is None:
                with torch.inference_mode(False):
                    self._tensor = torch.frombuffer(mapping, dtype=torch.uint8)
            return self._tensor

    def pin(self) -> bool:
        """Register the memory with CUDA, so that device copies are asynchronous; blocks.

        Populates what is not yet populated. Tried once; a failure is logged and leaves the
        memory usable as it is. It also leaves CUDA's last error set for the calling thread, so
        call this on a thread that launches nothing.

        Returns:
            Whether the memory is pinned; False where there is no CUDA.

        Raises:
            ClosedError: after `close`.
        """
        with self._lock:
            mapping = self._open()
            if self._pinned is None:
                self._pinned = _host_register(memfd.address(mapping), self.nbytes)
            return self._pinned

    def close(self) -> None:
        """Give the memory back, as soon as no view of it is left; idempotent."""
        with self._lock:
            mapping, self._mapping = self._mapping, None
            fd, self.fd = self.fd, -1
            self._tensor = None
            if mapping is None:
                return
            if self._pinned:
                _host_unregister(memfd.address(mapping))
            os.close(fd)

    def close_in_child(self) -> None:
        """Drop what a fork copied, so that the child does not keep the memory alive."""
        self._lock = threading.Lock()  # another thread may have held it at the fork
        self._mapping = self._tensor = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _open(self) -> mmap:
        if self._mapping is None:
            raise ClosedError("the slab is closed, or belongs to the parent of this process")
        return self._mapping

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_mapping", None) is not None:
            warnings.warn("unclosed Slab", ResourceWarning, source=self, stacklevel=2)
            self.close()


def _check_size(asked: int, size: int) -> None:
    if asked <= 0:
        raise ConfigError(f"max_local_cpu_size={asked}: must be more than 0")
    bound = headroom()
    if bound is not None and size > bound.free:
        raise ConfigError(
            f"max_local_cpu_size={asked} does not fit: {bound.free} bytes are free below "
            f"{bound.source} ({bound.limit} bytes); lower max_local_cpu_size below that, or "
            f"give the process more memory"
        )


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _host_register(address: int, nbytes: int) -> bool:
    import torch

    if not torch.cuda.is_available():
        return False
    try:
        code = int(_cudart().cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE))
    except RuntimeError as error:  # torch could not start CUDA here
        reason = str(error)
    else:
        if code == 0:
            return True
        reason = f"cudaHostRegister returned {code}"
    _log.warning("host memory of %d bytes stays unpinned, copies are slower: %s", nbytes, reason)
    return False


def _host_unregister(address: int) -> None:
    code = int(_cudart().cudaHostUnregister(address))
    if code:
        _log.warning("host memory could not be unpinned: cudaHostUnregister returned %d", code)


def _close_in_child() -> None:
    for slab in list(_slabs):
        slab.close_in_child()


_slabs: weakref.WeakSet[Slab] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)


class PageAllocator:
    """Free pages of a slab, as runs kept by size; every call is O(1) per run that it touches.

    Pages beyond the watermark set by `grow` do not exist yet.
    """

    def __init__(self, nbytes: int) -> None:
        self._limit = nbytes // PAGE_BYTES
        self._grown = 0
        self._free = 0
        self._runs: dict[int, int] = {}  # first page -> pages
        self._ends: dict[int, int] = {}  # page after the last -> first page
        # One set of first pages per size class; class k holds runs of 2**(k-1) to 2**k - 1 pages.
        # Ordered dictionaries, because the first key of a plain one gets slow to find when many
        # before it were deleted.
        self._classes: list[OrderedDict[int, None]] = [
            OrderedDict() for _ in range(self._limit.bit_length() + 1)
        ]
        self._taken: dict[int, int] = {}  # first page -> pages, as handed out

    @property
    def free_bytes(self) -> int:
        """Bytes that `allocate` could hand out at once."""
        return self._free * PAGE_BYTES

    @property
    def used_bytes(self) -> int:
        """Bytes that are handed out."""
        return (self._grown - self._free) * PAGE_BYTES

    def grow(self, watermark: int) -> None:
        """Take over the pages below `watermark` bytes; never gives any back."""
        pages = min(watermark // PAGE_BYTES, self._limit)
        if pages > self._grown:
            start, self._grown = self._grown, pages
            self._insert(start, pages - start)

    def allocate(self, nbytes: int) -> tuple[Extent, ...] | None:
        """Reserve `nbytes`, rounded up to pages: one run if any is long enough, else several.

        Returns:
            Extents of whole pages, none for zero bytes; None when too few pages are free.
        """
        need = -(-nbytes // PAGE_BYTES)
        if need > self._free:
            return None
        extents = []
        while need:
            start = self._fitting(need)
            if start is None:
                start = self._longest()
            pages = min(need, self._runs[start])
            self._take(start, pages)
            extents.append(Extent(start * PAGE_BYTES, pages * PAGE_BYTES))
            need -= pages
        return tuple(extents)

    def free(self, extents: Iterable[Extent]) -> None:
        """Give back extents exactly as `allocate` returned them.

        Raises:
            ValueError: an extent is not allocated (any more).
        """
        for extent in extents:
            start, pages = extent.offset // PAGE_BYTES, extent.nbytes // PAGE_BYTES
            if self._taken.get(start) != pages:
                raise ValueError(f"{extent} is not allocated")
            del self._taken[start]
            self._insert(start, pages)

    def _fitting(self, need: int, *, candidates: int = 16) -> int | None:
        """First page of a run of at least `need` pages, None when none was found."""
        own = need.bit_length()
        for start, _ in zip(self._classes[own], range(candidates), strict=False):
            if self._runs[start] >= need:
                return start
        for runs in self._classes[own + 1 :]:
            for start in runs:
                return start
        return None

    def _longest(self) -> int:
        for runs in reversed(self._classes):
            for start in runs:
                return start
        raise AssertionError("free pages without a run")

    def _take(self, start: int, pages: int) -> None:
        """Hand out the first `pages` pages of the run at `start`."""
        length = self._remove(start)
        self._taken[start] = pages
        if length > pages:
            self._add(start + pages, length - pages)

    def _insert(self, start: int, pages: int) -> None:
        """Add free pages, joined with the free runs on either side."""
        before = self._ends.get(start)
        if before is not None:
            pages += self._remove(before)
            start = before
        after = start + pages
        if after in self._runs:
            pages += self._remove(after)
        self._add(start, pages)

    def _add(self, start: int, pages: int) -> None:
        self._runs[start] = pages
        self._ends[start + pages] = start
        self._classes[pages.bit_length()][start] = None
        self._free += pages

    def _remove(self, start: int) -> int:
        pages = self._runs.pop(start)
        del self._ends[start + pages]
        del self._classes[pages.bit_length()][start]
        self._free -= pages
        return pages
