"""How long to wait: before an attempt is repeated, and while a store asks for a slower pace.

A `Pace` is owned by one `S3Store`, on its event loop. Sends nothing and delays no reader.
"""

from __future__ import annotations

import asyncio
import random
import time


def jitter(attempt: int) -> float:
    """Seconds before a repeated attempt."""
    return random.uniform(0.5, 1.0) * 0.05 * float(2**attempt)  # noqa: S311  # jitter


def spread(attempt: int) -> float:
    """Seconds before a repeated upload; a fleet that failed together comes back scattered."""
    return random.uniform(0.1, min(10.0, 0.2 * 2**attempt))  # noqa: S311  # jitter


class Pace:
    """How long writers wait after a store asked for a slower pace; readers go ahead at once."""

    def __init__(self) -> None:
        self._step = 0.0
        self._resume = 0.0

    async def wait(self) -> None:
        """Return once the store may be written to again, after ten seconds at the latest."""
        if (pause := self._resume - time.monotonic()) > 0:
            await asyncio.sleep(pause)

    def slower(self, asked: float) -> None:
        """The store throttles, and asks for so many seconds of peace; 0.0 when it does not say."""
        self._step = min(8.0, max(0.1, 2 * self._step))
        pause = max(self._step * random.uniform(0.5, 1.0), min(asked, 10.0))  # noqa: S311  # jitter
        self._resume = time.monotonic() + pause

    def faster(self) -> None:
        """The store took a write."""
        self._step = self._step / 2 if self._step > 0.1 else 0.0
