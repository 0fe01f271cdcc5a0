"""The message-shaped port between a serving scheduler and the engine.

The scheduler's side never waits: `want`, `reserve`, `filled` and `release` only hand a message
over, answers come through `poll`. A *ticket* (a number that the scheduler chooses) stands for one
hold on one item: a fetch under way, then a lease, or a reservation to be filled. `Ready` means
that the bytes are in the slab, verified, and leased to the ticket until `release`.

Two ports speak it: `ThreadPort` here, with the engine on a thread of this process, and
`child.ProcessPort`, with the engine in a process of its own. Both pass
`testing.port_conformance`.

Locking: the desk's one lock guards its table of tickets; it is held for dictionary work only.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ec_s3.engine import EncoderCache
from ec_s3.errors import CapacityError, ClosedError, ECS3Error, RemoteError
from ec_s3.fetch import Miss, PrivateItem
from ec_s3.local import Lease, Reservation
from ec_s3.loop import LoopThread
from ec_s3.types import Extent, FlushReport, ItemMeta, MissReason, TensorSpec
from ec_s3.uploads import Upload

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from ec_s3.config import ECConfig
    from ec_s3.keys import Namespace
    from ec_s3.metrics import Data
    from ec_s3.pages import Slab
    from ec_s3.store import Store

logger = logging.getLogger(__name__)

START_SECONDS = 30.0
CLOSE_GRACE = 5.0
"""Seconds that closing may take beyond the flush."""

UNKNOWN = FlushReport(pending=1)
"""What is reported when nobody can say what was left behind: never complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Bring an item into the slab and lease it to the ticket.

    Attributes:
        ticket: the scheduler's number for this hold.
        identifier: the item.
        save_nbytes: on absence, reserve this many bytes to save the item into; 0 for none.
        probe: only find out whether the bucket holds the item (an encode-only producer).
        fresh: do not believe a remembered "absent".
    """

    ticket: int
    identifier: str
    save_nbytes: int = 0
    probe: bool = False
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """The item lies in the slab, leased to the ticket."""

    ticket: int
    spec: TensorSpec
    extents: tuple[Extent, ...]
    meta: ItemMeta = field(default_factory=ItemMeta)


@dataclass(frozen=True, slots=True)
class Absent:
    """There is no item; `extents` is the reservation that the want asked for, if it was granted."""

    ticket: int
    reason: MissReason
    extents: tuple[Extent, ...] | None = None


@dataclass(frozen=True, slots=True)
class Present:
    """Answer to a probe: the bucket holds the item. The ticket ends with it."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Granted:
    """Answer to `reserve`: pages to fill, None when there is no room."""

    ticket: int
    extents: tuple[Extent, ...] | None


Event = Ready | Absent | Present | Granted


class EnginePort(Protocol):
    """What the scheduler part of a connector needs of an engine. No call waits."""

    @property
    def alive(self) -> bool:
        """Whether the engine answers; once False it stays so."""
        ...

    def want(self, want: Want) -> None:
        """Ask for an item; answered by `Ready`, `Absent` or `Present`."""
        ...

    def reserve(self, ticket: int, identifier: str, nbytes: int) -> None:
        """Ask for pages to save an item into; answered by `Granted`."""
        ...

    def filled(self, ticket: int, spec: TensorSpec, meta: ItemMeta) -> None:
        """The reservation holds the item now: make it ready, upload it. Ends the ticket."""
        ...

    def release(self, ticket: int) -> None:
        """End the ticket, whatever it stands for; unknown tickets are ignored."""
        ...

    def poll(self) -> list[Event]:
        """The answers since the last call."""
        ...

    def drain_stats(self) -> Data:
        """Increments of the engine's metrics since the last call, for `metrics.Stats.merge`."""
        ...

    def close(self, timeout: float) -> FlushReport:
        """Flush and stop; the only call that waits, at most `timeout` seconds and a little.

        Returns:
            What was left behind; never complete when that cannot be found out. Later calls return
            the same, and all other calls do nothing then but end tickets.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Grant:
    """A reservation, and for which item."""

    reservation: Reservation
    identifier: str


_Holder = Lease | _Grant | None  # None: a want under way


class Desk:
    """The engine's side of a port: turns messages into engine calls, and results into events.

    Its methods may be called from any thread; `emit` is called from the caller's thread and from
    the engine's loop.
    """

    def __init__(
        self, cache: EncoderCache, loop: LoopThread, emit: Callable[[Event], None]
    ) -> None:
        self._cache = cache
        self._loop = loop
        self._emit = emit
        self._lock = threading.Lock()
        self._holders: dict[int, _Holder] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def want(self, want: Want) -> None:
        """See `EnginePort.want`. A host tier hit is answered before the call returns."""
        key = self._cache.key_of(want.identifier)
        lease = None if want.probe else self._cache.tier.lookup(key)
        with self._lock:
            self._holders[want.ticket] = lease
        if lease is not None:
            self._cache.count_local_hit()
            self._emit(Ready(want.ticket, lease.spec, lease.extents, lease.meta))
            return
        try:
            self._loop.post(self._start, want)
        except ClosedError:
            self._absent(want, MissReason.CLOSED)

    def reserve(self, ticket: int, identifier: str, nbytes: int) -> None:
        """See `EnginePort.reserve`; answered before the call returns."""
        grant = self._grant(identifier, nbytes)
        if grant is not None:
            with self._lock:
                self._holders[ticket] = grant
        self._emit(Granted(ticket, None if grant is None else grant.reservation.extents))

    def _grant(self, identifier: str, nbytes: int) -> _Grant | None:
        if nbytes < 0:
            return None
        try:
            reservation = self._cache.tier.reserve(self._cache.key_of(identifier), nbytes)
        except CapacityError:
            return None
        return None if reservation is None else _Grant(reservation, identifier)

    def filled(self, ticket: int, spec: TensorSpec, meta: ItemMeta) -> None:
        """See `EnginePort.filled`."""
        with self._lock:
            holder = self._holders.get(ticket)
            if not isinstance(holder, _Grant):
                return
            del self._holders[ticket]
        reservation = holder.reservation
        if spec.nbytes != reservation.nbytes or spec.dtype != self._cache.namespace.dtype:
            reservation.abort()
            return
        reservation.commit(spec, meta, dirty=self._cache.uploads).release()
        try:
            self._loop.post(self._cache.enqueue, Upload(reservation.key, holder.identifier))
        except ClosedError:
            logger.debug("an item was saved after the engine was closed")

    def release(self, ticket: int) -> None:
        """See `EnginePort.release`."""
        with self._lock:
            holder = self._holders.pop(ticket, None)
            task = self._tasks.pop(ticket, None)
        if isinstance(holder, Lease):
            holder.release()
        elif isinstance(holder, _Grant):
            holder.reservation.abort()
        if task is not None:
            try:
                self._loop.post(task.cancel)
            except ClosedError:
                logger.debug("a fetch was dropped after the engine was closed")

    def _start(self, want: Want) -> None:
        with self._lock:
            if want.ticket not in self._holders:
                return  # released before it started
            task = self._loop.loop.create_task(self._serve(want))
            self._tasks[want.ticket] = task

    async def _serve(self, want: Want) -> None:
        try:
            if want.probe:
                if want.fresh:
                    key = self._cache.key_of(want.identifier)
                    self._cache.reader.tiers.presence.forget_absence(key)
                found = await self._cache.is_shared(want.identifier)
                if found:
                    self._end(want.ticket)
                    self._emit(Present(want.ticket))
                else:
                    self._absent(want, MissReason.ABSENT)
                return
            item = await self._cache.reader.acquire(
                want.identifier,
                timeout=self._cache.config.metadata_timeout,
                fresh=want.fresh,
                linger=False,
            )
        except RemoteError as error:
            self._absent(want, MissReason(error.reason))
        except ECS3Error:
            self._absent(want, MissReason.CLOSED)
        except Exception:  # the port's outermost border: the scheduler must get an answer
            self._cache.statistics.add("errors", where="engine")
            logger.exception("a fetch failed unexpectedly")
            self._absent(want, MissReason.FAILED)
        else:
            self._answer(want, item)

    def _answer(self, want: Want, item: Lease | PrivateItem | Miss) -> None:
        if isinstance(item, Miss):
            self._absent(want, item.reason)
        elif isinstance(item, PrivateItem):
            self._absent(want, MissReason.TOO_LARGE)
        elif self._hand(want.ticket, item):
            self._emit(Ready(want.ticket, item.spec, item.extents, item.meta))
        else:
            item.release()

    def _absent(self, want: Want, reason: MissReason) -> None:
        grant = self._grant(want.identifier, want.save_nbytes) if want.save_nbytes else None
        if grant is None:
            self._end(want.ticket)
            self._emit(Absent(want.ticket, reason))
        elif self._hand(want.ticket, grant):
            self._emit(Absent(want.ticket, reason, grant.reservation.extents))
        else:
            grant.reservation.abort()

    def _hand(self, ticket: int, holder: Lease | _Grant) -> bool:
        """Give the ticket its hold; False when the ticket was released meanwhile."""
        with self._lock:
            self._tasks.pop(ticket, None)
            if ticket not in self._holders:
                return False
            self._holders[ticket] = holder
            return True

    def _end(self, ticket: int) -> None:
        with self._lock:
            self._tasks.pop(ticket, None)
            self._holders.pop(ticket, None)


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
        self._events: deque[Event] = deque()
        self._cache = EncoderCache(config, namespace, slab=slab, store=store, facts=facts)
        self._loop = LoopThread("ec_s3-engine")
        try:
            self._loop.run(self._cache.start(), timeout=START_SECONDS)
        except BaseException:
            self._loop.close()
            raise
        self._desk = Desk(self._cache, self._loop, self._events.append)
        self._report = UNKNOWN
        self._closed = False

    @property
    def alive(self) -> bool:
        """See `EnginePort.alive`."""
        return not self._closed

    def want(self, want: Want) -> None:
        """See `EnginePort.want`."""
        self._desk.want(want)

    def reserve(self, ticket: int, identifier: str, nbytes: int) -> None:
        """See `EnginePort.reserve`."""
        self._desk.reserve(ticket, identifier, nbytes)

    def filled(self, ticket: int, spec: TensorSpec, meta: ItemMeta) -> None:
        """See `EnginePort.filled`."""
        self._desk.filled(ticket, spec, meta)

    def release(self, ticket: int) -> None:
        """See `EnginePort.release`."""
        self._desk.release(ticket)

    def poll(self) -> list[Event]:
        """See `EnginePort.poll`."""
        events = self._events
        return [events.popleft() for _ in range(len(events))]

    def drain_stats(self) -> Data:
        """See `EnginePort.drain_stats`."""
        self._cache.stats()
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
