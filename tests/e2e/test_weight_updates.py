"""Real vLLM whose encoder's weights are changed in place answers as one that has no cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ec_s3.header import read_header
from ec_s3.keys import parse_key
from ec_s3.testing.vllm_process import PATIENT, client_environment, image, prompt

if TYPE_CHECKING:
    from ec_s3.testing.lab import Lab

_PREFIX = "weights"
_SECONDS = 400


def _run(lab: Lab, folder: Path, *, cached: bool, ranks: int) -> list[dict[str, Any]]:
    job: dict[str, Any] = {
        "model": str(lab.model("llava")),
        "multiprocessing": ranks > 1,
        "tensor_parallel_size": ranks,
        "llm": {"worker_extension_cls": "weights_job.Updates"},
    }
    if cached:
        job["ec_transfer_config"] = {
            "ec_connector": "ECS3Connector",
            "ec_connector_module_path": "ec_s3.connector",
            "ec_role": "ec_both",
            "ec_connector_extra_config": {"url": lab.server.location(_PREFIX), **PATIENT},
        }
    pictures = [image(lab.pictures[name]) for name in ("china-0", "flower-0")]
    task = {
        "job": job,
        "cached": cached,
        "url": lab.server.location(_PREFIX),
        "prompts": [prompt(picture) for picture in pictures],
    }
    folder.mkdir()
    given, found, log = (folder / name for name in ("in.json", "out.json", "log"))
    given.write_text(json.dumps(task))
    here = Path(__file__).parent
    environment = {**client_environment(), "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    with log.open("wb") as output:
        result = subprocess.run(
            [sys.executable, str(here / "weights_job.py"), str(given), str(found)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=_SECONDS,
            check=False,
        )
    assert result.returncode == 0, log.read_text()[-8000:]
    batches: list[dict[str, Any]] = json.loads(found.read_text())
    return batches


def _tokens(batch: dict[str, Any]) -> list[list[int]]:
    return [answer["token_ids"] for answer in batch["answers"]]


def test_every_rank_says_so_and_nothing_of_the_old_weights_is_used(
    lab: Lab, tmp_path: Path
) -> None:
    reference = _run(lab, tmp_path / "reference", cached=False, ranks=1)
    old, new = _tokens(reference[0]), _tokens(reference[2])
    assert old != new, "the change of the weights can be seen in the answers"

    batches = _run(lab, tmp_path / "cached", cached=True, ranks=2)
    assert [_tokens(batch) for batch in batches] == [old, old, new, new, old]
    # The last come from the bucket: vLLM's own cache was cleared, and so was host memory.
    assert [batch["encoder_items"] for batch in batches] == [2, 0, 2, 0, 0]

    keys = lab.wait_for_uploads(_PREFIX, 4)
    folders = set()
    for key in keys:
        namespace = parse_key(key.removeprefix(f"{_PREFIX}/")).namespace
        header = read_header(lab.read(key), max_tensor_bytes=1 << 24)
        assert header.namespace == namespace
        folders.add(namespace)
    assert len(folders) == 2
