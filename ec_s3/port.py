"""The message-shaped port between a serving scheduler and the engine.

The scheduler's side never waits: `want`, `reserve`, `filled` and `release` only hand a message
over, answers come through `poll`. `Ready` means that the bytes are in the slab, verified, and
leased to the ticket until `release`.

Two ports speak it: `ThreadPort` here, with the engine on a thread of this process, and
`child.ProcessPort`, with the engine in a process of its own. Both pass
`testing.port_conformance`.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Protocol

from ec_s3.desk import Desk
from ec_s3.engine import EncoderCache
from ec_s3.errors import ClosedError
from ec_s3.loop import LoopThread
from ec_s3.tickets import Absent, Event, Granted, Present, Ready, Want, outdated
from ec_s3.types import FlushReport, MissReason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ec_s3.config import ECConfig
    from ec_s3.keys import Namespace
    from ec_s3.metrics import Data
    from ec_s3.pages import Slab
    from ec_s3.store import Store
    from ec_s3.types import ItemMeta, TensorSpec

__all__ = ["Absent", "EnginePort", "Event", "Granted", "Present", "Ready", "ThreadPort", "Want"]

logger = logging.getLogger(__name__)

START_SECONDS = 30.0
CLOSE_GRACE = 5.0
"""Seconds that closing may take beyond the flush."""

UNKNOWN = FlushReport(pending=1)
"""What is reported when nobody can say what was left behind: never complete."""


class EnginePort(Protocol):
    """What the scheduler part of a connector needs of an engine. No call waits."""

    @property
    def alive(self) -> bool:
        """Whether the engine answers now."""
        ...

    def want(self, want: Want) -> None:
        """Ask for an item; answered by `Ready`, `Absent` or `Present`."""
        ...

    def reserve(self, ticket: int, identifier: str, nbytes: int) -> None:
        """Ask for pages to save an item into; answered by `Granted`."""
        ...

    def filled(
        self, ticket: int, spec: TensorSpec, meta: ItemMeta, *, compare: bool = False
    ) -> None:
        """The reservation holds the item now: make it ready, upload it. Ends the ticket.

        With `compare` it is only compared with what is there, and neither kept nor uploaded.
        """
        ...

    def release(self, ticket: int) -> None:
        """End the ticket, whatever it stands for; unknown tickets are ignored."""
        ...

    def poll(self) -> list[Event]:
        """The answers since the last call."""
        ...

    def suspend(self) -> None:
        """The weights are about to be changed: serve and keep nothing until `resume`; idempotent.

        No ticket becomes ready any more, nothing is reserved, and what was reserved before is
        not kept when it is filled. Leases stay where they are until they are released.
        """
        ...

    def resume(self, weight_version: str) -> None:
        """Go on, with weights of this name; idempotent.

        No ticket from before becomes ready any more, or keeps anything.
        """
        ...

    def drain_stats(self) -> Data:
        """Increments of the engine's metrics since the last call, for `metrics.Stats.merge`."""
        ...

    def close(self, timeout: float) -> FlushReport:
        """Flush and stop; the only call that waits, at most `timeout` seconds and a little.

        Returns:
            What was left behind; never complete when that cannot be found out. Later calls return
            the same, and all other calls do nothing then but end tickets: whatever is asked for is
            answered by a no, or not at all.
        """
        ...


class ThreadPort:
    """The engine on a thread of this process.

    Args:
        config: settings.
        namespace: what makes two tensors interchangeable.
        slab: host memory, owned by the caller.
        store: the bucket, ready made; None opens what `config.url` names.
        facts: what identifiers depend on but the namespace does not, for the bucket's manifest.
    """

    def __init__(
        self,
        config: ECConfig,
        namespace: Namespace,
        slab: Slab,
        *,
        store: Store | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        self._events: deque[tuple[Event, int]] = deque()
        self._cache = EncoderCache(config, namespace, slab=slab, store=store, facts=facts)
        self._loop = LoopThread("ec_s3-engine")
        try:
            self._loop.run(self._cache.start(), timeout=START_SECONDS)
        except BaseException:
            self._loop.close()
            raise
        self._desk = Desk(self._cache, self._loop, lambda *event: self._events.append(event))
        self._report = UNKNOWN
        self._closed = False

    @property
    def alive(self) -> bool:
        """See `EnginePort.alive`."""
        return not self._closed

    @property
    def cache(self) -> EncoderCache:
        """The engine itself, for who shares its process; see there what any thread may call."""
        return self._cache

    def flush(self, timeout: float) -> FlushReport:
        """Wait for the uploads, at most `timeout` seconds and a little. Not for a scheduler.

        Raises:
            ClosedError: the port is closed.
            TimeoutError: the engine does not answer.
        """
        return self._loop.run(self._cache.flush(timeout), timeout=timeout + CLOSE_GRACE)

    def want(self, want: Want) -> None:
        """See `EnginePort.want`."""
        if self._closed:
            self._answer(Absent(want.ticket, MissReason.CLOSED))
        else:
            self._desk.want(want)

    def reserve(self, ticket: int, identifier: str, nbytes: int) -> None:
        """See `EnginePort.reserve`."""
        if self._closed:
            self._answer(Granted(ticket, None))
        else:
            self._desk.reserve(ticket, identifier, nbytes)

    def _answer(self, event: Event) -> None:
        self._events.append((event, self._cache.gate.now.weights))

    def filled(
        self, ticket: int, spec: TensorSpec, meta: ItemMeta, *, compare: bool = False
    ) -> None:
        """See `EnginePort.filled`."""
        self._desk.filled(ticket, spec, meta, compare=compare)

    def release(self, ticket: int) -> None:
        """See `EnginePort.release`."""
        self._desk.release(ticket)

    def poll(self) -> list[Event]:
        """See `EnginePort.poll`."""
        events = self._events
        weights = self._cache.gate.now.weights
        return [self._told(*events.popleft(), weights) for _ in range(len(events))]

    def _told(self, event: Event, asked: int, weights: int) -> Event:
        if asked >= weights:
            return event
        self._desk.release(event.ticket)
        return outdated(event)

    def suspend(self) -> None:
        """See `EnginePort.suspend`."""
        self._desk.suspend()

    def resume(self, weight_version: str) -> None:
        """See `EnginePort.resume`."""
        self._desk.resume(weight_version)

    def drain_stats(self) -> Data:
        """See `EnginePort.drain_stats`."""
        self._cache.gauges.update()
        return self._cache.statistics.drain()

    def close(self, timeout: float) -> FlushReport:
        """See `EnginePort.close`; idempotent."""
        if self._closed:
            return self._report
        self._closed = True
        try:
            closing = self._cache.close(timeout)
            self._report = self._loop.run(closing, timeout=timeout + CLOSE_GRACE)
        except (TimeoutError, ClosedError) as error:
            logger.warning("the engine did not close: %s", error)
        finally:
            self._loop.close()
        return self._report
