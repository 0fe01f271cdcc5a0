"""Tiny multimodal model folders that real vLLM can serve, made offline in a few seconds.

Two shapes of encoder output: `make_llava` gives a fixed number of rows per image, `make_qwen2_vl`
a number that depends on the image's size, with grid metadata. The weights are drawn from a fixed
seed and scaled so that the generated tokens depend on the image: vLLM's own dummy weights are so
small that every image gets the same answer, and a wrong tensor would go unnoticed.

Runs in any process; must never touch the network. Needs transformers and tokenizers, which come
with vLLM and are no dependency of ec_s3.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ec_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

LLM_WIDTH = 64
"""Width of the language model, and so of an encoder output `[num_embeds, LLM_WIDTH]`."""

_SEED = 20
_GAIN = 1.5  # above 1, so that attention is sharp and answers differ between images

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
    vocabulary = _write_tokenizer(
        path,
        specials=_LLAVA_TOKENS,
        roles={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        image="<image>",
    )
    # transformers 5 saves CLIP without the "vision_model." level that vLLM's loader expects.
    _write_weights(path, _llava_config(vocabulary, dtype), level="vision_tower.vision_model.")
    _write_json(
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
    _write_json(
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
    vocabulary = _write_tokenizer(
        path,
        specials=_QWEN_TOKENS,
        roles={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
    )
    _write_weights(path, _qwen2_vl_config(vocabulary, dtype))
    cell = (_QWEN_PATCH * _QWEN_MERGE) ** 2
    _write_json(
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
            **_llm_sizes(positions=2048),
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
        **_llm_sizes(positions=4096),
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


def _llm_sizes(*, positions: int) -> dict[str, object]:
    return {
        "hidden_size": LLM_WIDTH,
        "intermediate_size": 2 * LLM_WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
    }


def _write_tokenizer(
    path: Path, *, specials: Sequence[str], roles: Mapping[str, str], image: str, video: str = ""
) -> Mapping[str, int]:
    """Write a byte-level tokenizer without merges; returns its vocabulary."""
    tokenizers, transformers = _import("tokenizers"), _import("transformers")
    path.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*specials, *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in specials]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=2048,
        additional_special_tokens=list(specials),
        **roles,
    )
    fast.chat_template = _chat_template(image, video or image)
    fast.save_pretrained(str(path))
    return vocabulary


def _write_weights(path: Path, config: Mapping[str, object], *, level: str = "") -> None:
    """Write the configuration and matching weights; `level` is a nesting that names must have."""
    import torch
    from safetensors.torch import save_file

    transformers = _import("transformers")
    transformers.utils.logging.disable_progress_bar()
    _write_json(path / "config.json", config)
    hf_config = transformers.AutoConfig.from_pretrained(str(path))
    model = transformers.AutoModelForImageTextToText.from_config(hf_config)
    model.save_pretrained(str(path))  # for the names: those of a published checkpoint
    tensors = {}
    generator = torch.Generator().manual_seed(_SEED)
    for name, shape in sorted(_saved_shapes(path).items()):
        outer = level.partition(".")[0] + "."
        if level and name.startswith(outer) and not name.startswith(level):
            name = level + name.removeprefix(outer)
        tensors[name] = _draw(name, shape, generator).to(getattr(torch, str(config["dtype"])))
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    _write_json(path / "config.json", config)


def _saved_shapes(path: Path) -> dict[str, list[int]]:
    from safetensors import safe_open

    with safe_open(str(path / "model.safetensors"), framework="pt") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # a safetensors file is no dict and not iterable


def _draw(name: str, shape: list[int], generator: Any) -> Any:
    """Weights that keep the size of activations: norms 1, biases 0, matrices by fan-in."""
    import torch

    if len(shape) < 2:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    fan_in = 1 if "embed_tokens" in name else math.prod(shape[1:])
    return torch.randn(shape, generator=generator) * (_GAIN / math.sqrt(fan_in))


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"tiny models need {name} ({error}), which comes with vLLM: run `make setup`"
        ) from error


def _chat_template(image: str, video: str) -> str:
    """A template that puts `image` where a message has an image part, and `video` for a video."""
    return (
        "{% for message in messages %}{{ message['role'] }}: "
        "{% if message['content'] is string %}{{ message['content'] }}"
        "{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% elif part['type'] == 'video' %}" + video + "{% else %}" + image + "{% endif %}"
        "{% endfor %}{% endif %}\n{% endfor %}assistant:"
    )


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
