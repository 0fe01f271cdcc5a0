"""What a user of the host tier holds: a reservation to fill, or a lease on a ready entry.

Used from any thread; `local.LocalTier` makes them. They never end by themselves: neither a clock
nor a lost reference frees pages, because a copy into or out of them may still be running.

Locking: the tier's lock guards the state of every holder and every field of `Entry`; the tier's
callbacks are called with it held.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ec_s3.errors import ClosedError
from ec_s3.types import Extent

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from ec_s3.pages import Slab
    from ec_s3.types import ItemMeta, TensorSpec


@dataclass(slots=True, eq=False)
class Entry:
    """The tier's record of one tensor; fields beyond the first four change under its lock."""

    key: str
    spec: TensorSpec
    meta: ItemMeta
    extents: tuple[Extent, ...]
    dirty: bool
    size: int = field(init=False)  # bytes of whole pages
    indexed: bool = False
    leases: int = 0
    last_use: int = 0
    older: Entry | None = field(default=None, repr=False)  # a repr would follow the whole list
    newer: Entry | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.size = sum(extent.nbytes for extent in self.extents)


class _Holder:
    """A claim on pages, until it is ended on purpose."""

    def __init__(
        self, slab: Slab, lock: threading.Lock, extents: tuple[Extent, ...], nbytes: int
    ) -> None:
        self.extents = extents
        self.nbytes = nbytes
        self._slab = slab
        self._lock = lock
        self._ended = False

    def segments(self, offset: int = 0, nbytes: int | None = None) -> list[memoryview]:
        """The tensor's bytes from `offset` on, `nbytes` or all that follow, in order.

        Writable views of the slab, to be used only until this holder is ended.

        Raises:
            ValueError: the range lies outside the tensor.
            ClosedError: the holder is ended or the slab closed.
        """
        stop = self.nbytes if nbytes is None else offset + nbytes
        if not 0 <= offset <= stop <= self.nbytes:
            raise ValueError(f"bytes {offset} to {stop} of {self.nbytes}")
        if self._ended:
            raise ClosedError(f"{type(self).__name__} used after its end")
        if len(self.extents) == 1 and offset < stop:  # nearly always
            return [self._slab.view(Extent(self.extents[0].offset + offset, stop - offset))]
        return [self._slab.view(extent) for extent in _cut(self.extents, offset, stop)]

    def __enter__(self) -> Self:
        return self

    def __del__(self) -> None:
        # Frees nothing: a copy may be running. Takes no lock: this thread may hold it.
        if not self._ended and not self._slab.closed:
            name = type(self).__name__
            warnings.warn(f"{name} never ended, its pages stay taken", ResourceWarning, 2, self)


class Lease(_Holder):
    """Use of a ready entry, which stays where it is until `release`. Thread-safe.

    Attributes:
        key: the entry's key.
        spec: element type and shape.
        meta: what travels with the tensor.
        extents: whole pages that hold the tensor, in order.
        nbytes: size of the tensor.
    """

    def __init__(
        self,
        slab: Slab,
        lock: threading.Lock,
        entry: Entry,
        *,
        clean: Callable[[Entry], None],
        release: Callable[[Entry], None],
        share: Callable[[Entry], Lease],
    ) -> None:
        super().__init__(slab, lock, entry.extents, entry.spec.nbytes)
        self.key = entry.key
        self.spec = entry.spec
        self.meta = entry.meta
        self._entry = entry
        self._clean = clean
        self._release = release
        self._share = share

    def share(self) -> Lease:
        """Another lease of the same entry, to be released on its own.

        Raises:
            ClosedError: this lease has been released.
        """
        with self._lock:
            if self._ended:
                raise ClosedError("the lease has been released")
            return self._share(self._entry)

    @property
    def indexed(self) -> bool:
        """Whether a lookup of the key finds this very entry."""
        return self._entry.indexed

    def mark_clean(self) -> None:
        """Say that another tier has the entry now; idempotent, also after `release`."""
        with self._lock:
            self._clean(self._entry)

    def release(self) -> None:
        """End the lease; idempotent."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._release(self._entry)

    def __exit__(self, *_: object) -> None:
        self.release()


class Reservation(_Holder):
    """Pages to be filled, then turned into an entry by `commit`. Thread-safe.

    As a context manager it aborts unless committed.

    Attributes:
        key: key of the entry to be.
        extents: whole pages reserved, in order.
        nbytes: size of the tensor to be.
    """

    def __init__(
        self,
        slab: Slab,
        lock: threading.Lock,
        extents: tuple[Extent, ...],
        *,
        key: str,
        nbytes: int,
        commit: Callable[[Entry], Lease],
        abort: Callable[[Sequence[Extent]], None],
    ) -> None:
        super().__init__(slab, lock, extents, nbytes)
        self.key = key
        self._commit = commit
        self._abort = abort

    def commit(self, spec: TensorSpec, meta: ItemMeta, *, dirty: bool) -> Lease:
        """Make the filled pages a ready entry, and lease it.

        The first writer of a key wins: where the key is ready already, this entry stays outside
        the index (`Lease.indexed` is False) and ends with its lease.

        Args:
            spec: what was written.
            meta: what travels with it.
            dirty: whether no other tier has it yet.

        Raises:
            ValueError: `spec` is of another size than was reserved; the reservation stays open.
            ClosedError: committed or aborted before.
        """
        if spec.nbytes != self.nbytes:
            raise ValueError(f"{spec} has {spec.nbytes} bytes, {self.nbytes} were reserved")
        with self._lock:
            if self._ended:
                raise ClosedError("Reservation committed after its end")
            self._ended = True
            return self._commit(Entry(self.key, spec, meta, self.extents, dirty))

    def abort(self) -> None:
        """Give the pages back; nothing may write to them any more. Idempotent."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._abort(self.extents)

    def __exit__(self, *_: object) -> None:
        self.abort()


def _cut(extents: Sequence[Extent], start: int, stop: int) -> Iterator[Extent]:
    """The parts of consecutive extents that hold bytes `start` to `stop` of their content."""
    at = 0
    for extent in extents:
        low, high = max(start - at, 0), min(stop - at, extent.nbytes)
        if low < high:
            yield Extent(extent.offset + low, high - low)
        at += extent.nbytes
