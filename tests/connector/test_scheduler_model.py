"""vLLM's scheduler, played at random against the scheduler part.

The machine does what vLLM does, in vLLM's order: ensure, has, alloc, one step's metadata, the
ranks' answers at any later time; with evictions from vLLM's own cache, chunked prefill, KV
failures after a yes, preemption, aborts, streaming input, reused names, and an engine that answers
when and what it likes, late or never.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from vllm_play import Feature, Output, Play, Request, feature, spec

from ec_s3.connector.link import Answer
from ec_s3.keys import bind
from ec_s3.types import MissReason

RANKS = 2
MAX_DEFERRED = 2
NAMES = ["a", "b", "c"]
ROWS = {"a": 4, "b": 4, "c": 6}
REASONS = [
    MissReason.ABSENT,
    MissReason.NO_ROOM,
    MissReason.NO_ROOM,
    MissReason.UNREACHABLE,
    MissReason.TOO_LARGE,
]


MAX_LIVE = 5


def seldom(times: int) -> st.SearchStrategy[bool]:
    """True once in so many times."""
    return st.sampled_from([False] * (times - 1) + [True])


Wish = tuple[list[tuple[str, bool, bool]], bool, str | None]
_ITEM = st.tuples(st.sampled_from(NAMES), st.booleans(), seldom(10))
_WISH: st.SearchStrategy[Wish] = st.tuples(
    st.lists(_ITEM, min_size=1, max_size=3), seldom(4), st.sampled_from([None, None, "s"])
)
"""Items by name, with media or not, with a row more than others say; mixed; the cache's salt."""


def carries_media(item: Feature) -> bool:
    return "pixel_values" in (item.data or {})


@dataclass
class Live:
    request: Request
    total: int
    computed: int = 0
    media_since: float | None = None
    """When vLLM first asked for the media that it has now."""

    @property
    def media(self) -> bool:
        return all(carries_media(item) for item in self.request.mm_features)


class VLLMAtPlay(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.play = Play(ranks=RANKS, window=8, max_deferred=MAX_DEFERRED)
        self.live: dict[str, Live] = {}
        self.cache: dict[str, int] = {}
        self.freed: list[str] = []
        self.answers: list[Answer] = []
        self.loading: dict[int, tuple[int, set[int]]] = {}
        self.lost: set[int] = set()
        """Tickets of orders that a rank took to its grave."""

    # -- what clients, the engine and the ranks do -------------------------------------------

    @initialize(wishes=st.lists(_WISH, min_size=3, max_size=3))
    def some_arrive(self, wishes: list[Wish]) -> None:
        for wish in wishes:
            self._arrive(wish)

    @precondition(lambda self: len(self.live) < MAX_LIVE)
    @rule(wish=_WISH)
    def arrives(self, wish: Wish) -> None:
        self._arrive(wish)

    def _arrive(self, wish: Wish) -> None:
        request_id = next(str(i) for i in range(MAX_LIVE) if str(i) not in self.live)
        items, mixed, salt = wish
        live = Live(Request(request_id, [], salt), 2)
        for name, media, odd in items:
            self._extend(live, name, media=media if mixed else items[0][1], odd=odd)
        self.live[request_id] = live

    def _extend(self, live: Live, name: str, *, media: bool, odd: bool) -> None:
        rows = ROWS[name] + odd
        live.request.mm_features.append(
            feature(name, offset=live.total - 2, rows=rows, media=media)
        )
        live.total += rows + 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), name=st.sampled_from(NAMES), media=st.booleans())
    def stream_goes_on(self, data: st.DataObject, name: str, media: bool) -> None:
        live = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        if len(live.request.mm_features) < 4:
            self._extend(live, name, media=media, odd=False)
            live.media_since = None

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 2.5, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.play.now += seconds

    @rule(slow=st.booleans())
    def engine_gets_slow_or_quick(self, slow: bool) -> None:
        self.play.port.slow = slow
        self.play.port.deliver()

    @precondition(lambda self: self.play.port.wants and self.play.port.alive)
    @rule(data=st.data(), found=st.booleans(), room=st.booleans(), bad=st.booleans())
    def engine_answers(self, data: st.DataObject, found: bool, room: bool, bad: bool) -> None:
        port = self.play.port
        ticket = data.draw(st.sampled_from(sorted(port.wants)))
        port.room = room
        rows = ROWS[port.wants[ticket].identifier[-1]]
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
        self._answer(self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1))))

    def _answer(self, answer: Answer) -> None:
        if answer.kind == "loaded":
            ticket, missing = self.loading[answer.number]
            assert ticket in self.play.port.leases, "pages of a running copy were given up"
            missing.discard(answer.rank)
        self.play.holds.on_answer(answer)

    @precondition(lambda self: self.play.hub.ready and self.play.port.alive)
    @rule(what=st.sampled_from(["rank", "engine", *["reset"] * 18]), rank=st.integers(0, RANKS - 1))
    def trouble(self, what: str, rank: int) -> None:
        if what == "rank":
            self._lose(rank)
        elif what == "engine":
            self.play.port.alive = False
        else:
            self.cache.clear()
            self.freed.clear()

    @rule(done=st.booleans())
    def weights_change(self, *, done: bool) -> None:
        self.play.scheduler.suspend()
        if done:
            self.play.scheduler.resume("next")

    def _lose(self, rank: int) -> None:
        self.play.hub.ready = False
        self.play.holds.on_answer(Answer(rank, "gone"))
        for answer in [answer for answer in self.answers if answer.rank == rank]:
            self.answers.remove(answer)
            number = answer.number
            self.lost.add(self.loading[number][0] if answer.kind == "loaded" else number)

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
        self._step(data)

    @rule(data=st.data(), pause=st.sampled_from([0.0, 0.3]))
    def answers_and_steps(self, data: st.DataObject, pause: float) -> None:
        port = self.play.port
        for _ in range(3):
            port.deliver()
            for ticket in sorted(port.wants) if port.alive else ():
                if data.draw(st.booleans()):
                    port.ready(ticket, spec(ROWS[port.wants[ticket].identifier[-1]]))
                else:
                    port.absent(ticket, data.draw(st.sampled_from(REASONS)))
            self._step(data)
            self.play.now += pause

    def _step(self, data: st.DataObject) -> None:
        encodes: dict[str, list[int]] = {}
        loads: list[str] = []
        tokens = 0
        for name in list(self.live):
            live = self.live[name]
            if self.play.scheduler.ensure(live.request, live.computed):
                tokens += self._schedule(data, name, live, encodes, loads)
            elif live.media:
                self._check_deadline(live)
        self._finish_step(data, encodes, loads, tokens)

    def _check_deadline(self, live: Live) -> None:
        if live.media_since is None:
            live.media_since = self.play.now
        waited = self.play.now - live.media_since
        assert waited < self.play.setup.fetch_timeout, "deferred beyond its deadline"

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
        planned: dict[str, tuple[int, Feature, bool]] = {}
        for index, item in enumerate(live.request.mm_features):
            start, rows = item.mm_position.offset, item.mm_position.rows
            if start + item.mm_position.length <= live.computed or start >= end:
                continue
            before = planned.get(item.identifier)
            known = self.cache.get(item.identifier, before and before[1].mm_position.rows)
            if known is not None:
                if known != rows:
                    self._end(name)  # vLLM fails such a request by itself
                    return 0
                continue
            yes = self.play.scheduler.has(item.identifier)
            if yes:
                self._check_promise(live, item)
            else:
                assert carries_media(item), "it would have been encoded without its media"
            planned[item.identifier] = (index, item, yes)
        if planned and data.draw(st.integers(0, 4)) == 0:
            return 0  # no KV blocks after all
        for index, item, yes in planned.values():
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
        assert self.play.port.made[held.ticket] == len(self.play.port.weight_versions), (
            "a yes for what other weights made"
        )
        assert not self.play.port.suspended
        assert held.spec is not None
        assert held.spec.shape[0] == item.mm_position.rows, "a yes with other rows"

    def _finish_step(
        self, data: st.DataObject, encodes: dict[str, list[int]], loads: list[str], tokens: int
    ) -> None:
        if data.draw(st.integers(0, 2)) == 0 and encodes:
            encodes.pop(next(iter(encodes)))  # preempted in the same step
        freed = [identifier for identifier in self.freed if identifier not in self.cache]
        self.freed.clear()
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
            assert name in self.live, "an ended request, or a later one of its name"
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
        waiting = [n for n in self.live if n in self.play.scheduler._judge.deferred]
        assert len(waiting) <= MAX_DEFERRED

    @invariant()
    def nothing_is_remembered_of_the_dead(self) -> None:
        scheduler = self.play.scheduler
        assert set(scheduler._requests) <= set(self.live)
        assert scheduler._judge.deferred <= set(self.live)
        assert scheduler._unavailable <= set(self.live)
        assert set(scheduler._judge.turns._asked) <= set(self.live)

    def teardown(self) -> None:
        for name in list(self.live):
            self._end(name)
        for answer in self.answers:
            self._answer(answer)
        self.play.port.slow = False
        self.play.port.deliver()
        self.play.idle(tokens=1)
        self.play.port.deliver()
        assert self.play.port.open_tickets == self.lost, "every ticket is ended once"
        assert self.lost or self.play.held == 0


def _case() -> Any:
    VLLMAtPlay.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
    return VLLMAtPlay.TestCase


TestVLLMAtPlay = _case()
