"""Sounds and videos that were prewarmed by real vLLM are not encoded again by its server.

Needs what vLLM decodes them with, which the set-up leaves out: `make media-test` installs it.
"""

from __future__ import annotations

import base64
import json
import os
import wave
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ec_s3.cli.output import ExitCode
from ec_s3.testing.prewarm_jobs import end_job, start_job
from ec_s3.testing.tiny_sound_models import SAMPLE_RATE, make_qwen2_audio, tone
from ec_s3.testing.vllm_server import VLLMServer, text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ec_s3.testing.lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_FRAMES = 8


@pytest.fixture(autouse=True)
def decoders() -> None:
    """What decodes; skipped without, unless REQUIRE_DECODERS forbids that."""
    missing = [name for name in ("cv2", "soundfile") if find_spec(name) is None]
    if missing:
        what = f"not installed: {', '.join(missing)}"
        if os.environ.get("REQUIRE_DECODERS"):
            pytest.fail(f"{what}, and REQUIRE_DECODERS is set; run `make media-test`")
        pytest.skip(what)


def _sound(path: Path, number: int) -> None:
    samples = tone(hertz=220.0 * (number + 1), seconds=0.5 * (number + 1))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes((samples * 32000).astype("<i2").tobytes())


def _clip(path: Path, number: int) -> None:
    cv2: Any = import_module("cv2")  # untyped, and not installed where types are checked
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 4, (112, 84))
    for frame in range(_FRAMES):
        rows, columns = np.mgrid[0:84, 0:112]
        picture = (rows * (number + 1) + columns * (frame + 1)) % 256
        writer.write(np.repeat(picture[..., None], 3, axis=2).astype(np.uint8))
    writer.release()


def _media(
    folder: Path, suffix: str, write: Callable[[Path, int], None]
) -> tuple[list[Path], Path]:
    """Three files, and a manifest with a fourth that breaks off."""
    files = [folder / f"{number}.{suffix}" for number in range(3)]
    for number, file in enumerate(files):
        write(file, number)
    cut = folder / f"cut.{suffix}"
    cut.write_bytes(files[0].read_bytes()[:24])
    manifest = folder / "media.jsonl"
    rows = [{"uri": file.name} for file in (*files, cut)]
    manifest.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return files, manifest


def _ask(server: VLLMServer, modality: str, file: Path) -> tuple[int, ...]:
    kind = f"{modality}_url"
    data = base64.b64encode(file.read_bytes()).decode()
    url = f"data:{modality}/{file.suffix[1:]};base64,{data}"
    reply = server.chat([{"type": kind, kind: {"url": url}}, text()])
    assert reply.status == 200, reply.body
    return reply.tokens


@pytest.mark.parametrize(("modality", "suffix"), [("audio", "wav"), ("video", "mp4")])
def test_prewarmed_media_reach_no_encoder_of_a_fresh_server(
    lab: Lab, tmp_path: Path, modality: str, suffix: str
) -> None:
    write = {"audio": _sound, "video": _clip}[modality]
    model = make_qwen2_audio(tmp_path / "model") if modality == "audio" else lab.model("qwen2-vl")
    (tmp_path / "media").mkdir()
    files, manifest = _media(tmp_path / "media", suffix, write)
    prefix = f"prewarmed-{modality}"
    limit = ("--limit-mm-per-prompt", json.dumps({modality: 1}))

    job = start_job(
        url=lab.server.location(prefix), model=model, media=manifest, workdir=tmp_path, name="job"
    )
    code = end_job(job)
    assert code == ExitCode.FINDING, (tmp_path / "job.log").read_text(encoding="utf-8")[-8000:]
    report = json.loads((tmp_path / "job.json").read_text(encoding="utf-8"))
    assert (report["encoded"], report["failed"]) == (3, 1)
    assert report["modalities"] == {modality: 4}
    (failure,) = (tmp_path / "job-errors.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(failure)["line"] == 4
    assert len(lab.server.items(prefix)) == 3

    with VLLMServer(
        model,
        workdir=tmp_path,
        name="server",
        role="ec_both",
        settings={"url": lab.server.location(prefix)},
        arguments=limit,
    ) as server:
        server.wait()
        tokens = [_ask(server, modality, file) for file in files]
        assert server.encoded == 0, server.log_tail()
        server.stop()
    assert len(set(tokens)) == 3, "they are heard and seen"
    assert [request.method for request in lab.moved(prefix)].count("GET") == 3
