"""A process with a job's encoder: `python prewarm_encode_job.py <in> <out>`.

The input is JSON: a model, options, settings of the connector, and entries, each with the fields of
a `MediaItem` and its `file`. They are identified and encoded as often as `rounds` says, on a thread
that is not the main one, as a job does it. The output lists, by round, what became of each entry
and how many items the encoder worked on. With `fails`, vLLM fails in the midst of the first round.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def main(task: dict[str, Any]) -> dict[str, Any]:
    os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"})
    from ec_s3.connector import encode_log

    with (
        tempfile.TemporaryDirectory() as workdir,
        encode_log.installed(Path(workdir)) as log,
        ThreadPoolExecutor(1) as thread,
    ):
        return thread.submit(work, task, Path(workdir), log).result()


def work(task: dict[str, Any], workdir: Path, log: Any) -> dict[str, Any]:
    from ec_s3.connector.encoder import open_encoder
    from ec_s3.prewarm.encoding import EncoderSettings, MediaItem

    encoder = open_encoder(
        EncoderSettings(
            model=task["model"],
            arguments=tuple(task["arguments"]),
            connector=task["connector"],
            workdir=workdir,
        )
    )
    files = [Path(entry.pop("file")) for entry in task["entries"]]
    items = [MediaItem(uri="", **entry) for entry in task["entries"]]
    encoder.encode([])  # vLLM starts now, and encodes dummies as it does
    log.drain()
    if task["fails"]:
        fail(encoder._engine)
    rounds = [one_round(encoder, log, items, files) for _ in range(task["rounds"])]
    encoder.close()
    encoder.close()
    return {"namespace": encoder.namespace.id, "rounds": rounds}


def fail(engine: Any) -> None:
    def step() -> None:
        raise RuntimeError("out of memory")

    engine._vllm.step = step


def one_round(encoder: Any, log: Any, items: list[Any], files: list[Path]) -> dict[str, Any]:
    from ec_s3.prewarm.encoding import Failed, Identified

    identified = encoder.identify(items, files)
    assert log.drain() == [], "identifying makes no call of the encoder"
    named = [one for one in identified if isinstance(one, Identified)]
    results = encoder.encode(named)
    failed = [one for one in (*identified, *results) if isinstance(one, Failed)]
    return {
        "names": {one.item.line: one.identifier for one in named},
        "done": [one.item.line for one in results if isinstance(one, Identified)],
        "reasons": {one.item.line: one.reason for one in failed},
        "encoded": sum(len(call.rows) for call in log.drain()),
    }


if __name__ == "__main__":
    found = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(found))
