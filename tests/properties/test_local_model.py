"""Any sequence of operations on a tier behaves like a naive model of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ec_s3.errors import CapacityError
from ec_s3.local import Lease, LocalTier, Reservation
from ec_s3.pages import PAGE_BYTES, Slab
from ec_s3.types import ItemMeta, TensorSpec

PAGES = 10
NAMES = "abcdefghijkl"
KEYS = st.sampled_from(NAMES)
# Bytes around page borders. Mostly small, or the tier would rarely hold enough to have an order.
SIZES = st.builds(
    lambda pages, cut: max(pages * PAGE_BYTES - cut, 0),
    st.sampled_from([0, 1, 1, 1, 2, 2, 3, PAGES, PAGES + 1]),
    st.sampled_from([0, 1, 1000]),
)
META = ItemMeta()


@dataclass(eq=False)
class Item:
    """What the model knows of one tensor, reserved or ready."""

    key: str
    nbytes: int
    mark: int
    dirty: bool = False
    used: int = 0
    holders: list[Reservation | Lease] = field(default_factory=list)

    @property
    def pages(self) -> int:
        return -(-self.nbytes // PAGE_BYTES)


class TierMachine(RuleBasedStateMachine):
    """`index` is what a lookup may find; `reserved` and `detached` hold pages beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.slab = Slab.create(PAGES * PAGE_BYTES)
        self.tier = LocalTier(self.slab)
        self.populated = 0
        self.index: dict[str, Item] = {}
        self.reserved: list[Item] = []
        self.detached: list[Item] = []
        self.clock = 0
        self.marks = 0
        self.evictions = 0
        self.dirty_evictions = 0

    def teardown(self) -> None:
        self.slab.close()

    # --- the model

    def everything(self) -> list[Item]:
        return [*self.index.values(), *self.reserved, *self.detached]

    def free(self) -> int:
        return self.populated - sum(item.pages for item in self.everything())

    def make_room(self, pages: int) -> bool:
        idle = [item for item in self.index.values() if not item.holders]
        if self.free() + sum(item.pages for item in idle) < pages:
            return False
        idle.sort(key=lambda item: (item.dirty, item.used))
        while self.free() < pages:
            victim = idle.pop(0)
            del self.index[victim.key]
            self.evictions += 1
            self.dirty_evictions += victim.dirty
        return True

    def use(self, item: Item) -> None:
        self.clock += 1
        item.used = self.clock

    def leased(self) -> list[Item]:
        return [item for item in [*self.index.values(), *self.detached] if item.holders]

    def ready(self, item: Item, *, dirty: bool) -> None:
        reservation = item.holders.pop()
        assert isinstance(reservation, Reservation)
        item.dirty = dirty
        lease = reservation.commit(TensorSpec("uint8", (item.nbytes,)), META, dirty=dirty)
        item.holders.append(lease)
        winner = self.index.setdefault(item.key, item)
        assert lease.indexed == (winner is item)
        if winner is not item:
            self.detached.append(item)
        self.use(winner)

    def end(self, item: Item, *, clean: bool, late: bool = False) -> None:
        lease = item.holders.pop()
        assert isinstance(lease, Lease)
        if late:
            lease.release()
        if clean:
            lease.mark_clean()
            item.dirty = False
        lease.release()
        if item in self.detached and not item.holders:
            self.detached.remove(item)

    # --- operations

    @initialize(pages=st.integers(4, PAGES))
    def start(self, pages: int) -> None:
        self.populate(pages)

    @rule(pages=st.integers(1, PAGES))
    def populate(self, pages: int) -> None:
        self.populated = max(self.populated, pages)
        self.slab._populated = self.populated * PAGE_BYTES

    @rule(keys=st.lists(KEYS, min_size=1, max_size=6), pages=st.integers(1, 2), dirty=st.booleans())
    def put(self, keys: list[str], pages: int, dirty: bool) -> None:
        for key in keys:
            before = len(self.reserved)
            self.reserve(key, pages * PAGE_BYTES)
            if len(self.reserved) > before:
                item = self.reserved.pop()
                self.ready(item, dirty=dirty)
                self.end(item, clean=False)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=6))
    def read(self, keys: list[str]) -> None:
        for key in keys:
            lease = self.tier.lookup(key)
            item = self.index.get(key)
            assert (lease is None) == (item is None)
            if lease is not None and item is not None:
                lease.release()
                self.use(item)

    @rule(key=KEYS, nbytes=SIZES)
    def reserve(self, key: str, nbytes: int) -> None:
        self.marks = (self.marks + 1) % 251
        item = Item(key, nbytes, self.marks)
        if item.pages > PAGES:
            with pytest.raises(CapacityError):
                self.tier.reserve(key, nbytes)
            return
        expected = self.make_room(item.pages)
        reservation = self.tier.reserve(key, nbytes)
        assert (reservation is not None) == expected
        if reservation is not None:
            for part in reservation.segments():
                part[:] = bytes([item.mark]) * len(part)
            item.holders.append(reservation)
            self.reserved.append(item)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), dirty=st.booleans())
    def commit(self, data: st.DataObject, dirty: bool) -> None:
        item = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        self.ready(item, dirty=dirty)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        item = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        for holder in item.holders:
            assert isinstance(holder, Reservation)
            holder.abort()

    @rule(key=KEYS, touch=st.booleans())
    def lookup(self, key: str, touch: bool) -> None:
        lease = self.tier.lookup(key, touch=touch)
        item = self.index.get(key)
        assert (lease is None) == (item is None)
        if lease is not None and item is not None:
            item.holders.append(lease)
            if touch:
                self.use(item)

    @precondition(lambda self: self.leased())
    @rule(data=st.data(), clean=st.booleans(), late=st.booleans())
    def release(self, data: st.DataObject, clean: bool, late: bool) -> None:
        held = self.leased()
        item = held[data.draw(st.integers(0, len(held) - 1))]
        self.end(item, clean=clean, late=late)

    @rule(key=KEYS)
    def discard(self, key: str) -> None:
        item = self.index.pop(key, None)
        assert self.tier.discard(key) == (item is not None)
        if item is not None and item.holders:
            self.detached.append(item)

    @precondition(lambda self: len(self.index) > 6)
    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.detached += [item for item in self.index.values() if item.holders]
        self.index.clear()

    # --- what always holds

    @invariant()
    def accounting_is_exact(self) -> None:
        stats = self.tier.stats()

        def total(items: list[Item]) -> int:
            return sum(item.pages for item in items) * PAGE_BYTES

        assert stats.used_bytes == total(self.everything()) <= stats.capacity_bytes
        assert stats.reserved_bytes == total(self.reserved)
        assert stats.leased_bytes == total(self.leased())
        assert stats.dirty_bytes == total([i for i in self.index.values() if i.dirty])
        assert stats.entries == len(self.index)
        assert stats.evictions == self.evictions
        assert stats.dirty_evictions == self.dirty_evictions

    @invariant()
    def index_is_the_models(self) -> None:
        assert {key for key in NAMES if self.tier.contains(key)} == set(self.index)

    @invariant()
    def holders_never_overlap_and_content_is_kept(self) -> None:
        taken: set[int] = set()
        for item in [*self.reserved, *self.leased()]:
            holder = item.holders[0]
            for extent in holder.extents:
                first = extent.offset // PAGE_BYTES
                pages = set(range(first, first + extent.nbytes // PAGE_BYTES))
                assert not pages & taken
                assert max(pages) < self.populated
                taken |= pages
            for part in holder.segments():
                assert part[0] == part[len(part) // 2] == part[-1] == item.mark

    @invariant()
    def idle_entries_keep_their_content(self) -> None:
        for key, item in self.index.items():
            lease = self.tier.lookup(key, touch=False)
            assert lease is not None
            with lease:
                assert lease.nbytes == item.nbytes
                assert all(part[0] == part[-1] == item.mark for part in lease.segments())


TierMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # slabs are real memory
)
TestTier = TierMachine.TestCase
