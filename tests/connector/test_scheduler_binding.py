"""What a request takes, and what may be kept: inputs, salts, clients' names and their wishes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllm_play import Digest, Feature, Output, Play, Request, feature, spec

from ec_s3.connector.media import Kind
from ec_s3.port import Ready
from ec_s3.types import ItemMeta

HASH = "0123456789abcdef" * 4
OURS, OTHERS = "a" * 64, "b" * 64


def bound(play: Play, item: Feature, digest: str | None) -> Digest:
    """Let the inputs of an item be digested to this."""
    known = Digest(digest)
    play.digests[id(item.data)] = known
    return known


def answer(play: Play, *, digest: str) -> None:
    """Answer the one want with an item that was made of inputs with this digest."""
    ticket = play.only_want()
    play.port.ready(ticket, spec(4))
    event = play.port._events.pop()
    assert isinstance(event, Ready)
    play.port._events.append(replace(event, meta=ItemMeta(input_digest=digest)))


def offer(play: Play, *, ours: str | None, theirs: str) -> tuple[Request, Digest]:
    """A request with media, and an item in memory under its identifier."""
    item = feature()
    digest = bound(play, item, ours)
    request = play.request(item)
    assert not play.scheduler.ensure(request, 0)
    answer(play, digest=theirs)
    return request, digest


def test_item_made_of_the_same_inputs_is_taken() -> None:
    play = Play()
    request, _ = offer(play, ours=OURS, theirs=OURS)
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")


def test_item_of_another_picture_under_the_same_name_is_encoded_instead() -> None:
    play = Play()
    request, _ = offer(play, ours=OURS, theirs=OTHERS)
    assert play.scheduler.ensure(request, 0)
    assert not play.scheduler.has("a")
    assert play.stats.snapshot()["given_up_binding"] == 1
    assert not play.encode(request).saves, "what lies there is not replaced"


def test_item_with_digest_is_refused_when_the_own_inputs_cannot_be_digested() -> None:
    play = Play()
    request, _ = offer(play, ours="", theirs=OTHERS)
    assert play.scheduler.ensure(request, 0)
    assert not play.scheduler.has("a")


def test_request_waits_for_the_digest_of_its_inputs_and_no_longer_than_its_deadline() -> None:
    play = Play()
    request, digest = offer(play, ours=None, theirs=OURS)
    assert not play.scheduler.ensure(request, 0)
    digest.done(OURS)
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")

    late = Play()
    request, _ = offer(late, ours=None, theirs=OURS)
    late.now = 2.0
    assert late.scheduler.ensure(request, 0)
    assert not late.scheduler.has("a"), "not known is not agreed"


@pytest.mark.parametrize("strict", [False, True])
def test_item_without_digest_is_taken_unless_a_binding_is_required(*, strict: bool) -> None:
    play = Play(require_binding=strict)
    request, _ = offer(play, ours=OURS, theirs="")
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a") is not strict


def test_request_without_media_takes_the_item_that_it_names() -> None:
    play = Play(require_binding=True)
    request = play.request(feature(media=False))
    assert not play.scheduler.ensure(request, 0)
    answer(play, digest=OTHERS)
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")


def test_saved_item_carries_the_digest_of_its_inputs_even_if_that_is_late() -> None:
    play = Play()
    item = feature()
    digest = bound(play, item, None)
    request = play.request(item)
    assert not play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(request, 0)
    (order,) = play.encode(request).saves
    play.saved(order.ticket)
    assert not play.port.filled_items
    digest.done(OURS)
    assert play.port.filled_items == [("a", spec(4))]
    assert play.port.filled_metas[0].input_digest == OURS


def test_inputs_that_are_covered_or_cached_are_not_digested() -> None:
    play = Play()
    request = play.request(feature(rows=4))
    assert play.scheduler.ensure(request, 4)
    play.scheduler._mirror["a"] = None
    assert play.scheduler.ensure(play.request(feature(), name="other"), 0)
    assert not play.digests


def encode_absent(play: Play, request: Request) -> list[str]:
    """Identifiers that a step saves when the bucket does not have the request's one item."""
    assert not play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(request, 0)
    return [order.identifier for order in play.encode(request).saves]


@pytest.mark.parametrize(
    ("identifier", "kept"),
    [(HASH, True), (HASH * 2, True), (f"adapter:{HASH}", True), ("my-cat", False), ("../x", False)],
)
def test_output_under_a_name_that_a_client_chose_is_looked_up_but_not_kept(
    identifier: str, *, kept: bool
) -> None:
    play = Play(rules={"client_names": False})
    saved = encode_absent(play, play.request(feature(identifier)))
    assert saved == ([identifier] if kept else [])


def test_clients_names_are_kept_where_that_is_wanted() -> None:
    play = Play(rules={"client_names": True})
    assert encode_absent(play, play.request(feature("my-cat"))) == ["my-cat"]


def test_request_that_asks_not_to_be_stored_may_still_be_answered_from_the_cache() -> None:
    play = Play()
    request = play.request(feature())
    request.ec_transfer_params = {"store": False}
    assert encode_absent(play, request) == []

    warm = Play()
    warm.port.items["a"] = spec(4)
    request = warm.request(feature())
    request.ec_transfer_params = {"store": False}
    assert warm.scheduler.ensure(request, 0)
    assert warm.scheduler.has("a")


def test_salted_request_takes_no_part_unless_that_is_wanted() -> None:
    play = Play(rules={"salted": False})
    request = play.request(feature(), salt="tenant")
    assert play.scheduler.ensure(request, 0)
    assert not play.scheduler.has("a")
    assert not play.encode(request).saves
    assert not play.port.history

    lost = play.request(feature(media=False), name="lost", salt="tenant")
    assert not play.scheduler.ensure(lost, 0)
    assert play.scheduler.take_unavailable() == {"lost"}


@pytest.mark.parametrize("identifier", ["request-image-0", "chatcmpl-1-video-2"])
def test_request_local_name_without_media_fails_at_once(identifier: str) -> None:
    play = Play()
    request = play.request(feature(identifier, media=False))
    assert not play.scheduler.ensure(request, 0)
    assert play.scheduler.take_unavailable() == {"r"}
    assert not play.port.history


def test_media_in_vllms_shared_memory_stays_unbound() -> None:
    play = Play()
    item = feature()
    assert item.data is not None
    item.data["monotonic_id"] = item.data["pixel_values"]
    (found,) = play.scheduler._classifier.items(play.request(item))
    assert found.kind is Kind.MEDIA
    assert found.inputs is None


def lost_by_the_bucket(play: Play, *, name: str) -> Output:
    """A request for what vLLM's own cache holds, on an encode-only engine."""
    request = play.request(feature(), name=name)
    assert not play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(request, 0)
    return Output()


def test_encode_only_engine_saves_again_what_the_bucket_has_lost() -> None:
    play = Play(role="producer")
    first = feature()
    bound(play, first, OURS)
    request = play.request(first)
    assert encode_absent(play, request) == ["a"]
    play.scheduler.finished(request)
    again = lost_by_the_bucket(play, name="again")
    (order,) = play.scheduler.build_meta(again).saves
    assert order.cached
    play.saved(order.ticket)
    assert play.port.filled_metas[-1].input_digest == OURS, "of the inputs that it was made of"


def test_what_vllm_was_told_to_skip_is_not_saved_again() -> None:
    """Its tensor never was in vLLM's cache: nobody knows where it would come from."""
    play = Play(role="producer")
    request = play.request(feature())
    assert not play.scheduler.ensure(request, 0)
    play.port.present(play.only_want())
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")
    play.scheduler.allocated(request, 0)
    assert not play.idle(tokens=1).saves
    play.scheduler.finished(request)
    again = lost_by_the_bucket(play, name="again")
    assert not play.scheduler.build_meta(again).saves
