"""How an engine of `real_scheduler` is laid out, and what vLLM's processor makes of media."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CHUNK = 16
"""Most tokens of a step."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the engine runs.

    Attributes:
        role: `both`, `consumer` or `producer`.
        policy: vLLM's scheduling policy.
        ahead: steps that are scheduled before the results of earlier ones are known.
        runner: which of vLLM's model runners is played.
        blocks: KV cache blocks.
        lookahead: tokens beyond a chunk that a drafter reads.
        replay: tokens of a prefix hit that are computed again.
    """

    role: str = "both"
    policy: str = "fcfs"
    ahead: int = 0
    runner: int = 1
    blocks: int = 24
    lookahead: int = 0
    replay: int = 0


def make_config(folder: str, layout: Layout) -> Any:
    """A VllmConfig for a model folder."""
    from vllm.config import ECTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    connector = ECTransferConfig(
        ec_connector="ECS3Connector",
        ec_connector_module_path="ec_s3.connector",
        ec_role=f"ec_{layout.role}",
    )
    return EngineArgs(
        model=folder,
        load_format="dummy",
        max_model_len=256,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=True,
        scheduling_policy=layout.policy,
        ec_transfer_config=connector,
    ).create_engine_config()


def fields(*, media: bool) -> Any:
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
    )

    def elem(value: torch.Tensor) -> Any:
        return MultiModalFieldElem(data=value, field=MultiModalBatchedField())

    fields = {"image_grid_thw": elem(torch.tensor([1, 2, 2]))}
    return MultiModalKwargsItem(
        {**fields, **({"pixel_values": elem(torch.zeros(2))} if media else {})}
    )


def carries_media(item: Any) -> bool:
    return "pixel_values" in item.data
