"""Items of every modality and shape, as vLLM's own classes describe them."""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_engine import SmallEngine, prompt, until, without_vllm
from vllm_play import DTYPE, WIDTH, Output, Play, Request, spec

from ec_s3.connector.widths import MODALITIES, output_widths
from ec_s3.types import TensorSpec

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

_WIDE = 4 * WIDTH
"""Width of a "DeepStack" output: the features of four levels side by side."""


class Maker:
    """Makes vLLM's own feature objects."""

    def __init__(self) -> None:
        from vllm.multimodal import inputs

        self._vllm: Any = inputs

    def __call__(
        self,
        identifier: str = "a",
        *,
        modality: str = "image",
        offset: int = 0,
        length: int = 4,
        embeds: list[bool] | None = None,
        fields: tuple[str, ...] = ("pixel_values", "image_grid_thw"),
    ) -> Any:
        mask = None if embeds is None else torch.tensor(embeds, dtype=torch.bool)
        shared = self._vllm.MultiModalSharedField(batch_size=1)
        data = {name: self._vllm.MultiModalFieldElem(torch.ones(1), shared) for name in fields}
        return self._vllm.MultiModalFeatureSpec(
            data=self._vllm.MultiModalKwargsItem(data),
            modality=modality,
            identifier=identifier,
            mm_position=self._vllm.PlaceholderRange(
                offset=offset, length=len(embeds) if embeds else length, is_embed=mask
            ),
            mm_hash=identifier,
        )


@pytest.fixture(scope="module")
def item() -> Maker:
    """Makes items; the tests here are skipped where vLLM is not installed."""
    if not os.environ.get("REQUIRE_VLLM"):
        pytest.importorskip("vllm", exc_type=ImportError)
    return Maker()


def absent(play: Play, request: Request) -> None:
    """The bucket holds none of the request's items, and it goes on to the encoder."""
    play.scheduler.ensure(request, 0)
    for ticket in list(play.port.wants):
        play.port.absent(ticket)
    assert play.scheduler.ensure(request, 0)


# -- shapes ------------------------------------------------------------------------------------


def test_holes_of_a_placeholder_count_for_its_place_but_not_for_its_rows(item: Maker) -> None:
    play = Play()
    holed = item(offset=3, embeds=[False, True, True, False, True, False])
    request = play.request(holed)
    absent(play, request)
    assert play.port.history[0].save_nbytes == 3 * WIDTH * 4
    (order,) = play.encode(request).saves
    assert order.spec == spec(3)
    play.saved(order.ticket)
    play.idle(tokens=1, free_encoder_mm_hashes=["a"])
    again = play.request(holed, name="again")
    assert play.scheduler.ensure(again, 8), "its last token, a hole, is not computed"
    assert play.scheduler.has("a")
    longer = play.request(item(embeds=[True, True, False, True, True]), name="longer")
    assert play.scheduler.ensure(longer, 0)
    assert not play.scheduler.has("a"), "other rows under the same identifier"


def test_item_whose_placeholder_is_all_holes_is_left_alone(item: Maker) -> None:
    play = Play()
    request = play.request(item(embeds=[False, False]))
    assert play.scheduler.ensure(request, 0)
    assert not play.scheduler.has("a")
    assert not play.encode(request).saves
    assert not play.port.history


def test_deepstack_output_is_reserved_by_its_measured_width(item: Maker) -> None:
    play = Play(widths={"image": _WIDE})
    request = play.request(item())
    absent(play, request)
    (order,) = play.encode(request).saves
    assert order.spec == TensorSpec(DTYPE, (4, _WIDE))


def test_width_of_what_is_found_is_taken_as_it_is_where_none_was_measured(item: Maker) -> None:
    play = Play(role="consumer")
    play.port.items["a"] = spec(4, width=_WIDE)
    request = play.request(item())
    assert play.scheduler.ensure(request, 0)
    (order,) = play.load(request).loads
    assert order.spec == spec(4, width=_WIDE)


def test_item_of_another_width_than_was_measured_is_encoded(item: Maker) -> None:
    play = Play(widths={"image": _WIDE})
    play.port.items["a"] = spec(4)
    request = play.request(item())
    assert play.scheduler.ensure(request, 0)
    assert not play.scheduler.has("a")


def test_wide_outputs_go_through_the_host_memory_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with without_vllm(monkeypatch), SmallEngine(width=4 * 2048) as engine:
        engine.serve(prompt("1", "a"))
        assert engine.encoded == ["a"]
        numbers = itertools.count()

        def loaded() -> list[str]:
            engine.serve(prompt(f"again {next(numbers)}", "a"))
            return engine.loaded

        until(loaded, "the saved item is loaded")
        assert set(engine.loaded) == {"a"}, "rightly: the engine compares with the encoder's output"


# -- modalities --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modality", "fields"),
    [
        ("video", ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")),
        ("audio", ("input_audio_features", "feature_attention_mask")),
        ("vision_chunk", ("pixel_values", "image_grid_thw")),
    ],
)
def test_every_modality_is_saved_and_loaded(
    item: Maker, modality: str, fields: tuple[str, ...]
) -> None:
    play = Play(widths={modality: WIDTH})
    made = item(modality=modality, fields=fields)
    request = play.request(made)
    absent(play, request)
    (order,) = play.encode(request).saves
    play.saved(order.ticket)
    play.idle(tokens=1, free_encoder_mm_hashes=["a"])
    again = play.request(made, name="again")
    assert play.scheduler.ensure(again, 0)
    assert len(play.load(again).loads) == 1


def test_item_of_a_modality_of_unknown_width_is_loaded_but_not_saved(item: Maker) -> None:
    play = Play(widths={"image": WIDTH})
    play.port.items["b"] = spec(4)
    lost = play.request(item("a", modality="audio", fields=("features",)), name="1")
    found = play.request(item("b", modality="audio", fields=("features",)), name="2")
    absent(play, lost)
    assert not play.encode(lost).saves
    assert play.scheduler.ensure(found, 0)
    assert len(play.load(found).loads) == 1


@pytest.mark.parametrize(
    ("modality", "fields"),
    [
        ("image", ("image_embeds", "image_grid_thw")),
        ("video", ("video_embeds", "video_grid_thw")),
        ("audio", ("audio_embeds",)),
        ("prompt_embeds", ("prompt_embeds",)),
    ],
)
def test_embeddings_that_a_client_sends_are_never_looked_up_reserved_or_saved(
    item: Maker, modality: str, fields: tuple[str, ...]
) -> None:
    play = Play(widths={modality: WIDTH})
    play.port.items["a"] = spec(4)
    request = play.request(item(modality=modality, fields=fields))
    assert play.scheduler.ensure(request, 0)
    assert not play.scheduler.has("a")
    metadata = play.encode(request)
    assert not metadata.saves
    assert not metadata.loads
    play.scheduler.finished(request)
    assert not play.port.history
    assert not play.port.open_tickets


# -- several items -----------------------------------------------------------------------------


def test_items_of_one_request_are_loaded_and_encoded_side_by_side(item: Maker) -> None:
    play = Play(widths={"image": WIDTH, "audio": WIDTH})
    play.port.items["b"] = spec(6)
    request = play.request(
        item("a"),
        item("b", offset=4, length=6),
        item("c", offset=12, modality="audio", fields=("features",)),
    )
    absent(play, request)
    assert [play.scheduler.has(name) for name in "abc"] == [False, True, False]
    for index in range(3):
        play.scheduler.allocated(request, index)
    metadata = play.scheduler.build_meta(Output({request.request_id: [0, 2]}))
    assert [order.identifier for order in metadata.loads] == ["b"]
    assert [order.identifier for order in metadata.saves] == ["a", "c"]
    for order in metadata.saves:
        play.saved(order.ticket)
    play.loaded(metadata.loads[0].transfer)
    play.scheduler.finished(request)
    play.idle(tokens=1)
    assert not play.port.open_tickets
    assert not play.held


@pytest.mark.parametrize("held", [True, False], ids=["found", "absent"])
def test_item_that_is_twice_in_a_request_is_moved_once(item: Maker, held: bool) -> None:
    play = Play()
    request = play.request(item("a"), item("a", offset=10))
    if held:
        play.port.items["a"] = spec(4)
        assert play.scheduler.ensure(request, 0)
        (order,) = play.load(request).loads  # vLLM tells of the first place only
        assert play.scheduler.ensure(request, 4), "the second place is in vLLM's cache"
        play.loaded(order.transfer)
    else:
        absent(play, request)
        (order,) = play.encode(request).saves
        assert play.scheduler.ensure(request, 4)
        play.saved(order.ticket)
    assert len(play.port.history) == 1
    play.scheduler.finished(request)
    play.idle(tokens=1)
    assert not play.port.open_tickets


def test_item_of_two_requests_in_one_step_is_fetched_and_loaded_once(item: Maker) -> None:
    play = Play()
    first, second = play.request(item(), name="1"), play.request(item(offset=7), name="2")
    assert not play.scheduler.ensure(first, 0)
    assert not play.scheduler.ensure(second, 0)
    play.port.ready(play.only_want(), spec(4))
    assert play.scheduler.ensure(first, 0)
    assert play.scheduler.has("a")
    play.scheduler.allocated(first, 0)
    assert play.scheduler.ensure(second, 0), "vLLM has it from this step on and does not ask"
    (order,) = play.scheduler.build_meta(Output()).loads
    play.loaded(order.transfer)
    for request in (first, second):
        play.scheduler.finished(request)
    play.idle(tokens=1)
    assert not play.port.open_tickets
    assert not play.held


# -- what vLLM has computed already ------------------------------------------------------------


def test_prefix_hit_that_ends_inside_an_item_still_needs_it(item: Maker) -> None:
    play = Play()
    play.port.items["a"] = spec(4)
    request = play.request(item(offset=2))
    assert play.scheduler.ensure(request, 5)
    assert play.scheduler.has("a")


def test_chunks_after_the_first_of_an_item_ask_for_nothing(item: Maker) -> None:
    play = Play(window=2)
    play.port.items["a"] = spec(8)
    request = play.request(item(length=8))
    assert play.scheduler.ensure(request, 0)
    (order,) = play.load(request).loads
    play.loaded(order.transfer)
    for computed in (2, 4, 6, 8):
        assert play.scheduler.ensure(request, computed)
        assert not play.idle(tokens=2).loads
    assert len(play.port.history) == 1
    assert not play.port.open_tickets


# -- widths ------------------------------------------------------------------------------------


def _config(**ec: Any) -> Any:
    vision = SimpleNamespace()
    model = SimpleNamespace(
        hf_config=SimpleNamespace(vision_config=vision), get_inputs_embeds_size=lambda: 64
    )
    return SimpleNamespace(ec_transfer_config=SimpleNamespace(**ec), model_config=model)


def test_widths_are_those_that_vllm_has_measured() -> None:
    assert output_widths(_config(mm_encoder_output_widths={"image": 256})) == {"image": 256}
    assert output_widths(_config(mm_encoder_output_widths={})) == {}


def test_widths_follow_from_the_model_where_vllm_measures_none() -> None:
    config = _config(is_ec_producer=True)
    assert output_widths(config) == dict.fromkeys(MODALITIES, 64)
    config.model_config.hf_config.vision_config.out_hidden_size = 32
    assert output_widths(config)["image"] == 64
    config.model_config.hf_config.vision_config.deepstack_visual_indexes = [5, 11, 17]
    assert output_widths(config)["image"] == 4 * 32
    config.ec_transfer_config.is_ec_producer = False
    assert output_widths(config) == {}, "nothing is to be saved"
