"""Ranged reads of one object, the bytes of which are worked on while they still arrive.

Runs on the engine's event loop; the work runs on the codec threads. A read is never left before
nobody writes to its buffers any more. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ec_s3.arriving import Arriving
from ec_s3.cancellation import all_or_cancel, end_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ec_s3.buffers import Body
    from ec_s3.metrics import Stats
    from ec_s3.store import Store


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """One object being read: from where, into what."""

    store: Store
    key: str
    body: Body
    stats: Stats | None

    @contextlib.asynccontextmanager
    async def reading(self, start: int, length: int, *, etag: str = "") -> AsyncIterator[Arriving]:
        """Read a range while the block works on it; the block is left when the read has ended.

        A block that has seen enough leaves the read to its end: a connection, or an endpoint, is
        none the worse for a bad object. One that raises calls it off.

        Args:
            start: first byte.
            length: bytes wanted; fewer come where the object ends before.
            etag: the version that it must be of, empty for any.

        Raises:
            RemoteError: the store failed, or has another version.
        """
        arriving = Arriving(self.body.take)
        task = asyncio.ensure_future(self._read(arriving, start, length, etag or None))
        try:
            yield arriving
        except BaseException:
            await end_all([task])
            raise
        if task.done():
            task.result()
        else:
            await all_or_cancel([task])

    async def _read(self, arriving: Arriving, start: int, length: int, etag: str | None) -> None:
        asked = time.monotonic()
        try:
            result = await self.store.get(
                self.key, into=arriving, start=start, length=length, if_match=etag
            )
        except BaseException as failure:
            arriving.end(failure)
            raise
        if result is not None and arriving.info is None:  # a store that tells nothing meanwhile
            arriving.answered(result.info)
        arriving.end()
        if result is not None:
            self.body.part(result.body)
            if self.stats is not None:
                now, began = time.monotonic(), arriving.began
                self.stats.observe("fetch_seconds", began - asked, phase="first_byte")
                self.stats.observe("fetch_seconds", now - began, phase="body")
                self.stats.add("download_bytes", len(result.body), kind="stored")

    def decoded(self, seconds: float) -> None:
        """Count a range that is decoded."""
        if self.stats is not None:
            self.stats.observe("fetch_seconds", seconds, phase="decode")
