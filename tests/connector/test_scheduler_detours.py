"""When vLLM goes back, when the weights change, and what an ended request leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_play import Output, Play, Request, feature, spec

from ec_s3.port import Ready
from ec_s3.types import MissReason

WINDOW = 8


def hit(play: Play, *, media: bool, tokens: int) -> Request:
    """A request whose prefix, of so many tokens, vLLM has found computed."""
    request = play.request(feature(offset=10, rows=4, media=media))
    request.num_computed_tokens = 0
    assert play.scheduler.ensure(request, tokens) is (tokens >= 14 + WINDOW)
    return request


def test_item_in_the_part_of_a_prefix_hit_that_is_computed_again_is_loaded() -> None:
    play = Play(replay=WINDOW)
    play.port.items["a"] = spec(4)
    request = play.request(feature(offset=10, rows=4, media=False))
    assert play.scheduler.ensure(request, 16)
    assert play.scheduler.has("a"), "vLLM goes back to token 8 and asks"


def test_item_before_the_part_that_is_computed_again_is_not_asked_for() -> None:
    play = Play(replay=WINDOW)
    hit(play, media=False, tokens=14 + WINDOW)
    assert not play.port.history


def test_lost_item_in_the_part_that_is_computed_again_fails_its_request_alone() -> None:
    play = Play(replay=WINDOW)
    request = hit(play, media=False, tokens=16)
    play.port.absent(play.only_want(), MissReason.TOO_LARGE)
    assert not play.scheduler.ensure(request, 16)
    assert play.scheduler.take_unavailable() == {"r"}


def test_running_request_is_not_asked_to_go_back() -> None:
    play = Play(replay=WINDOW)
    request = play.request(feature(offset=10, rows=4, media=False))
    request.num_computed_tokens = 16
    assert play.scheduler.ensure(request, 16)
    assert not play.port.history


def test_excused_request_counts_what_is_computed_again() -> None:
    play = Play(replay=WINDOW)
    request = play.request(feature(offset=10, rows=4, media=False))
    assert not play.scheduler.excuse(request, 16)
    assert play.scheduler.take_unavailable() == {"r"}
    assert play.scheduler.excuse(request, 14 + WINDOW)


def test_preempted_request_takes_what_lies_in_memory_instead_of_encoding_again() -> None:
    play = Play()
    request = play.request(feature())
    assert not play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(request, 0)
    (order,) = play.encode(request).saves
    play.saved(order.ticket)
    assert play.scheduler.ensure(request, 4)
    play.idle(tokens=1, free_encoder_mm_hashes=["a"])
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")


def test_preempted_request_is_not_kept_waiting_beyond_its_first_deadline() -> None:
    play = Play()
    request = play.request(feature())
    assert not play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want(), MissReason.UNREACHABLE)
    assert play.scheduler.ensure(request, 0)
    play.encode(request)
    assert play.scheduler.ensure(request, 4)
    play.idle(tokens=1, free_encoder_mm_hashes=["a"])
    play.now = 5.0
    assert play.scheduler.ensure(request, 0)
    assert not play.scheduler.has("a")


# -- changing the weights ----------------------------------------------------------------------


def test_nothing_is_asked_for_or_promised_while_the_weights_change() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    assert play.scheduler.ensure(request, 0)
    play.scheduler.suspend()
    assert not play.scheduler.has("a")
    other = play.request(feature("b"), name="other")
    assert play.scheduler.ensure(other, 0), "encoded without us"
    assert not play.encode(other).saves
    assert [want.identifier for want in play.port.history] == ["a"]


def test_yes_given_without_media_stands_though_the_weights_are_to_change() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature(media=False))
    assert play.scheduler.ensure(request, 0)
    play.scheduler.suspend()
    assert play.scheduler.has("a"), "a no would end the engine"
    assert play.load_of(request)


def test_after_the_change_everything_is_asked_for_anew() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    assert play.scheduler.ensure(request, 0)
    play.scheduler.suspend()
    play.port.items.clear()
    play.scheduler.resume("next")
    assert not play.scheduler.online, "only the scheduler's own thread starts over"
    assert not play.scheduler.ensure(request, 0)
    assert not play.scheduler.has("a")
    assert [want.identifier for want in play.port.history] == ["a", "a"]
    assert play.port.weight_versions == ["next"]


def test_planned_load_outlives_the_change_as_vllm_counts_on_it() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")
    play.scheduler.allocated(request, 0)
    play.scheduler.suspend()
    play.scheduler.resume("next")
    (order,) = play.scheduler.build_meta(Output()).loads
    assert play.port.leases
    play.loaded(order.transfer)
    play.idle()
    assert not play.port.leases


def test_what_vllm_has_cached_of_the_old_weights_is_never_saved_again() -> None:
    play = Play(role="producer")
    request = play.request(feature())
    assert not play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(request, 0)
    assert play.encode(request).saves
    play.scheduler.finished(request)
    play.scheduler.suspend()
    play.scheduler.resume("next")
    play.idle()
    again = play.request(feature(), name="again")
    assert not play.scheduler.ensure(again, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(again, 0)
    assert not play.idle(tokens=1).saves


def test_weights_that_change_twice_before_a_step_are_started_over_once_for_the_last() -> None:
    play = Play()
    for version in ("second", "third"):
        play.scheduler.suspend()
        play.scheduler.resume(version)
    play.scheduler.suspend()
    play.idle()
    assert not play.scheduler.online
    play.scheduler.resume("fourth")
    play.idle()
    assert play.scheduler.online


# -- the end of a request ------------------------------------------------------------------------


def answered(play: Play, how: Any, *, role: str = "both") -> set[str]:
    """What is told at the end of a request whose one item was answered like this."""
    request = play.request(feature())
    if not play.scheduler.ensure(request, 0):
        how(play.only_want())
        assert play.scheduler.ensure(request, 0)
    if role == "both" and not play.scheduler.has("a"):
        play.encode(request)
    return set(play.scheduler.finished(request))


def test_ended_request_names_what_it_saved() -> None:
    play = Play()
    assert answered(play, play.port.absent) == {"a"}


def test_ended_request_names_nothing_while_uploads_fail() -> None:
    play = Play()
    play.holds.uploading = False
    assert answered(play, play.port.absent) == set()


def test_ended_request_names_nothing_that_found_no_room() -> None:
    play = Play()
    play.port.room = False
    assert answered(play, play.port.absent) == set()


@pytest.mark.parametrize("shared", [False, True])
def test_ended_request_names_what_the_bucket_is_known_to_hold(*, shared: bool) -> None:
    play = Play()

    def ready(ticket: int) -> None:
        play.port.ready(ticket, spec(4))
        event = play.port._events.pop()
        assert isinstance(event, Ready)
        play.port._events.append(
            Ready(event.ticket, event.spec, event.extents, event.meta, shared=shared)
        )

    assert answered(play, ready) == ({"a"} if shared else set())


def test_encode_only_engine_names_what_it_was_spared() -> None:
    play = Play(role="producer")
    assert answered(play, play.port.present, role="producer") == {"a"}


@pytest.mark.parametrize("cause", ["not done", "not scheduled"])
def test_ended_request_names_no_item_whose_save_did_not_happen(cause: str) -> None:
    """Its client would be told to send only metadata, and its next request would fail."""
    play = Play(role="producer")
    request = play.request(feature())
    play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(request, 0)
    if cause == "not done":
        (order,) = play.encode(request).saves
        play.saved(order.ticket, done=False)
    else:
        play.scheduler.allocated(request, 0)
        assert not play.scheduler.build_meta(Output()).saves
    play.idle(tokens=1)
    assert not play.scheduler.finished(request)


def test_aborted_request_names_nothing() -> None:
    play = Play()
    request = play.request(feature())
    assert not play.scheduler.ensure(request, 0)
    assert play.scheduler.finished(request) == {}
    assert play.scheduler.finished(request) == {}


def test_time_that_a_request_was_kept_waiting_is_recorded_by_its_end() -> None:
    play = Play()
    for name, outcome in (("r", "ready"), ("s", "absent"), ("t", "ended")):
        request = play.request(feature(name), name=name)
        assert not play.scheduler.ensure(request, 0)
        play.now += 0.5
        if outcome == "ready":
            play.port.ready(play.only_want(), spec(4))
        elif outcome == "absent":
            play.port.absent(play.only_want())
        if outcome == "ended":
            play.scheduler.finished(request)
        else:
            assert play.scheduler.ensure(request, 0)
    snapshot = play.stats.snapshot()
    for outcome in ("ready", "absent", "ended"):
        assert snapshot[f"deferral_seconds_{outcome}_sum"] == 0.5
        assert snapshot[f"deferral_seconds_{outcome}_count"] == 1
