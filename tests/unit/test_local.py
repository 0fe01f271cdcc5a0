"""LocalTier: LRU order, leases, exact accounting, and what it refuses."""

from __future__ import annotations

import gc
import random
import threading
from typing import TYPE_CHECKING

import pytest

from ec_s3.errors import CapacityError, ClosedError
from ec_s3.local import Lease, LocalTier
from ec_s3.pages import PAGE_BYTES, Slab
from ec_s3.types import ItemMeta, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

META = ItemMeta(encode_seconds=0.5)
CAPACITY = 12  # pages


def spec(nbytes: int) -> TensorSpec:
    return TensorSpec("uint8", (nbytes,))


@pytest.fixture
def slab() -> Iterator[Slab]:
    with Slab.create(CAPACITY * PAGE_BYTES) as made:
        made.populate()
        yield made


@pytest.fixture
def tier(slab: Slab) -> LocalTier:
    return LocalTier(slab)


def put(tier: LocalTier, key: str, nbytes: int = PAGE_BYTES, *, dirty: bool = False) -> None:
    reservation = tier.reserve(key, nbytes)
    assert reservation is not None
    with reservation:
        for segment in reservation.segments():
            segment[:8] = key.encode().ljust(8)
        reservation.commit(spec(nbytes), META, dirty=dirty).release()


def fill(tier: LocalTier, count: int = CAPACITY, *, dirty: bool = False) -> list[str]:
    keys = [f"k{i}" for i in range(count)]
    for key in keys:
        put(tier, key, dirty=dirty)
    return keys


def hold(tier: LocalTier, key: str) -> Lease:
    lease = tier.lookup(key)
    assert lease is not None
    return lease


def present(tier: LocalTier, keys: list[str]) -> list[str]:
    return [key for key in keys if tier.contains(key)]


# --- reading back


def test_entry_comes_back_with_its_bytes_spec_and_meta(tier: LocalTier) -> None:
    nbytes = 2 * PAGE_BYTES + 77
    reservation = tier.reserve("a", nbytes)
    assert reservation is not None
    with reservation:
        assert sum(extent.nbytes for extent in reservation.extents) == 3 * PAGE_BYTES
        assert sum(len(segment) for segment in reservation.segments()) == nbytes
        reservation.segments()[0][:3] = b"abc"
        reservation.segments(nbytes - 2)[-1][:] = b"yz"
        with reservation.commit(spec(nbytes), META, dirty=True) as lease:
            assert (lease.key, lease.spec, lease.meta) == ("a", spec(nbytes), META)
    with hold(tier, "a") as lease:
        assert lease.indexed
        assert bytes(lease.segments(0, 3)[0]) == b"abc"
        assert bytes(lease.segments(nbytes - 2)[-1]) == b"yz"


def test_ranges_are_cut_across_extents(tier: LocalTier) -> None:
    fill(tier)
    for key in ("k1", "k3", "k5", "k7"):
        tier.discard(key)
    reservation = tier.reserve("big", 4 * PAGE_BYTES)
    assert reservation is not None
    with reservation:
        assert len(reservation.extents) == 4
        for value, segment in enumerate(reservation.segments()):
            segment[:] = bytes([value]) * len(segment)
        parts = reservation.segments(PAGE_BYTES - 2, PAGE_BYTES + 4)
        assert b"".join(parts) == b"\0\0" + b"\1" * PAGE_BYTES + b"\2\2"
        assert reservation.segments(PAGE_BYTES, 0) == []


def test_range_outside_the_tensor_is_refused(tier: LocalTier) -> None:
    put(tier, "a", 100)
    with hold(tier, "a") as lease:
        for offset, nbytes in ((-1, 5), (101, None), (90, 11), (5, -1)):
            with pytest.raises(ValueError, match="of 100"):
                lease.segments(offset, nbytes)


def test_absent_key_is_none(tier: LocalTier) -> None:
    assert tier.lookup("nothing") is None
    assert not tier.contains("nothing")
    assert not tier.discard("nothing")


def test_reserved_is_not_ready(tier: LocalTier) -> None:
    reservation = tier.reserve("a", 5)
    assert reservation is not None
    with reservation:
        assert tier.lookup("a") is None
        assert not tier.contains("a")


def test_empty_tensor_takes_no_pages(tier: LocalTier) -> None:
    put(tier, "empty", 0)
    assert tier.stats().used_bytes == 0
    with hold(tier, "empty") as lease:
        assert lease.extents == ()
        assert lease.segments() == []


# --- which goes first


def test_reads_protect_from_eviction(tier: LocalTier) -> None:
    keys = fill(tier)
    for _ in range(5):
        hold(tier, "k0").release()
    put(tier, "new0")
    put(tier, "new1")
    assert present(tier, keys) == ["k0", *keys[3:]]
    assert tier.stats().evictions == 2


def test_clean_entries_are_evicted_before_dirty_ones(tier: LocalTier) -> None:
    put(tier, "dirty", dirty=True)
    fill(tier, CAPACITY - 1)
    for i in range(CAPACITY - 1):
        put(tier, f"new{i}")
    assert tier.contains("dirty")
    stats = tier.stats()
    assert (stats.evictions, stats.dirty_evictions) == (CAPACITY - 1, 0)


def test_dirty_entries_go_when_no_clean_one_is_left_and_are_counted(tier: LocalTier) -> None:
    keys = fill(tier, dirty=True)
    put(tier, "new", 2 * PAGE_BYTES)
    assert present(tier, keys) == keys[2:]
    stats = tier.stats()
    assert (stats.evictions, stats.dirty_evictions) == (2, 2)


def test_cleaned_entry_keeps_its_place_in_the_order(tier: LocalTier) -> None:
    keys = fill(tier, dirty=True)
    leases = {key: hold(tier, key) for key in keys}
    hold(tier, "k1").release()
    for key in reversed(keys):  # uploads end in any order
        leases[key].mark_clean()
        leases[key].mark_clean()
        leases[key].release()
    assert tier.stats().dirty_bytes == 0
    put(tier, "new", 3 * PAGE_BYTES)
    assert present(tier, keys) == ["k1", *keys[4:]]


def test_cleaning_after_release_counts_too(tier: LocalTier) -> None:
    put(tier, "a", dirty=True)
    lease = hold(tier, "a")
    lease.release()
    lease.mark_clean()
    assert tier.stats().dirty_bytes == 0


def test_lookup_without_touch_is_no_use(tier: LocalTier) -> None:
    keys = fill(tier)
    lease = tier.lookup("k0", touch=False)
    assert lease is not None
    lease.release()
    put(tier, "new")
    assert present(tier, keys) == keys[1:]


def test_ten_thousand_items_stay_bounded_and_the_last_ones_remain(tier: LocalTier) -> None:
    for i in range(10_000):
        put(tier, f"i{i}")
        assert tier.stats().used_bytes <= CAPACITY * PAGE_BYTES
    assert all(tier.contains(f"i{i}") for i in range(10_000 - CAPACITY, 10_000))
    assert tier.stats().entries == CAPACITY


# --- what does not fit


def test_item_larger_than_tier_evicts_nothing(tier: LocalTier) -> None:
    keys = fill(tier)
    with pytest.raises(CapacityError):
        tier.reserve("huge", 2 * CAPACITY * PAGE_BYTES)
    with pytest.raises(CapacityError):
        tier.reserve("huge", CAPACITY * PAGE_BYTES + 1)
    assert present(tier, keys) == keys
    assert tier.stats().evictions == 0


def test_no_room_because_of_leases_evicts_nothing(tier: LocalTier) -> None:
    keys = fill(tier)
    leases = [hold(tier, key) for key in keys[:4]]
    assert tier.reserve("big", (CAPACITY - 3) * PAGE_BYTES) is None
    assert present(tier, keys) == keys
    reservation = tier.reserve("big", (CAPACITY - 4) * PAGE_BYTES)
    assert reservation is not None
    reservation.abort()
    assert present(tier, keys) == keys[:4]
    for lease in leases:
        lease.release()


def test_no_room_because_of_reservations_is_none(tier: LocalTier) -> None:
    first = tier.reserve("a", CAPACITY * PAGE_BYTES)
    assert first is not None
    assert tier.reserve("b", 1) is None
    first.abort()
    put(tier, "b")


def test_only_the_populated_part_is_used() -> None:
    with Slab.create(8 * PAGE_BYTES) as slab:
        tier = LocalTier(slab)
        assert tier.reserve("a", 1) is None
        slab.populate()
        put(tier, "a", 8 * PAGE_BYTES)
        assert tier.stats().used_bytes == slab.nbytes


def test_negative_size_is_refused(tier: LocalTier) -> None:
    with pytest.raises(ValueError, match="-1"):
        tier.reserve("a", -1)


# --- holders


def test_leased_entries_stay_through_any_pressure(tier: LocalTier) -> None:
    """Announced to a reader means there until released, however full the tier."""
    fill(tier, 2)
    announced = [hold(tier, "k0"), hold(tier, "k1")]
    for i in range(100):
        put(tier, f"other{i}")
    for lease in announced:
        assert bytes(lease.segments()[0][:8]) == lease.key.encode().ljust(8)
        assert tier.contains(lease.key)
        lease.release()


def test_pages_are_free_only_after_both_ranks_released(tier: LocalTier) -> None:
    put(tier, "a", CAPACITY * PAGE_BYTES)
    fast, slow = hold(tier, "a"), hold(tier, "a")
    fast.release()
    fast.release()
    assert tier.reserve("b", 1) is None
    slow.release()
    put(tier, "b")
    assert not tier.contains("a")


def test_discard_while_leased_hides_at_once_and_frees_at_the_last_release(tier: LocalTier) -> None:
    put(tier, "a", CAPACITY * PAGE_BYTES, dirty=True)
    one, two = hold(tier, "a"), hold(tier, "a")
    assert tier.discard("a")
    assert not tier.discard("a")
    assert tier.lookup("a") is None
    assert not one.indexed
    one.mark_clean()
    one.release()
    assert tier.reserve("b", 1) is None
    assert bytes(two.segments()[0][:1]) == b"a"
    two.release()
    assert tier.stats().used_bytes == 0


def test_clear_forgets_everything_but_keeps_leased_pages(tier: LocalTier) -> None:
    fill(tier, 5)
    lease = hold(tier, "k2")
    tier.clear()
    assert tier.stats().entries == 0
    assert tier.stats().used_bytes == PAGE_BYTES
    assert bytes(lease.segments()[0][:2]) == b"k2"
    lease.release()
    assert tier.stats().used_bytes == 0


def test_first_writer_of_a_key_wins(tier: LocalTier) -> None:
    first, second = tier.reserve("a", 5), tier.reserve("a", 5)
    assert first is not None
    assert second is not None
    first.segments()[0][:] = b"first"
    second.segments()[0][:] = b"other"
    late = second.commit(spec(5), META, dirty=True)
    early = first.commit(spec(5), META, dirty=False)
    assert late.indexed
    assert not early.indexed
    assert bytes(early.segments()[0]) == b"first"
    with hold(tier, "a") as found:
        assert bytes(found.segments()[0]) == b"other"
    assert tier.stats().used_bytes == 2 * PAGE_BYTES
    early.mark_clean()
    assert tier.stats().dirty_bytes == PAGE_BYTES
    early.release()
    assert tier.stats().used_bytes == PAGE_BYTES
    late.release()
    assert tier.contains("a")


def test_commit_of_another_size_is_refused_and_keeps_the_reservation(tier: LocalTier) -> None:
    reservation = tier.reserve("a", 5)
    assert reservation is not None
    with pytest.raises(ValueError, match="5 were reserved"):
        reservation.commit(spec(6), META, dirty=False)
    reservation.commit(spec(5), META, dirty=False).release()


def test_uncommitted_reservation_is_aborted_at_the_end_of_its_block(tier: LocalTier) -> None:
    reservation = tier.reserve("a", 5)
    assert reservation is not None
    with pytest.raises(KeyError), reservation:
        raise KeyError
    assert tier.stats().used_bytes == 0
    reservation.abort()
    for use in (
        reservation.segments,
        lambda: reservation.commit(spec(5), META, dirty=False),
    ):
        with pytest.raises(ClosedError):
            use()


def test_released_lease_hands_out_no_more_bytes(tier: LocalTier) -> None:
    put(tier, "a")
    lease = hold(tier, "a")
    lease.release()
    with pytest.raises(ClosedError):
        lease.segments()


def test_lost_reservation_or_lease_keeps_its_pages_and_is_reported(tier: LocalTier) -> None:
    lost: list[object] = [tier.reserve("a", 5)]
    with pytest.warns(ResourceWarning, match="Reservation never ended"):
        lost.clear()
    put(tier, "b")
    lost.append(hold(tier, "b"))
    with pytest.warns(ResourceWarning, match="Lease never ended"):
        lost.clear()
    stats = tier.stats()
    assert stats.reserved_bytes == stats.leased_bytes == PAGE_BYTES
    assert tier.reserve("c", (CAPACITY - 1) * PAGE_BYTES) is None


def test_holders_of_a_closed_slab_end_quietly() -> None:
    with Slab.create(PAGE_BYTES) as slab:
        slab.populate()
        tier = LocalTier(slab)
        put(tier, "a")
        lease = hold(tier, "a")
    with pytest.raises(ClosedError):
        lease.segments()
    del lease
    gc.collect()


# --- accounting


def test_accounting_is_exact_over_ten_thousand_random_operations(tier: LocalTier) -> None:
    rng = random.Random(7)
    held: list[Lease] = []
    for _ in range(10_000):
        key = f"k{rng.randrange(100)}"
        action = rng.random()
        if action < 0.45:
            nbytes = rng.choice([0, 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES])
            reservation = tier.reserve(key, nbytes)
            if reservation is not None:
                held.append(reservation.commit(spec(nbytes), META, dirty=rng.random() < 0.5))
        elif action < 0.6:
            lease = tier.lookup(key)
            held.extend([lease] if lease else [])
        elif action < 0.7:
            tier.discard(key)
        if held and (len(held) > 5 or action > 0.6):
            lease = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.5:
                lease.mark_clean()
            lease.release()
        stats = tier.stats()
        assert 0 <= stats.dirty_bytes <= stats.used_bytes <= stats.capacity_bytes
        assert 0 <= stats.leased_bytes <= stats.used_bytes
        assert stats.reserved_bytes == 0
    for lease in held:
        lease.release()
    tier.clear()
    stats = tier.stats()
    assert stats.used_bytes == stats.leased_bytes == stats.dirty_bytes == stats.entries == 0
    assert stats.evictions > 100
    put(tier, "whole", CAPACITY * PAGE_BYTES)
    with hold(tier, "whole") as lease:
        assert len(lease.extents) == 1


# --- threads


def work(tier: LocalTier, seed: int, errors: list[str]) -> None:
    """Random puts and reads; every byte read must be the one that belongs to the key."""
    rng = random.Random(seed)
    for _ in range(300):
        number = rng.randrange(24)
        key, value = f"t{number}", bytes([number])
        nbytes = (number % 3 + 1) * PAGE_BYTES - 5
        lease = tier.lookup(key)
        if lease is None:
            reservation = tier.reserve(key, nbytes)
            if reservation is None:
                continue
            for segment in reservation.segments():
                segment[:] = value * len(segment)
            if rng.random() < 0.1:
                reservation.abort()
                continue
            lease = reservation.commit(spec(nbytes), META, dirty=rng.random() < 0.5)
        with lease:
            if any(bytes(part) != value * len(part) for part in lease.segments()):
                errors.append(key)
            if rng.random() < 0.3:
                lease.mark_clean()
        if rng.random() < 0.05:
            tier.discard(key)


def test_eight_threads_under_eviction_read_only_what_belongs_to_their_key(tier: LocalTier) -> None:
    errors: list[str] = []
    threads = [threading.Thread(target=work, args=(tier, seed, errors)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors
    stats = tier.stats()
    assert stats.evictions > 0
    assert stats.reserved_bytes == stats.leased_bytes == 0
    tier.clear()
    assert tier.stats().used_bytes == 0
