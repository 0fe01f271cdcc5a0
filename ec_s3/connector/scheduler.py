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

from ec_s3.connector.audit import Audits
from ec_s3.connector.judge import Judge
from ec_s3.connector.media import Kind
from ec_s3.connector.messages import StepMetadata
from ec_s3.connector.plans import Plans
from ec_s3.connector.state import Phase, Seen, State, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ec_s3.connector.binding import Binding
    from ec_s3.connector.holds import Holds
    from ec_s3.connector.media import Classifier, MediaItem
    from ec_s3.connector.state import Held, Setup
    from ec_s3.metrics import Stats
    from ec_s3.port import EnginePort

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.0005
"""Pause of a step that does nothing but wait for fetches. vLLM in one process would spin through
such steps and keep the interpreter from the very threads that it waits for."""

NAP_SECONDS = 0.02
"""How long a waiting request is not looked at again unless something happens: vLLM asks for it in
every step, and after a step's computing none of this code is in the processor's caches."""

NEW_ITEMS_PER_STEP = 64
"""Items looked at for the first time in one step (each costs 20 to 40 us): the requests of a burst
that are beyond it wait for the next steps, and the requests that decode do not wait for them."""

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
        bind: Callable[[Mapping[str, object] | None], Binding],
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
        self._mirror: dict[str, Binding | None] = {}
        self._unavailable: set[str] = set()
        self._phase = Phase()
        self._epoch = 0
        self._audits = Audits(setup.audit_fraction, holds)
        self._judge = Judge(
            setup,
            holds=holds,
            audits=self._audits,
            online=lambda: self.online,
            holding=lambda: self._hub.ready and self._settled,
            bind=bind,
            mirror=self._mirror,
            requests=self._requests,
            stats=stats,
            clock=clock,
        )
        self._plans = Plans(setup, holds, classifier, binding=self._judge.binding)
        # What this step has promised; cleared by `build_meta`.
        self._current: tuple[str, Seen] | None = None
        self._promised: dict[tuple[str, str], tuple[Seen, MediaItem, Held]] = {}
        self._allocated: set[str] = set()
        self._waited = False
        self._new_items = 0

    # -- hooks -----------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any request with media is under way."""
        return bool(self._requests)

    @property
    def online(self) -> bool:
        """Whether anything may be promised.

        Every rank has the slab, the engine answers, and the weights are not being changed.
        """
        return self._settled and self._hub.ready and self._port.alive

    @property
    def _settled(self) -> bool:
        """Whether the weights in use are those that everything held was made by."""
        phase = self._phase
        return phase.epoch == self._epoch and not phase.suspended

    def ensure(self, request: Any, computed: int) -> bool:
        """Whether the request may be scheduled; starts what it needs."""
        self._current = None
        self._judge.vouched.clear()
        request_id = str(request.request_id)
        seen = self._requests.get(request_id)
        if seen is None or len(seen.items) != len(request.mm_features):
            if self._new_items >= NEW_ITEMS_PER_STEP:
                self._waited = True
                return False
            self._new_items += len(request.mm_features)
            seen = self._first_sight(request, request_id)
        self._current = (request_id, seen)
        reach = self._reach(request, computed)
        if self._is_past(request_id, seen, reach):
            return True
        self._pump()
        now = self._clock()
        if now < seen.naps_until and request_id not in self._holds.woken and reach == seen.reached:
            self._waited = True
            return False
        self._holds.woken.discard(request_id)
        seen.naps_until = 0.0
        if seen.failed:
            self._unavailable.add(request_id)
            return False
        verdict = self._judge.request(request_id, seen, reach=reach, computed=computed)
        if verdict is Verdict.FAIL:
            self._fail(request_id, seen)
            return False
        if verdict is Verdict.WAIT and self._judge.may_wait(request_id, seen):
            self._waited = True
            if seen.late is None and self._holds.all_fetching(seen):
                seen.naps_until = min(now + NAP_SECONDS, seen.deadline)
            return False
        self._judge.stops_waiting(request_id, seen)
        if not self._setup.consumer:
            self._save_again(request, request_id, seen)
        return True

    def freed(self, request: Any) -> None:
        """The request has used an item; vLLM may not ask for it again for as long as it likes.

        Of a session that has answered, for example, until its client goes on.
        """
        request_id = str(request.request_id)
        seen = self._requests.get(request_id)
        if seen is not None:
            ahead = getattr(request, "num_output_placeholders", 0)
            self._is_past(request_id, seen, request.num_computed_tokens - ahead)

    def _is_past(self, request_id: str, seen: Seen, reach: int) -> bool:
        """Whether every placeholder is computed; then the request holds nothing any more."""
        if reach < seen.end:
            return False
        if seen.reached < seen.end:
            self._judge.stops_waiting(request_id, seen)
            self._holds.let_go_all(request_id, seen)
        seen.reached = reach
        return True

    def _save_again(self, request: Any, request_id: str, seen: Seen) -> None:
        """Save what vLLM's own cache holds, and so is not encoded, but the bucket has lost."""
        for index, item in enumerate(seen.items):
            binding = self._mirror.get(item.identifier)
            if binding is not None and item.identifier not in self._allocated:
                self._plans.save(request, index, request_id, seen, encoded_from=binding)

    def _reach(self, request: Any, computed: int) -> int:
        """Up to where nothing is needed any more.

        Of a prefix hit, some models compute the last tokens again (vLLM's `prefix_replay_tokens`):
        vLLM tells only `request` where it stands, and goes back after `ensure`.
        """
        if not self._setup.replay or computed <= request.num_computed_tokens:
            return computed
        return max(0, computed - self._setup.replay)

    def excuse(self, request: Any, computed: int) -> bool:
        """The answer of `ensure` when nothing can be done for a request any more.

        One that carries its media goes on to the encoder; one that does not can only fail.
        """
        reach = self._reach(request, computed)
        if not self._classifier.needs_loading(request, reach):
            return True
        self.give_up(request)
        return False

    def give_up(self, request: Any) -> None:
        """Let a request fail, singly."""
        self._unavailable.add(str(request.request_id))

    def has(self, identifier: str) -> bool:
        """Whether the item can be had without encoding; only right after `ensure`."""
        if identifier not in self._allocated:
            self._mirror.pop(identifier, None)  # asked for means: vLLM does not have it
        if self._current is None:
            return False
        request_id, seen = self._current
        item = seen.find(identifier)
        held = self._holds.get(item.name) if item is not None else None
        if item is None or held is None or item.kind is Kind.UNTOUCHED:
            return False
        # Without media the answer was given in `ensure`: a no would end the engine for certain.
        vouched = identifier in self._judge.vouched
        if not vouched and not (self._hub.ready and self._settled):
            return False
        if not self._setup.consumer:
            return held.state is State.PRESENT
        if held.state is not State.READY or not self._judge.good(seen, item, held):
            return False
        if self._audits.takes(request_id, item, held):
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
            self._plans.load(request_id, *promise)
        if len(self._mirror) >= MIRROR_ITEMS:
            self._mirror.clear()
        self._mirror[identifier] = None
        self._allocated.add(identifier)
        seen = self._requests.get(request_id)
        if seen is None or index >= len(seen.items):
            return
        item = seen.items[index]
        held = self._holds.get(item.name)
        skipped = held is not None and held.state is State.PRESENT
        encoded = promise is None and not skipped and item.kind is Kind.MEDIA
        if encoded and self._setup.producer:
            self._mirror[identifier] = self._judge.binding(seen, item)
            audit = self._audits.took(request_id, identifier)
            # What is found, and not to be compared, is of other media or rows: nothing to keep.
            if audit or held is None or held.state is not State.READY:
                self._plans.save(request, index, request_id, seen, audit=audit)

    def build_meta(self, output: Any) -> StepMetadata:
        """This step's orders; ends the step's promises."""
        self._pump()
        for identifier in output.free_encoder_mm_hashes:
            if identifier not in self._allocated:
                self._mirror.pop(identifier, None)
        if self._waited and not output.total_num_scheduled_tokens:
            self._pause(IDLE_SECONDS)
        self._waited = False
        self._stats.set("deferred_requests", len(self._judge.deferred))
        return self.planned(output)

    def planned(self, output: Any) -> StepMetadata:
        """The orders alone: what is left of `build_meta` when the rest of it fails."""
        self._promised.clear()
        self._audits.clear()
        self._allocated.clear()
        self._current = None
        self._new_items = 0
        loads, saves = self._plans.take(output)
        encodes = sum(map(len, output.scheduled_encoder_inputs.values()))
        return StepMetadata(self._nonce, self._hub.address, loads, saves, encodes)

    def finished(self, request: Any) -> dict[str, str]:
        """The request has ended, was aborted or failed: let go of what it held.

        Returns:
            Identifiers of its items that the bucket holds, or will as far as can be told, with the
            digest of the inputs that they are made of, empty where it is not known.
        """
        request_id = str(request.request_id)
        seen = self._requests.pop(request_id, None)
        self._holds.woken.discard(request_id)
        self._unavailable.discard(request_id)  # a later request may have the same name
        if self._current is not None and self._current[0] == request_id:
            self._current = None
        if seen is None:
            return {}
        self._judge.stops_waiting(request_id, seen, "ended")
        if seen.holds:
            self._holds.let_go_all(request_id, seen)
        shared = seen.shared
        if seen.saved and self._holds.uploading:
            lost = self._holds.lost
            shared = shared.union(i for i, ticket in seen.saved.items() if not lost(ticket))
        return {identifier: seen.digest_of(identifier) for identifier in shared}

    # -- changing the weights --------------------------------------------------------------

    def suspend(self) -> None:
        """No more yes, want or save until `resume`; any one thread."""
        self._phase = Phase(self._phase.epoch, suspended=True)
        self._port.suspend()

    def resume(self, weight_version: str) -> None:
        """Go on with other weights; any one thread. Nothing of the old ones is used again."""
        self._port.resume(weight_version)
        self._phase = Phase(self._phase.epoch + 1)

    def _start_over(self, epoch: int) -> None:
        """Forget what was held of the old weights; planned loads stay, as vLLM counts on them."""
        self._holds.start_over()
        for seen in self._requests.values():
            seen.holds.clear()
            seen.settled.clear()
            seen.asked.clear()
            seen.shared.clear()
            seen.saved.clear()
        self._mirror.clear()
        self._epoch = epoch

    def take_unavailable(self) -> set[str]:
        """Requests that can only fail, each reported once."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    # -- requests and plans ----------------------------------------------------------------

    def _first_sight(self, request: Any, request_id: str) -> Seen:
        before = self._requests.get(request_id)
        items = self._classifier.items(request)
        end = max((item.end for item in items), default=0)
        seen = Seen(items, end, self._clock() + self._setup.fetch_timeout)
        if before is not None:  # a streaming request has got more media
            seen.settled, seen.holds, seen.bindings = before.settled, before.holds, before.bindings
            seen.shared, seen.saved = before.shared, before.saved
        self._requests[request_id] = seen
        return seen

    def _fail(self, request_id: str, seen: Seen) -> None:
        seen.failed = True
        self._unavailable.add(request_id)
        self._holds.let_go_all(request_id, seen)
        self._judge.stops_waiting(request_id, seen, "failed")

    def _pump(self) -> None:
        """Take in what engine, ranks and operators have said since."""
        epoch = self._phase.epoch
        if epoch != self._epoch:
            self._start_over(epoch)
        if self._holds.take_in():
            self._stats.add("given_up", reason="rank_gone")
            logger.error("a rank is gone; the encoder cache is off")
