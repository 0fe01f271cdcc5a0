"""The parts of a tiny model's folder: tokenizer, configuration, weights from a fixed seed.

`tiny_models` and `tiny_sound_models` put models together from them. Runs in any process; must never
touch the network. Needs transformers and tokenizers, which come with vLLM.
"""

from __future__ import annotations

import json
import math
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ec_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

LLM_WIDTH = 64
"""Width of the language model, and so of an encoder output `[num_embeds, LLM_WIDTH]`."""

_SEED = 20
_GAIN = 1.5  # above 1, so that attention is sharp and answers differ between images


def llm_sizes(*, positions: int) -> dict[str, object]:
    """Fields of a language model's configuration that make it tiny."""
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


def write_tokenizer(
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


def write_weights(
    path: Path,
    config: Mapping[str, object],
    *,
    model: str = "AutoModelForImageTextToText",
    renamed: tuple[str, str] = ("", ""),
) -> None:
    """Write the configuration and matching weights.

    Args:
        path: the folder.
        config: of the model.
        model: transformers' class for it.
        renamed: what names of weights begin with as transformers saves them, and as vLLM wants it.
    """
    import torch
    from safetensors.torch import save_file

    transformers = _import("transformers")
    transformers.utils.logging.disable_progress_bar()
    write_json(path / "config.json", config)
    hf_config = transformers.AutoConfig.from_pretrained(str(path))
    made_by = getattr(transformers, model)
    made = made_by.from_config(hf_config) if model.startswith("Auto") else made_by(hf_config)
    made.save_pretrained(str(path))  # for the names: those of a published checkpoint
    tensors = {}
    saved, wanted = renamed
    generator = torch.Generator().manual_seed(_SEED)
    for name, shape in sorted(_saved_shapes(path).items()):
        if name.startswith(saved) and (saved.startswith(wanted) or not name.startswith(wanted)):
            name = wanted + name.removeprefix(saved)
        tensors[name] = _draw(name, shape, generator).to(getattr(torch, str(config["dtype"])))
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    write_json(path / "config.json", config)


def _saved_shapes(path: Path) -> dict[str, list[int]]:
    from safetensors import safe_open

    with safe_open(str(path / "model.safetensors"), framework="pt") as file:
        return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # a safetensors file is no dict and not iterable


def _draw(name: str, shape: list[int], generator: Any) -> Any:
    """Weights that keep the size of activations: norms 1, biases 0, matrices by fan-in."""
    import torch

    if len(shape) < 2:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    # A decoder's embeddings are its output layer too: large ones would only repeat the last token.
    alone = "embed_tokens" in name and "decoder" not in name
    fan_in = 1 if alone else math.prod(shape[1:])
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


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write one file of the folder."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
