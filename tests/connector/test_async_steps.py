"""Steps that overlap: with asynchronous scheduling, or pipeline stages, vLLM plans a step while
earlier ones still run, and hears of their end later.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from vllm_play import Output, Play, feature, spec

from ec_s3.connector import assembly

if TYPE_CHECKING:
    from vllm_play import Request


def ready(play: Play, *identifiers: str) -> None:
    for identifier in identifiers:
        play.port.items[identifier] = spec(4)


def load(play: Play, request: Request) -> Any:
    """A step that plans the load of the request's only item; the order."""
    assert play.scheduler.ensure(request, 0)
    (order,) = play.load(request).loads
    return order


def encode(play: Play, request: Request) -> Any:
    """A step that plans the encode of the request's only item; the order to save it."""
    play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(request, 0)
    (order,) = play.encode(request).saves
    return order


def test_pages_of_a_load_in_flight_stay_while_later_steps_are_planned_and_the_request_ends() -> (
    None
):
    play = Play(ranks=2)
    ready(play, "a")
    request = play.request(feature())
    order = load(play, request)
    for tokens in (4, 5):  # planned ahead: vLLM counts tokens as computed once they are scheduled
        assert play.scheduler.ensure(request, tokens)
        assert not play.idle(tokens=1).loads
    play.loaded(order.transfer, rank=1)
    play.scheduler.finished(request)
    play.idle(tokens=1)
    assert play.port.leases, "rank 0 has not copied yet"
    play.loaded(order.transfer, rank=0)
    play.idle(tokens=1)
    assert not play.port.open_tickets
    assert not play.held


def test_request_that_shares_an_item_with_a_load_in_flight_asks_for_nothing() -> None:
    play = Play()
    ready(play, "a")
    order = load(play, play.request(feature(), name="1"))
    second = play.request(feature(), name="2")
    assert play.scheduler.ensure(second, 0)
    assert not play.idle(tokens=1).loads
    assert len(play.port.history) == 1
    play.loaded(order.transfer)


def test_item_that_vllm_evicts_while_its_load_is_in_flight_is_loaded_again() -> None:
    play = Play()
    ready(play, "a")
    first, second = play.request(feature(), name="1"), play.request(feature(), name="2")
    early = load(play, first)
    play.scheduler.ensure(first, 4)
    play.idle(tokens=1, free_encoder_mm_hashes=["a"])
    late = load(play, second)
    assert late.transfer != early.transfer
    play.loaded(early.transfer)
    play.idle(tokens=1)
    assert play.port.leases, "the second load has not run"
    play.loaded(late.transfer)
    play.scheduler.finished(first)
    play.scheduler.finished(second)
    play.idle(tokens=1)
    assert not play.port.open_tickets
    assert not play.held


def test_encode_in_flight_of_an_aborted_request_is_saved() -> None:
    play = Play()
    request = play.request(feature())
    order = encode(play, request)
    play.scheduler.finished(request)
    play.idle(tokens=1)
    play.saved(order.ticket)
    assert play.port.filled_items == [("a", spec(4))]
    play.idle(tokens=1)
    assert not play.port.open_tickets
    assert not play.held


def test_encode_in_flight_is_not_ordered_a_second_time() -> None:
    play = Play()
    order = encode(play, play.request(feature(), name="1"))
    second = play.request(feature(), name="2")
    assert play.scheduler.ensure(second, 0)
    assert not play.idle(tokens=1).saves
    play.saved(order.ticket)
    play.idle(tokens=1)
    assert play.port.filled_items == [("a", spec(4))]


def test_request_that_was_scheduled_once_more_after_its_last_token_leaves_nothing() -> None:
    play = Play()
    ready(play, "a")
    request = play.request(feature())
    order = load(play, request)
    assert play.scheduler.ensure(request, 5), "the step ahead, planned before the end was known"
    play.scheduler.finished(request)
    play.idle(tokens=1)
    play.loaded(order.transfer)
    play.idle(tokens=1)
    assert not play.port.open_tickets
    assert not play.held
    assert not play.scheduler.busy


def test_failure_is_heard_although_two_steps_were_planned_before_vllm_asks_for_it() -> None:
    play = Play(role="producer")
    lost = play.request(feature(media=False), name="lost")
    other = play.request(feature("b"), name="other")
    for _ in range(2):
        assert not play.scheduler.ensure(lost, 0)
        play.scheduler.ensure(other, 0)
        play.idle(tokens=1)
    assert play.scheduler.take_unavailable() == {"lost"}
    play.scheduler.finished(lost)
    play.scheduler.ensure(other, 0)
    assert not play.scheduler.take_unavailable()


def test_yes_of_one_batch_is_no_promise_to_the_next() -> None:
    play = Play()
    ready(play, "a", "b")
    blocked, other = play.request(feature("a"), name="1"), play.request(feature("b"), name="2")
    assert play.scheduler.ensure(blocked, 0)
    assert play.scheduler.has("a")  # and then no KV blocks were free
    assert not play.idle(tokens=1).loads
    assert load(play, other).identifier == "b"
    assert load(play, blocked).identifier == "a"


def test_item_without_media_in_flight_is_not_asked_for_again_while_its_request_decodes() -> None:
    play = Play(role="consumer")
    ready(play, "a")
    request = play.request(feature(media=False))
    order = load(play, request)
    for tokens in range(4, 8):
        assert play.scheduler.ensure(request, tokens)
        play.idle(tokens=1)
    assert len(play.port.history) == 1
    play.loaded(order.transfer)
    play.idle(tokens=1)
    assert not play.port.open_tickets


def test_preempted_request_is_judged_anew_while_its_first_load_is_in_flight() -> None:
    play = Play(role="consumer")
    ready(play, "a")
    request = play.request(feature(media=False))
    early = load(play, request)
    assert play.scheduler.ensure(request, 4)
    play.idle(tokens=1, free_encoder_mm_hashes=["a"])
    late = load(play, request)
    for order in (early, late):
        play.loaded(order.transfer)
    play.scheduler.finished(request)
    play.idle(tokens=1)
    assert not play.port.open_tickets
    assert not play.held


@pytest.mark.parametrize("media", [True, False])
def test_tokens_planned_ahead_are_not_taken_for_a_prefix_hit(media: bool) -> None:
    """VLLM tells `computed` without the tokens that are planned but not sampled yet, so it is less
    than the request's own count; after a prefix hit it is more.
    """
    play = Play(replay=16)
    ready(play, "a")
    request = play.request(feature(media=media))
    order = load(play, request)
    play.loaded(order.transfer)
    play.idle(tokens=1, free_encoder_mm_hashes=["a"])
    play.port.items.clear()
    request.num_computed_tokens = 4
    assert play.scheduler.ensure(request, 4)
    request.num_computed_tokens = 7
    assert play.scheduler.ensure(request, 5), "its item is computed: it decodes"
    assert len(play.port.history) == 1


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("first", [True, False])
def test_only_the_first_pipeline_stage_has_a_worker_part(
    monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    if not os.environ.get("REQUIRE_VLLM"):
        pytest.importorskip("vllm", exc_type=ImportError)
    from vllm.distributed import parallel_state

    for name, value in {
        "get_pp_group": SimpleNamespace(is_first_rank=first),
        "get_pcp_group": SimpleNamespace(rank_in_group=1),
        "get_tensor_model_parallel_rank": 1,
    }.items():
        monkeypatch.setattr(parallel_state, name, lambda value=value: value)
    monkeypatch.setattr(assembly, "_address", lambda _: "hub")
    monkeypatch.setattr(assembly, "Worker", lambda address, *, rank, device: (address, rank))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        device_config=SimpleNamespace(device_type="cpu"),
    )
    built: object = assembly.build_worker(config)
    assert built == (("hub", 3) if first else None)


@pytest.mark.parametrize("stages", [1, 2])
def test_only_ranks_of_the_first_pipeline_stage_are_waited_for(stages: int) -> None:
    layout = SimpleNamespace(
        tensor_parallel_size=2, prefill_context_parallel_size=2, pipeline_parallel_size=stages
    )
    assert assembly._ranks(SimpleNamespace(parallel_config=layout)) == 4


def test_idle_step_between_two_batches_in_flight_keeps_the_loads_of_neither() -> None:
    play = Play()
    ready(play, "a")
    order = load(play, play.request(feature()))
    assert not play.scheduler.build_meta(Output(total_num_scheduled_tokens=0)).loads
    assert not play.scheduler.build_meta(Output()).loads
    play.loaded(order.transfer)
