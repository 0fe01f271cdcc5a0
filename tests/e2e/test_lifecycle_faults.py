"""Requests, processes and memory come to a bad end; vLLM goes on, and nothing is left behind.

The short selection of the fault matrix (`make faults`, in `tests/matrix`) for every test run.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from ec_s3.testing.census import group_processes, named_like, rank_sockets, slab_users
from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.testing.vllm_process import image, prompt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ec_s3.testing.lab import Lab
    from ec_s3.testing.vllm_process import VLLMProcess

_END_SECONDS = 60.0
_TWO_ITEMS = "512KiB"  # pages of 256 KiB, and an item of the tiny model fits into one
_STORY = prompt(text="tell me a long story", max_tokens=400)


def _load(
    lab: Lab, process: VLLMProcess, pictures: Iterable[str], **fields: float
) -> tuple[list[dict[str, Any]], int]:
    """Outcomes of one request per picture, beside a long text, and how many were encoded."""
    prompts = [{**prompt(image(lab.pictures[name])), **fields} for name in pictures]
    result = process.load([_STORY, *prompts])
    assert result["outcomes"][0]["finish_reason"] in ("length", "stop")
    return result["outcomes"][1:], result["encoder_items"]


def _tokens(outcomes: Iterable[dict[str, Any]]) -> list[tuple[int, ...]]:
    return [tuple(outcome["token_ids"]) for outcome in outcomes]


def test_aborted_idle_and_killed_engines_leave_nothing(lab: Lab) -> None:
    cold = lab.cold()
    prefix = "lifecycle"
    stored, new = ["china-0", "china-1", "flower-0"], ["hopper-0", "hopper-1"]
    lab.copy(cold, prefix, pictures=stored)
    with FaultServer(lab.server.url) as proxy:
        process = lab.start(prefix=prefix, endpoint=proxy.url)

        hang = Fault(method="GET", path="/v1/", hang=True)
        proxy.add(hang)
        aborted, _ = _load(lab, process, stored, abort_after=0.05)
        proxy.clear()
        after, encoded = _load(lab, process, stored)

        proxy.add(Fault(method="PUT", path="/v1/", delay=0.5))
        fresh, _ = _load(lab, process, new)
        lab.wait_for_uploads(prefix, len(new))  # without a step of the engine
        proxy.clear()

        proxy.add(Fault(method="PUT", path="/v1/", hang=True))
        _load(lab, process, ["hopper-2"])
        everyone = set(group_processes(process.pid))
        sockets = rank_sockets(process.pid)
        held_before = bool(everyone & slab_users()) and bool(sockets)
        os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + _END_SECONDS
        while (
            set(group_processes(process.pid)) or sockets & rank_sockets()
        ) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = set(group_processes(process.pid))
        process.kill()

    assert hang.met > 0
    assert [outcome["finish_reason"] for outcome in aborted] == ["abort"] * len(stored)
    assert _tokens(after) == [cold.answers[name].tokens for name in stored]
    assert encoded == 0
    assert _tokens(fresh) == [cold.answers[name].tokens for name in new]
    assert held_before
    assert not left
    assert not everyone & slab_users()
    assert not sockets & rank_sockets()
    assert lab.unfinished_uploads(prefix) == []
    assert len(lab.server.items(prefix)) == len(stored) + len(new)


@pytest.mark.slow
def test_two_item_tier_and_a_killed_engine_process_cost_no_answer(lab: Lab) -> None:
    cold = lab.cold()
    prefix = "small"
    pictures = list(lab.pictures)
    lab.copy(cold, prefix, pictures=pictures[:4])
    settings = {"max_local_cpu_size": _TWO_ITEMS, "engine": "process", "fetch_timeout": "1s"}
    process = lab.start(prefix=prefix, settings=settings)
    crowded = [_load(lab, process, pictures)[0] for _ in range(2)]
    (child,) = named_like(process.pid, "ec_s3.child")
    os.kill(child, signal.SIGKILL)
    orphaned = [_load(lab, process, pictures[:4]) for _ in range(2)]
    process.finish()

    right = [cold.answers[name].tokens for name in pictures]
    assert [_tokens(outcomes) for outcomes in crowded] == [right, right]
    assert [_tokens(outcomes) for outcomes, _ in orphaned] == [right[:4], right[:4]]
