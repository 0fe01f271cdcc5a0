"""What a prototype in real vLLM has shown of the contract, as far as no other test shows it.

Each test names the finding it stands for. What needs ranks and an engine that really run is in
`test_engine_findings.py`.
"""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

import pytest
from vllm_play import Output, Play, feature, spec

from ec_s3.config import ECConfig
from ec_s3.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_engine_without_all_ranks_says_so_once_and_a_request_without_media_waits_for_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rank that cannot map turns the cache off; it must not end the engine at the first load."""
    play = Play()
    play.hub.ready = False
    play.port.items["a"] = spec(4)
    bare = play.request(feature(media=False), name="bare")
    for i in range(5):
        assert play.scheduler.ensure(play.request(feature(), name=f"r{i}"), 0)
        assert not play.scheduler.has("a")
        assert not play.scheduler.ensure(bare, 0)
        play.idle(tokens=1)
    assert not play.port.history
    assert caplog.text.count("not mapped the host memory") == 1
    play.hub.ready = True
    assert play.scheduler.ensure(bare, 0)
    assert play.scheduler.has("a")


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_nothing_is_reported_through_vllms_worker_metadata() -> None:
    """It is lost on idle steps, for V1 producers and with other executors than `mp`."""
    if not os.environ.get("REQUIRE_VLLM"):
        pytest.importorskip("vllm", exc_type=ImportError)
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    from ec_s3.connector import ECS3Connector

    for name in (
        "build_connector_worker_meta",
        "update_connector_output",
        "has_pending_push_work",
    ):
        ours = inspect.getattr_static(ECS3Connector, name)
        assert ours is inspect.getattr_static(ECConnectorBase, name), name


def test_load_of_a_request_that_is_preempted_in_the_same_step_is_still_delivered() -> None:
    """vLLM counts the item as cached from the moment of the allocation."""
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.has("a")
    play.scheduler.allocated(request, 0)
    other = Output(scheduled_encoder_inputs={}, total_num_scheduled_tokens=1)
    (order,) = play.scheduler.build_meta(other).loads
    play.loaded(order.transfer)
    play.idle(tokens=1)
    assert not play.port.leases


def test_deferral_is_short_by_default_as_waiting_costs_a_core() -> None:
    config = ECConfig()
    assert (config.fetch_timeout, config.metadata_timeout) == (2.0, 30.0)
    assert config.max_deferred_requests == 16


def test_item_that_leaves_the_tier_between_the_two_questions_is_still_held() -> None:
    """With two items and room for one, each fetch evicted what the other request waited for."""
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(feature())
    assert play.scheduler.ensure(request, 0)
    del play.port.items["a"]
    for _ in range(3):
        assert play.scheduler.has("a")
        play.idle(tokens=1)
        assert play.port.leases
        assert play.scheduler.ensure(request, 0)
    assert len(play.port.history) == 1


def test_answer_is_for_the_request_asked_about_last_and_for_no_other() -> None:
    """`has_cache_item` names no request; rows that are too many are answered silently wrong."""
    play = Play()
    play.port.items["a"] = spec(4)
    assert not play.scheduler.has("a"), "nobody has been asked about"
    first = play.request(feature(rows=4), name="1")
    assert play.scheduler.ensure(first, 0)
    assert play.scheduler.ensure(play.request(feature(rows=6), name="2"), 0)
    assert not play.scheduler.has("a"), "the second one expects six rows"
    assert play.scheduler.ensure(play.request(name="text"), 0)
    assert not play.scheduler.has("a")
    assert play.scheduler.ensure(first, 0)
    assert play.scheduler.has("a")
    play.idle(tokens=1)
    assert not play.scheduler.has("a"), "a new step has begun"
    assert play.scheduler.ensure(first, 0)
    play.scheduler.finished(first)
    assert not play.scheduler.has("a")


def test_item_without_media_is_waited_for_however_far_away_it_is() -> None:
    """Nothing can be done about it later: a no at its chunk would end the engine."""
    play = Play(window=8)
    request = play.request(feature("a", offset=1_000, media=False))
    assert not play.scheduler.ensure(request, 0)


def test_running_request_is_deferred_when_its_next_chunk_reaches_a_missing_item() -> None:
    play = Play(window=8)
    request = play.request(feature("a", offset=20))
    for computed in (0, 8):
        assert play.scheduler.ensure(request, computed), "text chunks run while it is fetched"
        play.idle(tokens=8)
    play.now = 1.0
    assert not play.scheduler.ensure(request, 16)
    play.port.ready(play.only_want(), spec(4))
    assert play.scheduler.ensure(request, 16)
    assert play.scheduler.has("a")


class _Untouchable:
    """Items of a request that may be counted and no more."""

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[object]:
        raise AssertionError("an item was looked at")


def test_decoding_request_costs_the_same_whatever_the_number_of_its_items() -> None:
    play = Play(window=1_000)
    items = [feature(f"i{i}", offset=4 * i) for i in range(40)]
    play.port.items.update({f"i{i}": spec(4) for i in range(40)})
    request = play.request(*items)
    assert play.scheduler.ensure(request, 0)
    assert play.scheduler.ensure(request, 160)
    asked = len(play.port.history)
    seen: Any = play.scheduler._requests["r"]
    seen.items = _Untouchable()
    for computed in range(160, 260):
        assert play.scheduler.ensure(request, computed)
        play.idle(tokens=1)
    assert len(play.port.history) == asked
    assert not play.port.leases


def test_lack_of_room_is_no_absence_and_is_forgotten_with_its_request() -> None:
    """Three kinds of no: absent in the store, no room now, given up for this request."""
    play = Play()
    crowded = play.request(feature(), name="1")
    play.scheduler.ensure(crowded, 0)
    play.port.absent(play.only_want(), MissReason.NO_ROOM)
    assert play.scheduler.ensure(crowded, 0)
    play.scheduler.finished(crowded)
    assert not play.scheduler.ensure(play.request(feature(), name="2"), 0), "asked for anew"
    assert len(play.port.wants) == 1


def test_giving_up_is_for_one_request_and_hides_the_item_from_no_other() -> None:
    play = Play()
    slow = play.request(feature(), name="slow")
    play.scheduler.ensure(slow, 0)
    ticket = play.only_want()
    play.now = 2.0
    assert play.scheduler.ensure(slow, 0), "past its deadline"
    late = play.request(feature(), name="late")
    assert not play.scheduler.ensure(late, 0), "has a deadline of its own"
    assert len(play.port.history) == 1, "and shares the fetch"
    play.port.ready(ticket, spec(4))
    assert play.scheduler.ensure(late, 0)
    assert play.scheduler.has("a")
