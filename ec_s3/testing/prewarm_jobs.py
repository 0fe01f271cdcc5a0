"""Prewarm jobs as processes, and catalogues for them with entries that cannot be encoded.

Used by the end-to-end test and by the demonstration. A job is `ec-s3 prewarm` in a process group of
its own, which whoever started it ends.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ec_s3.testing.pictures import make_pictures
from ec_s3.testing.vllm_process import client_environment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BATCH = 16
JOB_SECONDS = 600.0
DTYPE = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """A manifest, and what is in it.

    Attributes:
        manifest: the file.
        pictures: the good ones.
        broken: entries that cannot be encoded.
    """

    manifest: Path
    pictures: Sequence[Path]
    broken: int


def make_catalogue(folder: Path, number: int) -> Catalogue:
    """Pictures and their manifest, with a line that is no JSON, a lost file and a cut one."""
    pictures = make_pictures(folder / "pictures", number)
    cut = folder / "pictures" / "cut.png"
    cut.write_bytes(pictures[1].read_bytes()[:300])
    lines = [json.dumps({"uri": f"pictures/{path.name}"}) for path in pictures]
    third = number // 3
    lines.insert(3 * third, json.dumps({"uri": f"pictures/{cut.name}"}))
    lines.insert(2 * third, json.dumps({"uri": "pictures/lost.png"}))
    lines.insert(third, '{"uri": "pictures/0000.jpg"')
    manifest = folder / "catalogue.jsonl"
    manifest.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Catalogue(manifest=manifest, pictures=pictures, broken=3)


def start_job(
    *,
    url: str,
    model: Path,
    media: Path,
    workdir: Path,
    name: str,
    arguments: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start `ec-s3 prewarm` in a process group of its own.

    Args:
        url: the store.
        model: folder of a tiny model.
        media: what to encode.
        workdir: folder for `<name>.log`, `<name>.json` and `<name>-errors.jsonl`.
        name: of the job.
        arguments: further ones of vLLM.
    """
    command = [sys.executable, "-m", "ec_s3.cli.app", "--json", "--url", url, "prewarm"]
    command += ["--model", str(model), "--media", str(media), "--batch-size", str(BATCH)]
    command += ["--report", str(workdir / f"{name}.json")]
    command += ["--errors", str(workdir / f"{name}-errors.jsonl")]
    command += ["--", "--dtype", DTYPE, "--max-model-len", "1024", "--enforce-eager", *arguments]
    vllm = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (workdir / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=client_environment() | vllm | {"EC_S3_MAX_LOCAL_CPU_SIZE": "64MiB"},
            process_group=0,
        )


def end_job(job: subprocess.Popen[bytes], *, kill: bool = False) -> int:
    """Wait for a job's end, or kill it with all of its processes; its exit code."""
    try:
        if not kill:
            return job.wait(JOB_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    return job.wait(30)


def sent(path: Path) -> dict[str, Any]:
    """A picture as a client sends it: its file, in the request."""
    kind = "jpeg" if path.suffix == ".jpg" else "png"
    body = base64.b64encode(path.read_bytes()).decode()
    url = f"data:image/{kind};base64,{body}"
    return {"part": {"type": "image_url", "image_url": {"url": url}}}
