"""What each media item means for its request in this step: go on, wait, or fail.

Belongs to the scheduler part and runs on its thread. It asks the engine for items through `Holds`
and never waits. Media requests have one deadline; what cannot be had by then is encoded. Requests
without media have another way out of nothing: they wait longer, and fail singly.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ec_s3.connector.media import Kind
from ec_s3.connector.state import Seen, State, Turns, Verdict
from ec_s3.policy import should_defer
from ec_s3.types import DTYPE_BYTES, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ec_s3.connector.audit import Audits
    from ec_s3.connector.binding import Binding
    from ec_s3.connector.holds import Holds
    from ec_s3.connector.media import MediaItem
    from ec_s3.connector.state import Held, Setup
    from ec_s3.metrics import Stats

logger = logging.getLogger(__name__)

REPROBE_SECONDS = 0.25
"""Pause before an item that only a consumer's metadata names is asked for again."""

LONGEST_PAUSE = 4.0
"""The same for one that finds no room for all of its items again and again."""

GRANT_LEAD_SECONDS = 0.25
"""How long before its deadline a waiting item asks for pages to save the encode into."""


_FINAL = (MissReason.TOO_LARGE, MissReason.DISABLED, MissReason.DELETED)
"""Absences that asking again does not end: no room for it ever, or an operator's word."""


class Judge:
    """Decides for one item at a time, and which requests may wait.

    Args:
        setup: what is fixed.
        holds: the table of held items.
        audits: draws items that are encoded even if they are found.
        online: whether anything may be asked for or promised now.
        holding: whether what is held may be promised, even if the engine is gone.
        bind: starts digesting an item's processed inputs.
        mirror: identifiers that vLLM's own encoder cache holds.
        requests: what is remembered of each request.
        stats: metrics.
        clock: seconds.

    Attributes:
        vouched: identifiers of items without media that the request asked about last was let go
            on for: the answer for these cannot be taken back.
        deferred: requests with media that wait.
        turns: requests without media that found no room.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        holds: Holds,
        audits: Audits,
        online: Callable[[], bool],
        holding: Callable[[], bool],
        bind: Callable[[Mapping[str, object] | None], Binding],
        mirror: Mapping[str, object],
        requests: Mapping[str, Seen],
        stats: Stats,
        clock: Callable[[], float],
    ) -> None:
        self._setup = setup
        self._holds = holds
        self._audits = audits
        self._online = online
        self._holding = holding
        self._bind = bind
        self._mirror = mirror
        self._requests = requests
        self._stats = stats
        self._clock = clock
        self._warned_offline = False
        self.vouched: set[str] = set()
        self.deferred: set[str] = set()
        self.turns = Turns()

    def request(self, request_id: str, seen: Seen, *, reach: int, computed: int) -> Verdict:
        """What the items beyond `reach` mean for their request, all together.

        Items with media are waited for only if the step that starts at `computed` may reach them.
        """
        if reach < seen.reached:  # preempted: what was encoded since may be in memory
            seen.settled.clear()
        seen.reached = reach
        if all(item.end <= reach for item in seen.items if item.name == seen.missing):
            seen.missing = None
        waits = False
        for item in seen.items:
            if item.end <= reach:
                continue
            verdict = self.verdict(request_id, seen, item)
            if verdict is Verdict.FAIL:
                return verdict
            if item.kind is Kind.METADATA:
                self.vouched.add(item.identifier)
            near = item.kind is Kind.METADATA or item.offset < computed + self._setup.window
            waits = waits or (verdict is Verdict.WAIT and near)
        return Verdict.WAIT if waits else Verdict.GO

    # -- one item --------------------------------------------------------------------------

    def verdict(self, request_id: str, seen: Seen, item: MediaItem) -> Verdict:
        """What the item means for the request; starts what it needs."""
        if item.kind is Kind.UNTOUCHED:
            return Verdict.GO
        if item.kind is Kind.REFUSED:
            return Verdict.FAIL
        if item.kind is Kind.METADATA:
            return self._without_media(request_id, seen, item)
        if item.name in seen.settled or not self._works():
            return Verdict.GO
        # An encode-only engine asks about these, too: it tells consumers what the bucket holds.
        if item.identifier in self._mirror and self._setup.consumer:
            return Verdict.GO
        held = self._holds.get(item.name)
        if held is None:
            held = self._holds.want(item, audit=self._audits.draws(item))
        self._holds.hold(request_id, seen, item.name)
        outcome = self._outcome(seen, item, held)
        if outcome is None:
            return Verdict.WAIT
        if outcome == "ready" and held.shared:
            seen.shared.add(item.identifier)
        seen.outcome = outcome
        seen.settled.add(item.name)
        return Verdict.GO

    def _outcome(self, seen: Seen, item: MediaItem, held: Held) -> str | None:
        """How the wait for an item ended; None while it goes on."""
        now = self._clock()
        if held.state is State.ABSENT:
            self._ask_grant(seen, item)
            # Encoded a moment ago for another request: that is there sooner than a second encode.
            saving = self._setup.consumer and self._holds.is_being_saved(item.name)
            return None if saving and now < seen.deadline else "absent"
        if held.state is not State.FETCHING:
            good = self.good(seen, item, held)
            if good is not None:
                if not good:
                    reason = "mismatch" if self._unfit(item, held) else "binding"
                    self._stats.add("given_up", reason=reason)
                return "ready" if good else "absent"
        elif not self._patient(seen, item, now) and not self._holds.is_being_saved(item.name):
            if item.name not in seen.asked:
                seen.asked.add(item.name)
                self._ask_grant(seen, item)
            if not self._holds.awaits_grant(item.name):  # the look-up goes on meanwhile
                self._stats.add("given_up", reason="policy")
                return "policy"
        if now < seen.deadline:
            # Once: whoever is refused pages is looked at again for that, and would ask for ever.
            if now >= seen.deadline - GRANT_LEAD_SECONDS and item.name not in seen.asked:
                seen.asked.add(item.name)
                self._ask_grant(seen, item)
            return None
        self._ask_grant(seen, item)
        self._stats.add("given_up", reason="deadline")
        return "deadline"

    def _patient(self, seen: Seen, item: MediaItem, now: float) -> bool:
        width = self._setup.widths.get(item.modality, self._setup.min_width)
        nbytes = item.rows * width * DTYPE_BYTES[self._setup.dtype]
        return self._setup.patience(nbytes, now - seen.deadline + self._setup.fetch_timeout)

    def _without_media(self, request_id: str, seen: Seen, item: MediaItem) -> Verdict:
        if not self._setup.consumer or seen.find(item.identifier) is None:
            return Verdict.FAIL
        now = self._clock()
        if seen.late is None:
            seen.late = now + self._setup.metadata_timeout
        held = self._reach(request_id, seen, item)
        if held is not None and held.state is State.READY:
            seen.missing = None
            return Verdict.GO if self.good(seen, item, held) else Verdict.FAIL
        if held is not None and held.state is State.ABSENT:
            if held.reason in _FINAL:
                return Verdict.FAIL
            # All of its items or none: what it holds could be what others wait for. Those that
            # found no room try one after the other, or they would take it from each other.
            others = len(seen.holds) > 1
            self._holds.let_go_all(request_id, seen)
            seen.retry_at, seen.missing = now + REPROBE_SECONDS, item.name
            if held.reason is MissReason.NO_ROOM:
                if others:  # each attempt may fetch what it then gives up again
                    seen.retry_at = now + min(LONGEST_PAUSE, REPROBE_SECONDS * 2**seen.crowded)
                    seen.crowded += 1
                self.turns.join(request_id, now)
        return Verdict.WAIT if now < seen.late else Verdict.FAIL

    def _reach(self, request_id: str, seen: Seen, item: MediaItem) -> Held | None:
        """An item without media, held and asked for; None while it may not be asked for."""
        held = self._holds.get(item.name) if item.name in seen.holds else None
        if held is not None and held.state is State.READY and self._holding():
            return held
        if not self._works():
            return None
        if held is None:
            now = self._clock()
            turn = self.turns.may_try(request_id, now) and now >= seen.retry_at
            if not turn or seen.missing not in (None, item.name):
                return None
            if not self._holds.will_be_saved(item.name):
                self._holds.forget_absence(item.name)
        held = self._holds.get(item.name) or self._holds.want(item, fresh=True)
        self._holds.hold(request_id, seen, item.name)
        return held

    def _works(self) -> bool:
        if self._online():
            return True
        if not self._warned_offline:
            self._warned_offline = True
            logger.warning("the encoder cache is not on: some rank has not mapped the host memory")
        return False

    def good(self, seen: Seen, item: MediaItem, held: Held) -> bool | None:
        """Whether an item in memory is exactly what this request needs; None: not known yet.

        Too many rows would be answered from the wrong ones, too few or another width kill the
        engine. A request that carries its media takes only what was made of the same inputs, where
        that is known; one without only what was made of those that it names, if it does.
        """
        if held.state is State.PRESENT:  # its consumer compares, and is told with what
            return None if self.binding(seen, item).digest is None else True
        if self._unfit(item, held):
            return False
        if item.kind is not Kind.MEDIA and not item.bound_to:
            return True
        bound = held.meta.input_digest
        if not bound:
            return not self._setup.require_binding
        digest = item.bound_to or self.binding(seen, item).digest
        return None if digest is None else digest == bound

    def _unfit(self, item: MediaItem, held: Held) -> bool:
        spec = held.spec
        return (
            spec is None
            or spec.dtype != self._setup.dtype
            or len(spec.shape) != 2
            or spec.shape[0] != item.rows
            or self._setup.widths.get(item.modality, spec.shape[1]) != spec.shape[1]
            or spec.shape[1] < self._setup.min_width
        )

    def binding(self, seen: Seen, item: MediaItem) -> Binding:
        """The digest of an item's inputs, which may still be on its way."""
        binding = seen.bindings.get(item.offset)
        if binding is None:
            binding = seen.bindings[item.offset] = self._bind(item.inputs)
        return binding

    def _ask_grant(self, seen: Seen, item: MediaItem) -> None:
        """Ask for what a save needs: pages, and the digest of the item's inputs."""
        if self._online():
            self._holds.ask_grant(item)
            if self._setup.producer and item.persist:
                self.binding(seen, item)

    # -- one request -----------------------------------------------------------------------

    def may_wait(self, request_id: str, seen: Seen) -> bool:
        """Whether a request with waiting items is deferred, rather than let through."""
        if request_id in self.deferred:
            return True
        now = self._clock()
        has_media = all(item.kind is not Kind.METADATA for item in seen.items)
        if len(self.deferred) >= self._setup.max_deferred:
            # vLLM may have stopped asking for some; those go on when it asks again.
            self.deferred = {i for i in self.deferred if now < self._requests[i].deadline}
        if not should_defer(
            has_media=has_media,
            deferred=len(self.deferred),
            max_deferred=self._setup.max_deferred,
        ):
            self._stats.add("given_up", reason="limit")
            for item in seen.items:
                if item.kind is Kind.MEDIA:
                    self._ask_grant(seen, item)
                    seen.settled.add(item.name)
            return False
        if has_media:
            self.deferred.add(request_id)
        if seen.waiting_since is None:
            seen.waiting_since = now
        return True

    def stops_waiting(self, request_id: str, seen: Seen, outcome: str = "") -> None:
        """The request is deferred no more."""
        self.deferred.discard(request_id)
        self.turns.leave(request_id)
        seen.late = None
        if seen.waiting_since is not None:
            waited = self._clock() - seen.waiting_since
            seen.waiting_since = None
            self._stats.observe("deferral_seconds", waited, outcome=outcome or seen.outcome)
