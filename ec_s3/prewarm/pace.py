"""How fast a job may ask its buckets, and what it does when they ask for a slower pace.

Runs on one event loop. The rate holds for all requests of a job together; a bucket that throttles
or cannot be reached stops them all for a while, longer each time until one is answered again.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, TypeVar

from ec_s3.errors import RemoteError, RemoteThrottledError
from ec_s3.policy import TokenBucket

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

RETRY_SECONDS = 120.0
"""How long one request is tried again before the store counts as failed."""

_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 20.0


class Pace:
    """The pace of one job.

    Args:
        rate: most requests a second; None leaves it to the buckets.
        clock: seconds, monotonic.
        sleep: waits so many seconds.
        retry_seconds: see `RETRY_SECONDS`.

    Attributes:
        requests: requests that were made.
        retries: those of them that were made again.
    """

    def __init__(
        self,
        rate: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._bucket = TokenBucket(rate) if rate else None
        self._clock = clock
        self._sleep = sleep
        self._retry_seconds = retry_seconds
        self._step = 0.0
        self._resume = 0.0
        self.requests = 0
        self.retries = 0

    async def turn(self, requests: int = 1) -> None:
        """Wait until so many requests may be made."""
        while (pause := self._resume - self._clock()) > 0:
            await self._sleep(pause)
        self.requests += requests
        if self._bucket is not None:
            wait = self._bucket.take(requests, now=self._clock())
            if wait > 0:
                await self._sleep(wait)

    async def call(self, request: Callable[[], Awaitable[T]], *, patient: bool = True) -> T:
        """Make a request at this pace, and again while it fails in passing.

        Args:
            request: makes it.
            patient: whether to wait for a store that does not answer; one that asks for a slower
                pace is always waited for.

        Raises:
            RemoteError: it failed for good, or for too long.
        """
        give_up = None
        while True:
            await self.turn()
            if give_up is None:  # at a low rate the first turn may take longer than that
                give_up = self._clock() + self._retry_seconds
            try:
                result = await request()
            except RemoteError as error:
                passing = error.retryable and (patient or isinstance(error, RemoteThrottledError))
                if not passing or self._clock() >= give_up:
                    raise
                self.retries += 1
                self._slower()
            else:
                self._step = 0.0
                return result

    def _slower(self) -> None:
        now = self._clock()
        if now < self._resume:
            return  # requests that were under way together tell the same
        self._step = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * self._step))
        self._resume = now + self._step * random.uniform(0.5, 1.0)  # noqa: S311  # jitter
