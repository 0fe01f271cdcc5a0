"""Reads items from the tiers: host, disk, bucket, in this order.

Runs on the engine's event loop. One fetch per key at a time, shared by everybody who wants it;
a caller who gives up changes nothing for the others. Every miss has a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ec_s3.errors import ClosedError, RemoteError
from ec_s3.existence import Existence
from ec_s3.fetch import NO_SPARE, OVERSIZED, Miss, PrivateItem
from ec_s3.singleflight import SingleFlight
from ec_s3.types import Expectation, MissReason, Tier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
    from collections.abc import Set as AbstractSet

    from ec_s3.config import ECConfig
    from ec_s3.fetch import Fetcher
    from ec_s3.gate import Gate
    from ec_s3.local import Lease
    from ec_s3.metrics import Stats
    from ec_s3.tiers import Tiers

logger = logging.getLogger(__name__)

ANYTHING = Expectation()

MAX_PREFETCHES = 4096
"""Prefetches under way or waiting; more are not started, as they could only push one another out
of the host tier."""

STOP_SECONDS = 1.5
"""How long cancelled fetches may take to let go of their memory when the reader is closed."""


@dataclass(frozen=True, slots=True)
class _Found:
    """An item, and the tier that had it."""

    item: Lease | PrivateItem
    tier: Tier


def _share(result: _Found | Miss) -> _Found | Miss:
    return result if isinstance(result, Miss) else _Found(result.item.share(), result.tier)


def _drop(result: _Found | Miss) -> None:
    if not isinstance(result, Miss):
        result.item.release()


def release_all(items: Iterable[Lease | PrivateItem | Miss]) -> None:
    """Give items back; a miss needs nothing."""
    for item in items:
        if not isinstance(item, Miss):
            item.release()


def _is_damaged(item: Lease | PrivateItem | Miss) -> bool:
    return isinstance(item, Miss) and item.reason is MissReason.CORRUPT


class Reader:
    """The reading half of the engine.

    Args:
        config: time limits.
        gate: says in which namespace, and whether at all.
        tiers: host tier, disk, bucket.
        fetcher: reads one object into the host tier.
        stats: counters.
        clock: seconds, monotonic.

    Attributes:
        tiers: as given.
        existence: whether they hold an item, without reading it.
    """

    def __init__(
        self,
        config: ECConfig,
        gate: Gate,
        *,
        tiers: Tiers,
        fetcher: Fetcher,
        stats: Stats,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._gate = gate
        self.tiers = tiers
        self._fetcher = fetcher
        self._stats = stats
        self._clock = clock
        self._fetches = asyncio.Semaphore(config.max_fetches)
        self._barred: dict[str, int] = {}
        self._flights: SingleFlight[_Found | Miss] = SingleFlight(
            _share, _drop, called_off=lambda: Miss(MissReason.ABSENT)
        )
        self.existence = Existence(config, gate, tiers=tiers, clock=clock)
        self._background: set[asyncio.Task[None]] = set()

    async def acquire(
        self,
        identifier: str,
        *,
        expect: Expectation = ANYTHING,
        timeout: float | None = None,
        fresh: bool = False,
        linger: bool = True,
        resident: bool = False,
    ) -> Lease | PrivateItem | Miss:
        """The item itself, leased, from whichever tier holds it.

        Args:
            identifier: the item.
            expect: what its tensor must look like.
            timeout: seconds, default `blocking_timeout`.
            fresh: do not believe a remembered "absent".
            linger: the fetch goes on for later callers when this one has left; without it, it is
                cancelled when nobody waits any more.
            resident: an item that the host tier can never hold is a miss, and is not read.

        Returns:
            A lease that the caller must release, or the reason why there is none.
        """
        self._stats.add("queries")
        since = self._gate.now
        key = since.namespace.object_key(identifier)
        refusal = self._gate.refusal(key, since)
        if refusal is not None:
            return self._answer(Miss(refusal), expect)
        held = self.tiers.local.lookup(key)
        if held is not None:
            return self._answer(_Found(held, Tier.LOCAL), expect)
        if fresh:
            self.tiers.presence.forget_absence(key)
        limit = self._config.blocking_timeout if timeout is None else timeout
        result: _Found | Miss
        try:
            async with asyncio.timeout(limit):
                result = await self._fly(key, identifier, wanted=linger, resident=resident)
        except TimeoutError:
            result = Miss(MissReason.TIMEOUT)
        refusal = self._gate.refusal(key, since)  # that may have changed since
        if refusal is not None:
            _drop(result)
            result = Miss(refusal)
        elif not isinstance(result, Miss):
            self.tiers.local.use(key)  # it may have been fetched for nobody
        return self._answer(result, expect)

    async def _fly(
        self, key: str, identifier: str, *, wanted: bool, resident: bool
    ) -> _Found | Miss:
        def load() -> Coroutine[object, object, _Found | Miss]:
            return self._load(key, identifier, resident=resident)

        result = await self._flights.run(key, load, wanted=wanted)
        # Somebody else's flight, who had no use for it, or might not make room for it.
        if result is NO_SPARE or (result is OVERSIZED and not resident):
            result = await self._flights.run(key, load, wanted=wanted)
        return result

    async def preload(self, key: str) -> Lease | PrivateItem | Miss:
        """An item that nobody has asked for, by its key; counts as no query.

        It takes only host memory that is free, and is the first to be evicted until it is used. It
        takes no place from those who fetch for a request, and does not go to the disk tier.
        """
        since = self._gate.now
        refusal = self._gate.refusal(key, since)
        if refusal is not None:
            return Miss(refusal)
        result = await self._flights.run(key, lambda: self._load(key, None, resident=True))
        refusal = self._gate.refusal(key, since)
        if refusal is not None:
            _drop(result)
            return Miss(refusal)
        return result if isinstance(result, Miss) else result.item

    def is_busy(self, *, but: AbstractSet[str]) -> bool:
        """Whether anything but these keys is being fetched."""
        return not self._flights.keys() <= but

    async def acquire_many(
        self, identifiers: Iterable[str], *, expect: Expectation, timeout: float | None
    ) -> list[Lease | PrivateItem | Miss]:
        """Several at the same time, in order; the caller must release every item."""
        works = [self.acquire(i, expect=expect, timeout=timeout) for i in identifiers]
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:  # whoever leaves early must not keep what the others found
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            release_all(item for item in ended if not isinstance(item, BaseException))
            raise

    def _answer(self, result: _Found | Miss, expect: Expectation) -> Lease | PrivateItem | Miss:
        """Compare with what was asked for, and count."""
        if not isinstance(result, Miss) and not expect.admits(result.item.spec):
            result.item.release()
            result = Miss(MissReason.MISMATCH)
        if isinstance(result, Miss):
            self._stats.add("misses", reason=result.reason)
            return result
        self.count_hit(result.item, result.tier)
        return result.item

    def count_hit(self, item: Lease | PrivateItem, tier: Tier) -> None:
        """An item is handed out; any thread."""
        self._stats.add("hits", tier=tier)
        if item.meta.encode_seconds:
            self._stats.add("saved_encoder_seconds", item.meta.encode_seconds)
        if self.tiers.refresher is not None:
            self.tiers.refresher.served(item.key)

    async def _load(self, key: str, identifier: str | None, *, resident: bool) -> _Found | Miss:
        try:
            return await self._search(key, identifier, resident=resident)
        except ClosedError:
            return Miss(MissReason.CLOSED)
        except Exception:  # a flight's outermost border: a caller must get an answer
            self._stats.add("errors", where="fetch")
            logger.exception("a fetch failed unexpectedly")
            return Miss(MissReason.FAILED)

    async def _search(self, key: str, identifier: str | None, *, resident: bool) -> _Found | Miss:
        if key in self._barred:
            return Miss(MissReason.ABSENT)
        held = self.tiers.local.lookup(key)  # stored while the flight was starting
        if held is not None:
            return _Found(held, Tier.LOCAL)
        if self.tiers.disk is not None:
            found = await self._fetch(Tier.DISK, key, identifier, resident=resident)
            if not isinstance(found, Miss) or found is OVERSIZED:
                return found
            if found.reason is MissReason.NO_ROOM:
                return found
        if self.tiers.remote is None or self.tiers.presence.get(key, now=self._clock()) is False:
            return Miss(MissReason.ABSENT)
        found = await self._fetch(Tier.REMOTE, key, identifier, resident=resident)
        if isinstance(found, Miss) and found.reason is MissReason.CHANGED:
            found = await self._fetch(Tier.REMOTE, key, identifier, resident=resident)
        return found

    async def _fetch(
        self, tier: Tier, key: str, identifier: str | None, *, resident: bool
    ) -> _Found | Miss:
        store = self.tiers.remote if tier is Tier.REMOTE else self.tiers.disk
        assert store is not None
        started = self._clock()
        asked = identifier is not None
        keep = self.tiers.writeback if asked and tier is Tier.REMOTE else None
        stats = self._stats if asked and tier is Tier.REMOTE else None
        try:
            # The slot bounds what bodies take in memory while they wait to be decoded; the time
            # limit frees it from a store that has none of its own, when all callers are gone.
            async with (
                self._fetches if asked else contextlib.nullcontext(),
                asyncio.timeout(self._config.metadata_timeout),
            ):
                if stats is not None:
                    stats.observe("fetch_seconds", self._clock() - started, phase="queue")
                read = partial(
                    self._fetcher.fetch,
                    store,
                    key,
                    identifier,
                    keep=keep,
                    stats=stats,
                    valid_after=self._gate.control.valid_after,
                    resident=resident,
                )
                item = await read()
                if tier is Tier.REMOTE and _is_damaged(item):
                    item = await read()  # what was damaged on its way is whole the next time
        except RemoteError as error:
            return Miss(MissReason(error.reason))
        except TimeoutError:
            return Miss(MissReason.TIMEOUT)
        if isinstance(item, Miss):
            await self._missed(tier, key, item)
            return item
        if asked:
            self._stats.observe("load_seconds", self._clock() - started, tier=tier)
            self._stats.add("load_bytes", item.spec.nbytes, tier=tier)
        if stats is not None:
            stats.add("download_bytes", item.spec.nbytes, kind="raw")
        if tier is Tier.REMOTE:
            self.tiers.presence.set(key, present=True, now=self._clock())
            self.tiers.refused.forget(key)
        return _Found(item, tier)

    async def _missed(self, tier: Tier, key: str, miss: Miss) -> None:
        if miss is OVERSIZED or miss.reason is MissReason.NO_ROOM:
            return
        refused = miss.reason is not MissReason.ABSENT
        if refused and miss.reason is not MissReason.STALE:
            self._stats.add("corrupt_objects", tier=tier)
        if tier is Tier.DISK:
            if refused and self.tiers.disk is not None:
                with contextlib.suppress(RemoteError):
                    await self.tiers.disk.delete([key])
        else:
            self.tiers.presence.set(key, present=False, now=self._clock())
            if refused:
                self.tiers.refused.add(key, miss.etag)
            else:
                self.tiers.refused.forget(key)

    def prefetch(self, identifiers: Iterable[str]) -> None:
        """Start bringing items into the host tier; returns at once. Call on the loop."""
        for identifier in identifiers:
            since = self._gate.now
            key = since.namespace.object_key(identifier)
            if self._gate.refusal(key, since) is not None:
                continue
            if self.tiers.local.contains(key) or key in self._flights:
                continue
            if len(self._background) >= MAX_PREFETCHES:
                logger.debug("%d prefetches are waiting, no more are started", MAX_PREFETCHES)
                return
            task = asyncio.get_running_loop().create_task(self._prefetch(key, identifier))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _prefetch(self, key: str, identifier: str) -> None:
        with contextlib.suppress(ClosedError):
            _drop(await self._fly(key, identifier, wanted=True, resident=True))

    @contextlib.asynccontextmanager
    async def barred(self, keys: Iterable[str]) -> AsyncIterator[None]:
        """While entered, nothing of these keys is fetched; what was being fetched is called off.

        A fetch that began before a deletion must not bring the item back after it.
        """
        barred = set(keys)
        for key in barred:
            self._barred[key] = self._barred.get(key, 0) + 1
        try:
            await self._flights.call_off(barred)
            for writer in (self.tiers.writeback, self.tiers.refresher):
                if writer is not None:
                    await writer.call_off(barred)
            yield
        finally:
            for key in barred:
                self._barred[key] -= 1
                if not self._barred[key]:
                    del self._barred[key]

    def under_way(self) -> set[str]:
        """Keys that are being fetched, or written to the disk or to the bucket again."""
        keys = self._flights.keys()
        for writer in (self.tiers.writeback, self.tiers.refresher):
            if writer is not None:
                keys |= writer.keys()
        return keys

    async def close(self) -> None:
        """Cancel every fetch and wait until the last one has let go of its memory, or a little."""
        background = list(self._background)
        for task in background:
            task.cancel()
        await asyncio.gather(
            self._flights.close(STOP_SECONDS),
            self.existence.close(STOP_SECONDS),
            *background,
            return_exceptions=True,
        )
