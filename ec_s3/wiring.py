"""Makes the parts of an engine from its settings.

Called once per engine, on its event loop where that is needed; keeps nothing. Knows what the
settings mean for these parts, so that none of them needs to know the settings.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ec_s3.buffers import BufferPool
from ec_s3.fetch import Fetcher
from ec_s3.guard import GuardedStore
from ec_s3.manifest import Manifest
from ec_s3.policy import Breaker, TokenBucket
from ec_s3.uploads import UploadQueue, UploadTargets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor

    from ec_s3.config import ECConfig
    from ec_s3.gate import Gate
    from ec_s3.local import LocalTier
    from ec_s3.metrics import Stats
    from ec_s3.pages import Slab
    from ec_s3.reader import Tiers
    from ec_s3.signing import Keyring
    from ec_s3.store import Store

POOL_BYTES = 256 << 20  # idle buffers kept: as much as the reads in flight can use at once
FIRST_PAGES_BYTES = 64 << 20
FIRST_PAGES_SECONDS = 1.0


def guard(
    config: ECConfig, store: Store, *, stats: Stats, clock: Callable[[], float]
) -> GuardedStore:
    """The bucket as the engine uses it."""
    return GuardedStore(
        store, breaker=Breaker(), stats=stats, max_reads=config.max_fetches, clock=clock
    )


async def first_pages(slab: Slab) -> None:
    """Let the first puts find room: the first pages take milliseconds to populate."""
    wanted = min(slab.nbytes, FIRST_PAGES_BYTES)
    give_up = time.monotonic() + FIRST_PAGES_SECONDS
    while slab.populated_bytes < wanted and time.monotonic() < give_up:  # noqa: ASYNC110 a plain thread populates
        await asyncio.sleep(0.002)


def make_fetcher(
    config: ECConfig,
    *,
    tier: LocalTier,
    executor: Executor,
    keyring: Keyring | None,
) -> Fetcher:
    """What reads objects into the host tier."""
    return Fetcher(
        tier=tier,
        pool=BufferPool(POOL_BYTES),
        executor=executor,
        max_tensor_bytes=config.max_item_size,
        keyring=keyring,
    )


def make_queue(
    config: ECConfig,
    gate: Gate,
    *,
    tiers: Tiers,
    facts: Mapping[str, object],
    executor: Executor,
    stats: Stats,
    clock: Callable[[], float],
    keyring: Keyring | None,
) -> UploadQueue:
    """What writes items of the host tier to the stores; starts its workers."""
    bucket = TokenBucket(config.upload_rate) if config.upload_rate else None
    return UploadQueue(
        tier=tiers.local,
        targets=UploadTargets(
            remote=tiers.remote,
            disk=tiers.disk,
            presence=tiers.presence,
            refused=tiers.refused,
            admit_bytes=lambda n: bucket.take(n, now=clock()) if bucket else 0.0,
            manifest=Manifest(gate, facts),
            refusal=gate.upload_refusal,
        ),
        executor=executor,
        stats=stats,
        max_items=config.upload_queue_items,
        max_bytes=config.upload_queue_size,
        workers=config.max_uploads,
        level=config.compression_level,
        clock=clock,
        wall_clock=time.time,
        keyring=keyring,
    )
