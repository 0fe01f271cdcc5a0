"""Steps: what ec_s3 costs requests that have nothing to do with it, while its bucket is slow.

    python benchmarks/steps.py [--rounds 2] [--quick]      4 minutes; quick: 2

Real vLLM on the CPU, scheduler and worker in one process, so that ec_s3's threads share their
interpreter with every step: the layout in which they could hurt most. 96 text requests decode;
now and then a request with a picture comes, by turns one that is new, which is encoded and
uploaded, and one whose encoder output is in the bucket. Every request to the bucket takes 300 ms
more than it would. Steps that took in a picture are left out, whoever encoded it; all others are
timed.

Four engines run at once and take turns of 80 steps: two without a connector, one with ec_s3 on a
thread, one with ec_s3 in a process of its own. A turn is compared with the mean of the two turns
without a connector next to it, so that what else the machine does hits all alike; how those two
differ shows what is left of it, most of it luck of each process. A round starts them afresh. vLLM
computes with one thread, and the bucket's server stays on the last core: elsewhere it would be on
another machine. Limit: the median ratio of a turn's median step is at most 1.02.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Client
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from suite.report import Report
from suite.vllm_child import START_SECONDS, ChildProcess, cores_but_for_servers, counts, transfer

from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.testing.tiny_models import MODELS
from ec_s3.testing.traffic import RecordedServer

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT = 1.02
S3_SECONDS = 0.3
TEXTS = 96
TURN_STEPS = 80
TURNS = 10
"""Of each engine in a round; a text request has room for a little more tokens."""

WARM_STEPS = 80
EDGE = 224
TURN_SECONDS = 60.0
DRAIN_STEPS = 2000


# -- in the child ------------------------------------------------------------------------------


def picture(name: str) -> Any:
    """Noise; the name decides."""
    from PIL import Image

    rng = np.random.default_rng(list(name.encode()))
    return Image.fromarray(rng.integers(0, 256, (EDGE, EDGE, 3), dtype=np.uint8))


class Child:
    """One vLLM engine in this process."""

    def __init__(self, job: dict[str, Any]) -> None:
        import vllm

        llm = vllm.LLM(
            model=job["model"],
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=TEXTS + 8,
            enforce_eager=True,
            seed=0,
            disable_log_stats=False,
            ec_transfer_config=job["transfer"],
        )
        self._engine: Any = llm.llm_engine
        self._params = vllm.SamplingParams
        self._prompt = "<|vision_start|><|image_pad|><|vision_end|> what is this"
        gc.collect()
        gc.freeze()  # as vLLM's engine process does

    def begin(self) -> None:
        """Let the text requests decode."""
        tokens = TURN_STEPS * TURNS + WARM_STEPS + 20
        params = self._params(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        for number in range(TEXTS):
            self._engine.add_request(f"text-{number}", {"prompt": "tell me a story"}, params)
        for _ in range(WARM_STEPS):
            self.step()

    def add_picture(self, name: str) -> None:
        """A request that ends with the step that takes its picture in."""
        prompt = {"prompt": self._prompt, "multi_modal_data": {"image": picture(name)}}
        self._engine.add_request(f"picture-{name}", prompt, self._params(max_tokens=1))

    def step(self) -> tuple[float, int]:
        """Seconds, and pictures taken in."""
        begun = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - begun
        return seconds, sum(output.request_id.startswith("picture") for output in outputs)

    def turn(self, names: Sequence[str]) -> list[float]:
        """Seconds of each step that took in no picture; the pictures come evenly spaced."""
        samples = []
        gap = TURN_STEPS // len(names)
        for step in range(TURN_STEPS):
            if step % gap == 0:
                self.add_picture(names[step // gap])
            seconds, pictures = self.step()
            if not pictures:
                samples.append(seconds)
        return samples

    def fill(self, names: Sequence[str]) -> None:
        """Let the bucket have these."""
        for name in names:
            self.add_picture(name)
            for _ in range(DRAIN_STEPS):
                if not self._engine.has_unfinished_requests():
                    break
                self.step()

    def close(self) -> dict[str, float]:
        """The end; what became of the pictures."""
        self._engine.engine_core.shutdown()
        return {
            k: v for k, v in counts().items() if k.startswith(("hits_total", "misses_total")) and v
        }


def child(address: str) -> None:
    """Do what the parent says, one thing after the other."""
    with Client(address) as parent:
        engine = Child(parent.recv())
        parent.send("ready")
        word = ""
        while word != "close":
            word, names = parent.recv()
            answer: object = None
            if word == "begin":
                engine.begin()
            elif word == "turn":
                answer = engine.turn(names)
            elif word == "fill":
                engine.fill(names)
            else:
                answer = engine.close()
            parent.send(answer)


# -- in the parent -----------------------------------------------------------------------------


class Engine(ChildProcess):
    """A child."""

    def do(self, word: str, names: Sequence[str] = (), seconds: float = TURN_SECONDS) -> Any:
        """Let it do something; what it answers."""
        return self.tell((word, names), seconds)


NONE, AGAIN, THREAD, PROCESS = "no connector", "no connector, again", "thread", "process"


@dataclass(slots=True)
class Arm:
    """All that was measured of one: ratios of turns and of rounds, and step times in seconds."""

    ratios: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)


class Bench:
    """Runs rounds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = MODELS["qwen2-vl"].make(folder / "model", dtype="float32")
        self._known = [f"known {i}" for i in range(TURNS)]
        self._cores = cores_but_for_servers()

    def _engine(self, arm: str, url: str) -> Engine:
        job: dict[str, Any] = {"model": str(self._model), "transfer": None}
        if arm in (THREAD, PROCESS):
            job["transfer"] = transfer(url, engine=arm, policy="always")
        return Engine(__file__, job, self._folder, self._cores)

    def fill(self, url: str) -> None:
        """Let the bucket have what is known."""
        with self._engine(THREAD, url) as engine:
            engine.do("fill", self._known, START_SECONDS)
            engine.do("close")

    def round(self, number: int, url: str, arms: dict[str, Arm]) -> None:
        with ExitStack() as stack:
            engines = {arm: stack.enter_context(self._engine(arm, url)) for arm in arms}
            for engine in engines.values():
                engine.do("begin", seconds=START_SECONDS)
            medians: dict[str, list[float]] = {arm: [] for arm in arms}
            for turn in range(TURNS):
                for arm in arms if turn % 2 else reversed(arms):
                    pictures = [f"new {number} {turn} {arm}", self._known[turn]]
                    steps = engines[arm].do("turn", pictures)
                    medians[arm].append(statistics.median(steps))
                    arms[arm].steps += steps
            found = {arm: engine.do("close") for arm, engine in engines.items()}
        print(f"  round {number + 1}")
        for arm, turns in medians.items():
            plain = zip(medians[NONE], medians[AGAIN], strict=True)
            ratios = [b / statistics.mean(a) for a, b in zip(plain, turns, strict=True)]
            arms[arm].ratios += ratios
            print(
                f"    {arm:<20} median step {statistics.median(turns) * 1e3:.3f} ms, "
                f"ratio {statistics.median(ratios):.3f}  {found[arm] or ''}",
                flush=True,
            )


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def report(arms: dict[str, Arm], requests: int, *, quick: bool) -> None:
    made = Report(title="Steps of text requests while the bucket is slow", quick=quick)
    made.notes.append(
        f"{S3_SECONDS * 1e3:.0f} ms more on each of {requests} bucket requests; ratios of the "
        f"median steps of {len(arms[NONE].ratios)} turns each; p99 is of all steps together."
    )
    p99 = {arm: percentile(measured.steps, 0.99) for arm, measured in arms.items()}
    for arm, measured in arms.items():
        made.rows.append(
            {
                "engine": arm,
                "median ms": statistics.median(measured.steps) * 1e3,
                "ratio": statistics.median(measured.ratios),
                "quarter": percentile(measured.ratios, 0.25),
                "three quarters": percentile(measured.ratios, 0.75),
                "p99 ms": p99[arm] * 1e3,
                "p99 ratio": p99[arm] / statistics.mean((p99[NONE], p99[AGAIN])),
            }
        )
        print("  ", made.rows[-1])
    for arm in (THREAD, PROCESS):
        made.at_most(
            f"median step of text requests, bucket 300 ms slow, engine: {arm}",
            value=statistics.median(arms[arm].ratios),
            limit=LIMIT,
        )
    made.write("steps")


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time of text requests, bucket slow.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        os._exit(0)  # what vLLM leaves behind is of no interest
    arms = {arm: Arm() for arm in (NONE, AGAIN, THREAD, PROCESS)}
    with (
        tempfile.TemporaryDirectory() as folder,
        RecordedServer() as server,
        FaultServer(upstream=server.url) as slow,
    ):
        bench = Bench(Path(folder))
        bench.fill(server.location("steps"))
        slow.add(Fault(delay=S3_SECONDS))
        for number in range(1 if arguments.quick else arguments.rounds):
            bench.round(number, server.location("steps", endpoint=slow.url), arms)
        requests = slow.count()
    report(arms, requests, quick=arguments.quick)


if __name__ == "__main__":
    main()
