"""What kind of thing each media item of a request is, and under which name it is kept."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_play import Feature, Position, Request, feature

from ec_s3.connector.media import Classifier, Kind, MediaItem, Rules
from ec_s3.keys import bind
from ec_s3.metrics import Stats


def classify(item: Feature, *, tower: bool = False, adapter: object = None) -> MediaItem:
    rules = Rules(metadata_fields=lambda _: {"image_grid_thw"}, tower_adapters=tower)
    classifier = Classifier(rules)
    (found,) = classifier.items(Request("r", [item], lora_request=adapter))
    return found


def holding(**fields: object) -> Feature:
    data = {name: SimpleNamespace(data=value) for name, value in fields.items()}
    return Feature("a", Position(0, 4, 4), data)


def test_item_with_pixels_is_media() -> None:
    assert classify(feature()).kind is Kind.MEDIA


def test_item_whose_media_lies_in_vllms_shared_memory_is_media() -> None:
    assert classify(holding(address=0, monotonic_id=1, signature=[1])).kind is Kind.MEDIA


@pytest.mark.parametrize(
    "item",
    [
        holding(image_grid_thw=[1, 2, 2]),
        holding(image_grid_thw=[1, 2, 2], image_embeds=None),
        holding(),
        Feature("a", Position(0, 4, 4), None),
    ],
    ids=["grid only", "empty embeddings", "no fields", "no data"],
)
def test_item_without_anything_to_encode_has_only_metadata(item: Feature) -> None:
    assert classify(item).kind is Kind.METADATA


@pytest.mark.parametrize(
    "item",
    [
        holding(image_grid_thw=[1, 2, 2], image_embeds=[0.0]),
        Feature("a", Position(0, 4, 4), {"x": SimpleNamespace(data=[0])}, "prompt_embeds"),
        feature("request-image-0"),
        feature("request-vision_chunk-3"),
        feature(rows=0, length=3),
    ],
    ids=["client's embeddings", "prompt embeddings", "request-local", "chunk", "no rows"],
)
def test_item_that_is_not_ours_to_keep_is_untouched(item: Feature) -> None:
    assert classify(item).kind is Kind.UNTOUCHED


def test_item_encoded_under_an_adapter_of_unknown_content_is_untouched() -> None:
    assert classify(feature(), tower=True, adapter=object()).kind is Kind.UNTOUCHED
    assert classify(feature(), tower=True).kind is Kind.MEDIA
    assert classify(feature(), adapter=object()).kind is Kind.MEDIA


def test_rows_are_embeddings_not_placeholder_tokens() -> None:
    item = classify(feature(offset=7, length=10, rows=8))
    assert (item.offset, item.end, item.rows) == (7, 17, 8)


_text = st.text(st.characters(codec=None) | st.just("\0"), max_size=12)
_identifier = _text | st.tuples(_text, _text).map(lambda pair: bind(pair[0], pair[1]))


@given(a=st.tuples(_identifier, st.none() | _text), b=st.tuples(_identifier, st.none() | _text))
def test_no_client_can_name_an_item_of_another_salt(
    a: tuple[str, str | None], b: tuple[str, str | None]
) -> None:
    same = a[0] == b[0] and (a[1] or None) == (b[1] or None)
    assert (bind(*a) == bind(*b)) == same


def test_name_made_to_look_salted_is_not_the_salted_item() -> None:
    secret = bind("a", "tenant")
    assert bind(secret, None) != secret
    assert bind("a", None) == "a"


def test_params_that_are_not_understood_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stats = Stats()
    classifier = Classifier(Rules(metadata_fields=lambda _: set()), stats)
    values: list[object] = [[], "secret-of-a-client", {"store": 1}, {"store": False}, None]
    with caplog.at_level(logging.WARNING, "ec_s3"):
        for value in values:
            classifier.items(Request("r", [feature()], ec_transfer_params=value))
    assert stats.snapshot()["unusable_inputs_params"] == 3
    assert len(caplog.records) == 1
    assert "secret-of-a-client" not in caplog.text
