"""Requests without media take what their producer has made, and nothing else of that name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm_play import Digest, Play, Request, feature, spec

from ec_s3.port import Ready
from ec_s3.types import ItemMeta

OURS, OTHERS = "a" * 64, "b" * 64


def named(play: Play, digest: Any) -> Request:
    """A request that only names its item, with what a producer has published."""
    request = play.request(feature(media=False))
    request.ec_transfer_params = {"a": {"item_indices": [0], "input_digest": digest}}
    return request


def answer(play: Play, *, digest: str) -> None:
    """Answer the one want with an item that was made of inputs with this digest."""
    play.port.ready(play.only_want(), spec(4))
    event = play.port._events.pop()
    assert isinstance(event, Ready)
    play.port._events.append(replace(event, meta=ItemMeta(input_digest=digest)))


@pytest.mark.parametrize("wanted", [OURS, "", None, "junk", [OURS]])
def test_named_item_is_taken_when_it_is_the_one_that_was_published(wanted: Any) -> None:
    play = Play(role="consumer")
    request = named(play, wanted)
    assert not play.scheduler.ensure(request, 0)
    answer(play, digest=OURS)
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")


def test_named_item_that_was_made_of_something_else_is_not_taken() -> None:
    play = Play(role="consumer")
    request = named(play, OURS)
    assert not play.scheduler.ensure(request, 0)
    answer(play, digest=OTHERS)
    assert not play.scheduler.ensure(request, 0)
    assert play.scheduler.take_unavailable() == {"r"}
    play.scheduler.finished(request)
    assert play.held == 0


@pytest.mark.parametrize("required", [False, True])
def test_named_item_that_is_bound_to_nothing_is_taken_unless_binding_is_required(
    *, required: bool
) -> None:
    play = Play(role="consumer", require_binding=required)
    request = named(play, OURS)
    assert not play.scheduler.ensure(request, 0)
    answer(play, digest="")
    assert play.scheduler.ensure(request, 0) is not required


def test_encode_only_engine_waits_until_it_can_tell_what_an_item_was_made_of() -> None:
    play = Play(role="producer")
    item = feature()
    play.digests[id(item.data)] = digest = Digest(None)
    request = play.request(item)
    assert not play.scheduler.ensure(request, 0)
    play.port.present(play.only_want())
    assert not play.scheduler.ensure(request, 0)
    digest.done(OURS)
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.finished(request) == {"a": OURS}


def test_item_that_is_saved_can_be_told_with_what_it_was_made_of() -> None:
    play = Play()
    item = feature()
    play.digests[id(item.data)] = Digest(OURS)
    request = play.request(item)
    assert not play.scheduler.ensure(request, 0)
    play.port.absent(play.only_want())
    assert play.scheduler.ensure(request, 0)
    assert len(play.encode(request).saves) == 1
    assert play.scheduler.finished(request) == {"a": OURS}


def test_inputs_that_cannot_be_digested_are_told_as_unknown() -> None:
    play = Play(role="producer")
    request = play.request(feature())
    assert not play.scheduler.ensure(request, 0)
    play.port.present(play.only_want())
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.finished(request) == {"a": ""}
