"""Steps: what ec_s3 costs requests that have nothing to do with it, while its bucket is slow.

    python benchmarks/steps.py [--rounds 4]

Real vLLM on the CPU, scheduler and worker in one process, so that ec_s3's threads share their
interpreter with every step: the layout in which they could hurt most. 96 text requests decode;
now and then a request with a picture comes, by turns one whose encoder output is in the bucket and
one that is new, which is encoded and uploaded. Every request to the bucket takes 300 ms more than
it would. Steps that took in a picture are left out, whoever encoded it; all others are timed.

A is vLLM without a connector, B with ec_s3; they alternate, each in a fresh process, within one
run. vLLM computes with one thread, and the bucket's server stays on the last core: elsewhere it
would be on another machine. Limit: the medians' ratio B to A is at most 1.02.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.testing.tiny_models import MODELS
from ec_s3.testing.traffic import RecordedServer
from ec_s3.testing.vllm_process import client_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT = 1.02
S3_SECONDS = 0.3
TEXTS = 96
STEPS = 800
"""Timed steps of a process; a text request has room for a little more tokens."""

WARM_STEPS = 80
GAP = 40
"""Steps between two pictures: a few a second, and more often than not one waits for the bucket."""

PICTURES = STEPS // GAP
EDGE = 224
PROCESS_SECONDS = 600.0
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

    def add_text(self, number: int) -> None:
        params = self._params(max_tokens=STEPS + WARM_STEPS + 20, ignore_eos=True, temperature=0.0)
        self._engine.add_request(f"text-{number}", {"prompt": "tell me a story"}, params)

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

    def run(self, known: Sequence[str], new: Sequence[str]) -> list[tuple[float, int]]:
        """Of each step that took in no picture: seconds, and pictures that waited meanwhile."""
        for number in range(TEXTS):
            self.add_text(number)
        for _ in range(WARM_STEPS):
            self.step()
        names = [name for pair in zip(known, new, strict=True) for name in pair]
        samples, waiting = [], 0
        for step in range(STEPS):
            if step % GAP == 0:
                self.add_picture(names[step // GAP])
                waiting += 1
            seconds, pictures = self.step()
            waiting -= pictures
            if not pictures:
                samples.append((seconds, waiting))
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
        from prometheus_client import REGISTRY

        self._engine.engine_core.shutdown()
        return {
            f"{sample.name.removeprefix('vllm:ec_s3_')} {'|'.join(labels)}".strip(): sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name in ("vllm:ec_s3_hits_total", "vllm:ec_s3_misses_total")
            for labels in [[v for k, v in sample.labels.items() if k in ("tier", "reason")]]
            if sample.value
        }


def child(job: dict[str, Any]) -> dict[str, Any]:
    engine = Child(job)
    if job["fill"]:
        engine.fill(job["known"])
        return {"counts": engine.close()}
    return {"samples": engine.run(job["known"], job["new"]), "counts": engine.close()}


# -- in the parent -----------------------------------------------------------------------------


class Bench:
    """Starts the children, one after the other."""

    def __init__(self, folder: Path, engine: str) -> None:
        self._folder = folder
        self._engine = engine
        self._model = MODELS["qwen2-vl"].make(folder / "model", dtype="float32")
        self._known = [f"known {i}" for i in range(PICTURES // 2)]
        self._number = 0
        self._cores = os.sched_getaffinity(0)
        for thread in os.listdir("/proc/self/task"):  # the servers'; later threads inherit it
            os.sched_setaffinity(int(thread), {max(self._cores)})

    def run(self, url: str | None, *, fill: bool = False) -> dict[str, Any]:
        """One child: with ec_s3 at a URL, or without a connector."""
        self._number += 1
        new = [f"new {self._number} {i}" for i in range(PICTURES // 2)]
        job = {
            "model": str(self._model),
            "transfer": None if url is None else self._transfer(url),
            "known": self._known,
            "new": new,
            "fill": fill,
        }
        files = [self._folder / f"{kind}-{self._number}.json" for kind in ("job", "result")]
        files[0].write_text(json.dumps(job))
        log = self._folder / f"{self._number}.log"
        with log.open("wb") as output:
            ended = subprocess.run(
                [sys.executable, __file__, "--child", *map(str, files)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=client_environment()
                | {
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_NO_USAGE_STATS": "1",
                    "HF_HUB_OFFLINE": "1",
                },
                timeout=PROCESS_SECONDS,
                check=False,
                preexec_fn=lambda: os.sched_setaffinity(0, self._cores),
            )
        if ended.returncode:
            sys.exit(f"a child failed:\n{log.read_text(errors='replace')[-4000:]}")
        result: dict[str, Any] = json.loads(files[1].read_text())
        return result

    def _transfer(self, url: str) -> dict[str, Any]:
        return {
            "ec_connector": "ECS3Connector",
            "ec_connector_module_path": "ec_s3.connector",
            "ec_role": "ec_both",
            "ec_connector_extra_config": {
                "url": url,
                "max_local_cpu_size": "64MiB",
                "engine": self._engine,
            },
        }


def percentile(seconds: Sequence[float], share: float) -> float:
    if not seconds:
        return float("nan")
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3


def measure(bench: Bench, url: str, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of every step, by arm and round; as a third arm those of B in which nobody waited."""
    times: dict[str, list[list[float]]] = {"A": [], "B": [], "B, nobody waits": []}
    for number in range(rounds):
        for arm in ("A", "B"):
            result = bench.run(url if arm == "B" else None)
            seconds = [taken for taken, _ in result["samples"]]
            times[arm].append(seconds)
            if arm == "B":
                alone = [taken for taken, waiting in result["samples"] if not waiting]
                times["B, nobody waits"].append(alone)
            print(
                f"  round {number + 1} {arm}: {len(seconds)} steps, "
                f"median {percentile(seconds, 0.5):.3f} ms, p99 {percentile(seconds, 0.99):.3f} ms"
                f"   {result['counts'] or ''}",
                flush=True,
            )
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time of text requests, bucket slow.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--engine", choices=("thread", "process"), default="thread")
    parser.add_argument("--output", type=Path, default=Path("build/bench/steps.json"))
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        job, result = arguments.child
        result.write_text(json.dumps(child(json.loads(job.read_text()))))
        os._exit(0)  # what vLLM leaves behind is of no interest
    with (
        tempfile.TemporaryDirectory() as folder,
        RecordedServer() as server,
        FaultServer(upstream=server.url) as slow,
    ):
        bench = Bench(Path(folder), arguments.engine)
        bench.run(server.location("steps"), fill=True)
        slow.add(Fault(delay=S3_SECONDS))
        times = measure(bench, server.location("steps", endpoint=slow.url), arguments.rounds)
        requests = slow.count()
    report = summary(times, requests) | {"engine": arguments.engine, "rounds": arguments.rounds}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


def summary(times: dict[str, list[list[float]]], requests: int) -> dict[str, Any]:
    medians = {arm: [percentile(round_, 0.5) for round_ in rounds] for arm, rounds in times.items()}
    pooled = {arm: [s for round_ in rounds for s in round_] for arm, rounds in times.items()}
    ratios, alone = (
        [b / a for a, b in zip(medians["A"], medians[arm], strict=True)]
        for arm in ("B", "B, nobody waits")
    )
    p99 = {arm: percentile(seconds, 0.99) for arm, seconds in pooled.items()}
    ratio = statistics.median(ratios)
    verdict = "" if ratio <= LIMIT else "  OVER THE LIMIT"
    print(f"\nText requests' steps, {S3_SECONDS * 1e3:.0f} ms more on {requests} bucket requests")
    print(
        f"  median ratio B to A: {ratio:.3f} (rounds {min(ratios):.3f} to {max(ratios):.3f})",
        end="",
    )
    print(verdict)
    print(
        f"  of it in steps in which no picture waits for the bucket: {statistics.median(alone):.3f}"
    )
    print(f"  A against A: {min(medians['A']):.3f} to {max(medians['A']):.3f} ms")
    print(f"  p99: A {p99['A']:.3f} ms, B {p99['B']:.3f} ms, ratio {p99['B'] / p99['A']:.3f}")
    return {
        "median ms": medians,
        "ratios": ratios,
        "ratios while nobody waits": alone,
        "median ratio": ratio,
        "p99 ms": p99,
        "p99 ratio": p99["B"] / p99["A"],
        "bucket requests": requests,
    }


if __name__ == "__main__":
    main()
