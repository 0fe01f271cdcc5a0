"""What a job's encoder has written is what servers look for, byte for byte, and serves them."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ec_s3 import wire
from ec_s3.config import ECConfig
from ec_s3.prewarm.encoding import EncoderSettings, Failed, Identified, MediaItem
from ec_s3.prewarm.expect import FIELDS, fields_of, read_expected
from ec_s3.prewarm.isolation import IsolatedEncoder, Opener
from ec_s3.testing.faults import Fault
from ec_s3.testing.vllm_process import PATIENT, client_environment
from ec_s3.testing.vllm_server import picture, text

if TYPE_CHECKING:
    from ec_s3.testing.faults import FaultServer
    from ec_s3.testing.lab import Lab

_SECONDS = 300
_MAX_BYTES = 1 << 24
_PICTURES = ("china-0", "china-1", "flower-0", "flower-1", "hopper-0", "hopper-1")
_OPTIONS = ("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--seed", "0")


def _run(
    lab: Lab,
    folder: Path,
    *,
    prefix: str,
    files: dict[int, Path],
    endpoint: str = "",
    rounds: int = 1,
    uuids: dict[int, str] | None = None,
    fails: bool = False,
) -> dict[str, Any]:
    """Let a process of its own encode these files, by line."""
    folder.mkdir()
    task = {
        "model": str(lab.model("qwen2-vl")),
        "arguments": _OPTIONS,
        "connector": {"url": lab.server.location(prefix, endpoint=endpoint), **PATIENT},
        "entries": [
            {"file": str(file), "line": line, "modality": "image", "uuid": (uuids or {}).get(line)}
            for line, file in files.items()
        ],
        "rounds": rounds,
        "fails": fails,
    }
    given, found, log = (folder / name for name in ("in.json", "out.json", "log"))
    given.write_text(json.dumps(task))
    script = Path(__file__).parent / "prewarm_encode_job.py"
    with log.open("wb") as output:
        result = subprocess.run(
            [sys.executable, str(script), str(given), str(found)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=client_environment(),
            timeout=_SECONDS,
            check=False,
        )
    assert result.returncode == 0, log.read_text()[-8000:]
    answer: dict[str, Any] = json.loads(found.read_text())
    return answer


@pytest.fixture(scope="module")
def job(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Six pictures, one of them twice, one that is broken; done twice."""
    folder = tmp_path_factory.mktemp("prewarm")
    broken = folder / "broken.png"
    broken.write_bytes(lab.pictures["china-2"].read_bytes()[:2000])
    files = dict(enumerate((lab.pictures[name] for name in _PICTURES), start=1))
    files |= {7: broken, 8: lab.pictures[_PICTURES[0]]}
    return _run(lab, folder / "job", prefix="encoded-ahead", files=files, rounds=2)


def test_bad_entry_is_left_out_and_the_others_are_in_the_bucket_once(
    lab: Lab, job: dict[str, Any]
) -> None:
    first, again = job["rounds"]
    assert first["done"] == again["done"] == [1, 2, 3, 4, 5, 6, 8]
    assert list(first["reasons"]) == list(again["reasons"]) == ["7"]
    assert first["names"]["8"] == first["names"]["1"]
    assert (first["encoded"], again["encoded"]) == (6, 0)
    assert len(lab.server.items("encoded-ahead")) == 6
    assert [request.method for request in lab.moved("encoded-ahead")].count("PUT") == 6


def test_objects_are_the_ones_that_an_engine_writes_for_its_clients(
    lab: Lab, job: dict[str, Any]
) -> None:
    process = lab.start("qwen2-vl", prefix="by-clients")
    for name in _PICTURES:
        data = base64.b64encode(lab.pictures[name].read_bytes()).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        assert lab.ask_with(process, {"part": part}).encoded == 1
    lab.wait_for_uploads("by-clients", len(_PICTURES))
    process.finish()

    theirs, ours = (
        {key.removeprefix(f"{prefix}/"): key for key in lab.server.items(prefix)}
        for prefix in ("by-clients", "encoded-ahead")
    )
    assert theirs.keys() == ours.keys()
    names = set()
    for key in ours:
        (their, their_bytes), (our, our_bytes) = (
            wire.decode(lab.read(full), max_tensor_bytes=_MAX_BYTES)
            for full in (theirs[key], ours[key])
        )
        assert (our.identifier, our.namespace, our.spec) == (
            their.identifier,
            their.namespace,
            their.spec,
        )
        assert our_bytes == their_bytes
        assert our.meta.placeholder == their.meta.placeholder != {}
        assert our.meta.input_digest == their.meta.input_digest != ""
        assert our.meta.encode_seconds
        names.add(our.identifier)
    assert names == set(job["rounds"][0]["names"].values())


@pytest.mark.slow
async def test_fresh_server_answers_from_the_bucket_alone_and_agrees_with_the_job(
    lab: Lab, job: dict[str, Any]
) -> None:
    before = len(lab.moved("encoded-ahead"))
    settings = {"require_binding": True}
    server = lab.serve(prefix="encoded-ahead", role="ec_both", settings=settings).wait()
    replies = [server.chat([picture(lab.pictures[name]), text()]) for name in _PICTURES]

    assert [reply.status for reply in replies] == [200] * len(_PICTURES)
    assert server.encoded == 0
    assert len({reply.tokens for reply in replies}) > len(_PICTURES) // 2, "they see"
    moved = lab.moved("encoded-ahead")[before:]
    assert [request.method for request in moved] == ["GET"] * len(_PICTURES)
    told = (await read_expected(server.url, ECConfig())).fields
    folder = job["namespace"].rpartition("/")[0]
    written = fields_of(lab.read(f"encoded-ahead/v1/{folder}/namespace.json"))
    assert told["namespace"] == job["namespace"]
    assert {name: told[name] for name in FIELDS if name != "key_version"} == {
        name: written[name] for name in FIELDS if name != "key_version"
    }
    server.stop()


@pytest.mark.slow
def test_vllm_that_failed_is_started_again_and_clients_own_names_are_kept(
    lab: Lab, tmp_path: Path
) -> None:
    files = {1: lab.pictures["china-3"], 2: lab.pictures["flower-3"]}
    uuids = {1: "logo", 2: "../banner"}
    answer = _run(lab, tmp_path / "job", prefix="names", files=files, uuids=uuids, fails=True)
    (only,) = answer["rounds"]
    assert only["names"] == {"1": "logo", "2": "../banner"}
    assert (only["done"], only["reasons"]) == ([1, 2], {})
    for name in uuids.values():
        assert lab.stored("names", name)[1].meta.input_digest


@pytest.mark.slow
def test_medium_that_ends_vllms_process_is_left_out_and_the_others_are_encoded(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    support = Path(__file__).parents[1] / "support"
    more = {"PYTHONPATH": str(support), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    for name, value in (client_environment() | more).items():
        monkeypatch.setenv(name, value)
    paths = [lab.pictures["china-1"], tmp_path / "kills-encoder.png", lab.pictures["flower-1"]]
    paths[1].write_bytes(lab.pictures["hopper-1"].read_bytes())
    items = [
        MediaItem(line=line, uri=str(path), modality="image")
        for line, path in enumerate(paths, start=1)
    ]
    settings = EncoderSettings(
        model=str(lab.model("qwen2-vl")),
        arguments=_OPTIONS,
        connector={"url": lab.server.location("crashed"), **PATIENT},
    )
    encoder = IsolatedEncoder(settings, Opener("mortal_encoder", "open_mortal_vllm"))
    try:
        named = encoder.identify(items, paths)
        results = encoder.encode([one for one in named if isinstance(one, Identified)])
    finally:
        encoder.close()
    assert [type(one) for one in results] == [Identified, Failed, Identified]
    assert "SIGSEGV" in results[1].reason  # type: ignore[union-attr]  # Failed, as just seen
    assert len(lab.server.items("crashed")) == 2


@pytest.mark.slow
def test_bucket_that_takes_nothing_fails_every_entry_with_the_reason(
    lab: Lab, bucket_faults: FaultServer, tmp_path: Path
) -> None:
    fault = Fault(method="PUT", path="/refused/", status=403)
    bucket_faults.add(fault)
    files = {1: lab.pictures["china-3"], 2: lab.pictures["flower-3"]}
    answer = _run(lab, tmp_path / "job", prefix="refused", files=files, endpoint=bucket_faults.url)
    assert fault.met >= 2
    (only,) = answer["rounds"]
    assert only["done"] == []
    assert list(only["reasons"]) == ["1", "2"]
    assert all("denied" in reason for reason in only["reasons"].values())
