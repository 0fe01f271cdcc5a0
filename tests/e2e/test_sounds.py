"""Real vLLM with models that hear: sounds are cached like pictures, or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ec_s3.testing.tiny_sound_models import (
    SOUND_PROMPT,
    SPEECH_PROMPT,
    make_qwen2_audio,
    make_whisper,
)
from ec_s3.testing.vllm_process import PATIENT, client_environment

if TYPE_CHECKING:
    from ec_s3.testing.lab import Lab

_TONES = [(440.0, 0.5), (880.0, 1.0), (1760.0, 1.5)]
_SECONDS = 300


def _listen(
    lab: Lab, folder: Path, model: Path, *, prompt: str, prefix: str = "", length: int = 1024
) -> list[dict[str, Any]]:
    """What a process of its own makes of the tones, without a cache when there is no prefix."""
    job: dict[str, Any] = {
        "model": str(model),
        "llm": {"limit_mm_per_prompt": {"audio": 1}, "max_model_len": length},
    }
    if prefix:
        job["ec_transfer_config"] = {
            "ec_connector": "ECS3Connector",
            "ec_connector_module_path": "ec_s3.connector",
            "ec_role": "ec_both",
            "ec_connector_extra_config": {"url": lab.server.location(prefix), **PATIENT},
        }
    folder.mkdir()
    given, found, log = (folder / name for name in ("in.json", "out.json", "log"))
    given.write_text(json.dumps({"job": job, "prompt": prompt, "tones": _TONES}))
    with log.open("wb") as output:
        result = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "sounds_job.py"), str(given), str(found)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=client_environment(),
            timeout=_SECONDS,
            check=False,
        )
    assert result.returncode == 0, log.read_text()[-8000:]
    answers: list[dict[str, Any]] = json.loads(found.read_text())
    assert len({tuple(answer["tokens"]) for answer in answers}) == len(_TONES), "they hear"
    return answers


def test_sound_is_encoded_once_and_answers_alike_in_the_next_process(
    lab: Lab, tmp_path: Path
) -> None:
    model = make_qwen2_audio(tmp_path / "model")
    prompt = f"{SOUND_PROMPT}what is this?"
    cold, warm = (
        _listen(lab, tmp_path / name, model, prompt=prompt, prefix="sounds")
        for name in ("cold", "warm")
    )
    assert [answer["encoded"] for answer in cold] == [1] * len(_TONES)
    assert [answer["encoded"] for answer in warm] == [0] * len(_TONES)
    assert [answer["tokens"] for answer in warm] == [answer["tokens"] for answer in cold]
    moved = [request.method for request in lab.moved("sounds")]
    assert moved == ["PUT"] * len(_TONES) + ["GET"] * len(_TONES)


@pytest.mark.slow
def test_model_with_a_decoder_answers_as_without_a_cache_and_nothing_is_stored(
    lab: Lab, tmp_path: Path
) -> None:
    model = make_whisper(tmp_path / "model")
    plain, beside = (
        _listen(lab, tmp_path / name, model, prompt=SPEECH_PROMPT, prefix=prefix, length=448)
        for name, prefix in (("plain", ""), ("beside", "speech"))
    )
    assert beside == plain
    assert [answer["encoded"] for answer in beside] == [1] * len(_TONES)
    assert lab.server.served("speech") == []
