"""A body while it arrives: how far it is, for those who can use its beginning already.

Lives on the event loop, and belongs to one read. It never says that bytes are there before they
are, and what it has said stays true.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LEAST_BYTES = 512 << 10


class Arriving:
    """A `store.Progress`: gets the buffer for a body, and follows it.

    Args:
        take: makes the buffer.

    Attributes:
        view: the buffer; empty until the answer's header is there.
        have: how many of its bytes are there, from the first on.
        ended: whether no more will come.
        began: when the answer's header came, on the monotonic clock.
    """

    def __init__(self, take: Callable[[int], memoryview]) -> None:
        self._take = take
        self._news = asyncio.Event()
        self.view = memoryview(b"")
        self.have = 0
        self.ended = False
        self.began = time.monotonic()

    def __call__(self, nbytes: int) -> memoryview:
        """See `store.Store.get`."""
        self.view = self._take(nbytes)
        self.began = time.monotonic()
        return self.view

    def arrived(self, nbytes: int) -> int:
        """See `store.Progress.arrived`: at half of what is missing, and so on.

        Few wake-ups, and little is left to be done when the last byte comes.
        """
        if nbytes:
            self.have = nbytes
            self._news.set()
        return nbytes + max(_LEAST_BYTES, (len(self.view) - nbytes) // 2)

    def end(self, nbytes: int) -> None:
        """No more will come; so many bytes are there."""
        self.have, self.ended = nbytes, True
        self._news.set()

    async def reaches(self, nbytes: int) -> bool:
        """Wait until so many bytes are there; False when the body ends before."""
        while self.have < nbytes and not self.ended:
            self._news.clear()
            await self._news.wait()
        return self.have >= nbytes
