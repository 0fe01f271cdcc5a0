"""A mixed load times every request, aborts some, and tells what became of each, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ec_s3.connector.mixed_load import LoadRequest, MixedLoad


@dataclass
class _Engine:
    """A clock that ticks once a step, and requests that end at a step of their own."""

    ends: dict[str, int]
    now: float = 0.0
    running: dict[str, int] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def abort_request(self, names: list[str], *, internal: bool) -> None:
        assert internal
        for name in names:
            if self.running.pop(name, None) is not None:
                self.aborted.append(name)

    def step(self) -> list[Any]:
        self.now += 1.0
        ended = [name for name, end in self.running.items() if end <= self.now]
        for name in ended:
            del self.running[name]
        completion = SimpleNamespace(token_ids=[7], finish_reason="length")
        return [
            SimpleNamespace(request_id=name.partition("-")[0], finished=True, outputs=[completion])
            for name in ended
        ]


class _LLM:
    def __init__(self, ends: list[int]) -> None:
        self.llm_engine = _Engine({})
        self._ends = ends

    def enqueue_chat(self, messages: list[Any], params: object, *, use_tqdm: bool) -> list[str]:
        number = len(self.llm_engine.ends)
        name = f"{number}-abc"
        self.llm_engine.ends[name] = self.llm_engine.running[name] = self._ends[number]
        return [name]


def _run(ends: list[int], aborts: list[float | None]) -> tuple[_LLM, list[tuple[str, float]]]:
    llm = _LLM(ends)
    load = MixedLoad(llm, in_process=True, clock=lambda: llm.llm_engine.now)
    requests = [LoadRequest(messages=[], params=None, abort_after=after) for after in aborts]
    return llm, [(outcome.finish_reason, outcome.seconds) for outcome in load.run(requests)]


def test_outcomes_come_in_the_order_of_the_requests_with_their_own_times() -> None:
    assert _run([3, 1, 2], [None] * 3)[1] == [("length", 3.0), ("length", 1.0), ("length", 2.0)]


def test_a_request_is_aborted_when_its_time_has_come() -> None:
    llm, outcomes = _run([9, 4], [2.0, None])
    assert outcomes == [("abort", 2.0), ("length", 4.0)]
    assert llm.llm_engine.aborted == ["0-abc"]


def test_a_request_that_ended_before_is_not_aborted() -> None:
    llm, outcomes = _run([1, 4], [2.0, None])
    assert outcomes == [("length", 1.0), ("length", 4.0)]
    assert llm.llm_engine.aborted == []
