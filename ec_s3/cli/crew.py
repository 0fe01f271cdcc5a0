"""Work on many objects at once for the commands: bounded, with pauses where a store is busy.

Coroutines on the command's event loop. Must never hold more items than are being worked on.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, TypeVar

from ec_s3.errors import RemoteError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

T = TypeVar("T")

ATTEMPTS = 4
"""How often a call is made that may succeed later; the store has its own attempts within each."""

PAUSE_SECONDS = 0.25
"""Before the first repetition; each further pause is twice as long."""


async def each(
    items: AsyncIterator[T], work: Callable[[T], Awaitable[object]], *, at_once: int
) -> None:
    """Work on items as they come, so many at once; the iterator is asked only when one is free.

    The first exception, of the iterator or of the work, ends the rest and is raised.
    """
    turn = asyncio.Lock()

    async def labour() -> None:
        while True:
            async with turn:
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            await work(item)

    tasks = [asyncio.ensure_future(labour()) for _ in range(at_once)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """The answer of a store's call, which is made again after a pause where that may help.

    Raises:
        RemoteError: the last failure, or one that no repetition heals.
    """
    for attempt in range(1, ATTEMPTS):
        try:
            return await call()
        except RemoteError as error:
            if not error.retryable:
                raise
        await pause(attempt)
    return await call()


async def pause(attempt: int) -> None:
    """Wait before a repetition, the longer the more there were."""
    # Jitter keeps those who failed together from coming back together.
    await asyncio.sleep(PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))  # noqa: S311  no secret
