"""The engine's side of a port: turns messages into engine calls, and results into events.

Runs in the engine's process, its methods on any thread. Nothing is leased or reserved across a
change of the engine's gate: what was asked for in one epoch is never ready in another, and a
reservation of one is not kept when it is filled in another.

Locking: one lock guards the table of tickets; it is held for dictionary work only.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ec_s3.errors import CapacityError, ClosedError, ECS3Error, RemoteError
from ec_s3.fetch import Miss, PrivateItem
from ec_s3.indexing import index_poll
from ec_s3.local import Lease, Reservation
from ec_s3.policy import Policy
from ec_s3.tickets import Absent, Granted, Present, Ready
from ec_s3.types import MissReason
from ec_s3.uploads import Upload

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from ec_s3.engine import EncoderCache
    from ec_s3.gate import Epoch
    from ec_s3.loop import LoopThread
    from ec_s3.tickets import Event, Want
    from ec_s3.types import ItemMeta, TensorSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Grant:
    """A reservation, for which item, and since when."""

    reservation: Reservation
    identifier: str
    since: Epoch


_Holder = Lease | _Grant | None  # None: a want under way


class Desk:
    """Keeps the tickets of one port.

    Args:
        cache: the engine.
        loop: what it runs on.
        emit: called with every event, and with the number of changes of the weights before it was
            asked for; from the caller's thread and from the engine's loop.
    """

    def __init__(
        self, cache: EncoderCache, loop: LoopThread, emit: Callable[[Event, int], object]
    ) -> None:
        self._cache = cache
        self._gate = cache.gate
        self._loop = loop
        self._emit = emit
        self._lock = threading.Lock()
        self._holders: dict[int, _Holder] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._policy = Policy(cache.config.policy)
        self._listing = cache.reader.tiers.presence.listing
        self._disk = cache.reader.tiers.disk is not None
        self._follow_index()

    def _follow_index(self) -> None:
        remote = self._cache.reader.tiers.remote
        if remote is None or not self._policy.uses_index:
            return
        poll = index_poll(
            remote,
            namespace=lambda: self._gate.now.namespace,
            listing=self._listing,
            max_age=self._cache.config.index_max_age,
            keyring=self._cache.config.keyring(),
            stats=self._cache.statistics,
        )
        self._loop.post(lambda: self._cache.governor.attend(poll.run()))

    def want(self, want: Want) -> None:
        """See `port.EnginePort.want`. A host tier hit is answered before the call returns."""
        since = self._gate.now
        key = since.namespace.object_key(want.identifier)
        refusal = self._gate.refusal(key, since)
        if refusal is not None:
            if not want.probe:
                self._cache.statistics.add("queries")
                self._cache.statistics.add("misses", reason=refusal)
            self._emit(Absent(want.ticket, refusal), since.weights)
            return
        lease = None if want.probe else self._cache.tier.lookup(key)
        with self._lock:
            self._holders[want.ticket] = lease
        if lease is not None:
            self._cache.count_local_hit(lease)
            self._emit(self._ready(want.ticket, lease), since.weights)
            return
        if not self._disk and self._is_unlisted(want, key):
            self._cache.statistics.add("queries")
            self._cache.statistics.add("misses", reason=MissReason.ABSENT)
            self._absent(want, since, MissReason.ABSENT)
            return
        try:
            self._loop.post(self._start, want, since)
        except ClosedError:
            self._absent(want, since, MissReason.CLOSED)

    def _is_unlisted(self, want: Want, key: str) -> bool:
        """Whether the index is taken at its word that the bucket lacks the item."""
        if want.probe or want.fresh or not self._listing.lacks(key):
            return False
        self._listing.deny(key)
        self._cache.statistics.add("index_answers", outcome="absent")
        return True

    def _lingers(self) -> bool:
        """Whether a fetch goes on for later requests when the one that it is for has ended.

        Where requests may not wait; as many as run at once anyway, so that none piles up.
        """
        if self._policy not in (Policy.LATENCY, Policy.NEVER):
            return False
        return len(self._cache.reader.under_way()) < self._cache.config.max_fetches

    def reserve(self, ticket: int, identifier: str, nbytes: int) -> None:
        """See `port.EnginePort.reserve`; answered before the call returns."""
        since = self._gate.now
        grant = self._grant(identifier, nbytes, since)
        if grant is not None:
            with self._lock:
                self._holders[ticket] = grant
        extents = None if grant is None else grant.reservation.extents
        self._emit(Granted(ticket, extents), since.weights)

    def _grant(self, identifier: str, nbytes: int, since: Epoch) -> _Grant | None:
        key = since.namespace.object_key(identifier)
        if nbytes < 0 or self._gate.refusal(key, since) is not None:
            return None
        try:
            reservation = self._cache.tier.reserve(key, nbytes)
        except CapacityError:
            return None
        return None if reservation is None else _Grant(reservation, identifier, since)

    def filled(
        self, ticket: int, spec: TensorSpec, meta: ItemMeta, *, compare: bool = False
    ) -> None:
        """See `port.EnginePort.filled`."""
        with self._lock:
            holder = self._holders.get(ticket)
            if not isinstance(holder, _Grant):
                return
            del self._holders[ticket]
        reservation = holder.reservation
        refusal = self._gate.refusal(reservation.key, holder.since)
        if refusal is not None:  # encoded in other times, with whatever weights
            self._cache.statistics.add("rejected_puts", reason=refusal)
            reservation.abort()
            return
        if spec.nbytes != reservation.nbytes or spec.dtype != holder.since.namespace.dtype:
            reservation.abort()
            return
        if compare:
            self._compare(holder, spec, meta)
            return
        if meta.encode_seconds:
            self._cache.statistics.add("encoder_seconds", meta.encode_seconds)
            self._cache.statistics.add("encoder_bytes", spec.nbytes)
        reservation.commit(spec, meta, dirty=self._cache.uploads).release()
        refusal = self._gate.refusal(reservation.key, holder.since)
        if refusal is not None:  # from the last look on; whoever forgets items may be through
            self._cache.statistics.add("rejected_puts", reason=refusal)
            self._cache.tier.discard(reservation.key)
            return
        try:
            self._loop.post(self._cache.enqueue, Upload(reservation.key, holder.identifier))
        except ClosedError:
            logger.debug("an item was saved after the engine was closed")

    def _compare(self, made: _Grant, spec: TensorSpec, meta: ItemMeta) -> None:
        audit = self._cache.auditor.offer
        try:
            self._loop.post(lambda: audit(made.reservation, spec, meta, identifier=made.identifier))
        except ClosedError:
            made.reservation.abort()

    def release(self, ticket: int) -> None:
        """See `port.EnginePort.release`."""
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

    def suspend(self) -> None:
        """See `port.EnginePort.suspend`."""
        with contextlib.suppress(ClosedError):
            self._cache.suspend()

    def resume(self, weight_version: str) -> None:
        """See `port.EnginePort.resume`."""
        with contextlib.suppress(ClosedError):
            self._cache.resume(weight_version=weight_version)

    def _start(self, want: Want, since: Epoch) -> None:
        with self._lock:
            if want.ticket not in self._holders:
                return  # released before it started
            task = self._loop.loop.create_task(self._serve(want, since))
            self._tasks[want.ticket] = task

    async def _serve(self, want: Want, since: Epoch) -> None:
        try:
            if want.probe:
                await self._probe(want, since)
                return
            reader = self._cache.reader
            if self._disk:
                key = since.namespace.object_key(want.identifier)
                if self._is_unlisted(want, key):
                    # A remembered absence ends behind the disk; whoever asks afresh forgets it.
                    reader.tiers.presence.set(key, present=False, now=time.monotonic())
            item = await reader.acquire(
                want.identifier,
                timeout=self._cache.config.metadata_timeout,
                fresh=want.fresh,
                linger=self._lingers(),
                resident=True,
            )
        except RemoteError as error:
            self._absent(want, since, MissReason(error.reason))
        except ECS3Error:
            self._absent(want, since, MissReason.CLOSED)
        except Exception:  # the port's outermost border: the scheduler must get an answer
            self._cache.statistics.add("errors", where="engine")
            logger.exception("a fetch failed unexpectedly")
            self._absent(want, since, MissReason.FAILED)
        else:
            self._answer(want, since, item)

    async def _probe(self, want: Want, since: Epoch) -> None:
        key = since.namespace.object_key(want.identifier)
        if want.fresh:
            self._cache.reader.tiers.presence.forget_absence(key)
        found = await self._cache.is_shared(want.identifier)
        refusal = self._gate.refusal(key, since)
        if found and refusal is None:
            self._end(want.ticket)
            self._emit(Present(want.ticket), since.weights)
        else:
            self._absent(want, since, refusal or MissReason.ABSENT)

    def _answer(self, want: Want, since: Epoch, item: Lease | PrivateItem | Miss) -> None:
        if isinstance(item, Miss):
            self._absent(want, since, item.reason)
        elif isinstance(item, PrivateItem):
            self._absent(want, since, MissReason.TOO_LARGE)
        elif (refusal := self._gate.refusal(item.key, since)) is not None:
            item.release()
            self._absent(want, since, refusal)
        elif self._hand(want.ticket, item):
            self._emit(self._ready(want.ticket, item), since.weights)
        else:
            item.release()

    def _ready(self, ticket: int, lease: Lease) -> Ready:
        shared = self._cache.is_known_shared(lease.key)
        return Ready(ticket, lease.spec, lease.extents, lease.meta, shared)

    def _absent(self, want: Want, since: Epoch, reason: MissReason) -> None:
        grant = self._grant(want.identifier, want.save_nbytes, since) if want.save_nbytes else None
        if grant is None:
            self._end(want.ticket)
            self._emit(Absent(want.ticket, reason), since.weights)
        elif self._hand(want.ticket, grant):
            self._emit(Absent(want.ticket, reason, grant.reservation.extents), since.weights)
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
