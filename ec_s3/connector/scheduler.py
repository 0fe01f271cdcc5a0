"""The scheduler part of the connector: which items to wait for, load and save.

Runs in vLLM's scheduler process on its main thread, one call at a time. It keeps dictionaries and
talks to the engine through a port and to the ranks through a hub; neither ever makes it wait.

The rule behind everything: a "yes" to `has_cache_item` means that the bytes are in this host's
memory, verified, right for *this* request, and held until every rank has copied them. vLLM has no
way back from a yes that turns out wrong.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

from ec_s3.connector.media import Kind
from ec_s3.connector.messages import LoadOrder, SaveOrder, StepMetadata
from ec_s3.connector.state import Seen, State, Turns, Verdict
from ec_s3.policy import should_defer
from ec_s3.types import MissReason, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.connector.holds import Holds
    from ec_s3.connector.media import Classifier, MediaItem
    from ec_s3.connector.state import Held, Setup
    from ec_s3.metrics import Stats
    from ec_s3.port import EnginePort

logger = logging.getLogger(__name__)

REPROBE_SECONDS = 0.25
"""Pause before an item that only a consumer's metadata names is asked for again."""

IDLE_SECONDS = 0.0005
"""Pause of a step that does nothing but wait for fetches. vLLM in one process would spin through
such steps and keep the interpreter from the very threads that it waits for."""

GRANT_LEAD_SECONDS = 0.25
"""How long before its deadline a waiting item asks for pages to save the encode into."""


MIRROR_ITEMS = 1 << 16
"""Most identifiers remembered as being in vLLM's own cache. vLLM tells of evictions, but not of a
`reset_encoder_cache`, so some may stay until they are asked for."""


class Hub(Protocol):
    """What the scheduler part needs of `link.RankHub`."""

    address: str

    @property
    def ready(self) -> bool:
        """Whether every rank has mapped the slab and none is gone."""
        ...


class Scheduler:
    """Decides; the port, the hub and the worker part do."""

    def __init__(
        self,
        setup: Setup,
        *,
        port: EnginePort,
        holds: Holds,
        hub: Hub,
        classifier: Classifier,
        stats: Stats,
        nonce: str,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._setup = setup
        self._port = port
        self._holds = holds
        self._hub = hub
        self._classifier = classifier
        self._stats = stats
        self._nonce = nonce
        self._clock = clock
        self._pause = pause
        self._requests: dict[str, Seen] = {}
        self._mirror: set[str] = set()
        self._deferred: set[str] = set()
        self._turns = Turns()
        self._unavailable: set[str] = set()
        # What this step has promised and planned; cleared by `build_meta`.
        self._current: tuple[str, Seen] | None = None
        self._promised: dict[tuple[str, str], tuple[Seen, MediaItem, Held]] = {}
        self._allocated: set[str] = set()
        self._loads: list[LoadOrder] = []
        self._saves: list[tuple[SaveOrder, str, int]] = []
        self._waited = False
        self._warned_offline = False

    # -- hooks -----------------------------------------------------------------------------

    @property
    def online(self) -> bool:
        """Whether anything may be promised: every rank has the slab, and the engine answers."""
        return self._hub.ready and self._port.alive

    def ensure(self, request: Any, computed: int) -> bool:
        """Whether the request may be scheduled; starts what it needs."""
        self._current = None
        request_id = str(request.request_id)
        seen = self._requests.get(request_id)
        if seen is None or len(seen.items) != len(request.mm_features):
            seen = self._first_sight(request, request_id)
        self._current = (request_id, seen)
        if computed >= seen.end:  # every placeholder is computed
            self._goes_on(request_id, seen)
            self._holds.let_go_all(request_id, seen)
            return True
        self._pump()
        if seen.failed:
            self._unavailable.add(request_id)
            return False
        waits = False
        for item in seen.items:
            if item.end <= computed:
                continue
            verdict = self._judge(request_id, seen, item)
            if verdict is Verdict.FAIL:
                self._fail(request_id, seen)
                return False
            near = item.kind is Kind.METADATA or item.offset < computed + self._setup.window
            waits = waits or (verdict is Verdict.WAIT and near)
        if waits and self._defer(request_id, seen):
            self._waited = True
            return False
        self._goes_on(request_id, seen)
        return True

    def excuse(self, request: Any, computed: int) -> bool:
        """The answer of `ensure` when nothing can be done for a request any more.

        One that carries its media goes on to the encoder; one that does not can only fail.
        """
        items = (item for item in self._classifier.items(request) if item.end > computed)
        if all(item.kind is not Kind.METADATA for item in items):
            return True
        self._unavailable.add(str(request.request_id))
        return False

    def has(self, identifier: str) -> bool:
        """Whether the item can be had without encoding; only right after `ensure`."""
        if identifier not in self._allocated:
            self._mirror.discard(identifier)  # asked for means: vLLM does not have it
        if self._current is None:
            return False
        request_id, seen = self._current
        item = seen.find(identifier)
        held = self._holds.get(item.name) if item is not None else None
        if item is None or held is None or item.kind is Kind.UNTOUCHED:
            return False
        # Without media the answer was given in `ensure`: a no would end the engine for certain.
        if item.kind is Kind.MEDIA and not self._hub.ready:
            return False
        if not self._setup.consumer:
            return held.state is State.PRESENT
        if held.state is not State.READY or not self._fits(held, item):
            return False
        self._holds.hold(request_id, seen, item.name)
        self._promised[request_id, identifier] = seen, item, held
        return True

    def allocated(self, request: Any, index: int) -> None:
        """The item is encoded or loaded in this step: plan the load or the save."""
        request_id = str(request.request_id)
        identifier = str(request.mm_features[index].identifier)
        promise = self._promised.pop((request_id, identifier), None)
        if promise is not None:  # before all else: vLLM takes the item for cached already
            self._plan_load(request_id, *promise)
        if len(self._mirror) >= MIRROR_ITEMS:
            self._mirror.clear()
        self._mirror.add(identifier)
        self._allocated.add(identifier)
        seen = self._requests.get(request_id)
        if seen is None or index >= len(seen.items):
            return
        item = seen.items[index]
        if promise is None and self._setup.producer and item.kind is Kind.MEDIA:
            self._plan_save(request_id, item, index)

    def build_meta(self, output: Any) -> StepMetadata:
        """This step's orders; ends the step's promises."""
        self._pump()
        for identifier in output.free_encoder_mm_hashes:
            if identifier not in self._allocated:
                self._mirror.discard(identifier)
        if self._waited and not output.total_num_scheduled_tokens:
            self._pause(IDLE_SECONDS)
        self._waited = False
        self._stats.set("deferred_requests", len(self._deferred))
        return self.planned(output)

    def planned(self, output: Any) -> StepMetadata:
        """The orders alone: what is left of `build_meta` when the rest of it fails."""
        self._promised.clear()
        self._allocated.clear()
        self._current = None
        # The V1 runner throws an idle step's metadata away: its loads go with the next one.
        idle = self._setup.consumer and not output.total_num_scheduled_tokens
        planned, self._saves = self._saves, []
        saves = []
        for order, request_id, index in planned:
            if index in output.scheduled_encoder_inputs.get(request_id, ()) and not idle:
                saves.append(order)
            else:
                self._holds.give_back(order.ticket)
        loads: list[LoadOrder] = []
        if not idle:
            loads, self._loads = self._loads, []
        return StepMetadata(self._nonce, self._hub.address, loads, saves)

    def finished(self, request: Any) -> None:
        """The request has ended, was aborted or failed: let go of what it held."""
        request_id = str(request.request_id)
        seen = self._requests.pop(request_id, None)
        self._deferred.discard(request_id)
        self._turns.leave(request_id)
        self._unavailable.discard(request_id)  # a later request may have the same name
        if self._current is not None and self._current[0] == request_id:
            self._current = None
        if seen is not None:
            self._holds.let_go_all(request_id, seen)

    def take_unavailable(self) -> set[str]:
        """Requests that can only fail, each reported once."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    # -- judging an item -------------------------------------------------------------------

    def _first_sight(self, request: Any, request_id: str) -> Seen:
        before = self._requests.get(request_id)
        items = self._classifier.items(request)
        end = max((item.end for item in items), default=0)
        seen = Seen(items, end, self._clock() + self._setup.fetch_timeout)
        if before is not None:  # a streaming request has got more media
            seen.settled, seen.holds = before.settled, before.holds
        self._requests[request_id] = seen
        return seen

    def _judge(self, request_id: str, seen: Seen, item: MediaItem) -> Verdict:
        if item.kind is Kind.UNTOUCHED:
            return Verdict.GO
        if item.kind is Kind.METADATA:
            return self._judge_metadata(request_id, seen, item)
        if item.name in seen.settled or item.identifier in self._mirror or not self._works():
            return Verdict.GO
        held = self._holds.get(item.name) or self._holds.want(item)
        self._holds.hold(request_id, seen, item.name)
        if held.state is State.FETCHING:
            return self._judge_waiting(seen, item)
        if held.state is State.READY and not self._fits(held, item):
            self._stats.add("given_up", reason="mismatch")
        elif held.state is State.ABSENT:
            self._ask_grant(item)
        seen.settled.add(item.name)
        return Verdict.GO

    def _judge_waiting(self, seen: Seen, item: MediaItem) -> Verdict:
        now = self._clock()
        if now >= seen.deadline - GRANT_LEAD_SECONDS:
            self._ask_grant(item)
        if now < seen.deadline:
            return Verdict.WAIT
        self._stats.add("given_up", reason="deadline")
        seen.settled.add(item.name)
        return Verdict.GO

    def _judge_metadata(self, request_id: str, seen: Seen, item: MediaItem) -> Verdict:
        if not self._setup.consumer or seen.find(item.identifier) is None:
            return Verdict.FAIL
        now = self._clock()
        if seen.late is None:
            seen.late = now + self._setup.metadata_timeout
        held = self._reach(request_id, seen, item)
        if held is not None and held.state is State.READY:
            seen.missing = None
            return Verdict.GO if self._fits(held, item) else Verdict.FAIL
        if held is not None and held.state is State.ABSENT:
            if held.reason is MissReason.TOO_LARGE:
                return Verdict.FAIL
            # All of its items or none: what it holds could be what others wait for. Those that
            # found no room try one after the other, or they would take it from each other.
            self._holds.let_go_all(request_id, seen)
            seen.retry_at, seen.missing = now + REPROBE_SECONDS, item.name
            if held.reason is MissReason.NO_ROOM:
                self._turns.join(request_id, now)
        return Verdict.WAIT if now < seen.late else Verdict.FAIL

    def _reach(self, request_id: str, seen: Seen, item: MediaItem) -> Held | None:
        """An item without media, held and asked for; None while it may not be asked for."""
        if not self._works():
            return None
        if item.name not in seen.holds:
            now = self._clock()
            turn = self._turns.may_try(request_id, now) and now >= seen.retry_at
            if not turn or seen.missing not in (None, item.name):
                return None
            if not self._holds.will_be_saved(item.name):
                self._holds.forget_absence(item.name)
        held = self._holds.get(item.name) or self._holds.want(item, fresh=True)
        self._holds.hold(request_id, seen, item.name)
        return held

    def _works(self) -> bool:
        if self.online:
            return True
        if not self._warned_offline:
            self._warned_offline = True
            logger.warning("the encoder cache is not on: some rank has not mapped the host memory")
        return False

    def _fits(self, held: Held, item: MediaItem) -> bool:
        """Whether an item in memory is exactly what vLLM expects.

        Too many rows would be answered from the wrong ones, too few kill the engine.
        """
        spec = held.spec
        return (
            spec is not None
            and spec.dtype == self._setup.dtype
            and len(spec.shape) == 2
            and spec.shape[0] == item.rows
        )

    def _defer(self, request_id: str, seen: Seen) -> bool:
        if request_id in self._deferred:
            return True
        has_media = all(item.kind is not Kind.METADATA for item in seen.items)
        if len(self._deferred) >= self._setup.max_deferred:
            # vLLM may have stopped asking for some; those go on when it asks again.
            now = self._clock()
            self._deferred = {i for i in self._deferred if now < self._requests[i].deadline}
        if not should_defer(
            has_media=has_media,
            deferred=len(self._deferred),
            max_deferred=self._setup.max_deferred,
        ):
            self._stats.add("given_up", reason="limit")
            for item in seen.items:
                if item.kind is Kind.MEDIA:
                    self._ask_grant(item)
                    seen.settled.add(item.name)
            return False
        if has_media:
            self._deferred.add(request_id)
        return True

    def _fail(self, request_id: str, seen: Seen) -> None:
        seen.failed = True
        self._unavailable.add(request_id)
        self._holds.let_go_all(request_id, seen)

    def _goes_on(self, request_id: str, seen: Seen) -> None:
        self._deferred.discard(request_id)
        self._turns.leave(request_id)
        seen.late = None

    # -- planning --------------------------------------------------------------------------

    def _ask_grant(self, item: MediaItem) -> None:
        if self.online:
            self._holds.ask_grant(item)

    def _plan_load(self, request_id: str, seen: Seen, item: MediaItem, held: Held) -> None:
        transfer = self._holds.start_transfer(item.name, held)
        assert held.spec is not None  # a promise is only made of what is ready
        self._loads.append(LoadOrder(transfer, item.identifier, held.spec, held.extents))
        if item.kind is Kind.MEDIA:
            self._holds.let_go(request_id, seen, item.name)

    def _plan_save(self, request_id: str, item: MediaItem, index: int) -> None:
        grant = self._holds.take_grant(item)
        if grant is None:
            return
        ticket, extents = grant
        spec = TensorSpec(self._setup.dtype, (item.rows, self._setup.widths[item.modality]))
        self._holds.expect_save(ticket, item.name, spec)
        order = SaveOrder(ticket, item.identifier, spec, extents)
        self._saves.append((order, request_id, index))

    def _pump(self) -> None:
        """Take in what engine and ranks have said since."""
        if self._holds.take_in():
            self._stats.add("given_up", reason="rank_gone")
            logger.error("a rank is gone; the encoder cache is off")
