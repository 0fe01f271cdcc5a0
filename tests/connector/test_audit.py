"""Items that are found and encoded all the same, to be compared with what is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from small_engine import SmallEngine, fill, prompt, reference, until
from vllm_play import Output, Play, feature, spec

from ec_s3.connector.link import Answer

pytestmark = pytest.mark.usefixtures("small_engines")

if TYPE_CHECKING:
    import torch
    from vllm_play import Feature, Request


def play(**setup: Any) -> Play:
    it = Play(audit_fraction=1.0, **setup)
    it.port.items["a"] = spec(4)
    return it


def audited(it: Play, request: Request) -> Any:
    """The order to save `a`, which is found and encoded all the same."""
    assert it.scheduler.ensure(request, 0)
    assert not it.scheduler.has("a")
    (order,) = it.encode(request).saves
    return order


def test_item_that_is_found_is_encoded_and_only_compared() -> None:
    it = play()
    request = it.request(feature())
    order = audited(it, request)
    assert order.spec == spec(4)
    assert it.port.grants[order.ticket] == ("a", spec(4).nbytes)
    it.saved(order.ticket)
    assert it.port.compared == [("a", spec(4))]
    assert it.port.filled_items == []
    it.scheduler.finished(request)
    it.idle()
    assert not it.port.open_tickets
    assert not it.held


def test_answer_stays_the_same_until_the_item_is_scheduled() -> None:
    it = play()
    request = it.request(feature())
    for _ in range(3):  # vLLM may find no room for the encode
        assert it.scheduler.ensure(request, 0)
        assert not it.scheduler.has("a")
        assert not it.idle(tokens=1).saves
    assert audited(it, request)


def test_those_that_share_a_found_item_have_it_encoded_once() -> None:
    it = play()
    first, second = it.request(feature()), it.request(feature(), name="second")
    audited(it, first)
    assert it.scheduler.ensure(first, 0)
    it.idle(tokens=1, free_encoder_mm_hashes=["a"])
    assert it.scheduler.ensure(second, 0)
    assert it.scheduler.has("a")
    assert len(it.load(second).loads) == 1


def test_item_without_media_is_never_audited() -> None:
    it = play()
    request = it.request(feature(media=False))
    assert it.scheduler.ensure(request, 0)
    assert it.scheduler.has("a")
    # Not even where a request with media holds it and has drawn it.
    it = play()
    with_media, without = it.request(feature()), it.request(feature(media=False), name="without")
    assert it.scheduler.ensure(with_media, 0)
    assert it.scheduler.ensure(without, 0)
    assert it.scheduler.has("a")


def test_item_that_is_absent_is_saved_as_always() -> None:
    it = play()
    request = it.request(feature("b"))
    assert not it.scheduler.ensure(request, 0)
    it.port.absent(it.only_want())
    assert it.scheduler.ensure(request, 0)
    assert not it.scheduler.has("b")
    (order,) = it.encode(request).saves
    it.saved(order.ticket)
    assert it.port.filled_items == [("b", spec(4))]
    it.scheduler.finished(request)
    it.idle()
    assert not it.port.open_tickets


@pytest.mark.parametrize("why", ["no room", "other rows", "not to be kept"])
def test_item_that_cannot_be_compared_is_answered_as_always(why: str) -> None:
    it = play()
    it.port.room = why != "no room"
    request = it.request(feature(rows=5 if why == "other rows" else 4))
    if why == "not to be kept":
        request.ec_transfer_params = {"store": False}
    assert it.scheduler.ensure(request, 0)
    if why == "other rows":
        assert not it.scheduler.has("a")
        assert it.encode(request).saves == [], "it replaces nothing"
    else:
        assert it.scheduler.has("a")
        it.scheduler.allocated(request, 0)
        assert len(it.scheduler.build_meta(Output()).loads) == 1
    it.scheduler.finished(request)
    assert it.port.compared == []


def test_item_of_other_inputs_is_not_taken_for_drift() -> None:
    it = play(require_binding=True)
    request = it.request(feature())
    assert it.scheduler.ensure(request, 0)
    assert not it.scheduler.has("a"), "what is stored is bound to nothing"
    assert it.encode(request).saves == []
    assert it.port.compared == []


def test_encode_that_did_not_happen_gives_its_pages_back() -> None:
    it = play()
    request = it.request(feature())
    order = audited(it, request)
    it.holds.on_answer(Answer(0, "saved", order.ticket, done=False))
    it.scheduler.finished(request)
    it.idle()
    assert it.port.compared == []
    assert not it.port.open_tickets


def test_pages_that_are_granted_late_come_with_the_item_all_the_same() -> None:
    it = play()
    it.port.slow = True
    request = it.request(feature())
    assert not it.scheduler.ensure(request, 0)
    it.port.deliver()
    assert it.scheduler.ensure(request, 0)
    assert not it.scheduler.has("a")


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_engine_that_only_encodes_or_only_loads_audits_nothing(role: str) -> None:
    with SmallEngine(role=role, url=None, audit_fraction=1) as engine:
        assert engine.scheduler._setup.audit_fraction == 0


# -- with an engine and a bucket -------------------------------------------------------------------


def serve(engine: SmallEngine, *names: str) -> None:
    engine.serve(*(prompt(f"r-{name}", name) for name in names))


def audits(engine: SmallEngine) -> dict[str, float]:
    return {
        outcome: engine.stats[f"audits_{outcome}"]
        for outcome in ("same", "close", "different", "skipped")
        if engine.stats[f"audits_{outcome}"]
    }


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_unchanged_encoder_is_the_same_bit_for_bit(url: str, kind: str) -> None:
    fill(url, "a", "b")
    with SmallEngine(url=url, audit_fraction=1, engine=kind) as engine:
        serve(engine, "a", "b")
        assert sorted(engine.encoded) == ["a", "b"]
        until(lambda: audits(engine) == {"same": 2}, "both are compared")
        assert engine.stats["uploads_written"] == 0
        until(lambda: engine.leased == 0, "nothing is held")


def test_changed_encoder_shows_and_changes_nothing(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(url, "near", "far")

    def drifted(item: Feature) -> torch.Tensor:
        return reference(item) * {"near": 1.0001, "far": -1.0, "new": 1.0}[item.identifier]

    with SmallEngine(url=url, audit_fraction=1) as engine:
        engine.encoder = lambda items: [drifted(item) for item in items]
        engine.right = drifted
        serve(engine, "near", "far", "new")
        until(lambda: audits(engine) == {"close": 1, "different": 1}, "both are compared")
        assert engine.stats["audit_worst_cosine"] == pytest.approx(-1)
        until(lambda: engine.stats["uploads_written"] == 1, "what is new is stored")
    assert "an audited item is not what the encoder makes of it now (different): far" in caplog.text
    with SmallEngine(url=url) as engine:
        serve(engine, "near", "far")
        assert engine.encoded == [], "the first content has stayed"


def test_only_the_rank_that_saves_compares(url: str) -> None:
    fill(url, "a")
    with SmallEngine(url=url, audit_fraction=1, ranks=2) as engine:
        serve(engine, "a")
        until(lambda: audits(engine) == {"same": 1}, "one comparison")


def test_a_fraction_is_drawn() -> None:
    it = Play(audit_fraction=0.25)
    draws = iter([0.24, 0.25, 0.0, 0.9])
    it.scheduler._audits._draw = lambda: next(draws)
    taken = []
    for name in "abcd":
        it.port.items[name] = spec(4)
        request = it.request(feature(name), name=name)
        assert it.scheduler.ensure(request, 0)
        taken.append(not it.scheduler.has(name))
        it.scheduler.finished(request)
    assert taken == [True, False, True, False]
