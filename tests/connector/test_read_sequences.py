"""Sequences that only a reading of vLLM's scheduler shows, and that ended badly before."""

from __future__ import annotations

import pytest
from vllm_play import Play, feature, spec

from ec_s3.types import MissReason


@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize("media", [True, False])
def test_item_of_another_width_than_the_encoders_is_never_promised(width: int, media: bool) -> None:
    """Right rows and dtype, other width: writing it into the inputs' embeddings ends the engine."""
    play = Play()
    play.port.items["a"] = spec(4, width=width)
    request = play.request(feature(media=media))
    if play.scheduler.ensure(request, 0):
        assert not play.scheduler.has("a")
    else:
        assert play.scheduler.take_unavailable() == {"r"}


def test_prefix_that_another_request_computed_does_not_leave_the_rest_unasked() -> None:
    """What was absent is asked for first and alone; it need not be needed any more."""
    play = Play(role="consumer")
    request = play.request(feature("a", media=False), feature("b", offset=4, media=False))
    play.scheduler.ensure(request, 0)
    for ticket in sorted(play.port.wants):
        if play.port.wants[ticket].identifier == "a":
            play.port.absent(ticket)
    assert not play.scheduler.ensure(request, 0)
    play.now = 1.0
    play.port.items["b"] = spec(4)
    assert play.scheduler.ensure(request, 4), "b is all it needs, and b is in memory"


@pytest.mark.parametrize("media", [True, False])
def test_decoding_request_needs_nothing_though_its_last_tokens_are_still_under_way(
    media: bool,
) -> None:
    """Steps ahead of their results are asked about with fewer tokens than are scheduled."""
    play = Play(replay=16)
    request = play.request(feature("a", rows=12, media=media))
    play.port.items["a"] = spec(12)
    assert play.scheduler.ensure(request, 0)
    play.loaded(play.load(request).loads[0].transfer)
    request.num_computed_tokens = 8
    assert play.scheduler.ensure(request, 8), "the second chunk"
    play.idle(tokens=1, free_encoder_mm_hashes=["a"])
    del play.port.items["a"]
    request.num_computed_tokens = 12
    assert play.scheduler.ensure(request, 12)
    request.num_computed_tokens = 14
    assert play.scheduler.ensure(request, 13), "its placeholders are computed"
    assert len(play.port.history) == 1


def test_item_without_media_that_is_held_survives_the_end_of_the_engine() -> None:
    play = Play(role="consumer")
    request = play.request(feature(media=False))
    play.scheduler.ensure(request, 0)
    play.port.ready(play.only_want(), spec(4))
    assert play.scheduler.ensure(request, 0)
    play.idle(tokens=1)
    play.port.alive = False
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")


def test_items_that_together_find_no_room_are_not_fetched_over_and_over() -> None:
    """Two items without media and room for one: each attempt gives up what it has fetched."""
    play = Play(role="consumer")
    request = play.request(feature("a", media=False), feature("b", offset=4, media=False))
    failed = False
    while play.now < 31.0 and not failed:
        play.scheduler.ensure(request, 0)
        for ticket in sorted(play.port.wants):
            if play.port.leases:
                play.port.absent(ticket, MissReason.NO_ROOM)
            else:
                play.port.ready(ticket, spec(4))
        play.idle(tokens=1)
        failed = bool(play.scheduler.take_unavailable())
        play.now += 0.05
    assert failed
    assert len(play.port.history) < 40
