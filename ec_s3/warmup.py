"""The warm start: fills host memory with what is likely to be asked for, before it is.

First what the disk tier holds, then the objects of the namespace in the bucket, the newest of each
first. Runs once, in the background on the engine's event loop, from the engine's start on. Must
never hold up a request or the start: it waits while anything is fetched for a request, takes only
host memory that is free, and what it has loaded is the first to be evicted.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ec_s3.errors import ClosedError, InvalidKeyError, RemoteError
from ec_s3.fetch import Miss
from ec_s3.keys import parse_key
from ec_s3.pages import PAGE_BYTES
from ec_s3.types import MissReason, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ec_s3.gate import Gate
    from ec_s3.metrics import Stats
    from ec_s3.pages import Slab
    from ec_s3.polling import Poll
    from ec_s3.reader import Reader
    from ec_s3.store import Store
    from ec_s3.types import ObjectInfo

logger = logging.getLogger(__name__)

AT_ONCE = 2
"""Items loaded at the same time."""

PAUSE = 0.02
"""Seconds until it looks again whether it may go on."""

MOST_LISTED = 1_000_000
LIST_SECONDS = 120.0
"""Where a listing is cut off: a thousand requests, or so long. Keys begin with digests, so the part
that was listed is as good a sample as any other."""

PATIENCE_SECONDS = 600.0
"""How long it waits for a moment without fetches, or for host memory to be populated."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest objects of a folder.

    Attributes:
        objects: newest first.
        whole: whether the whole folder was looked at.
    """

    objects: list[ObjectInfo]
    whole: bool


async def newest(
    store: Store,
    prefix: str,
    *,
    nbytes: int,
    most: int = MOST_LISTED,
    seconds: float = LIST_SECONDS,
) -> Newest:
    """The newest items below a prefix that are about so many bytes together.

    Lists the folder once, at most `most` objects of it in at most `seconds`, and holds no more than
    what it returns.

    Raises:
        RemoteError: the store failed.
    """
    heap: list[tuple[float, str, ObjectInfo]] = []  # oldest first; keys are distinct
    held = listed = 0
    whole = False
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async for info in store.list(prefix):
                listed += 1
                if listed > most:
                    break
                if not _is_item(info.key):
                    continue
                heapq.heappush(heap, (info.modified, info.key, info))
                held += _room(info)
                while heap and held - _room(heap[0][2]) >= nbytes:
                    held -= _room(heapq.heappop(heap)[2])
            else:
                whole = True
    return Newest([info for _, _, info in sorted(heap, reverse=True)], whole)


def _is_item(key: str) -> bool:
    try:
        parse_key(key)
    except InvalidKeyError:
        return False
    return True


def _room(info: ObjectInfo) -> int:
    """The least that an object's item takes of host memory, as far as its size tells."""
    return -(-max(info.size, 1) // PAGE_BYTES) * PAGE_BYTES


class WarmStart:
    """One engine's; `run` it once.

    Args:
        nbytes: most bytes of tensors to load.
        reader: loads items.
        slab: host memory, which may still be being populated.
        gate: says in which namespace.
        control: the poll of the control document, None without a bucket.
        stats: counters `warm_start_items`, `warm_start_bytes`, `errors`; gauge
            `warm_start_running`.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        reader: Reader,
        slab: Slab,
        gate: Gate,
        control: Poll | None,
        stats: Stats,
    ) -> None:
        self._reader = reader
        self._slab = slab
        self._namespace = gate.now.namespace
        self._gate = gate
        self._left = nbytes
        self._control = control
        self._stats = stats
        self._loaded = 0
        self._mine: set[str] = set()
        stats.set("warm_start_running", 1)  # whoever waits for its end may look before it runs

    async def run(self) -> None:
        """Load until it is enough, host memory is full, or there is nothing more."""
        started = time.monotonic()
        try:
            if self._control is not None:  # what an operator forbids is not read first
                await self._control.started.wait()
            await self._load_from(Tier.DISK)
            await self._load_from(Tier.REMOTE)
        except ClosedError:
            logger.debug("the engine was closed before the warm start was done")
        except Exception:  # the background task's outermost border
            self._stats.add("errors", where="warm_start")
            logger.exception("the warm start ended early")
        finally:
            self._stats.set("warm_start_running", 0)
        seconds = time.monotonic() - started
        logger.info("warm start: %d items loaded in %.1f s", self._loaded, seconds)

    async def _load_from(self, tier: Tier) -> None:
        tiers = self._reader.tiers
        store = tiers.disk if tier is Tier.DISK else tiers.remote
        if store is None or self._left <= 0:
            return
        prefix = f"{self._namespace.prefix}/{self._namespace.dtype}/"
        try:
            found = await newest(store, prefix, nbytes=self._left)
        except RemoteError as error:
            logger.warning("the warm start cannot list what is stored: %s", error)
            return
        if not found.whole:
            logger.info("warm start: the namespace is too large to be listed whole")
        objects = iter(found.objects)
        await asyncio.gather(*(self._work(objects, tier) for _ in range(AT_ONCE)))

    async def _work(self, objects: Iterator[ObjectInfo], tier: Tier) -> None:
        for info in objects:
            if not await self._may_go_on(info):
                return
            await self._load(info, tier)

    async def _may_go_on(self, info: ObjectInfo) -> bool:
        """Wait for those who have precedence, and for memory; False when this is the end."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < give_up:
            used = self._reader.tiers.local.stats().used_bytes
            populated = self._slab.populated_bytes
            full = _room(info) > self._slab.nbytes - used
            if full or self._left < info.size or self._gate.now.namespace != self._namespace:
                return False
            # A tensor may be larger than its object, which is all that is known yet.
            ready = populated == self._slab.nbytes or 2 * _room(info) <= populated - used
            if ready and not self._reader.is_busy(but=self._mine):
                return True
            await asyncio.sleep(PAUSE)
        return False

    async def _load(self, info: ObjectInfo, tier: Tier) -> None:
        if self._reader.tiers.local.contains(info.key):
            self._stats.add("warm_start_items", outcome="present")
            return
        self._mine.add(info.key)
        try:
            item = await self._reader.preload(info.key)
        finally:
            self._mine.discard(info.key)
        if isinstance(item, Miss):
            self._stats.add("warm_start_items", outcome="failed")
            if item.reason is MissReason.NO_ROOM:  # whoever is next would be read in vain, too
                self._left = 0
            return
        nbytes = item.spec.nbytes
        item.release()
        self._left -= nbytes
        self._loaded += 1
        self._stats.add("warm_start_items", outcome="loaded")
        self._stats.add("warm_start_bytes", nbytes, tier=tier)
