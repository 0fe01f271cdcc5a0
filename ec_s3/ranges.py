"""Ranged reads of one object, the bytes of which are worked on while they still arrive.

Runs on the engine's event loop; the work runs on the codec threads. A read is never left before
nobody writes to its buffers any more. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ec_s3.arriving import Arriving
from ec_s3.cancellation import all_or_cancel, run_to_end
from ec_s3.errors import FrameError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

    from ec_s3.buffers import Body
    from ec_s3.metrics import Stats
    from ec_s3.store import GetResult, Store


@dataclass(slots=True, kw_only=True)
class ObjectRead:
    """One object being read: from where, into what.

    Attributes:
        etag: its version, once known.
    """

    store: Store
    key: str
    body: Body
    stats: Stats | None
    etag: str = ""

    async def take_in(
        self, start: int, length: int, use: Callable[[Arriving], Awaitable[None]]
    ) -> GetResult | None:
        """Read a range, and let `use` work on what has arrived meanwhile; None when it is absent.

        Raises:
            FrameError: `use` has raised it; the range was read to its end all the same, as a
                connection, or an endpoint, is none the worse for a bad object.
        """
        arriving = Arriving(self.body.take)
        found: list[GetResult | None] = []
        bad: list[FrameError] = []

        async def read() -> None:
            result = None
            try:
                result = await self._get(start, length, arriving)
                found.append(result)
            finally:
                arriving.end(0 if result is None else len(result.body))

        async def work() -> None:
            try:
                await use(arriving)
            except FrameError as error:
                bad.append(error)

        await all_or_cancel([read(), work()])
        if found[0] is not None and bad:
            raise bad[0]
        return found[0]

    async def _get(self, start: int, length: int, arriving: Arriving) -> GetResult | None:
        asked = time.monotonic()
        result = await self.store.get(
            self.key, into=arriving, start=start, length=length, if_match=self.etag or None
        )
        if result is not None:
            self.etag = result.info.etag
            self.body.part(result.body)
            self._read(asked, arriving.began, len(result.body))
        return result

    def _read(self, asked: float, arrived: float, nbytes: int) -> None:
        if self.stats is not None:
            self.stats.observe("fetch_seconds", arrived - asked, phase="first_byte")
            self.stats.observe("fetch_seconds", time.monotonic() - arrived, phase="body")
            self.stats.add("download_bytes", nbytes, kind="stored")

    async def decode(self, executor: Executor, call: Callable[..., None], *work: object) -> float:
        """Run a call on what has arrived, in a thread; the seconds that it took."""
        started = time.monotonic()
        await run_to_end(executor, call, *work)
        return time.monotonic() - started

    def decoded(self, seconds: float) -> None:
        """Count a range that is decoded."""
        if self.stats is not None:
            self.stats.observe("fetch_seconds", seconds, phase="decode")
