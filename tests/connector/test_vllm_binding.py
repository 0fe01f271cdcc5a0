"""Digests of what the installed vLLM really hands over: the same in every kind of engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ec_s3.connector.binding import digest_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    # vLLM's own decoder makes tensors over the message's bytes.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]


def items() -> list[Any]:
    """Two pictures of one request: flat patches, a grid each, odd shapes in a list."""
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    sizes = torch.tensor([6, 4])
    patches = torch.arange(10 * 8, dtype=torch.float32).reshape(10, 8).to(torch.bfloat16)
    inputs = {
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 2, 3], [1, 2, 2]]),
        "scale": torch.tensor([0.5, 0.25]),
        "crops": [torch.ones(2, 3), torch.ones(1, 3)],
    }
    config = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes),
        "image_grid_thw": MultiModalFieldConfig.batched("image"),
        "scale": MultiModalFieldConfig.batched("image"),
        "crops": MultiModalFieldConfig.batched("image"),
    }
    return list(MultiModalKwargsItems.from_hf_inputs(inputs, config)["image"])


def test_items_of_one_request_differ_and_do_not_depend_on_what_lies_beside_them() -> None:
    first, second = items()
    assert digest_of(first) != digest_of(second)
    alone = {name: copy.deepcopy(element.data) for name, element in first.items()}
    assert digest_of(alone) == digest_of(first)


def test_digest_survives_the_way_to_an_engine_of_its_own_process() -> None:
    from vllm.multimodal.inputs import MultiModalKwargsItem
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    for item in items():
        sent = MsgpackEncoder().encode(item)
        received = MsgpackDecoder(MultiModalKwargsItem).decode(sent)
        assert digest_of(received) == digest_of(item)
