"""What requests and ranks hold at the engine's port: items on their way, ready, or to be saved.

Belongs to the scheduler part and runs on its thread, but for `on_answer`, which the hub's thread
calls. An item lives here while a request holds it or a rank has not answered a load of it; then
its ticket is given back, and the engine's host tier keeps it or not as it sees fit.

Locking: none. `on_answer` touches only `_saving` (each entry is popped by exactly one taker) and
the queue of answers.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ec_s3.connector.media import Kind
from ec_s3.connector.state import Held, State
from ec_s3.port import Absent, Granted, Present, Ready, Want
from ec_s3.types import DTYPE_BYTES, Extent, ItemMeta, TensorSpec

if TYPE_CHECKING:
    from ec_s3.connector.binding import Binding
    from ec_s3.connector.link import Answer
    from ec_s3.connector.media import MediaItem
    from ec_s3.connector.state import Seen, Setup
    from ec_s3.port import EnginePort, Event


LOST_SAVES = 1024
"""Most saves remembered as not having happened; they matter until their request ends."""


@dataclass(slots=True)
class _Grant:
    """Pages to save an item into, asked for apart from its fetch; None while not granted."""

    ticket: int
    nbytes: int
    extents: tuple[Extent, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Save:
    """What a rank is about to put into a reservation's pages."""

    name: str
    spec: TensorSpec
    meta: ItemMeta
    binding: Binding
    audit: bool


class Holds:
    """The table of held items, by name.

    Attributes:
        uploading: whether saves are on their way to the bucket, as far as can be told.
        woken: requests that hold something of which engine or ranks have said something new; the
            caller takes out whom it has looked at.
    """

    def __init__(self, setup: Setup, port: EnginePort) -> None:
        self._setup = setup
        self._port = port
        self._held: dict[str, Held] = {}
        self._by_ticket: dict[int, str] = {}
        self._grants: dict[str, _Grant] = {}
        self._saving: dict[int, _Save] = {}
        self._unanswered: Counter[str] = Counter()  # names, as `take_in` has seen it
        self._loading: dict[int, tuple[str, Held, set[int]]] = {}
        self._answers: deque[tuple[Answer, str]] = deque()
        self._lost: deque[int] = deque(maxlen=LOST_SAVES)
        self._next = 0
        self.uploading = True
        self.woken: set[str] = set()

    def __len__(self) -> int:
        return len(self._held) + len(self._grants) + len(self._saving) + len(self._loading)

    def get(self, name: str) -> Held | None:
        """The item, if anybody holds it."""
        return self._held.get(name)

    def all_fetching(self, seen: Seen) -> bool:
        """Whether the engine will say so when there is something new for the request."""
        held = (self._held.get(name) for name in seen.holds - seen.settled)
        return all(item is not None and item.state is State.FETCHING for item in held)

    def is_being_saved(self, name: str) -> bool:
        """Whether a rank may still report that it has saved the item."""
        return name in self._unanswered

    @property
    def saving(self) -> bool:
        """Whether a rank has yet to report on a save; as `take_in` has seen it."""
        return bool(self._unanswered)

    def will_be_saved(self, name: str) -> bool:
        """Whether a request is about to encode the item into pages that it has been granted."""
        held = self._held.get(name)
        return held is not None and (held.grant > 0 or name in self._grants)

    def has_grant(self, name: str) -> bool:
        """Whether there are pages to save the item into, asked for apart from its fetch."""
        grant = self._grants.get(name)
        return grant is not None and grant.extents is not None

    def awaits_grant(self, name: str) -> bool:
        """Whether the engine has yet to say if there are pages to save the item into."""
        grant = self._grants.get(name)
        return grant is not None and grant.extents is None

    # -- items -----------------------------------------------------------------------------

    def want(self, item: MediaItem, *, fresh: bool = False, audit: bool = False) -> Held:
        """Ask the engine for an item; what can be answered at once has been when this returns.

        An audit's pages are asked for first, and so are there when the item is.
        """
        held = Held(self._ticket(), audit=audit)
        held.asked = 0 if audit else self._save_nbytes(item)
        self._held[item.name] = held
        self._by_ticket[held.ticket] = item.name
        if audit:
            self.ask_grant(item)
        self._port.want(
            Want(
                ticket=held.ticket,
                identifier=item.name,
                save_nbytes=held.asked,
                probe=not self._setup.consumer,
                fresh=fresh,
            )
        )
        self._take_events()
        return held

    def hold(self, request_id: str, seen: Seen, name: str) -> None:
        """The request needs the item until it lets go."""
        self._held[name].holders.add(request_id)
        seen.holds.add(name)

    def let_go(self, request_id: str, seen: Seen, name: str) -> None:
        """The request needs the item no more."""
        seen.holds.discard(name)
        held = self._held.get(name)
        if held is not None:
            held.holders.discard(request_id)
            self._end_if_free(name, held)

    def let_go_all(self, request_id: str, seen: Seen) -> None:
        """The request needs nothing any more."""
        for name in list(seen.holds):
            self.let_go(request_id, seen, name)

    def start_over(self) -> None:
        """Nobody gets what is held now; loads under way keep their pages until they are answered.

        The caller makes requests forget what they hold.
        """
        held_before, self._held = self._held, {}
        for name, held in held_before.items():
            held.holders.clear()
            self._drop_grant(name)
            self._end_if_free(name, held)

    def _end_if_free(self, name: str, held: Held) -> None:
        if held.holders or held.transfers:
            return
        if self._held.get(name) is held:
            del self._held[name]
            self._drop_grant(name)
        self.give_back(held.ticket)

    def _drop_grant(self, name: str | None) -> None:
        grant = self._grants.pop(name, None) if name is not None else None
        if grant is not None:
            self.give_back(grant.ticket)

    def give_back(self, ticket: int) -> None:
        """End a ticket, whatever it stands for."""
        self._by_ticket.pop(ticket, None)
        save = self._saving.pop(ticket, None)
        if save is not None:
            self._lost.append(ticket)
            self._save_ended(save.name)
        self._port.release(ticket)

    def _ticket(self) -> int:
        self._next += 1
        return self._next

    # -- loads and saves -------------------------------------------------------------------

    def start_transfer(self, name: str, held: Held) -> int:
        """A load of the item begins: it stays until every rank has answered."""
        transfer = self._ticket()
        held.transfers.add(transfer)
        self._loading[transfer] = (name, held, set(range(self._setup.ranks)))
        return transfer

    def _save_nbytes(self, item: MediaItem) -> int:
        width = self._setup.widths.get(item.modality, 0)
        if not self._setup.producer or item.kind is not Kind.MEDIA or not item.persist:
            return 0
        return item.rows * width * DTYPE_BYTES[self._setup.dtype]

    def ask_grant(self, item: MediaItem) -> None:
        """Pages for the encode of an item whose fetch has not answered, or brought none."""
        nbytes = self._save_nbytes(item)
        held = self._held.get(item.name)
        if not nbytes or held is None or held.state not in (State.FETCHING, State.ABSENT):
            return
        if held.grant != nbytes and item.name not in self._grants:
            grant = _Grant(self._ticket(), nbytes)
            self._grants[item.name] = grant
            self._by_ticket[grant.ticket] = item.name
            self._port.reserve(grant.ticket, item.name, nbytes)
            self._take_events()

    def take_grant(self, item: MediaItem) -> tuple[int, tuple[Extent, ...]] | None:
        """Ticket and pages for a save: those that came with the absence, or asked for later.

        None when there are none, or when they were asked for by a request that takes the item to
        have another size.
        """
        nbytes = self._save_nbytes(item)
        held = self._held.get(item.name)
        if held is not None and held.grant == nbytes > 0:
            # The hold's ticket lives on as the save's; the hold gets one that means nothing.
            held.grant = 0
            ticket, held.ticket = held.ticket, self._ticket()
            self._by_ticket.pop(ticket, None)
            return ticket, held.extents
        grant = self._grants.get(item.name)
        if grant is None or grant.extents is None or grant.nbytes != nbytes:
            return None
        del self._grants[item.name]
        self._by_ticket.pop(grant.ticket, None)
        return grant.ticket, grant.extents

    def expect_save(
        self,
        ticket: int,
        name: str,
        spec: TensorSpec,
        *,
        meta: ItemMeta,
        binding: Binding,
        audit: bool = False,
    ) -> None:
        """A rank will fill the ticket's pages with this tensor, or report that it did not."""
        self._saving[ticket] = _Save(name, spec, meta, binding, audit)
        self._unanswered[name] += 1

    def _save_ended(self, name: str) -> None:
        held = self._held.get(name)
        if held is not None:
            self.woken |= held.holders
        self._unanswered[name] -= 1
        if not self._unanswered[name]:
            del self._unanswered[name]

    def lost(self, ticket: int) -> bool:
        """Whether a save, of late, did not happen."""
        return ticket in self._lost

    # -- events ----------------------------------------------------------------------------

    def on_answer(self, answer: Answer) -> None:
        """A rank has reported; called on the hub's thread.

        A filled reservation becomes ready at once, as an idle engine makes no further step. What
        concerns the scheduler's own state waits for `take_in`.
        """
        save = self._saving.pop(answer.number, None) if answer.kind == "saved" else None
        if save is not None and answer.done:
            save.binding.on_done(lambda digest: self._fill(answer, save, digest))
            return
        if save is not None:
            self._lost.append(answer.number)
            self._port.release(answer.number)
        self._answers.append((answer, save.name if save is not None else ""))

    def _fill(self, answer: Answer, save: _Save, digest: str) -> None:
        """The pages are filled and it is known of what: the engine takes them."""
        meta = replace(save.meta, encode_seconds=answer.encode_seconds, input_digest=digest)
        self._port.filled(answer.number, save.spec, meta, compare=save.audit)
        self._answers.append((answer, save.name))

    def take_in(self) -> bool:
        """Take in what engine and ranks have said; whether a rank is gone."""
        self._take_events()
        gone = False
        for _ in range(len(self._answers)):
            answer, name = self._answers.popleft()
            if answer.kind == "loaded":
                self._on_loaded(answer)
            elif answer.kind == "saved" and name:
                self._save_ended(name)
                if answer.done:
                    self.forget_absence(name)
            elif answer.kind == "gone":
                gone = True
                self.woken.update(*(held.holders for held in self._held.values()))
        return gone

    def _take_events(self) -> None:
        for event in self._port.poll():
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        name = self._by_ticket.get(event.ticket)
        held = self._held.get(name) if name is not None else None
        if held is not None:
            self.woken |= held.holders
        if isinstance(event, Granted):
            grant = self._grants.get(name) if name is not None else None
            if grant is None or grant.ticket != event.ticket:
                self._port.release(event.ticket)
            elif event.extents is None:
                self._drop_grant(name)
            else:
                grant.extents = event.extents
        elif held is None or held.ticket != event.ticket:
            self._port.release(event.ticket)  # the hold was given up before the answer came
        elif isinstance(event, Ready):
            held.state, held.spec, held.extents = State.READY, event.spec, event.extents
            held.meta, held.shared = event.meta, event.shared
            if not held.audit:
                self._drop_grant(name)  # nothing is to be saved any more
        elif isinstance(event, Present):
            held.state, held.shared = State.PRESENT, True
            self._drop_grant(name)
        elif isinstance(event, Absent):
            held.state, held.reason = State.ABSENT, event.reason
            held.grant, held.extents = held.asked if event.extents else 0, event.extents or ()

    def _on_loaded(self, answer: Answer) -> None:
        if answer.number not in self._loading:
            return
        name, held, missing = self._loading[answer.number]
        missing.discard(answer.rank)
        if not missing:
            del self._loading[answer.number]
            held.transfers.discard(answer.number)
            self._end_if_free(name, held)

    def forget_absence(self, name: str) -> None:
        """Whoever comes next must not find the absence from before."""
        held = self._held.get(name)
        if held is not None and held.state is State.ABSENT:
            held.holders.clear()
            self._end_if_free(name, held)
