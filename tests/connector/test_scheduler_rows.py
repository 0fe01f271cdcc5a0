"""Situations in which other projects' connectors stalled, died or answered wrongly.

Played against the scheduler part alone; those that need bytes and a bucket are in
`test_engine_rows.py`.
"""

from __future__ import annotations

import time

import pytest
from vllm_play import Output, Play, feature, spec

from ec_s3.connector.link import Answer
from ec_s3.connector.scheduler import NEW_ITEMS_PER_STEP
from ec_s3.types import MissReason, TensorSpec


def test_decoding_asks_nobody_for_anything() -> None:
    """vLLM PR #32585: remote existence checks in every step slowed down decoding."""
    play = Play()
    play.port.items["a"] = spec(4)
    requests = [play.request(feature("a"), name=f"r{i}") for i in range(32)]
    for request in requests:
        assert play.scheduler.ensure(request, 0)
        assert play.scheduler.has("a")
    play.scheduler.allocated(requests[0], 0)
    (order,) = play.scheduler.build_meta(Output()).loads
    play.loaded(order.transfer)
    play.idle(tokens=32)
    said: list[str] = []
    for verb in ("want", "reserve", "filled"):
        setattr(play.port, verb, lambda *_, verb=verb, **__: said.append(verb))
    for computed in range(4, 104):
        for request in requests:
            assert play.scheduler.ensure(request, computed)
        metadata = play.idle(tokens=32)
        assert not metadata.loads
        assert not metadata.saves
    assert said == []
    assert not play.port.leases
    assert not play.pauses


def test_item_in_memory_is_asked_for_once_however_often_its_request_is_scheduled() -> None:
    """vLLM PR #32585: at most one question per item while the answer holds."""
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    for _ in range(100):
        assert play.scheduler.ensure(request, 0)
        assert play.scheduler.has("a")
        play.idle(tokens=1)
    assert len(play.port.history) == 1


def test_probe_of_an_encode_only_server_is_made_once_per_request() -> None:
    play = Play(role="producer")
    request = play.request(feature())
    assert not play.scheduler.ensure(request, 0)
    play.port.present(play.only_want())
    for _ in range(100):
        assert play.scheduler.ensure(request, 0)
        play.idle(tokens=1)
    assert len(play.port.history) == 1


def test_many_cold_requests_cost_one_message_per_item_and_no_sleep_each() -> None:
    """LMCache#4983: 10 ms of sleep for each waiting request, on the scheduler's thread."""
    play = Play(max_deferred=256)
    requests = [
        play.request(*(feature(f"{i}-{k}", offset=4 * k) for k in range(4)), name=f"r{i}")
        for i in range(256)
    ]
    steps = 1_024 // NEW_ITEMS_PER_STEP
    started = time.thread_time()
    for step in range(steps):
        for request in requests:
            assert not play.scheduler.ensure(request, 0)
        play.idle()
        assert len(play.pauses) == step + 1, "one pause for the step, not for each request"
    spent = (time.thread_time() - started) / steps
    assert len(play.port.history) == 1_024
    assert spent < 256 * 0.010, "far from a sleep for each"
    for request in requests:
        assert not play.scheduler.ensure(request, 0)
    assert len(play.port.history) == 1_024, "nothing more while they wait"


@pytest.mark.parametrize("expected", [137, 139, 638])
def test_other_media_under_a_used_name_is_encoded_and_the_entry_is_left_alone(
    expected: int,
) -> None:
    """vLLM#55547, #57696: another length killed the engine, the same length answered wrongly."""
    play = Play()
    play.port.items["X"] = spec(138)
    request = play.request(feature("X", rows=expected))
    assert play.scheduler.ensure(request, 0)
    assert not play.scheduler.has("X")
    assert not play.encode(request).saves, "the name is taken"
    assert play.stats.snapshot()["given_up_mismatch"] == 1
    play.scheduler.finished(request)
    assert play.port.items["X"] == spec(138)
    play.idle(tokens=1, free_encoder_mm_hashes=["X"])
    right = play.request(feature("X", rows=138), name="right")
    assert play.scheduler.ensure(right, 0)
    assert play.scheduler.has("X")


def test_names_local_to_a_request_are_never_kept_or_asked_for() -> None:
    """LMCache#5055: after a restart of the frontend they meant other pictures."""
    play = Play()
    names = ["r-image-0", "cmpl-1-image-12", "chatcmpl-ab12-video-3"]
    request = play.request(*(feature(n, offset=4 * i) for i, n in enumerate(names)))
    assert play.scheduler.ensure(request, 0)
    for index, name in enumerate(names):
        assert not play.scheduler.has(name)
        assert not play.encode(request, index).saves
    assert not play.port.history
    bare = play.request(feature("r-image-0", media=False), name="bare")
    assert not play.scheduler.ensure(bare, 0)
    assert play.scheduler.take_unavailable() == {"bare"}, "it can be nowhere"


def test_one_failed_item_costs_only_itself() -> None:
    """sglang#28031: one failure threw away all hits of a batch."""
    play = Play()
    request = play.request(*(feature(n, offset=4 * i) for i, n in enumerate("abc")))
    assert not play.scheduler.ensure(request, 0)
    for ticket, want in list(play.port.wants.items()):
        if want.identifier == "b":
            play.port.absent(ticket, MissReason.FAILED)
        else:
            play.port.ready(ticket, spec(4))
    assert play.scheduler.ensure(request, 0)
    assert [play.scheduler.has(name) for name in "abc"] == [True, False, True]
    for index in range(3):
        play.scheduler.allocated(request, index)
    metadata = play.scheduler.build_meta(Output(scheduled_encoder_inputs={"r": [1]}))
    assert [order.identifier for order in metadata.loads] == ["a", "c"]
    assert [order.identifier for order in metadata.saves] == ["b"]


def test_rank_that_could_not_save_changes_nothing_for_the_others() -> None:
    """vllm-ascend#14106: a failed save on one rank put the ranks out of step."""
    play = Play(ranks=2)
    play.port.items["b"] = spec(4)
    request = play.request(feature("a"), feature("b", offset=4))
    play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("b")
    play.scheduler.allocated(request, 0)
    play.scheduler.allocated(request, 1)
    metadata = play.scheduler.build_meta(Output(scheduled_encoder_inputs={"r": [0]}))
    (save,), (load,) = metadata.saves, metadata.loads
    play.saved(save.ticket, done=False)
    for rank in range(2):
        play.loaded(load.transfer, rank=rank)
    play.scheduler.finished(request)
    play.idle(tokens=1, free_encoder_mm_hashes=["a", "b"])
    assert not play.port.open_tickets
    again = play.request(feature("b"), name="again")
    assert play.scheduler.ensure(again, 0)
    assert play.scheduler.has("b"), "the engine goes on serving"


def test_one_order_for_all_ranks_is_the_only_decision() -> None:
    """LMCache#1379: ranks looked up for themselves and disagreed."""
    play = Play(ranks=2)
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    assert play.scheduler.ensure(request, 0)
    metadata = play.load(request)
    (order,) = metadata.loads
    play.holds.on_answer(Answer(1, "loaded", order.transfer, done=False))
    play.scheduler.finished(request)
    play.idle(tokens=1)
    assert play.port.leases, "the other rank has the same order, and the bytes stay for it"
    play.loaded(order.transfer, rank=0)
    play.idle(tokens=1)
    assert not play.port.leases


def test_width_of_several_encoder_levels_is_not_taken_for_the_language_models() -> None:
    """dynamo#11244: a buffer was sized by the hidden size; DeepStack's outputs are wider."""
    play = Play(widths={"image": 4 * 2048}, window=2_048)
    request = play.request(feature(rows=1_024))
    play.scheduler.ensure(request, 0)
    assert play.port.history[0].save_nbytes == 1_024 * 8_192 * 4
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(request, 0)
    (order,) = play.encode(request).saves
    assert order.spec == TensorSpec("float32", (1_024, 8_192))


def test_consumer_asks_again_until_the_producers_upload_is_visible() -> None:
    """vLLM#29248: encoder and prefill timed out only when combined."""
    play = Play(role="consumer")
    request = play.request(feature(media=False))
    uploaded_at = 3.0
    while not play.scheduler.ensure(request, 0):
        for ticket in list(play.port.wants):
            if play.now < uploaded_at:
                play.port.absent(ticket)
            else:
                play.port.ready(ticket, spec(4))
        play.idle()
        play.now += 0.05
        assert play.now < uploaded_at + 1.0
    assert play.scheduler.has("a")


def test_consumer_that_has_the_media_encodes_at_once_what_is_not_yet_uploaded() -> None:
    play = Play(role="consumer")
    request = play.request(feature())
    assert not play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(request, 0)
    assert not play.scheduler.has("a")


def test_answer_that_comes_after_its_request_was_let_go_touches_nothing() -> None:
    """LMCache#5047: a retrieve that never completed parked its request for ever."""
    play = Play()
    request = play.request(feature())
    assert not play.scheduler.ensure(request, 0)
    ticket = play.only_want()
    play.now = 2.0
    assert play.scheduler.ensure(request, 0)
    (order,) = play.encode(request).saves
    play.scheduler.finished(request)
    assert ticket not in play.port.open_tickets
    play.saved(order.ticket)
    play.idle(tokens=1)
    assert not play.port.open_tickets
    assert play.port.filled_items == [("a", spec(4))]


def test_saves_under_way_become_ready_without_another_step() -> None:
    """vLLM#43433: when the engine went idle nobody asked for completions any more."""
    play = Play(max_deferred=0)
    requests = [play.request(feature(f"i{i}"), name=f"r{i}") for i in range(5)]
    tickets = []
    for request in requests:
        assert play.scheduler.ensure(request, 0)
        (order,) = play.encode(request).saves
        tickets.append(order.ticket)
        play.scheduler.finished(request)
    for ticket in tickets:
        play.saved(ticket)
    assert len(play.port.filled_items) == 5
