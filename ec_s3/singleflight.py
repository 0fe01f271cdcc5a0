"""One call in flight per key; everybody who asks for the key meanwhile shares its result.

Runs on one event loop. A flight is a task of its own: a caller who gives up or is cancelled
changes nothing for the others. When the last caller has left, an unwanted flight is cancelled.

The result is a resource (a lease): each caller gets its own share of it, and the flight's own
is dropped once the last caller has taken his.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0
    wanted: bool = False  # goes on although nobody waits


class SingleFlight(Generic[T]):
    """Shares one running call per key.

    Args:
        share: makes a caller's own share of a result.
        drop: gives a result back that nobody needs any more.
    """

    def __init__(self, share: Callable[[T], T], drop: Callable[[T], None]) -> None:
        self._share = share
        self._drop = drop
        self._flights: dict[str, _Flight[T]] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._flights

    def __len__(self) -> int:
        return len(self._flights)

    async def run(
        self, key: str, call: Callable[[], Coroutine[object, object, T]], *, wanted: bool = False
    ) -> T:
        """Join the flight of this key, or start one with `call`.

        Args:
            key: what the flight is about.
            call: starts the work; only called when no flight of the key is under way.
            wanted: the flight goes on to its own end even if every caller leaves.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.get_running_loop().create_task(call()))
            self._flights[key] = flight
            flight.task.add_done_callback(lambda _: self._landed(key, flight))
        flight.waiters += 1
        flight.wanted = flight.wanted or wanted
        try:
            return self._share(await asyncio.shield(flight.task))
        finally:
            flight.waiters -= 1
            if flight.waiters == 0:
                self._left(flight)

    async def close(self) -> None:
        """Cancel every flight and wait until all have landed."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _left(self, flight: _Flight[T]) -> None:
        if not flight.task.done():
            if not flight.wanted:
                flight.task.cancel()
        else:
            self._settle(flight)

    def _landed(self, key: str, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.waiters == 0:
            self._settle(flight)

    def _settle(self, flight: _Flight[T]) -> None:
        # Reading the exception here also keeps asyncio from reporting it as never retrieved.
        if not flight.task.cancelled() and flight.task.exception() is None:
            self._drop(flight.task.result())
