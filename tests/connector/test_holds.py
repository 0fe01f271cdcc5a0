"""Tickets at the port: every one is released or filled exactly once."""

from __future__ import annotations

import pytest
from vllm_play import Play, feature, spec

from ec_s3.connector.link import Answer
from ec_s3.types import MissReason


def test_slow_engine_is_polled_and_its_answer_found_in_a_later_step() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    play.port.slow = True
    request = play.request(feature())
    assert not play.scheduler.ensure(request, 0)
    assert not play.scheduler.has("a")
    play.port.deliver()
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")


@pytest.mark.parametrize("found", [True, False])
def test_answer_under_way_when_its_request_ends_is_released(found: bool) -> None:
    play = Play()
    request = play.request(feature())
    play.scheduler.ensure(request, 0)
    ticket = play.only_want()
    if found:
        play.port.ready(ticket, spec(4))
    else:
        play.port.absent(ticket)
    play.port.slow = True
    play.scheduler.finished(request)
    assert play.port.open_tickets
    play.port.deliver()
    play.idle()
    play.port.deliver()
    assert not play.port.open_tickets
    assert not play.held


def test_refused_reservation_is_forgotten_and_may_be_asked_for_again() -> None:
    play = Play(max_deferred=0)
    play.port.room = False
    first = play.request(feature(), name="1")
    assert play.scheduler.ensure(first, 0)
    assert not play.encode(first).saves
    play.scheduler.finished(first)
    assert not play.held
    play.port.room = True
    second = play.request(feature("b"), name="2")
    assert play.scheduler.ensure(second, 0)
    assert len(play.encode(second).saves) == 1


def test_reservation_for_another_size_is_not_used() -> None:
    play = Play()
    small, large = play.request(feature(rows=4), name="1"), play.request(feature(rows=6), name="2")
    play.scheduler.ensure(small, 0)
    assert not play.scheduler.ensure(large, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(large, 0)
    (order,) = play.encode(large).saves
    assert order.spec == spec(6)
    play.saved(order.ticket)
    assert play.port.filled_items == [("a", spec(6))]
    for request in (small, large):
        play.scheduler.finished(request)
    play.idle()
    assert not play.port.open_tickets


def test_reservation_asked_for_under_another_size_is_not_used() -> None:
    play = Play(max_deferred=0)
    small, large = play.request(feature(rows=4), name="1"), play.request(feature(rows=6), name="2")
    assert play.scheduler.ensure(small, 0)
    assert play.scheduler.ensure(large, 0)
    assert not play.encode(large).saves
    play.scheduler.finished(large)
    assert play.port.grants
    play.scheduler.finished(small)
    assert not play.port.open_tickets


def test_refused_reservation_is_asked_for_again_by_the_next_request_for_the_item() -> None:
    play = Play(max_deferred=0)
    play.port.room = False
    assert play.scheduler.ensure(play.request(feature(), name="1"), 0)
    play.port.room = True
    second = play.request(feature(), name="2")
    assert play.scheduler.ensure(second, 0)
    assert len(play.encode(second).saves) == 1


@pytest.mark.parametrize("role", ["both", "producer"])
@pytest.mark.parametrize("slow", [True, False])
def test_pages_to_save_an_item_into_go_back_when_it_turns_out_to_be_there(
    role: str, slow: bool
) -> None:
    play = Play(role=role, max_deferred=0)
    request = play.request(feature())
    play.port.slow = slow
    assert play.scheduler.ensure(request, 0)
    play.port.deliver()
    assert play.port.grants
    if role == "both":
        play.port.ready(play.only_want(), spec(4))
    else:
        play.port.present(play.only_want())
    play.idle(tokens=1)
    play.port.deliver()
    assert not play.port.grants
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")


def test_fetch_and_reservation_that_both_answer_leave_nothing_behind() -> None:
    play = Play()
    request = play.request(feature())
    play.scheduler.ensure(request, 0)
    fetch = play.only_want()
    play.now = 1.9
    assert not play.scheduler.ensure(request, 0), "near its deadline it asks for pages"
    play.port.absent(fetch)
    assert play.scheduler.ensure(request, 0)
    assert len(play.port.grants) == 2
    (order,) = play.encode(request).saves
    play.saved(order.ticket)
    play.idle(tokens=1)
    play.scheduler.finished(request)
    assert not play.port.open_tickets
    assert not play.held


@pytest.mark.parametrize("kind", ["loaded", "saved", "nonsense"])
def test_answer_to_no_order_is_ignored(kind: str) -> None:
    play = Play()
    play.holds.on_answer(Answer(0, kind, 99, done=True))
    play.idle(tokens=1)
    assert not play.held


def test_second_answer_of_a_rank_ends_nothing_twice() -> None:
    play = Play(ranks=2)
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    play.scheduler.ensure(request, 0)
    (order,) = play.load(request).loads
    play.scheduler.finished(request)
    for _ in range(3):
        play.loaded(order.transfer, rank=0)
    play.idle(tokens=1)
    assert play.port.leases
    play.loaded(order.transfer, rank=1)
    play.loaded(order.transfer, rank=1)
    play.idle(tokens=1)
    assert not play.held


def test_pages_of_a_rank_that_is_gone_are_never_given_up() -> None:
    play = Play(ranks=2)
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    play.scheduler.ensure(request, 0)
    (order,) = play.load(request).loads
    play.loaded(order.transfer, rank=0)
    play.hub.ready = False
    play.holds.on_answer(Answer(1, "gone"))
    play.scheduler.finished(request)
    play.idle(tokens=1)
    assert play.port.leases, "it may still be copying"


def test_saves_go_on_being_taken_in_after_a_rank_is_gone() -> None:
    play = Play(ranks=2)
    request = play.request(feature())
    play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want())
    play.scheduler.ensure(request, 0)
    (order,) = play.encode(request).saves
    play.hub.ready = False
    play.saved(order.ticket)
    assert play.port.filled_items == [("a", spec(4))]


def test_item_shared_by_two_loads_is_released_after_both() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    orders = []
    for name in ("1", "2"):
        request = play.request(feature(), name=name)
        assert play.scheduler.ensure(request, 0)
        orders += play.load(request).loads
        play.idle(tokens=1, free_encoder_mm_hashes=["a"])
        play.scheduler.finished(request)
    assert len(play.port.history) == 1, "the second shares the first one's lease"
    play.loaded(orders[1].transfer)
    play.idle(tokens=1)
    assert play.port.leases
    play.loaded(orders[0].transfer)
    play.idle(tokens=1)
    assert not play.port.open_tickets
    assert not play.held


def test_item_that_the_tier_evicted_after_its_last_holder_is_fetched_anew() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    first = play.request(feature(), name="1")
    assert play.scheduler.ensure(first, 0)
    play.scheduler.finished(first)
    del play.port.items["a"]
    second = play.request(feature(), name="2")
    assert not play.scheduler.ensure(second, 0)
    assert not play.scheduler.has("a")


def test_consumer_reserves_nothing() -> None:
    play = Play(role="consumer", max_deferred=0)
    request = play.request(feature())
    assert play.scheduler.ensure(request, 0)
    assert play.port.history[0].save_nbytes == 0
    play.port.absent(play.only_want(), MissReason.UNREACHABLE)
    assert not play.encode(request).saves
    assert not play.port.grants
