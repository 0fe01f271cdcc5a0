"""Whether the tiers hold an item, found out without reading it.

Runs on the engine's event loop. One probe per key at a time, shared by everybody who asks; what a
probe has found is remembered for a while (`presence`). Must not answer yes for an object that a
reader would refuse as too old.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from ec_s3.errors import RemoteError, RemoteTimeoutError
from ec_s3.lookup import is_stale
from ec_s3.singleflight import SingleFlight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ec_s3.config import ECConfig
    from ec_s3.gate import Gate
    from ec_s3.store import Store
    from ec_s3.tiers import Tiers
    from ec_s3.types import ObjectInfo


class Existence:
    """Answers for one engine.

    Args:
        config: time limits.
        gate: says in which namespace, and whether at all.
        tiers: host tier, disk, bucket.
        clock: seconds, monotonic.
    """

    def __init__(
        self, config: ECConfig, gate: Gate, *, tiers: Tiers, clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._gate = gate
        self._tiers = tiers
        self._clock = clock
        self._probes: SingleFlight[bool] = SingleFlight(bool, lambda _: None)

    async def contains_many(
        self, identifiers: Iterable[str], *, timeout: float | None = None
    ) -> Mapping[str, bool]:
        """Existence of many items at once, asked for in parallel."""
        names = list(dict.fromkeys(identifiers))
        found = await asyncio.gather(*(self.contains(i, timeout=timeout) for i in names))
        return dict(zip(names, found, strict=True))

    async def contains(self, identifier: str, *, timeout: float | None = None) -> bool:
        """Whether some tier holds the item; False when that cannot be found out in time."""
        since = self._gate.now
        key = since.namespace.object_key(identifier)
        if self._gate.refusal(key, since) is not None:
            return False
        if self._tiers.local.contains(key):
            return True
        limit = self._config.blocking_timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(limit):
                found = await self._probes.run(key, lambda: self._probe(key))
                return found and self._gate.refusal(key, since) is None
        except (TimeoutError, RemoteError):
            return False

    async def _probe(self, key: str) -> bool:
        if self._tiers.disk is not None:
            with contextlib.suppress(RemoteError):
                info = await self._tiers.disk.head(key)
                if info is not None and not await self._is_stale(self._tiers.disk, info):
                    return True
        return await self._in_bucket(key)

    async def in_bucket(self, key: str) -> bool:
        """Whether the bucket holds the key, from a short-lived memory or a HEAD.

        Raises:
            RemoteError: the bucket cannot say, or not within `metadata_timeout`.
        """
        try:
            async with asyncio.timeout(self._config.metadata_timeout):
                return await self._in_bucket(key)
        except RemoteError:
            raise
        except TimeoutError:
            raise RemoteTimeoutError("no answer in time", operation="head", key=key) from None

    async def _in_bucket(self, key: str) -> bool:
        remote = self._tiers.remote
        if remote is None:
            return False
        known = self._tiers.presence.get(key, now=self._clock())
        if known is None:
            info = await remote.head(key)
            if info is not None and await self._is_stale(remote, info):
                self._tiers.refused.add(key, info.etag)
            known = info is not None and not self._tiers.refused.knows(key, info.etag)
            self._tiers.presence.set(key, present=known, now=self._clock())
        return known

    async def _is_stale(self, store: Store, info: ObjectInfo) -> bool:
        return await is_stale(store, info, valid_after=self._gate.control.valid_after)

    async def close(self, timeout: float) -> None:
        """Cancel every probe and wait for their end, at most `timeout` seconds."""
        await self._probes.close(timeout)
