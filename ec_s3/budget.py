"""A bound on the bytes that are in use at one time; those who want some wait for their turn.

Runs on one event loop. Turns are in order of arrival, so a large item is not starved by small ones.
"""

from __future__ import annotations

import asyncio
from collections import deque


class ByteBudget:
    """Bytes in use; one item larger than all of the budget may go alone.

    Args:
        limit: most bytes in use.

    Attributes:
        used: bytes in use.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0
        self._turns: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, nbytes: int) -> None:
        """Wait until so many bytes may be used, and use them."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append((nbytes, turn))
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(nbytes)
            else:
                self._grant()  # those behind this one, which takes its turn no more
            raise

    def release(self, nbytes: int) -> None:
        """Give bytes back."""
        self.used -= nbytes
        self._grant()

    def _grant(self) -> None:
        while self._turns:
            nbytes, turn = self._turns[0]
            if turn.done():  # cancelled, and perhaps its waiter does not know yet
                self._turns.popleft()
                continue
            if self.used and self.used + nbytes > self._limit:
                return
            self._turns.popleft()
            self.used += nbytes
            turn.set_result(None)
