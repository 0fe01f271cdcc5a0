"""Tiny models that hear, made offline like those of `tiny_models`, and sounds to play to them.

`make_qwen2_audio` reads a sound as an item of a prompt, with as many rows as it is long;
`make_whisper` has an encoder and a decoder, which no encoder cache can serve. Runs in any process;
must never touch the network. Needs transformers and tokenizers, which come with vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ec_s3.testing.model_folder import llm_sizes, write_json, write_tokenizer, write_weights

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE_RATE = 16_000
SOUND_PROMPT = "<|audio_bos|><|AUDIO|><|audio_eos|>"
"""What stands for a sound in a prompt of `make_qwen2_audio`."""

SPEECH_PROMPT = "<|startoftranscript|>"
"""The whole prompt of `make_whisper`."""

_MEL_BINS = 16


def make_qwen2_audio(path: Path, *, dtype: str = "float32") -> Path:
    """Write a Qwen2-Audio-shaped model: 25 rows per second of sound, 30 seconds at most.

    Raises:
        ConfigError: transformers or tokenizers is not installed.
    """
    end, pad, begin, sound = "<|im_end|>", "<|endoftext|>", "<|audio_bos|>", "<|AUDIO|>"
    vocabulary = write_tokenizer(
        path,
        specials=(pad, end, begin, sound, "<|audio_eos|>"),
        roles={"eos_token": end, "pad_token": pad},
        image=SOUND_PROMPT,
    )
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "dtype": dtype,
        "audio_token_index": vocabulary[sound],
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "dtype": dtype,
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "num_mel_bins": _MEL_BINS,
            "max_source_positions": 1500,
        },
        "text_config": {
            "model_type": "qwen2",
            "dtype": dtype,
            "vocab_size": len(vocabulary),
            "bos_token_id": vocabulary[pad],
            "eos_token_id": vocabulary[end],
            "tie_word_embeddings": False,
            **llm_sizes(positions=2048),
        },
    }
    # transformers 5 saves one level more than a published checkpoint has.
    surplus = ("language_model.model.model.", "language_model.model.")
    write_weights(path, config, model="Qwen2AudioForConditionalGeneration", renamed=surplus)
    _write_processor(path, "Qwen2AudioProcessor", seconds=30)
    return path


def make_whisper(path: Path, *, dtype: str = "float32") -> Path:
    """Write a Whisper-shaped model: an encoder for 2 seconds of sound, and a decoder.

    Raises:
        ConfigError: transformers or tokenizers is not installed.
    """
    end = "<|endoftext|>"
    vocabulary = write_tokenizer(
        path,
        specials=(end, SPEECH_PROMPT),
        roles={"bos_token": end, "eos_token": end, "pad_token": end},
        image="",
    )
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": dtype,
        "vocab_size": len(vocabulary),
        "num_mel_bins": _MEL_BINS,
        "d_model": 64,
        **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
        **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")},
        "max_source_positions": 100,
        "max_target_positions": 448,
        **{f"{role}_token_id": vocabulary[end] for role in ("bos", "eos", "pad")},
        "decoder_start_token_id": vocabulary[SPEECH_PROMPT],
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
    }
    write_weights(path, config, model="WhisperForConditionalGeneration")
    _write_processor(path, "WhisperProcessor", seconds=2)
    return path


def tone(*, hertz: float, seconds: float) -> np.ndarray:
    """A sine at `SAMPLE_RATE`, `[samples]`, float32."""
    times = np.arange(int(SAMPLE_RATE * seconds)) / SAMPLE_RATE
    wave: np.ndarray = np.sin(2 * np.pi * hertz * times).astype(np.float32)
    return wave


def _write_processor(path: Path, name: str, *, seconds: int) -> None:
    write_json(path / "processor_config.json", {"processor_class": name})
    write_json(
        path / "preprocessor_config.json",
        {
            "processor_class": name,
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": _MEL_BINS,
            "sampling_rate": SAMPLE_RATE,
            "hop_length": 160,
            "chunk_length": seconds,
            "n_fft": 400,
            "padding_value": 0.0,
            "return_attention_mask": True,
        },
    )
