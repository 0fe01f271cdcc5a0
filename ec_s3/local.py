"""The host tier: which tensors lie in the slab, who is using them, and which go first.

An entry is `reserved`, then `ready`, then leased any number of times, then evicted or discarded.
Called from any thread; every call is short, does no I/O and copies no tensor bytes. Never takes
pages away from whoever holds them (see `leases`).

Locking: one lock per tier guards the index, both orders of eviction, the pages, the counters, and
the state of every lease and reservation. Methods marked "locked" are called with it held; nothing
is called under it that could take it again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ec_s3.errors import CapacityError
from ec_s3.leases import Entry, Lease, Reservation
from ec_s3.pages import PAGE_BYTES, PageAllocator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ec_s3.pages import Slab
    from ec_s3.types import Extent

__all__ = ["Lease", "LocalStats", "LocalTier", "Reservation"]

_ORDER_WALK = 1000  # bounds the time under the lock; only an entry cleaned very late is misplaced


@dataclass(frozen=True, slots=True)
class LocalStats:
    """State of a tier at one moment. Byte counts are of whole pages.

    Attributes:
        capacity_bytes: size of the slab.
        used_bytes: pages that are not free, including reservations and what was discarded
            while leased.
        reserved_bytes: pages of open reservations.
        leased_bytes: pages of entries with at least one lease.
        dirty_bytes: pages of entries in the index that no other tier has yet.
        entries: entries in the index.
        evictions: entries removed to make room, since the start.
        dirty_evictions: those of them that no other tier had.
    """

    capacity_bytes: int
    used_bytes: int
    reserved_bytes: int
    leased_bytes: int
    dirty_bytes: int
    entries: int
    evictions: int
    dirty_evictions: int


class _Order:
    """Entries by last use; a linked list, because an entry may have to go into the middle."""

    def __init__(self) -> None:
        self._oldest: Entry | None = None
        self._newest: Entry | None = None

    def __iter__(self) -> Iterator[Entry]:
        """Oldest first."""
        entry = self._oldest
        while entry is not None:
            yield entry
            entry = entry.newer

    def insert(self, entry: Entry) -> None:
        older = self._newest
        for _ in range(_ORDER_WALK):
            if older is None or older.last_use <= entry.last_use:
                break
            older = older.older
        newer = self._oldest if older is None else older.newer
        entry.older, entry.newer = older, newer
        if older is None:
            self._oldest = entry
        else:
            older.newer = entry
        if newer is None:
            self._newest = entry
        else:
            newer.older = entry

    def insert_oldest(self, entry: Entry) -> None:
        entry.newer, entry.older = self._oldest, None
        if self._oldest is None:
            self._newest = entry
        else:
            self._oldest.older = entry
        self._oldest = entry

    def remove(self, entry: Entry) -> None:
        older, newer = entry.older, entry.newer
        if older is None:
            self._oldest = newer
        else:
            older.newer = newer
        if newer is None:
            self._newest = older
        else:
            newer.older = older
        entry.older = entry.newer = None


class LocalTier:
    """An LRU of tensors in the populated part of one slab; thread-safe.

    A use is a commit, a lookup or a `use`. Only ready entries without a lease are evicted, least
    recently used first, and those that another tier has (clean) before those that none has (dirty).
    """

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._lock = threading.Lock()
        self._pages = PageAllocator(slab.nbytes)
        self._index: dict[str, Entry] = {}
        self._clean = _Order()
        self._dirty = _Order()
        self._uses = 0
        self._reserved_bytes = 0
        self._leased_bytes = 0
        self._idle_bytes = 0  # in the index and without a lease
        self._dirty_bytes = 0
        self._evictions = 0
        self._dirty_evictions = 0

    def reserve(self, key: str, nbytes: int, *, spare: bool = False) -> Reservation | None:
        """Take pages for a tensor, evicting what is needed; any number of times per key.

        Args:
            key: what the entry will be called.
            nbytes: size of the tensor.
            spare: nobody has asked for it. Nothing is evicted, and the entry is the first to go
                until it is used.

        Returns:
            None when there is no room now (pages in use or not yet populated); nothing was
            evicted then.

        Raises:
            CapacityError: larger than the whole tier; nothing was evicted.
            ValueError: a negative size.
        """
        if nbytes < 0:
            raise ValueError(f"cannot reserve {nbytes} bytes")
        size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        if size > self._slab.nbytes:
            raise CapacityError(f"{nbytes} bytes never fit a tier of {self._slab.nbytes}")
        with self._lock:
            self._pages.grow(self._slab.populated_bytes)
            if size > self._pages.free_bytes + (0 if spare else self._idle_bytes):
                return None
            self._evict(size - self._pages.free_bytes)
            extents = self._pages.allocate(size)
            assert extents is not None
            self._reserved_bytes += size
            return Reservation(
                self._slab,
                self._lock,
                extents,
                key=key,
                nbytes=nbytes,
                commit=self._commit_unused if spare else self._commit,
                abort=self._abort,
            )

    def lookup(self, key: str, *, touch: bool = True) -> Lease | None:
        """Lease the ready entry of a key, None when there is none.

        Args:
            key: as reserved.
            touch: whether this counts as a use.
        """
        with self._lock:
            entry = self._index.get(key)
            if entry is None:
                return None
            if touch:
                self._touch(entry)
            return self._lease(entry)

    def use(self, key: str) -> None:
        """Count a use of a ready entry that somebody else has leased for its user."""
        with self._lock:
            entry = self._index.get(key)
            if entry is not None:
                self._touch(entry)

    def contains(self, key: str) -> bool:
        """Whether a lookup would find the key now."""
        with self._lock:
            return key in self._index

    def discard(self, key: str) -> bool:
        """Forget a key at once; its pages are free when its last lease ends.

        Returns:
            Whether the key was there.
        """
        with self._lock:
            entry = self._index.get(key)
            if entry is None:
                return False
            self._drop(entry)
            return True

    def clear(self) -> None:
        """Discard every key."""
        with self._lock:
            for entry in list(self._index.values()):
                self._drop(entry)

    def stats(self) -> LocalStats:
        """The tier's counters, consistent with each other."""
        with self._lock:
            return LocalStats(
                capacity_bytes=self._slab.nbytes,
                used_bytes=self._pages.used_bytes,
                reserved_bytes=self._reserved_bytes,
                leased_bytes=self._leased_bytes,
                dirty_bytes=self._dirty_bytes,
                entries=len(self._index),
                evictions=self._evictions,
                dirty_evictions=self._dirty_evictions,
            )

    def _order(self, entry: Entry) -> _Order:
        return self._dirty if entry.dirty else self._clean

    def _touch(self, entry: Entry) -> None:
        """Locked: make it the most recently used."""
        self._order(entry).remove(entry)
        self._uses += 1
        entry.last_use = self._uses
        self._order(entry).insert(entry)

    def _evict(self, missing: int) -> None:
        """Locked: make `missing` bytes more free; the caller knows that it is possible."""
        victims = []
        for order in (self._clean, self._dirty):
            for entry in order:
                if missing <= 0:
                    break
                if not entry.leases:
                    victims.append(entry)
                    missing -= entry.size
        for entry in victims:
            self._evictions += 1
            self._dirty_evictions += entry.dirty
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        """Locked: take it out of the index."""
        del self._index[entry.key]
        self._order(entry).remove(entry)
        entry.indexed = False
        if entry.dirty:
            self._dirty_bytes -= entry.size
        if not entry.leases:
            self._idle_bytes -= entry.size
            self._pages.free(entry.extents)

    def _commit_unused(self, entry: Entry) -> Lease:
        """Locked."""
        return self._commit(entry, used=False)

    def _commit(self, entry: Entry, *, used: bool = True) -> Lease:
        """Locked."""
        self._reserved_bytes -= entry.size
        winner = self._index.setdefault(entry.key, entry)
        if winner is entry:
            entry.indexed = True
            if used:
                self._uses += 1
                entry.last_use = self._uses
                self._order(entry).insert(entry)
            else:
                self._order(entry).insert_oldest(entry)
            self._idle_bytes += entry.size
            if entry.dirty:
                self._dirty_bytes += entry.size
        elif used:
            self._touch(winner)
        return self._lease(entry)

    def _abort(self, extents: Sequence[Extent]) -> None:
        """Locked."""
        self._reserved_bytes -= sum(extent.nbytes for extent in extents)
        self._pages.free(extents)

    def _lease(self, entry: Entry) -> Lease:
        """Locked."""
        if not entry.leases:
            self._leased_bytes += entry.size
            if entry.indexed:
                self._idle_bytes -= entry.size
        entry.leases += 1
        return Lease(
            self._slab,
            self._lock,
            entry,
            clean=self._mark_clean,
            release=self._end_lease,
            share=self._lease,
        )

    def _end_lease(self, entry: Entry) -> None:
        """Locked."""
        entry.leases -= 1
        if entry.leases:
            return
        self._leased_bytes -= entry.size
        if entry.indexed:
            self._idle_bytes += entry.size
        else:
            self._pages.free(entry.extents)

    def _mark_clean(self, entry: Entry) -> None:
        """Locked."""
        if not entry.dirty:
            return
        if entry.indexed:
            self._dirty.remove(entry)
            self._dirty_bytes -= entry.size
            self._clean.insert(entry)
        entry.dirty = False
