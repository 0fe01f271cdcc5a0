"""Tiny multimodal model folders that real vLLM can serve, made offline in a few seconds.

Two shapes of encoder output: `make_llava` gives a fixed number of rows per image, `make_qwen2_vl`
a number that depends on the image's size, with grid metadata. The weights are drawn from a fixed
seed and scaled so that the generated tokens depend on the image: vLLM's own dummy weights are so
small that every image gets the same answer, and a wrong tensor would go unnoticed.

Runs in any process; must never touch the network. Needs transformers and tokenizers, which come
with vLLM and are no dependency of ec_s3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ec_s3.testing.model_folder import (
    LLM_WIDTH,
    llm_sizes,
    write_json,
    write_tokenizer,
    write_weights,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_MEAN = [0.48145466, 0.4578275, 0.40821073]
_STD = [0.26862954, 0.26130258, 0.27577711]

_LLAVA_TOKENS = ("<s>", "</s>", "<unk>", "<pad>", "<image>")
_LLAVA_IMAGE = 56
_LLAVA_PATCH = 14
LLAVA_ROWS = (_LLAVA_IMAGE // _LLAVA_PATCH) ** 2
"""Rows of every LLaVA encoder output."""

_QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_QWEN_PATCH = 14
_QWEN_MERGE = 2


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model shape by name: what the demo and the tests are parametrised with."""

    name: str
    make: Callable[..., Path]
    architecture: str


def make_llava(path: Path, *, dtype: str = "float32") -> Path:
    """Write a LLaVA-1.5-shaped model: `LLAVA_ROWS` rows per image whatever its size.

    Raises:
        ConfigError: transformers or tokenizers is not installed.
    """
    vocabulary = write_tokenizer(
        path,
        specials=_LLAVA_TOKENS,
        roles={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        image="<image>",
    )
    # transformers 5 saves CLIP without the "vision_model." level that vLLM's loader expects.
    write_weights(
        path,
        _llava_config(vocabulary, dtype),
        renamed=("vision_tower.", "vision_tower.vision_model."),
    )
    write_json(
        path / "preprocessor_config.json",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": _LLAVA_IMAGE},
            "crop_size": {"height": _LLAVA_IMAGE, "width": _LLAVA_IMAGE},
            "do_resize": True,
            "do_center_crop": True,
            "do_convert_rgb": True,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": _MEAN,
            "image_std": _STD,
            "resample": 3,
        },
    )
    write_json(
        path / "processor_config.json",
        {
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "patch_size": _LLAVA_PATCH,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    )
    return path


def make_qwen2_vl(path: Path, *, dtype: str = "float32") -> Path:
    """Write a Qwen2-VL-shaped model: one row per 28 x 28 pixels, 4 to 64 rows per image.

    Raises:
        ConfigError: transformers or tokenizers is not installed.
    """
    vocabulary = write_tokenizer(
        path,
        specials=_QWEN_TOKENS,
        roles={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
    )
    write_weights(path, _qwen2_vl_config(vocabulary, dtype))
    cell = (_QWEN_PATCH * _QWEN_MERGE) ** 2
    write_json(
        path / "preprocessor_config.json",
        {
            "processor_class": "Qwen2VLProcessor",
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": _QWEN_PATCH,
            "merge_size": _QWEN_MERGE,
            "temporal_patch_size": 2,
            "min_pixels": 4 * cell,
            "max_pixels": 64 * cell,
            "image_mean": _MEAN,
            "image_std": _STD,
        },
    )
    return path


MODELS: Mapping[str, TinyModel] = {
    "llava": TinyModel("llava", make_llava, "LlavaForConditionalGeneration"),
    "qwen2-vl": TinyModel("qwen2-vl", make_qwen2_vl, "Qwen2VLForConditionalGeneration"),
}
"""Every tiny model by name."""


def _llava_config(vocabulary: Mapping[str, int], dtype: str) -> dict[str, object]:
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": dtype,
        "image_token_index": vocabulary["<image>"],
        "image_seq_length": LLAVA_ROWS,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "llama",
            "dtype": dtype,
            "vocab_size": len(vocabulary),
            "bos_token_id": vocabulary["<s>"],
            "eos_token_id": vocabulary["</s>"],
            "pad_token_id": vocabulary["<pad>"],
            "head_dim": LLM_WIDTH // 2,
            "tie_word_embeddings": False,
            **llm_sizes(positions=2048),
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": _LLAVA_IMAGE,
            "patch_size": _LLAVA_PATCH,
            "projection_dim": 32,
        },
    }


def _qwen2_vl_config(vocabulary: Mapping[str, int], dtype: str) -> dict[str, object]:
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "dtype": dtype,
        "vocab_size": len(vocabulary),
        "bos_token_id": vocabulary["<|endoftext|>"],
        "eos_token_id": vocabulary["<|im_end|>"],
        "vision_start_token_id": vocabulary["<|vision_start|>"],
        "vision_end_token_id": vocabulary["<|vision_end|>"],
        "vision_token_id": vocabulary["<|vision_pad|>"],
        "image_token_id": vocabulary["<|image_pad|>"],
        "video_token_id": vocabulary["<|video_pad|>"],
        "hidden_act": "silu",
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        **llm_sizes(positions=4096),
        "vision_config": {
            "model_type": "qwen2_vl",
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": LLM_WIDTH,
            "num_heads": 2,
            "mlp_ratio": 2,
            "in_channels": 3,
            "in_chans": 3,
            "patch_size": _QWEN_PATCH,
            "spatial_patch_size": _QWEN_PATCH,
            "spatial_merge_size": _QWEN_MERGE,
            "temporal_patch_size": 2,
        },
    }
