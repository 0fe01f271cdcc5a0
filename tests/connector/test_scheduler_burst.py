"""A burst of requests does not hold up the step in which it comes."""

from __future__ import annotations

import pytest
from vllm_play import Play, Request, feature

from ec_s3.connector.judge import GRANT_LEAD_SECONDS
from ec_s3.connector.scheduler import NAP_SECONDS, NEW_ITEMS_PER_STEP

ITEMS = 4
BURST = 256


def burst(play: Play) -> list[Request]:
    return [
        play.request(*(feature(f"{i}-{k}", offset=4 * k) for k in range(ITEMS)), name=str(i))
        for i in range(BURST)
    ]


def test_a_step_looks_at_so_many_new_items_and_asks_for_no_more() -> None:
    play = Play(max_deferred=BURST)
    requests = burst(play)
    for step in range(1, 4):
        assert not any(play.scheduler.ensure(request, 0) for request in requests)
        assert len(play.port.history) == step * NEW_ITEMS_PER_STEP
        play.idle()


def test_every_request_of_the_burst_has_its_turn() -> None:
    play = Play(max_deferred=BURST)
    waiting, steps = burst(play), 0
    while waiting:
        waiting = [request for request in waiting if not play.scheduler.ensure(request, 0)]
        for ticket in list(play.port.wants):
            play.port.absent(ticket)
        play.idle()
        steps += 1
        assert steps <= BURST * ITEMS // NEW_ITEMS_PER_STEP + 1
    assert len(play.port.history) == BURST * ITEMS


def test_a_burst_without_anything_else_to_do_does_not_spin() -> None:
    play = Play(max_deferred=BURST)
    for request in burst(play):
        play.scheduler.ensure(request, 0)
    play.idle()
    assert len(play.pauses) == 1


def test_a_request_of_very_many_items_is_looked_at_whole() -> None:
    play = Play()
    many = play.request(*(feature(str(k), offset=4 * k) for k in range(2 * NEW_ITEMS_PER_STEP)))
    play.scheduler.ensure(many, 0)
    assert len(play.port.history) == 2 * NEW_ITEMS_PER_STEP


def test_requests_that_decode_are_not_held_up_by_a_burst() -> None:
    play = Play(max_deferred=BURST)
    decoding = play.request(feature("x"), name="decoding")
    assert play.scheduler.ensure(decoding, 4)
    for request in burst(play):
        play.scheduler.ensure(request, 0)
    assert play.scheduler.ensure(decoding, 5)


@pytest.mark.parametrize("slow", [False, True])
def test_pages_that_are_refused_are_not_asked_for_again_in_every_step(
    monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    play = Play(fetch_timeout=1.0)
    request = play.request(feature())
    asked = []
    reserve = play.port.reserve

    def count(ticket: int, identifier: str, nbytes: int) -> None:
        asked.append(play.now)
        reserve(ticket, identifier, nbytes)

    monkeypatch.setattr(play.port, "reserve", count)
    play.port.room, play.port.slow = False, slow
    assert not play.scheduler.ensure(request, 0)
    play.now = 1.0 - GRANT_LEAD_SECONDS
    for _ in range(50):
        assert not play.scheduler.ensure(request, 0)
        play.idle()
        play.port.deliver()
        play.now += NAP_SECONDS / 50
    assert len(asked) <= 2


def test_a_request_out_of_patience_that_is_refused_pages_goes_on_at_once() -> None:
    play = Play(patience=lambda _nbytes, _waited: False)
    request = play.request(feature())
    play.port.room, play.port.slow = False, True
    assert not play.scheduler.ensure(request, 0)
    play.port.deliver()
    assert play.scheduler.ensure(request, 0)
