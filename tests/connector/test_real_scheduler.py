"""vLLM's own scheduler, with what clients, engine and ranks may do to it, at random.

Chunked prefill, prefix hits, preemption, too little encoder cache, steps scheduled ahead of their
results, priorities, streaming sessions, a drafter that looks ahead, both model runners' rules: no
engine may die, no request may hang or wait beyond its deadline, only requests without media may
fail, and nothing may be left held.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from real_layouts import Layout, make_config
from real_scheduler import ROWS, RealScheduler
from vllm_play import spec

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM's own, as it starts

LAYOUTS = [
    Layout(),
    Layout(ahead=1),
    Layout(ahead=2, runner=2),
    Layout(policy="priority", blocks=16),
    Layout(policy="priority", blocks=16, ahead=1, runner=2),
    Layout(role="consumer", ahead=1),
    Layout(role="producer", runner=2),
    Layout(lookahead=1, ahead=1),
    Layout(replay=8),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not os.environ.get("REQUIRE_VLLM"):
        pytest.importorskip("vllm", exc_type=ImportError)
    from ec_s3.testing import tiny_models

    return str(tiny_models.make_qwen2_vl(tmp_path_factory.mktemp("model")))


def _wish(engine: RealScheduler) -> tuple[list[str], list[bool]]:
    """Items of a request, and which of them come with their media."""
    pick = engine.random
    names = [pick.choice(list(ROWS)) for _ in range(pick.choice([0, 1, 1, 2, 3]))]
    bare = pick.random() < 0.4 and engine.layout.role != "producer"
    mixed = bare and pick.random() < 0.2
    return names, [pick.random() < 0.5 if mixed else not bare for _ in names]


def _something_happens(engine: RealScheduler, streams: list[str]) -> None:
    dice, pick = engine.random.random(), engine.random
    live = sorted(engine.requests)
    if dice < 0.30 and len(live) < 6:
        stream = pick.random() < 0.2
        engine.arrive(*_wish(engine), stream=stream)
        if stream:
            streams.append(max(engine.requests, key=lambda name: int(name[1:])))
    elif dice < 0.36 and live:
        name = pick.choice(live)
        if name in streams and pick.random() < 0.7:
            engine.goes_on(name, *_wish(engine))
        else:
            engine.abort(name)
    elif dice < 0.38:
        engine.reset_encoder_cache()
    elif dice < 0.385:
        engine.vllm.reset_prefix_cache()
    elif dice < 0.387:
        engine.play.port.alive = False
    elif dice < 0.39:
        engine.play.scheduler.suspend()
    elif dice < 0.41 and engine.play.port.suspended:
        engine.play.scheduler.resume(f"w{pick.randrange(3)}")


def _episode(engine: RealScheduler) -> None:
    pick, port, streams = engine.random, engine.play.port, list[str]()
    for _ in range(80):
        _something_happens(engine, streams)
        if pick.random() < 0.5:
            engine.engine_answers()
        engine.ranks_answer()
        if port.items and pick.random() < 0.3:
            port.items.pop(pick.choice(sorted(port.items)))
        engine.step()
        engine.play.now += pick.choice([0.0, 0.01, 0.3, 1.0])
    for name in streams:
        if name in engine.requests:
            engine.abort(name)
    for _ in range(2_000):
        if not engine.busy:
            break
        engine.engine_answers()
        engine.ranks_answer()
        engine.step()
        engine.play.now += 0.1
    assert not engine.busy, f"hangs: {sorted(engine.vllm.requests)}"
    engine.ranks_answer(all_of_them=True)
    engine.play.idle(tokens=1)
    assert not port.open_tickets
    assert engine.play.held == 0
    assert engine.connector._errors == 0, "an error that nobody expected"


def _play(folder: str, layout: Layout, patch: pytest.MonkeyPatch, seeds: range) -> Counter[str]:
    config: Any = make_config(folder, layout)
    counted: Counter[str] = Counter()
    for seed in seeds:
        engine = RealScheduler(config, layout, patch, seed=seed)
        try:
            _episode(engine)
        except BaseException as error:
            error.add_note(f"seed {seed} of {layout}")
            raise
        counted += engine.counted
    return counted


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nothing_that_vllm_does_ends_the_engine_or_leaves_anything_behind(
    folder: str, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    counted = _play(folder, layout, monkeypatch, range(12))
    for what in ("encoded", "deferred", "aborted", "preempted"):
        assert counted[what], f"too tame: nothing was {what}"
    if layout.role != "producer":
        assert counted["loaded"] > 10, "too tame: little was loaded"


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_session_that_has_answered_holds_nothing_until_its_client_goes_on(
    folder: str, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    layout = Layout(role="consumer", ahead=ahead)
    config: Any = make_config(folder, layout)
    for seed in range(4):  # they differ in how long the answer is
        engine = RealScheduler(config, layout, monkeypatch, seed=seed)
        port = engine.play.port
        port.items.update({name: spec(rows) for name, rows in ROWS.items()})
        engine.arrive(list(ROWS), [False] * len(ROWS), stream=True)
        for _ in range(40):
            engine.ranks_answer(all_of_them=True)
            engine.step()
        assert engine.vllm.requests, "the session waits for its client"
        assert engine.counted["loaded"] == len(ROWS) * engine.ranks
        engine.play.idle(tokens=1)
        assert not port.leases


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nothing_that_vllm_does_ends_the_engine_however_long_it_is_tried(
    folder: str, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    _play(folder, layout, monkeypatch, range(1_000, 1_400))
