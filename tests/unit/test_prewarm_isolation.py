"""An encoder in a process of its own: whatever kills that process is found, told and left out."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mortal_encoder import SPACE
from PIL import Image
from typer.testing import CliRunner

from ec_s3.cli import prewarm_job
from ec_s3.cli.app import app
from ec_s3.errors import ConfigError, ECS3Error
from ec_s3.prewarm import isolation
from ec_s3.prewarm.encoding import EncoderSettings, Failed, Identified, MediaItem
from ec_s3.prewarm.isolation import IsolatedEncoder, Opener

if TYPE_CHECKING:
    from collections.abc import Iterator

MORTAL = Opener("mortal_encoder", "open_mortal")
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the child opens, by name."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


@pytest.fixture
def settings(tmp_path: Path) -> EncoderSettings:
    (tmp_path / "bucket").mkdir()
    return EncoderSettings(model="m", connector={"url": f"file://{tmp_path}/bucket"})


@pytest.fixture
def encoder(settings: EncoderSettings) -> Iterator[IsolatedEncoder]:
    opened = IsolatedEncoder(settings, MORTAL)
    yield opened
    opened.close()


def write(folder: Path, *names: str) -> tuple[list[MediaItem], list[Path]]:
    items, paths = [], []
    for number, name in enumerate(names):
        body = io.BytesIO()
        Image.new("RGB", (4, 4), (number, 1, 2)).save(body, "PNG")
        path = folder / f"{name}.png"
        path.write_bytes(body.getvalue())
        items.append(MediaItem(line=number + 1, uri=str(path), modality="image"))
        paths.append(path)
    return items, paths


def test_calls_reach_the_encoder_and_come_back(encoder: IsolatedEncoder, tmp_path: Path) -> None:
    assert encoder.namespace == SPACE
    assert encoder.facts == {"model_argument": "m"}
    items, paths = write(tmp_path, "a", "b")
    named = [one for one in encoder.identify(items, paths) if isinstance(one, Identified)]
    assert [one.item for one in named] == items
    assert encoder.encode(named) == named
    stranger = MediaItem(line=7, uri="x", modality="image")
    with pytest.raises(ValueError, match=r"not identified just before: lines \[7\]"):
        encoder.encode([Identified(item=stranger, identifier="x", num_embeds=1)])
    encoder.close()
    encoder.close()


def test_medium_that_kills_the_process_is_left_out_and_the_others_are_encoded(
    encoder: IsolatedEncoder, tmp_path: Path
) -> None:
    items, paths = write(tmp_path, "kills-decoder", "kills-encoder", "a")
    identified = encoder.identify(items, paths)
    assert [type(one) for one in identified] == [Failed, Identified, Identified]
    failure = identified[0]
    assert isinstance(failure, Failed)
    assert failure.reason == "the encoder died of it: it was ended by SIGSEGV"
    results = encoder.encode([one for one in identified if isinstance(one, Identified)])
    assert [type(one) for one in results] == [Failed, Identified]
    assert [one.item.line for one in results] == [2, 3]
    failure = results[0]
    assert isinstance(failure, Failed)
    assert "SIGKILL (out of memory?)" in failure.reason


def test_process_that_dies_again_and_again_ends_the_job(
    encoder: IsolatedEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "MAX_DEATHS", 2)
    with pytest.raises(ECS3Error, match="died 2 times in a row: it was ended by SIGSEGV"):
        encoder.identify(*write(tmp_path, "kills-decoder", "kills-decoder-too"))


def test_errors_of_the_encoder_stay_what_they_are(
    encoder: IsolatedEncoder, settings: EncoderSettings, tmp_path: Path
) -> None:
    (one,) = encoder.identify(*write(tmp_path, "not-encoded"))
    assert isinstance(one, Identified)
    with pytest.raises(ECS3Error, match=r"^vLLM has failed$"):
        encoder.encode([one])
    with pytest.raises(ConfigError, match=r"^no model m$"):
        IsolatedEncoder(settings, Opener("mortal_encoder", "open_none"))
    with pytest.raises(ConfigError, match="did not start: it ended with exit code 1"):
        IsolatedEncoder(settings, Opener("mortal_encoder", "open_and_die"))


def test_job_goes_on_beside_media_that_kill(
    tmp_path: Path, settings: EncoderSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prewarm_job, "open_encoder", lambda given: IsolatedEncoder(given, MORTAL))
    media = tmp_path / "media"
    media.mkdir()
    write(media, "a", "b", "c-kills-encoder", "d", "e-kills-decoder")
    errors = tmp_path / "errors.jsonl"
    command = ["--json", "--url", str(settings.connector["url"]), "prewarm", "--model", "m"]
    command += ["--media", str(media), "--errors", str(errors), "--batch-size", "4"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert (found["outcome"], found["encoded"], found["failed"]) == ("some", 3, 2)
    assert found["stopped"] is None
    told = [json.loads(line) for line in errors.read_text(encoding="utf-8").splitlines()]
    assert {(Path(one["uri"]).name, one["line"]) for one in told} == {
        ("c-kills-encoder.png", 3),
        ("e-kills-decoder.png", 5),
    }
    assert all("the encoder died of it" in one["reason"] for one in told)


_KILLED = """
import os, signal, sys
from ec_s3.prewarm.encoding import EncoderSettings
from ec_s3.prewarm.isolation import IsolatedEncoder, Opener

settings = EncoderSettings(model="m", connector={"url": sys.argv[1]})
encoder = IsolatedEncoder(settings, Opener("mortal_encoder", "open_mortal"))
print(encoder._process._child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_process_ends_with_the_job_that_is_killed(settings: EncoderSettings) -> None:
    command = [sys.executable, "-c", _KILLED, str(settings.connector["url"])]
    ended = subprocess.run(command, check=False, timeout=100, capture_output=True, env=os.environ)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    child = int(ended.stdout)
    give_up = time.monotonic() + 30
    while _lives(child):
        assert time.monotonic() < give_up, f"{child} lives on"
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # ended, and nobody has asked


def end_idle(encoder: IsolatedEncoder) -> None:
    """What the kernel does when memory runs out: it takes whom it wants."""
    child = encoder._process._child
    os.killpg(child.pid, signal.SIGKILL)
    child.wait(100)


def test_process_that_dies_idle_is_no_fault_of_the_next_entry(
    encoder: IsolatedEncoder, tmp_path: Path
) -> None:
    items, paths = write(tmp_path, "a")
    end_idle(encoder)
    (named,) = encoder.identify(items, paths)
    assert isinstance(named, Identified)
    end_idle(encoder)
    assert encoder.encode([named]) == [named]


class JumpingClock:
    """A module `time`: hours pass whenever a file appears."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker
        self._ahead = 0.0

    def monotonic(self) -> float:
        if self._marker.exists():
            self._marker.unlink()
            self._ahead += 10_000.0
        return time.monotonic() + self._ahead


def test_decoder_that_hangs_is_found_and_left_out(
    encoder: IsolatedEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items, paths = write(tmp_path, "a", "hangs-decoder", "b")
    monkeypatch.setattr(isolation, "time", JumpingClock(tmp_path / "hangs-decoder.hangs"))
    results = encoder.identify(items, paths)
    assert [type(one) for one in results] == [Identified, Failed, Identified]
    assert isinstance(results[1], Failed)
    assert "gave no answer within 630 s" in results[1].reason
    named = [one for one in results if isinstance(one, Identified)]
    assert encoder.encode(named) == named


def test_process_that_cannot_be_started_again_is_no_matter_of_settings(
    encoder: IsolatedEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "_opener", Opener("mortal_encoder", "open_none"))
    end_idle(encoder)
    with pytest.raises(ECS3Error, match="cannot be started again: no model m") as caught:
        encoder.identify(*write(tmp_path, "a"))
    assert not isinstance(caught.value, ConfigError)
    with pytest.raises(ECS3Error, match="cannot be started again"):
        encoder.identify(*write(tmp_path, "a"))


def test_process_that_a_driver_holds_does_not_hold_the_job(
    encoder: IsolatedEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = encoder._process._child

    def held(_: float) -> int:
        raise subprocess.TimeoutExpired("vllm", 30)

    with monkeypatch.context() as patch:
        patch.setattr(child, "wait", held)
        encoder.close()
    assert child.wait(100) is not None
