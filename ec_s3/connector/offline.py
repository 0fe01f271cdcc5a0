"""Run vLLM offline for one job, and report answers, encoder calls and times.

    python -m ec_s3.connector.offline JOB.json RESULT.json    # one shot: the job's batches
    python -m ec_s3.connector.offline JOB.json                # batches from stdin, a line each

In the second form every line of standard output is a JSON object: first `Started`, then one per
line of standard input, and `Finished` after its end. A line is `{"prompts": [...]}`, answered by a
`BatchResult`, `{"load": [...]}`, answered by a `LoadResult`, or `{"metrics": true}`.
vLLM's own output goes to standard error. `ec_s3.testing.vllm_process` is the other end.

Owns a whole process: it redirects standard output and sets vLLM's environment variables. The
encoder calls that vLLM makes at start-up on dummy input are not counted.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ec_s3.connector import encode_log
from ec_s3.connector.mixed_load import LoadRequest, MixedLoad
from ec_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ec_s3.connector.encode_log import EncodeLog
    from ec_s3.connector.mixed_load import Outcome

_METRIC_PREFIXES = ("ec_s3", "vllm:ec_", "vllm:mm_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """One image of a prompt, or another part of the message.

    Attributes:
        path: image file; None sends only `uuid` and `metadata`, as a client of an
            encode-prefill-decode deployment does.
        uuid: the client's own identifier, None for vLLM's content hash.
        metadata: what lays the item out without its pixels, for example `image_grid_thw`.
        part: instead of all that, a part as OpenAI's chat API has them, for example `video_url`.
    """

    path: str | None = None
    uuid: str | None = None
    metadata: Mapping[str, Any] | None = None
    part: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request: a user message with images first and text after.

    Attributes:
        max_tokens: of the answer, None for the job's.
        abort_after: seconds; see `LoadRequest`. Both count only in a load.
    """

    text: str = "what is this?"
    media: tuple[Media, ...] = ()
    max_tokens: int | None = None
    abort_after: float | None = None

    @classmethod
    def parse(cls, row: Mapping[str, Any]) -> Prompt:
        """Build from JSON."""
        media = tuple(Media(**item) for item in row.get("media", ()))
        return cls(**{**row, "media": media})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run.

    Attributes:
        multiprocessing: False keeps scheduler and worker in this process, which starts faster.
        logprobs: log-probabilities per token in the answers, None for none.
        llm: further arguments of `vllm.LLM`.
        batches: prompts of the one-shot form, one inner list per `generate` call.
    """

    model: str
    dtype: str = "float32"
    load_format: str = "auto"
    ec_transfer_config: Mapping[str, Any] | None = None
    max_tokens: int = 8
    logprobs: int | None = None
    tensor_parallel_size: int = 1
    multiprocessing: bool = False
    llm: Mapping[str, Any] = field(default_factory=dict)
    batches: tuple[tuple[Prompt, ...], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Job:
        """Build from JSON text.

        Raises:
            ConfigError: not JSON, an unknown field, or no model.
        """
        try:
            row = json.loads(text)
            batches = tuple(tuple(map(Prompt.parse, batch)) for batch in row.pop("batches", ()))
            return cls(**row, batches=batches)
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"not a job: {error}; fields: {', '.join(cls.__slots__)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What vLLM generated for one prompt; `logprobs` is that of each chosen token, or empty."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[float, ...] = ()
    ec_transfer_params: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """Answers of one `generate` call and the encoder's work during it.

    Attributes:
        started: seconds since the epoch.
        encoder_calls: calls per worker process (each tensor-parallel rank makes the same ones).
        encoder_items: images encoded, per worker process.
        encodes: every call of every process.
    """

    started: float
    seconds: float
    answers: tuple[Answer, ...]
    encoder_calls: int
    encoder_items: int
    encodes: tuple[encode_log.EncodeCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What became of each request of a load, and the images that it had encoded."""

    outcomes: tuple[Outcome, ...]
    encoder_items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The engine is up. Times are seconds since the epoch.

    Attributes:
        startup_encoder_calls: calls on dummy input before the first request.
    """

    vllm: str
    pid: int
    process_started: float
    imported: float
    ready: float
    startup_encoder_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The engine has shut down; `metrics` are vLLM's and the connector's Prometheus samples."""

    ended: float
    metrics: Mapping[str, float]


class OfflineEngine:
    """A vLLM engine with a counted encoder; not thread-safe."""

    def __init__(self, job: Job, log: EncodeLog) -> None:
        process_started = time.time()
        _prepare_environment(job)
        try:
            import vllm
        except ImportError as error:
            raise ConfigError(f"vLLM is not installed here ({error}); run `make setup`") from error
        imported = time.time()
        self._log = log
        self._job = job
        self._sampling = vllm.SamplingParams(
            max_tokens=job.max_tokens, temperature=0.0, logprobs=job.logprobs
        )
        self._llm = vllm.LLM(**_llm_arguments(job))
        self.started = Started(
            vllm=vllm.__version__,
            pid=os.getpid(),
            process_started=process_started,
            imported=imported,
            ready=time.time(),
            startup_encoder_calls=_per_process(log.drain())[0],
        )

    def generate(self, prompts: Sequence[Prompt]) -> BatchResult:
        """Answer all prompts in one batch, greedily."""
        started = time.time()
        messages = [_messages(prompt) for prompt in prompts]
        outputs = self._llm.chat(messages, self._sampling, use_tqdm=False)
        seconds = time.time() - started
        encodes = self._log.drain()
        calls, items = _per_process(encodes)
        return BatchResult(
            started=started,
            seconds=seconds,
            answers=tuple(map(_answer, outputs)),
            encoder_calls=calls,
            encoder_items=items,
            encodes=tuple(encodes),
        )

    def load(self, prompts: Sequence[Prompt]) -> LoadResult:
        """Answer prompts that overlap, each timed, some aborted; greedily."""
        load = MixedLoad(self._llm, in_process=not self._job.multiprocessing)
        requests = []
        for prompt in prompts:
            params = self._sampling.clone()
            params.max_tokens = prompt.max_tokens or self._job.max_tokens
            requests.append(
                LoadRequest(
                    messages=_messages(prompt), params=params, abort_after=prompt.abort_after
                )
            )
        outcomes = load.run(requests)
        return LoadResult(
            outcomes=tuple(outcomes), encoder_items=_per_process(self._log.drain())[1]
        )

    def metrics(self) -> Mapping[str, float]:
        """The encoder cache's samples as of vLLM's last report, keyed like the text format."""
        return _metrics()

    def close(self) -> Finished:
        """Shut the engine down, so that the connector flushes its uploads."""
        metrics = _metrics()
        self._llm.llm_engine.engine_core.shutdown()
        return Finished(ended=time.time(), metrics=metrics)


def run(job: Job, log: EncodeLog) -> dict[str, Any]:
    """Run the job's own batches in one engine."""
    engine = OfflineEngine(job, log)
    batches = [asdict(engine.generate(batch)) for batch in job.batches]
    return {
        "started": asdict(engine.started),
        "batches": batches,
        "finished": asdict(engine.close()),
    }


def serve(job: Job, log: EncodeLog, *, requests: Iterable[str], answers: TextIO) -> None:
    """Answer one batch per line until the input ends."""

    def tell(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    engine = OfflineEngine(job, log)
    tell(asdict(engine.started))
    for line in requests:
        match json.loads(line):
            case {"prompts": rows}:
                tell(asdict(engine.generate([Prompt.parse(row) for row in rows])))
            case {"load": rows}:
                tell(asdict(engine.load([Prompt.parse(row) for row in rows])))
            case {"metrics": True}:
                tell(engine.metrics())
    tell(asdict(engine.close()))


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit code."""
    if len(arguments) not in (1, 2):
        sys.stderr.write(f"{__doc__}\n")
        return 2
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        job = Job.parse(Path(arguments[0]).read_text(encoding="utf-8"))
        with (
            tempfile.TemporaryDirectory(prefix="ec_s3-offline-") as workdir,
            encode_log.installed(Path(workdir)) as log,
        ):
            if len(arguments) == 2:
                Path(arguments[1]).write_text(json.dumps(run(job, log)), encoding="utf-8")
            else:
                serve(job, log, requests=sys.stdin, answers=answers)
    except ConfigError as error:
        sys.stderr.write(f"offline: {error}\n")
        return 2
    return 0


def _prepare_environment(job: Job) -> None:
    """Set what vLLM reads from the environment; what the caller has set stays."""
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if job.multiprocessing or job.tensor_parallel_size > 1:
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # several processes share few cores
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if job.multiprocessing else "0"


def _llm_arguments(job: Job) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": job.model,
        "dtype": job.dtype,
        "load_format": job.load_format,
        "tensor_parallel_size": job.tensor_parallel_size,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "limit_mm_per_prompt": {"image": 4},
        "enforce_eager": True,
        "seed": 0,
        "disable_log_stats": False,  # the connector's metrics travel with vLLM's
    }
    if job.ec_transfer_config is not None:
        arguments["ec_transfer_config"] = dict(job.ec_transfer_config)
    return arguments | dict(job.llm)


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    content = [_part(item) for item in prompt.media]
    content.append({"type": "text", "text": prompt.text})
    return [{"role": "user", "content": content}]


def _part(item: Media) -> dict[str, Any]:
    part: dict[str, Any] = {} if item.uuid is None else {"uuid": item.uuid}
    if item.part is not None:
        return part | dict(item.part)
    if item.path is not None:
        from PIL import Image

        with Image.open(item.path) as image:
            return part | {"type": "image_pil", "image_pil": image.convert("RGB")}
    return part | {"type": "image_embeds", "image_embeds": dict(item.metadata or {})}


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    token_ids = tuple(completion.token_ids)
    chosen = zip(token_ids, completion.logprobs or (), strict=False)
    return Answer(
        token_ids=token_ids,
        text=completion.text,
        finish_reason=str(completion.finish_reason),
        logprobs=tuple(table[token].logprob for token, table in chosen),
        ec_transfer_params=getattr(output, "ec_transfer_params", None),
    )


def _per_process(calls: Sequence[encode_log.EncodeCall]) -> tuple[int, int]:
    """Calls and items of the process that made most of them."""
    by_calls = Counter(call.pid for call in calls)
    by_items: Counter[int] = Counter()
    for call in calls:
        by_items[call.pid] += len(call.rows)
    return max(by_calls.values(), default=0), max(by_items.values(), default=0)


def _metrics() -> dict[str, float]:
    """Samples that concern the encoder cache, keyed like the text format."""
    from prometheus_client import REGISTRY

    samples: dict[str, float] = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name.startswith(_METRIC_PREFIXES):
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
                samples[f"{sample.name}{{{labels}}}"] = sample.value
    return samples


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
