"""One call in flight per key; everybody who asks for the key meanwhile shares its result.

Runs on one event loop. A flight is a task of its own: a caller who gives up or is cancelled
changes nothing for the others. When the last caller has left, an unwanted flight is cancelled;
whoever asks after that starts a new one, also while the old one is still on its way down.

The result is a resource (a lease): each caller gets its own share of it, and the flight's own
is dropped once the last caller has taken his.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ec_s3.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0
    wanted: bool = False  # goes on although nobody waits
    settled: bool = False


class SingleFlight(Generic[T]):
    """Shares one running call per key.

    Args:
        share: makes a caller's own share of a result.
        drop: gives a result back that nobody needs any more.
        called_off: the result for those who wait for a flight that `call_off` ends; without it
            they get a `ClosedError`.
    """

    def __init__(
        self,
        share: Callable[[T], T],
        drop: Callable[[T], None],
        *,
        called_off: Callable[[], T] | None = None,
    ) -> None:
        self._share = share
        self._drop = drop
        self._called_off = called_off
        self._flights: dict[str, _Flight[T]] = {}  # those that can be joined
        self._tasks: set[asyncio.Task[T]] = set()  # and those on their way down
        self._closed = False

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

        Raises:
            ClosedError: closed before the result was there.
        """
        flight = self._flights.get(key)
        if flight is None or flight.task.done():
            flight = self._start(key, call)
        flight.waiters += 1
        flight.wanted = flight.wanted or wanted
        try:
            return self._share(await asyncio.shield(flight.task))
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                raise
            if self._closed or self._called_off is None:
                raise ClosedError("closed while the call was in flight") from None
            return self._called_off()
        finally:
            flight.waiters -= 1
            if flight.waiters == 0:
                self._left(key, flight)

    def _start(self, key: str, call: Callable[[], Coroutine[object, object, T]]) -> _Flight[T]:
        if self._closed:
            raise ClosedError("closed")
        task = asyncio.get_running_loop().create_task(call())
        flight = self._flights[key] = _Flight(task)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._landed(key, flight))
        return flight

    def keys(self) -> set[str]:
        """Keys of the flights that can be joined."""
        return set(self._flights)

    async def call_off(self, keys: set[str]) -> None:
        """End the flights of these keys and wait until they have landed."""
        flights = [self._flights.pop(key) for key in keys & self._flights.keys()]
        for flight in flights:
            flight.task.cancel()
        if flights:
            await asyncio.wait({flight.task for flight in flights})

    async def close(self, timeout: float) -> None:
        """Cancel every flight and wait for them to land, at most `timeout` seconds."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout)

    def _left(self, key: str, flight: _Flight[T]) -> None:
        if flight.task.done():
            self._settle(flight)
        elif not flight.wanted:
            flight.task.cancel()
            self._forget(key, flight)

    def _landed(self, key: str, flight: _Flight[T]) -> None:
        self._tasks.discard(flight.task)
        self._forget(key, flight)
        if flight.waiters == 0:
            self._settle(flight)

    def _forget(self, key: str, flight: _Flight[T]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    def _settle(self, flight: _Flight[T]) -> None:
        # Reading the exception here also keeps asyncio from reporting it as never retrieved.
        if flight.settled or flight.task.cancelled():
            return
        flight.settled = True
        if flight.task.exception() is None:
            self._drop(flight.task.result())
