"""Makes the parts of an engine from its settings.

Called once per engine, on its event loop where that is needed; keeps nothing. Knows what the
settings mean for these parts, so that none of them needs to know the settings.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ec_s3.buffers import BufferPool
from ec_s3.chunks import PARALLEL_RANGES
from ec_s3.fetch import Fetcher
from ec_s3.guard import GuardedStore
from ec_s3.manifest import Manifest
from ec_s3.policy import Breaker, TokenBucket
from ec_s3.presence import Presence, Refused
from ec_s3.refresh import Refresher
from ec_s3.remote import open_disk, open_store
from ec_s3.tiers import Tiers
from ec_s3.uploads import UploadQueue, UploadTargets
from ec_s3.warmup import AT_ONCE, WarmStart
from ec_s3.writeback import DiskWriteback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor

    from ec_s3.config import ECConfig
    from ec_s3.gate import Gate
    from ec_s3.local import LocalTier
    from ec_s3.metrics import Stats
    from ec_s3.pages import Slab
    from ec_s3.polling import Poll
    from ec_s3.reader import Reader
    from ec_s3.signing import Keyring
    from ec_s3.store import Store

POOL_BYTES = 256 << 20  # idle buffers kept: as much as the reads in flight can use at once
FIRST_PAGES_BYTES = 64 << 20
FIRST_PAGES_SECONDS = 1.0


def open_tiers(
    config: ECConfig,
    gate: Gate,
    *,
    local: LocalTier,
    store: Store | None,
    disk: Store | None,
    admit_bytes: Callable[[int], float],
    executor: Executor,
    stats: Stats,
    clock: Callable[[], float],
    keyring: Keyring | None,
) -> Tiers:
    """The tiers of an engine; stores that are not ready made are opened.

    Raises:
        ConfigError: the settings contradict each other.
    """
    store = store if store is not None else open_store(config)
    disk = disk if disk is not None else open_disk(config)
    remote = _guarded(config, store, stats, clock) if store is not None else None
    refused = Refused()
    refresher = None
    if remote is not None and config.object_lifetime is not None:
        refresher = Refresher(
            remote,
            gate,
            lifetime=config.object_lifetime,
            refused=refused,
            admit_bytes=admit_bytes,
            executor=executor,
            max_tensor_bytes=config.max_item_size,
            keyring=keyring,
            stats=stats,
        )
        remote.on_seen = refresher.learn
    return Tiers(
        local=local,
        disk=disk,
        remote=remote,
        writeback=DiskWriteback(disk, stats) if disk is not None else None,
        presence=Presence(positive_ttl=config.positive_ttl, negative_ttl=config.negative_ttl),
        refused=refused,
        refresher=refresher,
    )


def _guarded(
    config: ECConfig, store: Store, stats: Stats, clock: Callable[[], float]
) -> GuardedStore:
    # What is read for nobody in particular is read beside what requests read.
    reads = config.max_fetches + (config.object_lifetime is not None)
    reads += AT_ONCE * PARALLEL_RANGES if config.warm_start else 0
    breaker = Breaker(trusted=False)
    return GuardedStore(store, breaker=breaker, stats=stats, max_reads=reads, clock=clock)


def upload_rate(config: ECConfig, clock: Callable[[], float]) -> Callable[[int], float]:
    """Seconds to wait before that many bytes may be sent, whatever they are sent for."""
    if config.upload_rate is None:
        return lambda _: 0.0
    bucket = TokenBucket(config.upload_rate)
    return lambda nbytes: bucket.take(nbytes, now=clock())


async def first_pages(slab: Slab) -> None:
    """Let the first puts find room: the first pages take milliseconds to populate."""
    wanted = min(slab.nbytes, FIRST_PAGES_BYTES)
    give_up = time.monotonic() + FIRST_PAGES_SECONDS
    while slab.populated_bytes < wanted and time.monotonic() < give_up:  # noqa: ASYNC110 a plain thread populates
        await asyncio.sleep(0.002)


def warm_start(
    config: ECConfig, gate: Gate, *, reader: Reader, control: Poll | None, slab: Slab, stats: Stats
) -> WarmStart:
    """What fills host memory from the engine's start on."""
    return WarmStart(
        config.warm_start, reader=reader, slab=slab, gate=gate, control=control, stats=stats
    )


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
    admit_bytes: Callable[[int], float],
    executor: Executor,
    stats: Stats,
    clock: Callable[[], float],
    keyring: Keyring | None,
) -> UploadQueue:
    """What writes items of the host tier to the stores; starts its workers."""
    return UploadQueue(
        tier=tiers.local,
        targets=UploadTargets(
            remote=tiers.remote,
            disk=tiers.disk,
            presence=tiers.presence,
            refused=tiers.refused,
            admit_bytes=admit_bytes,
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
