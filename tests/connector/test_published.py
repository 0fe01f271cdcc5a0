"""What an engine tells of its items: enough to do without the media, or nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ec_s3.connector.params import read_params
from ec_s3.connector.published import (
    MAX_NUMBERS,
    content_part,
    placeholder_of,
    published,
    uploads_work,
)
from ec_s3.header import pack_header
from ec_s3.metrics import Stats
from ec_s3.types import ItemMeta, TensorSpec
from ec_s3.wire import encode, read_header

FIELDS = {
    "image": {"image_grid_thw"},
    "video": {"video_grid_thw", "timestamps"},
    "audio": {"audio_num_tokens"},
}


def fields(modality: str) -> set[str]:
    return FIELDS.get(modality, set())


def item(identifier: str = "a", modality: str = "image", **data: Any) -> Any:
    if modality == "image" and not data:
        data = {"image_grid_thw": torch.tensor([1, 16, 14])}
    return SimpleNamespace(
        identifier=identifier,
        mm_hash=identifier,
        modality=modality,
        mm_position=SimpleNamespace(get_num_embeds=lambda: 7),
        data={
            "pixel_values": SimpleNamespace(data=torch.zeros(2)),
            **{name: SimpleNamespace(data=value) for name, value in data.items()},
        },
    )


def tell(
    *features: Any, shared: set[str] | None = None, digests: dict[str, str] | None = None
) -> dict[str, Any] | None:
    known = {feature.identifier for feature in features} if shared is None else shared
    return published(
        features,
        {identifier: (digests or {}).get(identifier, "") for identifier in known},
        placeholder=lambda found: placeholder_of(found, fields(found.modality)),
    )


def test_item_is_told_with_what_lays_it_out() -> None:
    assert tell(item()) == {
        "a": {
            "modality": "image",
            "item_indices": [0],
            "metadata": {"image_grid_thw": [1, 16, 14]},
        }
    }


def test_published_items_agree_with_vllms_own_connectors() -> None:
    utils = pytest.importorskip("vllm.distributed.ec_transfer.ec_connector.utils")
    features = [item("a"), item("b", "audio"), item("a"), item("b", "audio")]
    for feature in features:
        data = feature.data
        feature.data = SimpleNamespace(
            get_data=lambda data=data: {name: element.data for name, element in data.items()},
            get=data.get,
        )
    theirs = utils.collect_ec_item_metadata(features, SimpleNamespace(fields_for=fields))
    ours = tell(*features) or {}
    for name, entry in theirs.items():
        assert {**ours[name], **entry} == ours[name]
    assert list(ours) == list(theirs)


def test_item_that_the_bucket_will_not_hold_is_not_told() -> None:
    told = tell(item("kept"), item("dropped"), shared={"kept"})
    assert told is not None
    assert list(told) == ["kept"]
    assert tell(item("dropped"), shared=set()) is None
    assert tell() is None


def test_places_of_an_item_count_all_items_of_the_request() -> None:
    told = tell(item("x"), item("a"), item("b"), item("a"), shared={"a", "b"}) or {}
    assert {name: entry["item_indices"] for name, entry in told.items()} == {"a": [1, 3], "b": [2]}


def test_one_name_for_two_layouts_is_not_told() -> None:
    other = item("a", image_grid_thw=torch.tensor([1, 2, 2]))
    assert tell(item("a"), other, item("a")) is None


@pytest.mark.parametrize(
    "feature",
    [
        item(modality="video", video_grid_thw=torch.tensor([1, 2, 2])),
        item(image_grid_thw=None),
        item(image_grid_thw="1,2,2"),
        item(image_grid_thw=torch.tensor([float("nan")])),
        item(modality="video", video_grid_thw=[1, 2, 2], timestamps=[True, False]),
        item(modality="video", video_grid_thw=[1, 2, 2], timestamps=[0.1] * (MAX_NUMBERS + 1)),
        item(modality="video", video_grid_thw=[1, 2], timestamps=torch.zeros(MAX_NUMBERS + 1)),
        item(modality="vision_chunk"),
        item(image_grid_thw=[10**400]),
    ],
    ids=[
        *("no timestamps", "no grid", "text", "nan", "flags", "long list", "long tensor"),
        *("no fields", "no 64-bit number"),
    ],
)
def test_item_that_needs_its_media_to_be_laid_out_is_not_told(feature: Any) -> None:
    assert tell(feature) is None
    assert placeholder_of(feature, fields(feature.modality)) == {}


def test_item_whose_inputs_vllm_keeps_elsewhere_is_not_told() -> None:
    feature = item()
    feature.data = None
    assert tell(feature) is None
    feature.data = {"address": SimpleNamespace(data=0)}
    assert tell(feature) is None


def test_audio_is_told_with_its_number_of_tokens() -> None:
    feature = item("a", "audio")
    assert (tell(feature) or {})["a"]["metadata"] == {"audio_num_tokens": [7]}
    assert placeholder_of(feature, fields("audio")) == {
        "modality": "audio",
        "metadata": {"audio_num_tokens": [7]},
    }


def test_item_under_an_adapter_is_told_by_the_hash_that_a_consumer_starts_from() -> None:
    feature = item("adapter:a")
    feature.mm_hash = "a"
    assert list(tell(feature) or {}) == ["a"]


def test_item_is_told_with_what_it_was_made_of_where_that_is_known() -> None:
    told = tell(item("a"), item("b"), item("a"), digests={"a": "5a" * 32}) or {}
    assert told["a"]["input_digest"] == "5a" * 32
    assert told["a"]["item_indices"] == [0, 2]
    assert "input_digest" not in told["b"]
    assert read_params(SimpleNamespace(ec_transfer_params=told)).digest("a") == "5a" * 32


def test_told_items_hold_nothing_of_where_they_are_stored() -> None:
    told = tell(item("a"), item("b", "audio")) or {}
    assert all(entry.keys() == {"modality", "item_indices", "metadata"} for entry in told.values())


def test_stored_placeholder_becomes_a_part_of_a_message() -> None:
    feature = item("../../x", modality="video", video_grid_thw=[1, 2, 2], timestamps=[0.0, 0.5])
    spec = TensorSpec("float32", (7, 2))
    frame = encode(
        spec,
        [memoryview(bytes(spec.nbytes))],
        identifier="../../x",
        namespace="n-0123456789abcdef/float32",
        meta=ItemMeta(placeholder=placeholder_of(feature, fields("video"))),
        created=0.0,
    )
    header = read_header(b"".join(map(bytes, frame.parts)), max_tensor_bytes=1 << 20)
    assert content_part(header.identifier, header.meta.placeholder) == {
        "type": "video_embeds",
        "video_embeds": {"timestamps": [0.0, 0.5], "video_grid_thw": [1, 2, 2]},
        "uuid": "../../x",
    }


@pytest.mark.parametrize(
    "placeholder",
    [
        {},
        {"modality": "image"},
        {"modality": "image", "metadata": {}},
        {"modality": "image", "metadata": [1]},
        {"modality": ["image"], "metadata": {"x": [1]}},
        {"modality": "prompt", "metadata": {"x": [1]}},
        {"metadata": {"x": [1]}},
    ],
)
def test_placeholder_that_says_too_little_makes_no_part(placeholder: dict[str, Any]) -> None:
    assert content_part("a", placeholder) is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner),
        max_leaves=30,
    )
)
def test_whatever_a_model_declares_the_placeholder_is_json(value: Any) -> None:
    placeholder = placeholder_of(item(image_grid_thw=value), {"image_grid_thw"})
    json.dumps(placeholder, allow_nan=False)
    pack_header({"placeholder": placeholder})


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("outcomes", "works"),
    [
        ([], None),
        (["written"], True),
        (["exists"], True),
        (["denied"], False),
        (["failed", "written"], False),
        (["queue_full"], False),
        (["evicted"], None),
    ],
)
def test_uploads_are_taken_to_work_until_they_fail_and_again_when_one_succeeds(
    outcomes: list[str], works: bool | None, before: bool
) -> None:
    stats = Stats()
    for outcome in outcomes:
        stats.add("uploads", outcome=outcome)
    assert uploads_work(stats.drain(), before=before) is (before if works is None else works)


def test_uploads_do_not_work_while_the_bucket_is_left_alone() -> None:
    stats = Stats()
    stats.set("breaker_open", 1)
    assert uploads_work(stats.drain(), before=True) is False
    assert uploads_work(stats.drain(), before=False) is False
    stats.set("breaker_open", 0)
    assert uploads_work(stats.drain(), before=False) is True
