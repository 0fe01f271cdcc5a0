"""Which engines share encoder outputs, and which never do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ec_s3.config import ECConfig
from ec_s3.connector.identity import namespace_of
from ec_s3.errors import ConfigError

_HF = {
    "architectures": ["M"],
    "vision_config": {"depth": 2},
    "text_config": {"layers": 2},
    "_name_or_path": "/somewhere",
    "transformers_version": "5",
}


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
        identity(multimodal_config=SimpleNamespace(video_pruning_rate=0.5)),
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
    } == {identity()}


def test_identity_can_be_overridden_so_that_copies_of_a_model_share() -> None:
    shared = ECConfig(model="org/model")
    assert identity(shared, model="/mnt/a") == identity(shared, model="/mnt/b") == identity()


@pytest.mark.parametrize("model", ["", " ", "/"])
def test_empty_identity_is_an_error_at_the_start(model: str) -> None:
    with pytest.raises(ConfigError):
        identity(model=model)
