"""Which engines share encoder outputs, and which never do."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ec_s3.config import ECConfig
from ec_s3.connector import identity as identity_module
from ec_s3.connector.identity import namespace_of
from ec_s3.errors import ConfigError
from ec_s3.keys import looks_like_content_hash

_HF = {
    "architectures": ["M"],
    "vision_config": {"depth": 2},
    "text_config": {"layers": 2},
    "_name_or_path": "/somewhere",
    "transformers_version": "5",
}


@pytest.fixture(autouse=True)
def scheme(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "vllm" not in request.keywords:
        monkeypatch.setattr(identity_module, "hash_scheme", lambda _: "scheme")


def engine(hf: dict[str, Any] | None = None, **model: Any) -> Any:
    fields = {
        "model": "org/model",
        "dtype": torch.bfloat16,
        "revision": None,
        "quantization": None,
        "seed": 0,
        "multimodal_config": SimpleNamespace(video_pruning_rate=None, mm_encoder_attn_dtype=None),
        **model,
    }
    config = SimpleNamespace(to_dict=lambda: {**_HF, **(hf or {})})
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config, **fields),
        load_config=SimpleNamespace(load_format=model.get("load_format", "auto")),
    )


def identity(config: ECConfig | None = None, **engine_fields: Any) -> str:
    return namespace_of(engine(**engine_fields), config or ECConfig()).id


def test_whatever_changes_an_output_changes_the_namespace() -> None:
    others = [
        identity(),
        identity(model="org/other"),
        identity(dtype=torch.float16),
        identity(revision="v2"),
        identity(quantization="fp8"),
        identity(hf={"vision_config": {"depth": 3}}),
        identity(hf={"text_config": {"layers": 2, "hidden_size": 5120}}),
        identity(hf={"thinker_config": {"text_config": {"hidden_size": 5120}}}),
        identity(multimodal_config=SimpleNamespace(video_pruning_rate=0.5)),
        identity(multimodal_config=SimpleNamespace(mm_processor_kwargs={"max_pixels": 1})),
        identity(multimodal_config=SimpleNamespace(mm_processor_kwargs={"max_pixels": 2})),
        identity(load_format="dummy"),
        identity(load_format="dummy", seed=1),
        identity(ECConfig(weight_version="2")),
        identity(ECConfig(adapter="f00")),
        identity(ECConfig.from_mapping({"salt": "tenant"})),
    ]
    assert len(set(others)) == len(others)


def test_whatever_does_not_change_an_output_leaves_the_namespace() -> None:
    assert {
        identity(),
        identity(model="org/model/"),
        identity(hf={"text_config": {"layers": 3}, "_name_or_path": "/elsewhere"}),
        identity(hf={"transformers_version": "6"}),
        identity(hf={"vision_config": {"depth": 2, "_name_or_path": "/x", "dtype": "float32"}}),
        identity(revision=""),
        identity(multimodal_config=SimpleNamespace(mm_processor_kwargs={})),
        identity(multimodal_config=SimpleNamespace(mm_processor_kwargs={"device": "cuda"})),
        identity(
            multimodal_config=SimpleNamespace(
                mm_processor_kwargs={"device": "cuda:1", "images_kwargs": {"device": "cuda:1"}}
            )
        ),
    } == {identity()}


def test_identity_can_be_overridden_so_that_copies_of_a_model_share() -> None:
    shared = ECConfig(model="org/model")
    assert identity(shared, model="/mnt/a") == identity(shared, model="/mnt/b") == identity()


@pytest.mark.parametrize("model", ["", " ", "/"])
def test_empty_identity_is_an_error_at_the_start(model: str) -> None:
    with pytest.raises(ConfigError):
        identity(model=model)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_another_way_of_hashing_content_is_another_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not os.environ.get("REQUIRE_VLLM"):
        pytest.importorskip("vllm", exc_type=ImportError)
    from vllm.multimodal.hasher import MultiModalHasher

    def under(algorithm: str) -> str:
        return identity(
            multimodal_config=SimpleNamespace(
                video_pruning_rate=None,
                mm_encoder_attn_dtype=None,
                mm_hasher_algorithm=algorithm,
            )
        )

    schemes = {under("blake3"), under("sha256"), under("sha512")}
    assert len(schemes) == 3
    assert under("blake3") in schemes
    feed = MultiModalHasher.iter_item_to_bytes

    def without_frames(cls: object, *item: object) -> object:
        del cls
        return (part for part in feed(*item) if len(part) != 8)

    monkeypatch.setattr(MultiModalHasher, "iter_item_to_bytes", classmethod(without_frames))
    assert under("blake3") not in schemes


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_a_request_sets_for_its_inputs_is_in_vllms_identifiers() -> None:
    """vLLM#49975: one picture, decoded in two ways. Whoever fills a bucket needs the same ones."""
    if not os.environ.get("REQUIRE_VLLM"):
        pytest.importorskip("vllm", exc_type=ImportError)
    from PIL import Image
    from vllm.multimodal.hasher import MultiModalHasher

    picture = Image.new("RGBA", (4, 4), (10, 20, 30, 40))
    settings: list[dict[str, Any]] = [
        {},
        {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}},
        {"media_io_kwargs": {"image": {"rgba_background_color": [255, 255, 255]}}},
        {"mm_processor_kwargs": {"max_pixels": 1}},
        {"model_id": "org/other"},
    ]
    found = {
        MultiModalHasher.hash_kwargs(
            "blake3", **{"model_id": "org/model", "image": picture, **more}
        )
        for more in settings
    }
    assert len(found) == len(settings)
    assert all(looks_like_content_hash(identifier) for identifier in found)
