"""Keeps a port whose engine may die: opens another one in its place, without the caller waiting.

While there is no engine every question is answered at once, by a miss. What the dead engine had
leased or reserved stays where it is until the caller ends those tickets; only then does the next
engine get the slab, as it takes all of it for free. What was only in the dead engine's memory, its
index and the uploads that were pending, is forgotten.

The methods are called as `port.EnginePort` says; a thread of its own waits for the engine's end and
opens the next one.

Locking: one lock guards everything that changes. Under it the port is called, which never waits;
engines are opened and closed without it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ec_s3.errors import ECS3Error
from ec_s3.metrics import combine
from ec_s3.port import UNKNOWN, EnginePort
from ec_s3.tickets import Absent, Granted, Ready, outdated
from ec_s3.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.keys import Namespace
    from ec_s3.metrics import Data
    from ec_s3.tickets import Event, Want
    from ec_s3.types import FlushReport, ItemMeta, TensorSpec

logger = logging.getLogger(__name__)

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds before an engine is opened; doubles each time one has died younger than this."""


class MortalPort(EnginePort, Protocol):
    """A port whose engine can die."""

    def wait_for_end(self) -> None:
        """Wait until the engine is gone and its last event is there for `poll`, or `close`."""
        ...


class RestartingPort:
    """An `EnginePort` over one engine after the other.

    Args:
        open_port: opens an engine with this namespace; called again after each one's end.
        namespace: the first one's.
        first_pause: seconds.

    Raises:
        ConfigError: the settings cannot be used.
        ECS3Error: the first engine did not start.
    """

    def __init__(
        self,
        open_port: Callable[[Namespace], MortalPort],
        namespace: Namespace,
        *,
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        self._pid = os.getpid()
        self._open = open_port
        self._namespace = namespace
        self._first_pause = first_pause
        self._suspended = False
        self._turns = 0  # suspensions and resumptions
        self._lock = threading.Condition()
        self._closed = False
        # False: no answer yet; True: pages of the slab are the caller's.
        self._tickets: dict[int, bool] = {}
        self._reserving: set[int] = set()
        self._owed: set[int] = set()  # of engines that are gone
        self._events: deque[tuple[Event, int]] = deque()
        self._stats: Data = {}
        self._report = UNKNOWN
        self._port: MortalPort | None = open_port(namespace)
        self._keeper = threading.Thread(
            target=self._keep, args=(self._port,), name="ec_s3-restart", daemon=True
        )
        self._keeper.start()

    @property
    def alive(self) -> bool:
        """Whether the engine answers; it may again after it did not."""
        port = self._port
        return port is not None and port.alive

    def want(self, want: Want) -> None:
        """See `EnginePort.want`."""
        with self._lock:
            if self._port is None:
                self._say(Absent(want.ticket, MissReason.CLOSED))
                return
            self._tickets[want.ticket] = False
            self._port.want(want)

    def reserve(self, ticket: int, identifier: str, nbytes: int) -> None:
        """See `EnginePort.reserve`."""
        with self._lock:
            if self._port is None:
                self._say(Granted(ticket, None))
                return
            self._tickets[ticket] = False
            self._reserving.add(ticket)
            self._port.reserve(ticket, identifier, nbytes)

    def filled(
        self, ticket: int, spec: TensorSpec, meta: ItemMeta, *, compare: bool = False
    ) -> None:
        """See `EnginePort.filled`; what a dead engine had reserved is not kept."""
        with self._lock:
            if self._end(ticket) and self._port is not None:
                self._port.filled(ticket, spec, meta, compare=compare)

    def release(self, ticket: int) -> None:
        """See `EnginePort.release`."""
        with self._lock:
            if self._end(ticket) and self._port is not None:
                self._port.release(ticket)

    def _end(self, ticket: int) -> bool:
        """Locked: forget a ticket; whether the engine of today may know it."""
        self._tickets.pop(ticket, None)
        self._reserving.discard(ticket)
        if ticket not in self._owed:
            return True
        self._owed.discard(ticket)
        self._lock.notify_all()
        return False

    def poll(self) -> list[Event]:
        """See `EnginePort.poll`."""
        with self._lock:
            if self._port is not None:
                self._collect(self._port)
            events, self._events = self._events, deque()
            turns = self._turns
        told = []
        for event, asked in events:
            if asked == turns:
                told.append(event)
            else:
                self.release(event.ticket)
                told.append(outdated(event))
        return told

    def _say(self, event: Event) -> None:
        """Locked."""
        self._events.append((event, self._turns))

    def _collect(self, port: MortalPort) -> None:
        """Locked: take what the engine has answered."""
        for event in port.poll():
            ticket = event.ticket
            self._reserving.discard(ticket)
            if isinstance(event, Ready) or getattr(event, "extents", None) is not None:
                if ticket in self._tickets:
                    self._tickets[ticket] = True
            else:
                self._tickets.pop(ticket, None)
            self._say(event)

    def suspend(self) -> None:
        """See `EnginePort.suspend`."""
        with self._lock:
            self._suspended = True
            self._turns += 1
            if self._port is not None:
                self._port.suspend()

    def resume(self, weight_version: str) -> None:
        """See `EnginePort.resume`."""
        with self._lock:
            self._suspended = False
            self._turns += 1
            self._namespace = replace(self._namespace, weight_version=weight_version)
            if self._port is not None:
                self._port.resume(weight_version)

    def drain_stats(self) -> Data:
        """See `EnginePort.drain_stats`."""
        with self._lock:
            data, self._stats = self._stats, {}
            return data if self._port is None else combine(data, self._port.drain_stats())

    def close(self, timeout: float) -> FlushReport:
        """See `EnginePort.close`; idempotent."""
        if os.getpid() != self._pid:
            return self._report
        with self._lock:
            if self._closed:
                return self._report
            self._closed = True
            port = self._port
            self._lock.notify_all()
        if port is not None:
            try:
                self._report = port.close(timeout)
            except subprocess.TimeoutExpired as error:  # a file system that is gone may hold it
                logger.warning("the engine did not close: %s", error)
        return self._report

    # -- the keeper's thread ---------------------------------------------------------------

    def _keep(self, port: MortalPort) -> None:
        try:
            self._open_one_after_the_other(port)
        except subprocess.TimeoutExpired:  # it may still write to the slab
            logger.exception("the engine's process does not end; the encoder cache stays off")

    def _open_one_after_the_other(self, port: MortalPort) -> None:
        pause = self._first_pause
        following: MortalPort | None = port
        while following is not None:
            opened = time.monotonic()
            following.wait_for_end()
            if not self._take_leave(following):
                return
            following.close(0.0)
            if time.monotonic() - opened > LONGEST_PAUSE:
                pause = self._first_pause
            following = None
            while following is None and self._await_turn(pause):
                pause = min(2 * pause, LONGEST_PAUSE)
                following = self._open_next()

    def _take_leave(self, port: MortalPort) -> bool:
        """Answer for the dead; False when the port is closed."""
        with self._lock:
            if self._closed:
                return False
            self._collect(port)
            self._stats = combine(self._stats, port.drain_stats())
            self._port = None
            for ticket, held in self._tickets.items():
                if held:
                    self._owed.add(ticket)
                elif ticket in self._reserving:
                    self._say(Granted(ticket, None))
                else:
                    self._say(Absent(ticket, MissReason.CLOSED))
            self._tickets.clear()
            self._reserving.clear()
            return True

    def _await_turn(self, pause: float) -> bool:
        """Wait for the pause, and until the slab is free; False when the port is closed."""
        with self._lock:
            self._lock.wait_for(lambda: self._closed, pause)
            self._lock.wait_for(lambda: self._closed or not self._owed)
            return not self._closed

    def _open_next(self) -> MortalPort | None:
        namespace = self._namespace
        try:
            port = self._open(namespace)
        except (ECS3Error, OSError, RuntimeError) as error:  # out of descriptors, of threads
            logger.warning("the engine's process cannot be started again: %s", error)
            return None
        with self._lock:
            if not self._closed:
                if self._namespace != namespace:
                    port.resume(self._namespace.weight_version)
                if self._suspended:
                    port.suspend()
                self._port = port
                logger.warning("the engine's process was started again")
                return port
        port.close(0.0)
        return None
