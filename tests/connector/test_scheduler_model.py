"""vLLM's scheduler, played at random against the scheduler part.

The machine does what vLLM does, in vLLM's order: ensure, has, alloc, one step's metadata, the
ranks' answers at any later time; with evictions from vLLM's own cache, chunked prefill, KV
failures after a yes, preemption, aborts, and an engine that answers when and what it likes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm_play import Feature, Output, Play, Request, feature, spec

from ec_s3.connector.link import Answer
from ec_s3.connector.media import bind
from ec_s3.types import MissReason

RANKS = 2
MAX_DEFERRED = 2
NAMES = ["a", "b", "c"]
ROWS = {"a": 4, "b": 4, "c": 6}
REASONS = [MissReason.ABSENT, MissReason.NO_ROOM, MissReason.UNREACHABLE, MissReason.TOO_LARGE]


@dataclass
class Live:
    request: Request
    born: float
    total: int
    computed: int = 0
    waiting: bool = False
    rows: dict[str, int] = field(default_factory=dict)

    @property
    def media(self) -> bool:
        return all("pixel_values" in (f.data or {}) for f in self.request.mm_features)


class VLLMAtPlay(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.play = Play(ranks=RANKS, window=8, max_deferred=MAX_DEFERRED)
        self.live: dict[str, Live] = {}
        self.cache: dict[str, int] = {}
        self.freed: list[str] = []
        self.answers: list[Answer] = []
        self.loading: dict[int, tuple[int, set[int]]] = {}
        self.born = 0
        self.failed: set[str] = set()

    # -- what clients, the engine and the ranks do -------------------------------------------

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3),
        media=st.booleans(),
        salt=st.sampled_from([None, None, "s"]),
        odd=st.booleans(),
    )
    def arrives(self, names: list[str], media: bool, salt: str | None, odd: bool) -> None:
        offset, features = 0, []
        rows = {name: ROWS[name] + (1 if odd and name == "c" else 0) for name in names}
        for name in names:
            features.append(feature(name, offset=offset, rows=rows[name], media=media))
            offset += rows[name] + 1
        self.born += 1
        request = Request(f"r{self.born}", features, salt)
        self.live[request.request_id] = Live(request, self.play.now, offset + 2, rows=rows)

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 2.5, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.play.now += seconds

    @precondition(lambda self: self.play.port.wants)
    @rule(data=st.data(), found=st.booleans(), room=st.booleans(), bad=st.booleans())
    def engine_answers(self, data: st.DataObject, found: bool, room: bool, bad: bool) -> None:
        port = self.play.port
        ticket = data.draw(st.sampled_from(sorted(port.wants)))
        port.room = room
        name = port.wants[ticket].identifier
        rows = ROWS[name[-1]]
        if found:
            port.ready(ticket, spec(rows + 1) if bad else spec(rows))
        else:
            port.absent(ticket, data.draw(st.sampled_from(REASONS)))

    @rule(name=st.sampled_from(NAMES))
    def tier_gains(self, name: str) -> None:
        self.play.port.items[name] = spec(ROWS[name])

    @precondition(lambda self: self.play.port.items)
    @rule(data=st.data())
    def tier_evicts(self, data: st.DataObject) -> None:
        items = self.play.port.items
        del items[data.draw(st.sampled_from(sorted(items)))]

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def rank_answers(self, data: st.DataObject) -> None:
        answer = self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))
        if answer.kind == "loaded":
            ticket, missing = self.loading[answer.number]
            assert ticket in self.play.port.leases, "pages of a running copy were given up"
            missing.discard(answer.rank)
        self.play.holds.on_answer(answer)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def client_aborts(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(sorted(self.live))))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def vllm_preempts(self, data: st.DataObject) -> None:
        self.live[data.draw(st.sampled_from(sorted(self.live)))].computed = 0

    def _end(self, name: str) -> None:
        self.play.scheduler.finished(self.live.pop(name).request)

    # -- one engine step ---------------------------------------------------------------------

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        encodes: dict[str, list[int]] = {}
        loads: list[str] = []
        tokens = 0
        for name in list(self.live):
            live = self.live[name]
            if not self.play.scheduler.ensure(live.request, live.computed):
                live.waiting = True
                assert not live.media or self.play.now < live.born + 1e6
                assert not live.media or self._within_deadline(live)
                continue
            live.waiting = False
            tokens += self._schedule(data, name, live, encodes, loads)
        self._finish_step(data, encodes, loads, tokens)

    def _within_deadline(self, live: Live) -> bool:
        seen = self.play.scheduler._requests[live.request.request_id]
        return self.play.now < seen.deadline

    def _schedule(
        self,
        data: st.DataObject,
        name: str,
        live: Live,
        encodes: dict[str, list[int]],
        loads: list[str],
    ) -> int:
        chunk = data.draw(st.integers(1, 8))
        end = min(live.total, live.computed + chunk)
        planned: list[tuple[int, Feature, bool]] = []
        scheduled: dict[str, int] = {}
        for index, item in enumerate(live.request.mm_features):
            start = item.mm_position.offset
            stop = start + item.mm_position.length
            if stop <= live.computed or start >= end or item.identifier in scheduled:
                continue
            if item.identifier in self.cache:
                if self.cache[item.identifier] != item.mm_position.rows:
                    self._end(name)  # vLLM fails such a request by itself
                    return 0
                continue
            yes = self.play.scheduler.has(item.identifier)
            if yes:
                self._check_promise(live, item)
            else:
                assert live.media, "an item without media would have been encoded"
            scheduled[item.identifier] = item.mm_position.rows
            planned.append((index, item, yes))
        if planned and data.draw(st.integers(0, 4)) == 0:
            return 0  # no KV blocks after all
        for index, item, yes in planned:
            self.cache[item.identifier] = item.mm_position.rows
            self.play.scheduler.allocated(live.request, index)
            if yes:
                loads.append(item.identifier)
            else:
                encodes.setdefault(name, []).append(index)
        live.computed = end
        return chunk

    def _check_promise(self, live: Live, item: Feature) -> None:
        name = bind(item.identifier, live.request.cache_salt)
        held = self.play.holds.get(name)
        assert held is not None
        assert self.play.port.leases.get(held.ticket) == name, "a yes without a lease"
        assert held.spec is not None
        assert held.spec.shape[0] == item.mm_position.rows, "a yes with other rows"

    def _finish_step(
        self, data: st.DataObject, encodes: dict[str, list[int]], loads: list[str], tokens: int
    ) -> None:
        if data.draw(st.integers(0, 2)) == 0 and encodes:
            encodes.pop(next(iter(encodes)))  # preempted in the same step
        freed, self.freed = self.freed, []
        metadata = self.play.scheduler.build_meta(
            Output(encodes, freed, total_num_scheduled_tokens=tokens)
        )
        assert sorted(order.identifier for order in metadata.loads) == sorted(loads)
        for order in metadata.loads:
            ticket = order.extents[0].offset >> 18
            assert ticket in self.play.port.leases
            self.loading[order.transfer] = (ticket, set(range(RANKS)))
            self.answers += [Answer(r, "loaded", order.transfer, done=True) for r in range(RANKS)]
        for save in metadata.saves:
            assert save.ticket in self.play.port.grants
            done = data.draw(st.booleans())
            self.answers.append(Answer(0, "saved", save.ticket, done=done))
        for name in self.play.scheduler.take_unavailable():
            assert name in self.live, "reported once, while it lives"
            assert not self.live[name].media, "a request with media can always be encoded"
            self._end(name)
        for name in [n for n, live in self.live.items() if live.computed >= live.total]:
            if data.draw(st.booleans()):
                self._end(name)
        if data.draw(st.booleans()) and self.cache:
            gone = data.draw(st.sampled_from(sorted(self.cache)))
            del self.cache[gone]
            self.freed.append(gone)

    # -- what always holds -------------------------------------------------------------------

    @invariant()
    def few_requests_with_media_wait(self) -> None:
        waiting = [n for n in self.live if n in self.play.scheduler._deferred]
        assert len(waiting) <= MAX_DEFERRED

    @invariant()
    def nothing_is_remembered_of_the_dead(self) -> None:
        assert set(self.play.scheduler._requests) <= set(self.live)
        assert self.play.scheduler._deferred <= set(self.live)

    def teardown(self) -> None:
        for name in list(self.live):
            self._end(name)
        for answer in self.answers:
            self.play.holds.on_answer(answer)
        self.play.idle(tokens=1)
        assert not self.play.port.open_tickets
        assert self.play.held == 0


def _case() -> Any:
    VLLMAtPlay.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
    return VLLMAtPlay.TestCase


TestVLLMAtPlay = _case()
