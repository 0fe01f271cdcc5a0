"""Copies the host tier's own counters into the metrics.

Called from any thread that wants up-to-date metrics; no I/O.

Locking: one lock makes reading the tier's totals and counting their increase one step, so that two
callers never count the same eviction.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ec_s3.local import LocalTier
    from ec_s3.metrics import Stats
    from ec_s3.pages import Slab


class TierGauges:
    """Feeds `local_bytes` and `local_evictions`."""

    def __init__(self, tier: LocalTier, slab: Slab, stats: Stats) -> None:
        self._tier = tier
        self._slab = slab
        self._stats = stats
        self._lock = threading.Lock()
        self._counted = {"clean": 0, "dirty": 0}

    def update(self) -> None:
        """Bring the metrics up to date."""
        with self._lock:
            local = self._tier.stats()
            dirty = local.dirty_evictions
            for kind, total in (("clean", local.evictions - dirty), ("dirty", dirty)):
                self._stats.add("local_evictions", total - self._counted[kind], kind=kind)
                self._counted[kind] = total
        for state, nbytes in (
            ("capacity", local.capacity_bytes),
            ("populated", self._slab.populated_bytes),
            ("used", local.used_bytes),
            ("reserved", local.reserved_bytes),
            ("leased", local.leased_bytes),
            ("dirty", local.dirty_bytes),
        ):
            self._stats.set("local_bytes", nbytes, state=state)
