"""The scheduler part, cell by cell of the item's life."""

from __future__ import annotations

import pytest
from vllm_play import Output, Play, feature, spec

from ec_s3.connector.link import Answer
from ec_s3.connector.scheduler import MIRROR_ITEMS, NAP_SECONDS
from ec_s3.types import MissReason


def test_unknown_item_is_fetched_and_its_request_waits() -> None:
    play = Play()
    request = play.request(feature())
    assert not play.scheduler.ensure(request, 0)
    assert [want.identifier for want in play.port.history] == ["a"]
    assert not play.scheduler.has("a")
    assert not play.scheduler.ensure(request, 0)
    assert len(play.port.history) == 1


def test_request_that_waits_is_looked_at_again_when_something_happens_or_a_nap_later() -> None:
    play = Play()
    request, other = play.request(feature()), play.request(feature("b"), name="other")
    assert not play.scheduler.ensure(request, 0)
    play.hub.ready = False
    assert not play.scheduler.ensure(request, 0), "nothing has been said yet"
    assert play.scheduler.ensure(other, 0)
    play.now += NAP_SECONDS
    assert play.scheduler.ensure(request, 0)

    play.hub.ready = True
    asleep = play.request(feature("c"), name="asleep")
    assert not play.scheduler.ensure(asleep, 0)
    play.port.absent(next(t for t, want in play.port.wants.items() if want.identifier == "c"))
    assert play.scheduler.ensure(asleep, 0)


def test_item_in_host_memory_never_defers() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")


def test_load_is_ordered_with_the_leased_extents_and_released_by_every_rank() -> None:
    play = Play(ranks=2)
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    assert play.scheduler.ensure(request, 0)
    (order,) = play.load(request).loads
    (ticket,) = play.port.leases
    assert (order.identifier, order.spec) == ("a", spec(4))
    assert order.extents == play.port.extents_of(ticket)
    play.scheduler.finished(request)
    play.loaded(order.transfer, rank=0)
    play.idle()
    assert play.port.leases, "a rank may still be copying"
    play.loaded(order.transfer, rank=1)
    play.idle()
    assert not play.port.open_tickets
    assert not play.held


def test_yes_is_repeatable_until_the_step_allocates() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    for _ in range(3):  # vLLM may fail to find KV blocks after a yes
        assert play.scheduler.ensure(request, 0)
        assert play.scheduler.has("a")
        assert not play.idle(tokens=1).loads
    assert play.scheduler.ensure(request, 0)
    assert len(play.load(request).loads) == 1


def test_absent_item_is_encoded_and_saved_into_the_reservation_that_came_with_the_answer() -> None:
    play = Play()
    request = play.request(feature())
    assert not play.scheduler.ensure(request, 0)
    ticket = play.only_want()
    play.port.absent(ticket)
    assert play.scheduler.ensure(request, 0)
    assert not play.scheduler.has("a")
    (order,) = play.encode(request).saves
    assert (order.ticket, order.spec, order.extents) == (
        ticket,
        spec(4),
        play.port.extents_of(ticket),
    )
    play.saved(ticket)
    assert play.port.filled_items == [("a", spec(4))], "ready without another engine step"
    play.scheduler.finished(request)
    play.idle()
    assert not play.port.open_tickets
    assert not play.held


def test_item_saved_a_moment_ago_is_found_by_the_next_request() -> None:
    play = Play()
    first = play.request(feature())
    play.scheduler.ensure(first, 0)
    play.port.absent(play.only_want())
    play.scheduler.ensure(first, 0)
    (order,) = play.encode(first).saves
    play.saved(order.ticket)
    play.idle(tokens=1, free_encoder_mm_hashes=["a"])
    second = play.request(feature(), name="s")
    assert play.scheduler.ensure(second, 0)
    assert play.scheduler.has("a")


def test_item_that_is_being_saved_is_waited_for_by_the_next_request() -> None:
    play = Play()
    order = play.save_of_first()
    second = play.request(feature(), name="s")
    assert not play.scheduler.ensure(second, 0)
    play.port.absent(play.only_want())
    assert not play.scheduler.ensure(second, 0), "the bucket cannot have it yet, but a rank has"
    play.saved(order.ticket)
    play.idle()
    assert play.scheduler.ensure(second, 0)
    assert play.scheduler.has("a")


@pytest.mark.parametrize("cause", ["not done", "no answer", "not a consumer"])
def test_item_whose_save_comes_to_nothing_is_encoded_by_the_next_request(cause: str) -> None:
    play = Play(role="producer" if cause == "not a consumer" else "both")
    order = play.save_of_first()
    second = play.request(feature(), name="s")
    assert not play.scheduler.ensure(second, 0)
    play.port.absent(play.only_want())
    if cause == "not done":
        assert not play.scheduler.ensure(second, 0)
        play.saved(order.ticket, done=False)
        play.idle()
    elif cause == "no answer":
        assert not play.scheduler.ensure(second, 0)
        play.now = 2.0
    assert play.scheduler.ensure(second, 0)
    assert not play.scheduler.has("a")
    assert len(play.encode(second).saves) == 1


@pytest.mark.parametrize("cause", ["not done", "not scheduled"])
def test_save_that_does_not_happen_gives_its_pages_back(cause: str) -> None:
    play = Play()
    request = play.request(feature())
    play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want())
    play.scheduler.ensure(request, 0)
    if cause == "not done":
        (order,) = play.encode(request).saves
        play.saved(order.ticket, done=False)
    else:
        play.scheduler.allocated(request, 0)
        assert not play.scheduler.build_meta(Output()).saves
    play.scheduler.finished(request)
    play.idle()
    assert not play.port.filled_items
    assert not play.port.open_tickets


def test_request_is_never_deferred_beyond_its_deadline_and_its_encode_is_still_saved() -> None:
    play = Play()
    request = play.request(feature())
    assert not play.scheduler.ensure(request, 0)
    fetch = play.only_want()
    play.now = 1.99
    assert not play.scheduler.ensure(request, 0)
    play.now = 2.0
    assert play.scheduler.ensure(request, 0)
    play.now = 100.0
    assert play.scheduler.ensure(request, 0), "the deadline is never extended"
    (order,) = play.encode(request).saves
    assert order.ticket != fetch
    play.saved(order.ticket)
    play.scheduler.finished(request)
    play.idle()
    assert play.port.filled_items == [("a", spec(4))]
    assert not play.port.open_tickets


def test_late_fetch_after_giving_up_serves_if_it_arrives_before_the_encode() -> None:
    play = Play()
    request = play.request(feature())
    play.scheduler.ensure(request, 0)
    ticket = play.only_want()
    play.now = 2.0
    assert play.scheduler.ensure(request, 0)
    play.port.ready(ticket, spec(4))
    assert play.scheduler.ensure(request, 0)
    (order,) = play.load(request).loads
    play.loaded(order.transfer)
    play.scheduler.finished(request)
    play.idle()
    assert not play.port.open_tickets


@pytest.mark.parametrize("rows", [3, 5])
def test_item_with_other_rows_is_encoded_and_hides_nothing_from_others(rows: int) -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    wrong = play.request(feature(rows=rows), name="wrong")
    assert play.scheduler.ensure(wrong, 0)
    assert not play.scheduler.has("a")
    right = play.request(feature(rows=4), name="right")
    assert play.scheduler.ensure(right, 0)
    assert play.scheduler.has("a")


def test_item_of_another_dtype_or_rank_is_never_promised() -> None:
    for found in (spec(4, dtype="float16"), spec(4).__class__("float32", (4, 2, 4))):
        play = Play()
        play.port.items["a"] = found
        assert play.scheduler.ensure(play.request(feature()), 0)
        assert not play.scheduler.has("a")


def test_aborted_request_drops_its_fetch_and_a_shared_one_goes_on() -> None:
    play = Play()
    first, second = play.request(feature(), name="1"), play.request(feature(), name="2")
    play.scheduler.ensure(first, 0)
    play.scheduler.ensure(second, 0)
    assert len(play.port.history) == 1
    play.scheduler.finished(first)
    assert play.port.wants, "the second still waits"
    play.scheduler.finished(second)
    assert not play.port.open_tickets


def test_answer_that_comes_after_the_abort_is_given_back() -> None:
    play = Play()
    request = play.request(feature())
    play.scheduler.ensure(request, 0)
    ticket = play.only_want()
    play.port.absent(ticket)
    play.scheduler.finished(request)
    play.idle()
    assert not play.port.open_tickets


def test_two_items_with_room_for_one_do_not_evict_each_other() -> None:
    play = Play()
    request = play.request(feature("a"), feature("b", offset=4))
    play.scheduler.ensure(request, 0)
    a, b = sorted(play.port.wants)
    play.port.ready(a, spec(4))
    play.port.absent(b, MissReason.NO_ROOM)
    for _ in range(5):
        assert play.scheduler.ensure(request, 0)
    assert len(play.port.history) == 2, "one fetch per request and item"
    assert play.scheduler.has("a")
    assert not play.scheduler.has("b")


def test_only_items_that_the_next_chunk_can_reach_are_waited_for() -> None:
    play = Play(window=16)
    request = play.request(feature("a", offset=0), feature("b", offset=40))
    play.port.items["a"] = spec(4)
    assert play.scheduler.ensure(request, 0), "b is far away"
    assert {want.identifier for want in play.port.history} == {"a", "b"}, "but on its way"
    assert not play.scheduler.ensure(request, 30), "now it is near"


def test_computed_items_need_nothing() -> None:
    play = Play()
    request = play.request(feature("a", offset=0), feature("b", offset=40))
    assert play.scheduler.ensure(request, 44)
    assert not play.port.history


def test_item_in_vllms_own_cache_is_not_fetched() -> None:
    play = Play()
    first = play.request(feature(), name="1")
    play.scheduler.ensure(first, 0)
    play.port.absent(play.only_want())
    play.scheduler.ensure(first, 0)
    play.encode(first)
    play.scheduler.finished(first)
    assert play.scheduler.ensure(play.request(feature(), name="2"), 0)
    assert len(play.port.history) == 1
    play.idle(tokens=1, free_encoder_mm_hashes=["a"])
    assert not play.scheduler.ensure(play.request(feature(), name="3"), 0), "vLLM has let it go"


def test_at_most_so_many_requests_wait_and_the_next_goes_to_the_encoder_and_is_saved() -> None:
    play = Play(max_deferred=2)
    for i in range(2):
        assert not play.scheduler.ensure(play.request(feature(f"i{i}"), name=f"r{i}"), 0)
    third = play.request(feature("i2"), name="r2")
    assert play.scheduler.ensure(third, 0)
    assert len(play.encode(third).saves) == 1
    play.scheduler.finished(play.request(name="r0"))
    assert not play.scheduler.ensure(play.request(feature("i3"), name="r3"), 0)


def test_salted_requests_share_nothing_with_others() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    assert not play.scheduler.ensure(play.request(feature(), name="1", salt="t1"), 0)
    assert not play.scheduler.ensure(play.request(feature(), name="2", salt="t2"), 0)
    assert len({want.identifier for want in play.port.history}) == 2
    assert play.scheduler.ensure(play.request(feature(), name="3"), 0)


def test_nothing_is_promised_or_fetched_before_every_rank_has_the_memory() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    play.hub.ready = False
    request = play.request(feature())
    assert play.scheduler.ensure(request, 0)
    assert not play.scheduler.has("a")
    assert not play.port.history


def test_rank_that_goes_away_ends_all_promises_and_waiting() -> None:
    play = Play()
    waiting = play.request(feature("a"), name="1")
    assert not play.scheduler.ensure(waiting, 0)
    play.port.items["b"] = spec(4)
    ready = play.request(feature("b"), name="2")
    assert play.scheduler.ensure(ready, 0)
    play.hub.ready = False
    play.holds.on_answer(Answer(0, "gone"))
    assert play.scheduler.ensure(waiting, 0)
    assert play.scheduler.ensure(ready, 0)
    assert not play.scheduler.has("b")


def test_engine_that_dies_keeps_the_promises_it_made() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    assert play.scheduler.ensure(request, 0)
    play.port.alive = False
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a"), "the bytes are in memory, and nobody reuses them"
    assert play.scheduler.ensure(play.request(feature("b"), name="2"), 0)


def test_idle_step_keeps_its_loads_for_the_next_one() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    play.scheduler.ensure(request, 0)
    play.scheduler.has("a")
    play.scheduler.allocated(request, 0)
    assert not play.idle().loads
    assert len(play.idle(tokens=1).loads) == 1


def test_idle_step_that_only_waits_lets_the_fetch_run() -> None:
    play = Play()
    play.scheduler.ensure(play.request(feature()), 0)
    play.idle(tokens=1)
    assert not play.pauses
    play.scheduler.ensure(play.request(feature()), 0)
    play.idle()
    assert len(play.pauses) == 1
    play.idle()
    assert len(play.pauses) == 1


# -- roles -----------------------------------------------------------------------------------


def test_producer_asks_only_whether_the_bucket_has_it_and_then_skips_the_encode() -> None:
    play = Play(role="producer")
    request = play.request(feature())
    assert not play.scheduler.ensure(request, 0)
    assert play.port.history[0].probe
    play.port.present(play.only_want())
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")
    play.scheduler.allocated(request, 0)
    metadata = play.scheduler.build_meta(Output())
    assert not metadata.loads
    assert not metadata.saves
    play.scheduler.finished(request)
    assert not play.port.open_tickets


def test_producer_saves_what_the_bucket_lacks() -> None:
    play = Play(role="producer")
    request = play.request(feature())
    play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(request, 0)
    assert not play.scheduler.has("a")
    assert len(play.encode(request).saves) == 1


def test_item_that_two_requests_of_a_step_bring_is_saved_once_and_as_an_encode() -> None:
    """As a save from vLLM's cache it would not tell how long its encode took."""
    play = Play(role="producer")
    first, second = (play.request(feature(), name=name) for name in ("first", "second"))
    play.scheduler.ensure(first, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(first, 0)
    play.scheduler.allocated(first, 0)
    assert play.scheduler.ensure(second, 0)
    (order,) = play.scheduler.build_meta(Output(scheduled_encoder_inputs={"first": [0]})).saves
    assert not order.cached


def test_consumer_loads_and_never_saves() -> None:
    play = Play(role="consumer")
    request = play.request(feature("a"), feature("b", offset=4))
    play.scheduler.ensure(request, 0)
    a, b = sorted(play.port.wants)
    play.port.ready(a, spec(4))
    play.port.absent(b)
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")
    assert not play.encode(request, 1).saves


@pytest.mark.parametrize(
    "item",
    [
        feature("r-image-0"),
        feature("a", modality="prompt_embeds"),
        feature("a", rows=0, length=3),
    ],
    ids=["request-local", "embeddings", "no rows"],
)
def test_untouched_items_are_neither_asked_for_nor_saved(item: object) -> None:
    play = Play()
    request = play.request(item)  # type: ignore[arg-type]  # parametrised
    assert play.scheduler.ensure(request, 0)
    assert not play.scheduler.has(request.mm_features[0].identifier)
    assert not play.encode(request).saves
    assert not play.port.history


# -- requests without media ------------------------------------------------------------------


def test_known_item_without_media_is_fetched_fresh_held_and_loaded() -> None:
    play = Play(role="consumer")
    request = play.request(feature(media=False))
    assert not play.scheduler.ensure(request, 0)
    assert play.port.history[0].fresh
    play.port.ready(play.only_want(), spec(4))
    assert play.scheduler.ensure(request, 0)
    (order,) = play.load(request).loads
    play.loaded(order.transfer)
    play.idle(tokens=1)
    assert play.port.leases, "held until its tokens are computed"
    assert play.scheduler.ensure(request, 4)
    assert not play.port.leases


def test_absent_item_without_media_is_asked_for_again_and_fails_alone_at_its_deadline() -> None:
    play = Play(role="consumer")
    lost, fine = play.request(feature("x", media=False)), play.request(feature("y"), name="f")
    play.port.items["y"] = spec(4)
    asked = 0
    while play.now < 30.0:
        assert not play.scheduler.ensure(lost, 0)
        assert play.scheduler.ensure(fine, 0)
        for ticket in list(play.port.wants):
            asked += 1
            play.port.absent(ticket)
        play.idle()
        play.now += 0.1
    assert asked > 10
    assert not play.scheduler.take_unavailable()
    assert not play.scheduler.ensure(lost, 0)
    assert play.scheduler.take_unavailable() == {"r"}
    assert not play.scheduler.take_unavailable()
    play.scheduler.finished(lost)
    assert not play.port.wants


@pytest.mark.parametrize("rows", [3, 5])
def test_item_without_media_and_with_other_rows_fails_at_once(rows: int) -> None:
    play = Play(role="consumer")
    play.port.items["a"] = spec(rows)
    assert not play.scheduler.ensure(play.request(feature(media=False)), 0)
    assert play.scheduler.take_unavailable() == {"r"}
    assert not play.port.leases


@pytest.mark.parametrize("reason", [MissReason.DISABLED, MissReason.DELETED])
def test_item_without_media_that_an_operator_forbids_fails_at_once(reason: MissReason) -> None:
    play = Play()
    request = play.request(feature(media=False))
    assert not play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want(), reason)
    assert not play.scheduler.ensure(request, 0)
    assert play.scheduler.take_unavailable() == {"r"}


def test_item_without_media_that_never_fits_fails_at_once() -> None:
    play = Play(role="consumer")
    request = play.request(feature(media=False))
    play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want(), MissReason.TOO_LARGE)
    assert not play.scheduler.ensure(request, 0)
    assert play.scheduler.take_unavailable() == {"r"}


def test_item_without_media_at_a_producer_fails_at_once() -> None:
    play = Play(role="producer")
    assert not play.scheduler.ensure(play.request(feature(media=False)), 0)
    assert play.scheduler.take_unavailable() == {"r"}


def test_request_without_media_holds_nothing_while_one_of_its_items_is_missing() -> None:
    play = Play(role="consumer")
    request = play.request(feature("a", media=False), feature("b", offset=4, media=False))
    play.scheduler.ensure(request, 0)
    a, b = sorted(play.port.wants)
    play.port.ready(a, spec(4))
    play.port.absent(b, MissReason.NO_ROOM)
    assert not play.scheduler.ensure(request, 0)
    assert not play.port.leases, "others may need the room"


def test_vllms_own_cache_is_not_trusted_for_a_request_without_media() -> None:
    play = Play()
    first = play.request(feature(), name="1")
    play.scheduler.ensure(first, 0)
    play.port.absent(play.only_want())
    play.scheduler.ensure(first, 0)
    play.encode(first)
    assert not play.scheduler.ensure(play.request(feature(media=False), name="2"), 0)


def test_requests_without_media_do_not_count_against_the_limit() -> None:
    play = Play(max_deferred=1)
    for i in range(5):
        item = feature(f"i{i}", media=False)
        assert not play.scheduler.ensure(play.request(item, name=f"m{i}"), 0)
    assert not play.scheduler.ensure(play.request(feature("x"), name="x"), 0)


def test_ready_item_without_media_never_fails_however_long_vllm_finds_no_room() -> None:
    play = Play(role="consumer")
    request = play.request(feature(media=False))
    play.scheduler.ensure(request, 0)
    play.port.ready(play.only_want(), spec(4))
    while play.now < 100.0:
        assert play.scheduler.ensure(request, 0)
        assert play.scheduler.has("a")
        play.idle(tokens=1)
        play.now += 10.0
    assert not play.scheduler.take_unavailable()


def test_preempted_request_without_media_gets_its_item_again_with_a_new_deadline() -> None:
    play = Play(role="consumer")
    request = play.request(feature(media=False))
    play.scheduler.ensure(request, 0)
    play.port.ready(play.only_want(), spec(4))
    assert play.scheduler.ensure(request, 0)
    play.loaded(play.load(request).loads[0].transfer)
    play.now = 60.0
    assert play.scheduler.ensure(request, 5), "it decodes"
    play.idle(tokens=1)
    assert not play.port.open_tickets
    assert not play.scheduler.ensure(request, 0), "preempted: everything anew"
    play.port.ready(play.only_want(), spec(4))
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")
    assert not play.scheduler.take_unavailable()


def test_two_requests_without_media_take_turns_when_only_one_of_them_fits() -> None:
    play = Play(role="consumer")
    first = play.request(feature("a", media=False), feature("b", offset=4, media=False), name="1")
    second = play.request(feature("c", media=False), feature("d", offset=4, media=False), name="2")
    room = 2
    done: list[str] = []
    waiting = {"1": first, "2": second}
    while waiting and play.now < 29.0:
        for name, request in list(waiting.items()):
            if play.scheduler.ensure(request, 0):
                assert play.scheduler.has(request.mm_features[0].identifier)
                assert play.scheduler.has(request.mm_features[1].identifier)
                play.scheduler.finished(waiting.pop(name))
                done.append(name)
        # The engine serves in the worst order: one of each request, and then there is no room.
        for ticket in sorted(play.port.wants, key=lambda t: play.port.wants[t].identifier in "bd"):
            if len(play.port.leases) < room:
                play.port.ready(ticket, spec(4))
            else:
                play.port.absent(ticket, MissReason.NO_ROOM)
        play.idle(tokens=1)
        play.now += 0.05
    assert done == ["1", "2"]
    assert play.now < 3.0
    assert len(play.port.history) < 20, "a pause lies between two tries"
    play.idle()
    assert not play.port.open_tickets


def test_absence_that_another_request_holds_is_asked_for_again() -> None:
    play = Play(role="consumer")
    media = play.request(feature(), name="m")
    play.scheduler.ensure(media, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(media, 0)
    request = play.request(feature(media=False))
    for _ in range(3):
        assert not play.scheduler.ensure(request, 0)
        play.idle(tokens=1)
        play.now += 1.0
    play.port.ready(play.only_want(), spec(4))
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")


def test_rank_that_goes_away_within_a_step_does_not_send_an_item_without_media_to_the_encoder() -> (
    None
):
    play = Play(role="consumer")
    request = play.request(feature(media=False))
    play.scheduler.ensure(request, 0)
    play.port.ready(play.only_want(), spec(4))
    assert play.scheduler.ensure(request, 0)
    play.hub.ready = False
    assert play.scheduler.has("a")
    assert len(play.load_of(request)) == 1


def test_identifier_that_a_request_uses_for_two_sizes_fails_it_when_it_has_no_media() -> None:
    play = Play(role="consumer")
    play.port.items["a"] = spec(6)
    request = play.request(feature("a", rows=4, media=False), feature("a", offset=4, rows=6))
    request.mm_features[1].data = request.mm_features[0].data
    assert not play.scheduler.ensure(request, 4), "the first item is computed already"
    assert play.scheduler.take_unavailable() == {"r"}


def test_failed_request_is_reported_until_vllm_has_ended_it_and_its_name_is_free_again() -> None:
    play = Play(role="producer")
    request = play.request(feature(media=False))
    for _ in range(2):
        assert not play.scheduler.ensure(request, 0)
        assert play.scheduler.take_unavailable() == {"r"}
    assert not play.scheduler.ensure(request, 0)
    play.scheduler.finished(request)
    play.port.items["a"] = spec(4)
    assert not play.scheduler.take_unavailable(), "a new request may have the name"


def test_reused_request_name_starts_anew() -> None:
    play = Play()
    first = play.request(feature("a"))
    play.scheduler.ensure(first, 0)
    play.now = 5.0
    assert play.scheduler.ensure(first, 0)
    play.scheduler.finished(first)
    second = play.request(feature("b"))
    assert not play.scheduler.ensure(second, 0)
    assert [want.identifier for want in play.port.wants.values()] == ["b"]


def test_streaming_request_waits_for_the_media_it_gains_and_keeps_what_it_has() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature("a"))
    assert play.scheduler.ensure(request, 0)
    play.now = 10.0
    request.mm_features.append(feature("b", offset=8))
    assert not play.scheduler.ensure(request, 0), "with a deadline of its own"
    assert play.scheduler.has("a")
    assert [want.identifier for want in play.port.history] == ["a", "b"]
    play.now = 12.0
    assert play.scheduler.ensure(request, 0)
    play.scheduler.finished(request)
    assert not play.port.open_tickets


def test_error_in_ensure_leaves_no_earlier_request_to_answer_for() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    assert play.scheduler.ensure(play.request(feature("a"), name="1"), 0)
    broken = play.request(feature("a"), name="2")
    broken.mm_features[0].mm_position = None  # type: ignore[assignment]  # a bug somewhere
    with pytest.raises(AttributeError):
        play.scheduler.ensure(broken, 0)
    assert not play.scheduler.has("a"), "a yes to the first one would not be loaded for the second"


def test_planned_load_outlives_an_error_in_the_hook_that_reports_it() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")
    play.scheduler.allocated(request, 0)
    with pytest.raises(TypeError):
        play.scheduler.build_meta(Output(free_encoder_mm_hashes=5))  # type: ignore[arg-type]  # a bug somewhere
    assert len(play.scheduler.planned(Output()).loads) == 1
    assert not play.idle(tokens=1).loads


def test_places_of_requests_that_vllm_asks_for_no_more_are_free_after_their_deadline() -> None:
    play = Play(max_deferred=1)
    assert not play.scheduler.ensure(play.request(feature("a"), name="1"), 0)
    assert play.scheduler.ensure(play.request(feature("b"), name="2"), 0)
    play.now = 2.5
    assert not play.scheduler.ensure(play.request(feature("c"), name="3"), 0)


def test_encode_is_saved_although_the_absence_came_with_no_reservation() -> None:
    play = Play()
    lost = play.request(feature(media=False), name="1")
    play.scheduler.ensure(lost, 0)
    request = play.request(feature(), name="2")
    assert not play.scheduler.ensure(request, 0), "both wait for one fetch"
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(request, 0)
    assert len(play.encode(request).saves) == 1


def test_mirror_of_vllms_cache_stays_bounded_though_vllm_forgets_in_silence() -> None:
    play = Play()
    for i in range(20):
        request = play.request(feature(f"i{i}"), name=f"r{i}")
        play.scheduler.ensure(request, 0)
        play.encode(request)
        play.scheduler.finished(request)
    assert len(play.scheduler._mirror) == 20
    play.scheduler._mirror.update((f"x{i}", None) for i in range(MIRROR_ITEMS))
    request = play.request(feature("new"))
    play.scheduler.ensure(request, 0)
    play.encode(request)
    assert set(play.scheduler._mirror) == {"new"}


def test_item_that_vllm_has_lost_in_silence_is_fetched_again_once_it_was_asked_for() -> None:
    play = Play()
    for name in ("1", "2"):
        request = play.request(feature(), name=name)
        play.scheduler.ensure(request, 0)
        if name == "1":
            play.encode(request)
            play.scheduler.finished(request)
    assert not play.scheduler.has("a"), "vLLM has reset its cache"
    play.idle(tokens=1)
    assert not play.scheduler.ensure(play.request(feature(), name="3"), 0)


def test_item_allocated_in_the_step_that_evicts_it_counts_as_cached() -> None:
    play = Play()
    request = play.request(feature())
    play.scheduler.ensure(request, 0)
    play.scheduler.allocated(request, 0)
    play.idle(tokens=1, free_encoder_mm_hashes=["a"])
    assert play.scheduler.ensure(play.request(feature(), name="2"), 0)


def test_yes_of_an_earlier_step_is_no_promise_any_more() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")
    play.idle(tokens=1)
    play.hub.ready = False
    assert play.scheduler.ensure(request, 0)
    assert not play.scheduler.has("a")
    assert not play.encode(request).loads


def test_lease_of_an_item_with_media_ends_with_its_load() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    assert play.scheduler.ensure(request, 0)
    (order,) = play.load(request).loads
    play.loaded(order.transfer)
    play.idle(tokens=1)
    assert not play.port.leases


def test_request_without_media_leaves_the_pages_of_an_encode_that_will_bring_its_item() -> None:
    play = Play()
    media = play.request(feature(), name="m")
    play.scheduler.ensure(media, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(media, 0)
    request = play.request(feature(media=False))
    assert not play.scheduler.ensure(request, 0)
    (order,) = play.encode(media).saves
    play.saved(order.ticket)
    play.now += 0.3
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")


def test_after_a_pause_the_item_that_was_absent_is_asked_for_first_and_alone() -> None:
    play = Play(role="consumer")
    request = play.request(feature("a", media=False), feature("b", offset=4, media=False))
    play.scheduler.ensure(request, 0)
    for ticket in sorted(play.port.wants):
        if play.port.wants[ticket].identifier == "b":
            play.port.absent(ticket)
    for _ in range(2):
        assert not play.scheduler.ensure(request, 0)
        assert not play.port.wants, "nothing before the pause is over"
        play.now += 0.1
    play.now += 0.1
    assert not play.scheduler.ensure(request, 0)
    assert [want.identifier for want in play.port.wants.values()] == ["b"]
    play.port.ready(play.only_want(), spec(4))
    assert not play.scheduler.ensure(request, 0)
    assert not play.scheduler.ensure(request, 0)
    play.port.ready(play.only_want(), spec(4))
    assert play.scheduler.ensure(request, 0)


def test_turn_passes_on_from_a_request_that_vllm_does_not_ask_for() -> None:
    play = Play(role="consumer")
    requests = [play.request(feature(i, media=False), name=i) for i in "ab"]
    for request in requests:
        play.scheduler.ensure(request, 0)
    for ticket in list(play.port.wants):
        play.port.absent(ticket, MissReason.NO_ROOM)
    for request in requests:
        play.scheduler.ensure(request, 0)
    play.now = 0.5
    assert not play.scheduler.ensure(requests[1], 0)
    assert not play.port.wants, "it is the first one's turn"
    play.now = 1.2
    assert not play.scheduler.ensure(requests[1], 0)
    assert [want.identifier for want in play.port.wants.values()] == ["b"]
    for request in requests:
        play.scheduler.finished(request)
    assert not play.scheduler._judge.turns._asked


def test_item_given_up_is_not_waited_for_again_when_a_streaming_request_gains_another() -> None:
    play = Play()
    request = play.request(feature("a"))
    play.scheduler.ensure(request, 0)
    play.now = 2.0
    assert play.scheduler.ensure(request, 0)
    request.mm_features.append(feature("b", offset=8))
    play.port.items["b"] = spec(4)
    assert play.scheduler.ensure(request, 0)


def test_streaming_request_lets_go_of_what_it_held_before_it_gained_media() -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature("a"))
    assert play.scheduler.ensure(request, 0)
    request.mm_features.append(feature("b", offset=8))
    play.scheduler.ensure(request, 4)
    play.scheduler.finished(request)
    assert not play.port.open_tickets


def test_item_named_like_a_clients_embeddings_is_still_promised_without_media() -> None:
    play = Play(role="consumer")
    play.port.items["a"] = spec(4)
    embeddings, request = feature(), feature(offset=4, media=False)
    assert embeddings.data is not None
    embeddings.data["image_embeds"] = embeddings.data.pop("pixel_values")
    both = play.request(embeddings, request)
    assert play.scheduler.ensure(both, 4)
    assert play.scheduler.has("a")


def test_late_reservation_is_returned_when_its_request_has_gone_on_without_it() -> None:
    play = Play()
    play.port.slow = True
    request = play.request(feature())
    play.scheduler.ensure(request, 0)
    play.now = 2.0
    assert play.scheduler.ensure(request, 0)
    assert not play.encode(request).saves, "the answer is under way"
    play.port.deliver()
    play.idle(tokens=1)
    assert play.port.grants
    play.scheduler.finished(request)
    play.port.deliver()
    play.idle(tokens=1)
    assert not play.port.open_tickets
    assert not play.held
