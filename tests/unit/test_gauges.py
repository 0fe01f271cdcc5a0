"""TierGauges: states as gauges, evictions as increments, also from many threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from ec_s3.gauges import TierGauges
from ec_s3.local import LocalTier
from ec_s3.metrics import Stats
from ec_s3.pages import PAGE_BYTES, Slab
from ec_s3.types import ItemMeta, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def slab() -> Iterator[Slab]:
    with Slab.create(4 * PAGE_BYTES) as made:
        made.populate()
        yield made


def put(tier: LocalTier, key: str, *, dirty: bool) -> None:
    reservation = tier.reserve(key, PAGE_BYTES)
    assert reservation is not None
    reservation.commit(TensorSpec("uint8", (PAGE_BYTES,)), ItemMeta(), dirty=dirty).release()


def test_evictions_are_counted_once_by_kind(slab: Slab) -> None:
    tier, stats = LocalTier(slab), Stats()
    gauges = TierGauges(tier, slab, stats)
    for i in range(6):
        put(tier, f"c{i}", dirty=False)
    for i in range(7):
        put(tier, f"d{i}", dirty=True)
    threads = [threading.Thread(target=gauges.update) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    flat = stats.snapshot()
    assert (flat["local_evictions_clean"], flat["local_evictions_dirty"]) == (6, 3)


def test_states_follow_the_tier(slab: Slab) -> None:
    tier, stats = LocalTier(slab), Stats()
    gauges = TierGauges(tier, slab, stats)
    put(tier, "a", dirty=True)
    gauges.update()
    before = stats.snapshot()
    tier.clear()
    gauges.update()
    after = stats.snapshot()
    assert before["local_bytes_dirty"] == before["local_bytes_used"] == PAGE_BYTES
    assert after["local_bytes_dirty"] == after["local_bytes_used"] == 0
    assert after["local_bytes_capacity"] == after["local_bytes_populated"] == 4 * PAGE_BYTES
