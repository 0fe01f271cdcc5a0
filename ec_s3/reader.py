"""Reads items of one namespace from the tiers: host, disk, bucket, in this order.

Runs on the engine's event loop. One fetch per key at a time, shared by everybody who wants it;
a caller who gives up changes nothing for the others. Every miss has a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ec_s3.errors import RemoteError
from ec_s3.fetch import Miss, PrivateItem
from ec_s3.singleflight import SingleFlight
from ec_s3.types import Expectation, MissReason, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ec_s3.config import ECConfig
    from ec_s3.fetch import Fetcher
    from ec_s3.keys import Namespace
    from ec_s3.local import Lease, LocalTier
    from ec_s3.metrics import Stats
    from ec_s3.presence import Presence, Refused
    from ec_s3.store import Store
    from ec_s3.writeback import DiskWriteback

ANYTHING = Expectation()


def _share(item: Lease | PrivateItem | Miss) -> Lease | PrivateItem | Miss:
    return item if isinstance(item, Miss) else item.share()


def release(item: Lease | PrivateItem | Miss) -> None:
    """Give an item back; a miss needs nothing."""
    if not isinstance(item, Miss):
        item.release()


@dataclass(frozen=True, slots=True)
class Tiers:
    """What a reader reads from, and what it remembers of it."""

    local: LocalTier
    disk: Store | None
    remote: Store | None
    writeback: DiskWriteback | None
    presence: Presence
    refused: Refused


class Reader:
    """The reading half of the engine.

    Args:
        config: time limits.
        namespace: key scheme and dtype.
        tiers: host tier, disk, bucket.
        fetcher: reads one object into the host tier.
        stats: counters.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: ECConfig,
        namespace: Namespace,
        *,
        tiers: Tiers,
        fetcher: Fetcher,
        stats: Stats,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._namespace = namespace
        self._tiers = tiers
        self._fetcher = fetcher
        self._stats = stats
        self._clock = clock
        self._flights: SingleFlight[Lease | PrivateItem | Miss] = SingleFlight(_share, release)
        self._probes: SingleFlight[bool] = SingleFlight(bool, lambda _: None)
        self._background: set[asyncio.Task[None]] = set()

    async def acquire(
        self,
        identifier: str,
        *,
        expect: Expectation = ANYTHING,
        timeout: float | None = None,
        fresh: bool = False,
        linger: bool = True,
    ) -> Lease | PrivateItem | Miss:
        """The item itself, leased, from whichever tier holds it.

        Args:
            identifier: the item.
            expect: what its tensor must look like.
            timeout: seconds, default `blocking_timeout`.
            fresh: do not believe a remembered "absent".
            linger: the fetch goes on for later callers when this one has left; without it, it is
                cancelled when nobody waits any more.

        Returns:
            A lease that the caller must release, or the reason why there is none.
        """
        self._stats.add("queries")
        key = self._namespace.object_key(identifier)
        item: Lease | PrivateItem | Miss | None = self._tiers.local.lookup(key)
        if item is not None:
            self._stats.add("hits", tier=Tier.LOCAL)
        else:
            if fresh and self._tiers.presence.get(key, now=self._clock()) is False:
                self._tiers.presence.forget(key)
            item = await self._join(key, identifier, timeout, linger=linger)
        if not isinstance(item, Miss) and not expect.admits(item.spec):
            item.release()
            item = Miss(MissReason.MISMATCH)
        if isinstance(item, Miss):
            self._stats.add("misses", reason=item.reason)
        return item

    async def _join(
        self, key: str, identifier: str, timeout: float | None, *, linger: bool
    ) -> Lease | PrivateItem | Miss:
        limit = self._config.blocking_timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(limit):
                return await self._flights.run(
                    key, lambda: self._load(key, identifier), wanted=linger
                )
        except TimeoutError:
            return Miss(MissReason.TIMEOUT)

    async def _load(self, key: str, identifier: str) -> Lease | PrivateItem | Miss:
        held = self._tiers.local.lookup(key)  # stored while the flight was starting
        if held is not None:
            return held
        if self._tiers.disk is not None:
            item = await self._load_from(self._tiers.disk, Tier.DISK, key, identifier)
            if not isinstance(item, Miss) or item.reason is MissReason.NO_ROOM:
                return item
        if self._tiers.remote is None or self._tiers.presence.get(key, now=self._clock()) is False:
            return Miss(MissReason.ABSENT)
        item = await self._load_from(self._tiers.remote, Tier.REMOTE, key, identifier)
        if isinstance(item, Miss) and item.reason is MissReason.CHANGED:
            item = await self._load_from(self._tiers.remote, Tier.REMOTE, key, identifier)
        return item

    async def _load_from(
        self, store: Store, tier: Tier, key: str, identifier: str
    ) -> Lease | PrivateItem | Miss:
        started = self._clock()
        try:
            item = await self._fetcher.fetch(
                store,
                key,
                identifier,
                keep=self._tiers.writeback if tier is Tier.REMOTE else None,
            )
        except RemoteError as error:
            return Miss(MissReason(error.reason))
        if isinstance(item, Miss):
            await self._missed(tier, key, item)
            return item
        self._stats.add("hits", tier=tier)
        self._stats.observe("load_seconds", self._clock() - started, tier=tier)
        self._stats.add("load_bytes", item.spec.nbytes, tier=tier)
        if item.meta.encode_seconds:
            self._stats.add("saved_encoder_seconds", item.meta.encode_seconds)
        if tier is Tier.REMOTE:
            self._tiers.presence.set(key, present=True, now=self._clock())
        return item

    async def _missed(self, tier: Tier, key: str, miss: Miss) -> None:
        refused = miss.reason not in (MissReason.ABSENT, MissReason.NO_ROOM)
        if refused:
            self._stats.add("corrupt_objects", tier=tier)
        if tier is Tier.DISK:
            if refused and self._tiers.disk is not None:
                with contextlib.suppress(RemoteError):
                    await self._tiers.disk.delete([key])
        elif miss.reason is not MissReason.NO_ROOM:
            self._tiers.presence.set(key, present=False, now=self._clock())
            if refused:
                self._tiers.refused.add(key, miss.etag)

    async def contains(self, identifier: str, *, timeout: float | None = None) -> bool:
        """Whether some tier holds the item; False when that cannot be found out in time."""
        return (await self.contains_many([identifier], timeout=timeout))[identifier]

    async def contains_many(
        self, identifiers: Iterable[str], *, timeout: float | None = None
    ) -> Mapping[str, bool]:
        """Existence of many items at once, asked for in parallel."""
        names = list(dict.fromkeys(identifiers))
        found = await asyncio.gather(
            *(self._exists(self._namespace.object_key(i), timeout) for i in names)
        )
        return dict(zip(names, found, strict=True))

    async def _exists(self, key: str, timeout: float | None) -> bool:
        if self._tiers.local.contains(key):
            return True
        limit = self._config.blocking_timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(limit):
                return await self._probes.run(key, lambda: self._probe(key))
        except (TimeoutError, RemoteError):
            return False

    async def _probe(self, key: str) -> bool:
        if self._tiers.disk is not None:
            with contextlib.suppress(RemoteError):
                if await self._tiers.disk.head(key) is not None:
                    return True
        return await self.in_bucket(key)

    async def in_bucket(self, key: str) -> bool:
        """Whether the bucket holds the key, from a short-lived memory or a HEAD.

        Raises:
            RemoteError: the bucket cannot say.
        """
        if self._tiers.remote is None:
            return False
        known = self._tiers.presence.get(key, now=self._clock())
        if known is None:
            known = await self._tiers.remote.head(key) is not None
            self._tiers.presence.set(key, present=known, now=self._clock())
        return known

    def prefetch(self, identifiers: Iterable[str]) -> None:
        """Start bringing items into the host tier; returns at once. Call on the loop."""
        for identifier in identifiers:
            key = self._namespace.object_key(identifier)
            if not self._tiers.local.contains(key) and key not in self._flights:
                task = asyncio.get_running_loop().create_task(self._prefetch(key, identifier))
                self._background.add(task)
                task.add_done_callback(self._background.discard)

    async def _prefetch(self, key: str, identifier: str) -> None:
        item = await self._flights.run(key, lambda: self._load(key, identifier), wanted=True)
        release(item)

    async def close(self) -> None:
        """Cancel every fetch and wait until the last one has let go of its memory."""
        for task in list(self._background):
            task.cancel()
        await self._flights.close()
        await self._probes.close()
