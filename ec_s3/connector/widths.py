"""How wide an encoder's output is, by modality: what a reservation for it is sized by.

Pure; runs once per process. A width that is wrong costs only the saves: a rank compares it with the
tensor before it copies anything.
"""

from __future__ import annotations

from typing import Any

MODALITIES = ("image", "video", "audio", "vision_chunk")


def output_widths(vllm_config: Any) -> dict[str, int]:
    """Width of an encoder output by modality; empty where nothing is to be saved.

    vLLM 0.32 and later measure them at start-up, for every role that encodes; before, they follow
    from the configuration.
    """
    ec = vllm_config.ec_transfer_config
    measured: dict[str, int] | None = getattr(ec, "mm_encoder_output_widths", None)
    if measured is not None:
        return dict(measured)
    if not ec.is_ec_producer:
        return {}
    return dict.fromkeys(MODALITIES, configured_width(vllm_config.model_config))


def configured_width(model: Any) -> int:
    """The language model's width, as often as the encoder hands out features of its levels.

    Qwen3-VL and its kin lay the features of several encoder levels side by side ("DeepStack").
    """
    vision = getattr(model.hf_config, "vision_config", None)
    levels = getattr(vision, "deepstack_visual_indexes", None)
    width = getattr(vision, "out_hidden_size", None)
    if levels and width:
        return int(width) * (1 + len(levels))
    return int(model.get_inputs_embeds_size())
