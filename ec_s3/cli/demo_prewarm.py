"""`make demo-prewarm`: a catalogue is prewarmed, the job is killed half-way, a fresh vLLM hits.

Pictures go through `ec-s3 prewarm` into an embedded S3 server; the job's process is killed with
SIGKILL and started again. Then a fresh vLLM server answers requests over HTTP from that bucket, and
a vLLM without any bucket the same ones. The verdict compares objects, encoder calls and answers.

Owns its child processes and its server; everything listens on the loopback address only. Must never
import vLLM: it runs in children.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ec_s3.cli.output import ExitCode
from ec_s3.errors import ECS3Error
from ec_s3.testing import vllm_process
from ec_s3.testing.prewarm_jobs import DTYPE, JOB_SECONDS, end_job, make_catalogue, sent, start_job
from ec_s3.testing.tiny_models import MODELS
from ec_s3.testing.traffic import RecordedServer
from ec_s3.testing.vllm_process import VLLMProcess, VLLMProcessError, client_environment
from ec_s3.testing.vllm_server import VLLMServer, picture, text

if TYPE_CHECKING:
    import subprocess

    from ec_s3.testing.prewarm_jobs import Catalogue

PICTURES = 200
PROMPTS = 20
MODEL = "qwen2-vl"
_BUCKET = "ec-demo"
_PREFIX = "prewarm"


def run(target: Path) -> int:
    """Run the demonstration; returns the exit code.

    Args:
        target: folder for logs, the report and the list of failed entries.
    """
    console = Console(highlight=False, soft_wrap=True)
    target.mkdir(parents=True, exist_ok=True)
    try:
        faults = _demonstrate(target, console)
    except (ECS3Error, VLLMProcessError, OSError) as error:
        console.print(str(error), markup=False)
        faults = [str(error).partition("\n")[0]]
    verdict = "demo: OK" if not faults else f"demo: FAILED {'; '.join(faults)}"
    console.print(verdict, markup=False)
    return 1 if faults else 0


def _demonstrate(target: Path, console: Console) -> list[str]:
    with RecordedServer(bucket=_BUCKET) as server, tempfile.TemporaryDirectory() as scratch:
        catalogue = make_catalogue(Path(scratch), PICTURES)
        model = MODELS[MODEL].make(Path(scratch) / "model", dtype=DTYPE)
        console.print(f"S3 server at {server.url}, bucket {_BUCKET}; logs in {target}")
        job: dict[str, Any] = {
            "url": server.location(_PREFIX),
            "model": model,
            "media": catalogue.manifest,
            "workdir": target,
        }
        console.print(f"prewarming {PICTURES} pictures ...")
        code = _kill_half_way(start_job(name="first", **job), server)
        left = len(server.items(_PREFIX))
        if code != -signal.SIGKILL:
            return [f"the first job was not killed, but ended with {code}: {target}/first.log"]
        console.print(f"killed with {left} objects in the bucket; starting it again ...")
        code = end_job(start_job(name="second", **job))
        if not (target / "second.json").exists():
            return [f"the second job ended with {code} and no report: {target}/second.log"]
        faults = _judge(target, console, catalogue, server, left=left)
        faults += _faults({f"exit code {code}": code == ExitCode.FINDING})
        return faults or _serve(server, catalogue, model, target, console)


def _kill_half_way(job: subprocess.Popen[bytes], server: RecordedServer) -> int:
    deadline = time.monotonic() + JOB_SECONDS
    while job.poll() is None and time.monotonic() < deadline:
        if len(server.items(_PREFIX)) >= PICTURES // 2:
            break
        time.sleep(0.05)
    return end_job(job, kill=True)


def _judge(
    target: Path, console: Console, catalogue: Catalogue, server: RecordedServer, *, left: int
) -> list[str]:
    """Show the second job's report; what is not as it should be."""
    report = json.loads((target / "second.json").read_text(encoding="utf-8"))
    errors = (target / "second-errors.jsonl").read_text(encoding="utf-8").splitlines()
    for field, value in report.items():
        console.print(f"  {field:<20} {value}", markup=False)
    for line in errors:
        console.print(f"  failed: {line}", markup=False)
    objects = len(server.items(_PREFIX))
    return _faults(
        {
            f"{objects} objects for {PICTURES} pictures": objects == PICTURES,
            f"{len(errors)} entries failed": len(errors) == report["failed"] == catalogue.broken,
            # An upload may have reached the server, and been stored after the kill.
            f"{report['present']} present, {left} were there": report["present"] >= left,
            f"{report['encoded']} encoded": report["encoded"] + report["present"] == PICTURES,
            f"an index of {report['index_items']}": report["index_items"] == PICTURES,
        }
    )


def _serve(
    server: RecordedServer, catalogue: Catalogue, model: Path, target: Path, console: Console
) -> list[str]:
    step = len(catalogue.pictures) // PROMPTS
    pictures = catalogue.pictures[::step][:PROMPTS]
    console.print(f"a fresh vLLM server answers {PROMPTS} requests from the prewarmed bucket ...")
    settings = {"url": server.location(_PREFIX)}
    with VLLMServer(
        model, workdir=target, name="prewarmed", role="ec_both", settings=settings, dtype=DTYPE
    ) as http:
        http.wait()
        replies = [http.chat([picture(path), text()]) for path in pictures]
        encoded = http.encoded
        http.stop()
    refused = [reply for reply in replies if reply.status != HTTPStatus.OK]
    if refused:
        return [f"{len(refused)} requests failed, one with {refused[0]}: {http.log}"]
    console.print("and a vLLM without any bucket answers the same ...")
    job = {"model": str(model), "dtype": DTYPE}
    with VLLMProcess(
        job, workdir=target, name="without", environment=client_environment()
    ) as process:
        batches = [process.generate([vllm_process.prompt(sent(path))]) for path in pictures]
        process.finish()
    calls = sum(batch["encoder_calls"] for batch in batches)
    console.print(f"pictures encoded: {encoded} prewarmed; {calls} encoder calls without")
    answers = [tuple(vllm_process.token_ids(batch)[0]) for batch in batches]
    return _faults(
        {
            f"{encoded} pictures encoded with a prewarmed bucket": not encoded,
            f"{calls} encoder calls without a bucket": calls >= PROMPTS,
            "the answers differ": [reply.tokens for reply in replies] == answers,
        }
    )


def _faults(checks: dict[str, bool]) -> list[str]:
    return [fault for fault, good in checks.items() if not good]


if __name__ == "__main__":
    raise SystemExit(
        run(Path(sys.argv[1] if len(sys.argv) > 1 else "build/demo-prewarm").resolve())
    )
