"""An `EnginePort` whose answers a test gives by hand; it checks the protocol as it goes.

One thread. Holds no bytes: leases and reservations are made-up extents, distinct per ticket.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from ec_s3.tickets import Absent, Granted, Present, Ready, Want, outdated
from ec_s3.types import Extent, FlushReport, ItemMeta, MissReason, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.metrics import Data
    from ec_s3.tickets import Event

_PAGE = 1 << 18


class FakePort:
    """Remembers every ticket until it is released or filled.

    Attributes:
        items: what the host tier holds, by name; a `want` of these is answered at once.
        wants: unanswered wants, by ticket.
        leases: names leased, by ticket.
        grants: names and sizes reserved, by ticket.
        filled_items: what was saved, in order.
        filled_metas: what came with it.
        compared: what was only to be compared with what is there, in order.
        weight_versions: names given to `resume`.
        made: leases and grants by ticket: how many weight versions had been named by then.
        suspended: whether between `suspend` and `resume`.
        room: whether reservations are granted.
        alive: see `EnginePort.alive`.
        slow: messages arrive only at `deliver`, as those to an engine in another process may.
    """

    def __init__(self) -> None:
        self.items: dict[str, TensorSpec] = {}
        self.wants: dict[int, Want] = {}
        self.leases: dict[int, str] = {}
        self.grants: dict[int, tuple[str, int]] = {}
        self.filled_items: list[tuple[str, TensorSpec]] = []
        self.filled_metas: list[ItemMeta] = []
        self.compared: list[tuple[str, TensorSpec]] = []
        self.history: list[Want] = []
        self.weight_versions: list[str] = []
        self.made: dict[int, int] = {}
        self.suspended = False
        self.room = True
        self.alive = True
        self.slow = False
        self._messages: deque[Callable[[], None]] = deque()
        self._events: deque[Event] = deque()
        self._changes = 0  # suspensions and resumptions
        self._asked: dict[int, int] = {}  # by ticket: how many of them there had been

    @property
    def open_tickets(self) -> set[int]:
        """Tickets that stand for something."""
        return {*self.wants, *self.leases, *self.grants}

    def extents_of(self, ticket: int) -> tuple[Extent, ...]:
        """Where the ticket's made-up bytes lie."""
        return (Extent(ticket * _PAGE, _PAGE),)

    def _post(self, message: Callable[[], None]) -> None:
        self._messages.append(message)
        if not self.slow:
            self.deliver()

    def deliver(self) -> None:
        """Let every message under way arrive, in order."""
        while self._messages:
            self._messages.popleft()()

    def want(self, want: Want) -> None:
        """See `EnginePort.want`."""
        self._asked[want.ticket] = self._changes
        self._post(partial(self._want, want))

    def _want(self, want: Want) -> None:
        assert want.ticket not in self.open_tickets, "a ticket stands for one hold only"
        self.history.append(want)
        self.wants[want.ticket] = want
        if self._late(want.ticket):
            self.absent(want.ticket, MissReason.SUSPENDED)
        elif want.identifier in self.items and not want.probe:
            self.ready(want.ticket)

    def ready(self, ticket: int, spec: TensorSpec | None = None) -> None:
        """Answer a want with the item, as it is in `items` or as given."""
        if self._late(ticket):
            self.absent(ticket, MissReason.SUSPENDED)
            return
        want = self.wants.pop(ticket)
        self.leases[ticket] = want.identifier
        self.made[ticket] = len(self.weight_versions)
        found = spec or self.items[want.identifier]
        self._events.append(Ready(ticket, found, self.extents_of(ticket), ItemMeta()))

    def present(self, ticket: int) -> None:
        """Answer a probe with yes."""
        del self.wants[ticket]
        self._events.append(Present(ticket))

    def absent(self, ticket: int, reason: MissReason = MissReason.ABSENT) -> None:
        """Answer a want with no, and with the reservation that it asked for, if there is room."""
        want = self.wants.pop(ticket)
        extents = None
        if want.save_nbytes and self.room and not self._late(ticket):
            self.grants[ticket] = (want.identifier, want.save_nbytes)
            self.made[ticket] = len(self.weight_versions)
            extents = self.extents_of(ticket)
        self._events.append(Absent(ticket, reason, extents))

    def reserve(self, ticket: int, identifier: str, nbytes: int) -> None:
        """See `EnginePort.reserve`."""
        self._asked[ticket] = self._changes
        self._post(partial(self._reserve, ticket, identifier, nbytes))

    def _reserve(self, ticket: int, identifier: str, nbytes: int) -> None:
        assert ticket not in self.open_tickets, "a ticket stands for one hold only"
        room = self.room and not self._late(ticket)
        if room:
            self.grants[ticket] = (identifier, nbytes)
            self.made[ticket] = len(self.weight_versions)
        self._events.append(Granted(ticket, self.extents_of(ticket) if room else None))

    def filled(
        self, ticket: int, spec: TensorSpec, meta: ItemMeta, *, compare: bool = False
    ) -> None:
        """See `EnginePort.filled`."""
        self._post(partial(self._filled, ticket, spec, meta, compare=compare))

    def _filled(self, ticket: int, spec: TensorSpec, meta: ItemMeta, *, compare: bool) -> None:
        name, nbytes = self.grants.pop(ticket)
        assert spec.nbytes == nbytes, "a reservation is filled with what it was made for"
        if self._late(ticket):
            return  # made by other weights
        if compare:
            self.compared.append((name, spec))
            return
        self.filled_items.append((name, spec))
        self.filled_metas.append(meta)
        self.items.setdefault(name, spec)

    def release(self, ticket: int) -> None:
        """See `EnginePort.release`."""
        self._post(partial(self._release, ticket))

    def _release(self, ticket: int) -> None:
        self.wants.pop(ticket, None)
        self.leases.pop(ticket, None)
        self.grants.pop(ticket, None)

    def suspend(self) -> None:
        """See `EnginePort.suspend`."""
        if not self.suspended:
            self.suspended = True
            self._changes += 1

    def resume(self, weight_version: str) -> None:
        """See `EnginePort.resume`."""
        others = self.weight_versions[-1:] != [weight_version]
        if others:
            self.weight_versions.append(weight_version)
            self.items.clear()
        if others or self.suspended:
            self.suspended = False
            self._changes += 1

    def _late(self, ticket: int) -> bool:
        """Whether nothing may become of a ticket: the weights are, or were, being changed."""
        return self.suspended or self._asked[ticket] < self._changes

    def poll(self) -> list[Event]:
        """See `EnginePort.poll`."""
        events = []
        for event in self._events:
            late = self._asked[event.ticket] < self._changes
            if late:
                self._release(event.ticket)
            events.append(outdated(event) if late else event)
        self._events.clear()
        return events

    def drain_stats(self) -> Data:
        """See `EnginePort.drain_stats`."""
        return {}

    def close(self, timeout: float) -> FlushReport:
        """See `EnginePort.close`."""
        del timeout
        self.alive = False
        return FlushReport()
