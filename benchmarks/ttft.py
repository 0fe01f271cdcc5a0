"""Time to first token: what a picture costs that nobody has seen, and one that somebody has.

    python benchmarks/ttft.py [--rounds 20] [--quick]      3 minutes; quick: 100 s

Real vLLM on the CPU, scheduler and worker in one process, its encoder slowed down by 100 ms an
encode; every request to the bucket takes 20 ms more than it would. Four engines run at once and
take turns, one request at a time, so that what else the machine does hits all alike:

* `no connector`, which also answers every prompt of the others: all tokens must be the same;
* `latency`, which has no index: it learns from its look-ups that nothing is ever found;
* `latency, index`: an index of the bucket tells it what is not there;
* `always`, which waits for every look-up: it gets a new picture, one that another engine has
  encoded and uploaded (warm bucket), and one that it has fetched some rounds ago and vLLM has
  dropped since (warm host).

vLLM's processor cache is off, and each prompt has a beginning of its own, so that no request
profits from another but through the encoder cache. Between two requests the uploads drain.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Client
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from suite.report import Report, explanation
from suite.vllm_child import ChildProcess, cores_but_for_servers, counts, transfer

from ec_s3.config import ECConfig
from ec_s3.indexing import list_tags, write_index
from ec_s3.keys import parse_key
from ec_s3.remote import open_store
from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.testing.tiny_models import MODELS
from ec_s3.testing.traffic import RecordedServer
from ec_s3.testing.vllm_process import client_environment

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

ENCODE_SECONDS = 0.1
S3_SECONDS = 0.02
EDGE = 224
CACHED_TOKENS = 512
"""Of vLLM's own encoder cache: eight pictures."""

LAG = 4
"""Rounds between a picture from the bucket and the same from host memory."""

WARM_ROUNDS = LAG + 2
PAUSE = 0.1
REQUEST_SECONDS = 30.0
TOKENS = 4

NONE, LATENCY, INDEX, ALWAYS = "no connector", "latency", "latency, index", "always"
BUCKET, HOST = "warm bucket", "warm host"


# -- in the child ------------------------------------------------------------------------------


class Child:
    """One vLLM engine in this process."""

    def __init__(self, job: dict[str, Any]) -> None:
        import vllm

        self._slow_down()
        llm = vllm.LLM(
            model=job["model"],
            dtype="float32",
            max_model_len=CACHED_TOKENS,
            max_num_batched_tokens=CACHED_TOKENS,
            max_num_seqs=4,
            mm_processor_cache_gb=0,
            enforce_eager=True,
            seed=0,
            disable_log_stats=False,
            ec_transfer_config=job["transfer"],
        )
        self._engine: Any = llm.llm_engine
        self._params = vllm.SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        self.encodes = 0

    def _slow_down(self) -> None:
        from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration as Model

        encode = Model.embed_multimodal

        def slow(model: Any, **inputs: Any) -> Any:
            output = encode(model, **inputs)
            self.encodes = getattr(self, "encodes", 0) + len(output)
            time.sleep(ENCODE_SECONDS * len(output))
            return output

        Model.embed_multimodal = slow

    def ask(self, number: int, picture: int) -> tuple[float, list[int], int]:
        """Seconds to the first token, all tokens, and pictures encoded."""
        from PIL import Image

        rng = np.random.default_rng(picture)
        image = Image.fromarray(rng.integers(0, 256, (EDGE, EDGE, 3), dtype=np.uint8))
        text = f"{number:06d} <|vision_start|><|image_pad|><|vision_end|> what is this"
        before, begun = self.encodes, time.perf_counter()
        self._engine.add_request(
            str(number), {"prompt": text, "multi_modal_data": {"image": image}}, self._params
        )
        first, tokens = 0.0, []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                first = first or time.perf_counter() - begun
                tokens = list(output.outputs[0].token_ids)
        return first, tokens, self.encodes - before


def child(address: str) -> None:
    """Answer what the parent asks, one thing after the other."""
    with Client(address) as parent:
        engine = Child(parent.recv())
        parent.send(None)
        while (question := parent.recv()) is not None:
            parent.send(engine.ask(*question) if question else counts())


# -- in the parent -----------------------------------------------------------------------------


class Engine(ChildProcess):
    """A child."""

    def ask(self, number: int, picture: int) -> tuple[float, list[int], int]:
        """See `Child.ask`."""
        seconds, tokens, encodes = self.tell((number, picture), REQUEST_SECONDS)
        return seconds, tokens, encodes

    def counts(self) -> dict[str, float]:
        """See `vllm_child.counts`."""
        found: dict[str, float] = self.tell((), REQUEST_SECONDS)
        return found


class Bench:
    """Runs rounds.

    Attributes:
        seconds: to the first token, by kind of request and round.
        encodes: pictures encoded, by kind of request.
        fetches: seconds of each fetch from the bucket, on average.
    """

    def __init__(self, folder: Path, server: RecordedServer, slow: FaultServer) -> None:
        self._folder = folder
        self._server, self._slow = server, slow
        self._model = MODELS["qwen2-vl"].make(folder / "model", dtype="float32")
        self._cores = cores_but_for_servers()
        self._numbers, self._pictures = itertools.count(), itertools.count()
        self._wrong = 0
        self.seconds: dict[str, list[float]] = {}
        self.encodes: dict[str, int] = {}
        self.fetches = float("nan")

    def _engine(self, **settings: object) -> Engine:
        job: dict[str, Any] = {"model": str(self._model), "transfer": None}
        if settings:
            url = self._server.location("ttft", endpoint=self._slow.url)
            job["transfer"] = transfer(url, **settings)
        return Engine(__file__, job, self._folder, self._cores)

    def run(self, rounds: int) -> None:
        with ExitStack() as stack:
            engines = {
                NONE: self._engine(),
                LATENCY: self._engine(policy="latency", index_max_age=0),
                ALWAYS: self._engine(policy="always"),
            }
            for engine in engines.values():
                stack.enter_context(engine)
            self._write_index(engines[NONE], engines[LATENCY])
            engines[INDEX] = stack.enter_context(self._engine(policy="latency"))
            uploaded: list[int] = []  # by the engine that has no index
            for number in range(WARM_ROUNDS + rounds):
                if number == WARM_ROUNDS:
                    self.seconds.clear()
                    self.encodes.clear()
                for kind, engine, picture in self._turns(engines, uploaded, number):
                    self._ask(kind, engine, picture, reference=engines[NONE])
            self._conclude(engines)

    def _turns(
        self, engines: dict[str, Engine], uploaded: list[int], number: int
    ) -> Iterator[tuple[str, Engine, int]]:
        new = next(self._pictures)
        for kind in (LATENCY, INDEX, ALWAYS):
            yield kind, engines[kind], new if kind == LATENCY else next(self._pictures)
        uploaded.append(new)
        if number >= 1:
            yield BUCKET, engines[ALWAYS], uploaded[number - 1]
        if number > LAG:
            yield HOST, engines[ALWAYS], uploaded[number - 1 - LAG]

    def _ask(self, kind: str, engine: Engine, picture: int, *, reference: Engine) -> None:
        number = next(self._numbers)
        plain, expected, _ = reference.ask(number, picture)
        seconds, tokens, encodes = engine.ask(number, picture)
        time.sleep(PAUSE)  # what was encoded goes to the bucket now
        self._wrong += tokens != expected
        self.seconds.setdefault(NONE, []).append(plain)
        self.seconds.setdefault(kind, []).append(seconds)
        self.encodes[kind] = self.encodes.get(kind, 0) + encodes

    def _write_index(self, plain: Engine, engine: Engine) -> None:
        """One item is in the bucket then; the engine that reads the index asks for others."""
        self._ask(LATENCY, engine, next(self._pictures), reference=plain)
        give_up = time.monotonic() + REQUEST_SECONDS
        while not (keys := self._server.items("ttft")):
            if time.monotonic() > give_up:
                sys.exit("nothing was uploaded")
            time.sleep(0.05)
        key = next(iter(keys)).removeprefix("ttft/")
        namespace = parse_key(key).namespace.partition("/")[0]

        async def write() -> None:
            store = open_store(ECConfig(url=self._server.location("ttft")))
            assert store is not None
            tags: array[int] = await list_tags(store, namespace)
            await write_index(store, tags, namespace=namespace, made=time.time())
            await store.aclose()

        os.environ.update(client_environment())
        asyncio.run(write())

    def _conclude(self, engines: dict[str, Engine]) -> None:
        if self._wrong:
            sys.exit(f"{self._wrong} answers differ from those without a connector")
        counts = engines[ALWAYS].counts()
        if counts.get("load_seconds_count|remote"):
            self.fetches = counts["load_seconds_sum|remote"] / counts["load_seconds_count|remote"]
        answered = engines[INDEX].counts().get("index_answers_total|absent", 0.0)
        print(f"answers from the index: {answered:.0f}; one fetch: {self.fetches * 1e3:.1f} ms")
        if self.encodes[BUCKET] or self.encodes[HOST]:
            print("not every warm picture was served:", self.encodes)


def report(bench: Bench, *, quick: bool) -> Report:
    medians = {kind: statistics.median(values) for kind, values in bench.seconds.items()}
    found = Report(
        title="Time to first token",
        quick=quick,
        notes=[explanation(__doc__)],
    )
    for kind, values in bench.seconds.items():
        quarters = statistics.quantiles(values, n=4)
        found.rows.append(
            {
                "request": kind if kind in (NONE, BUCKET, HOST) else f"new picture, {kind}",
                "median ms": medians[kind] * 1e3,
                "quartile 1 ms": quarters[0] * 1e3,
                "quartile 3 ms": quarters[2] * 1e3,
                "to no connector": medians[kind] / medians[NONE],
                "requests": len(values),
                "encoded": bench.encodes.get(kind, len(values)),
            }
        )
    floor = medians[HOST] + bench.fetches
    found.at_most(
        "a picture in the bucket: time to first token, to that from host memory plus one fetch",
        value=medians[BUCKET] / floor,
        limit=1.1,
        note=f"one fetch takes {bench.fetches * 1e3:.1f} ms",
    )
    found.at_most(
        "a new picture under `latency` with an index, to no connector",
        value=medians[INDEX] / medians[NONE],
        limit=1.05,
    )
    found.at_most(
        "the same without an index, once look-ups have found nothing for a while",
        value=medians[LATENCY] / medians[NONE],
        limit=1.05,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to first token, encoder slow, bucket far.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="6 rounds")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        os._exit(0)  # what vLLM leaves behind is of no interest
    with (
        tempfile.TemporaryDirectory() as folder,
        RecordedServer() as server,
        FaultServer(upstream=server.url) as slow,
    ):
        bench = Bench(Path(folder), server, slow)
        slow.add(Fault(delay=S3_SECONDS))
        bench.run(6 if arguments.quick else arguments.rounds)
    found = report(bench, quick=arguments.quick)
    for row in found.rows:
        print(
            "  ".join(f"{v:9.3f}" if isinstance(v, float) else f"{v!s:>26}" for v in row.values())
        )
    for target in found.targets:
        word = "met" if target.met else "MISSED"
        print(f"{word}: {target.text}: {target.value:.3f} ({target.limit}) {target.note}")
    found.write("ttft")


if __name__ == "__main__":
    main()
