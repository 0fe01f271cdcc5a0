"""Soak: real vLLM under random faults for a long time; it must give back what it takes.

    python tests/matrix/soak.py --minutes 20 --seed 1

One vLLM process in role ec_both, with a host tier much smaller than its pictures, asks an S3 server
through a fault server that lets every twentieth request fail in one way or another. Pictures are
drawn from a Zipf-like distribution, with text in between. Every answer is compared with that of a
clean run; memory, threads and files are sampled from outside. Prints a summary, writes
`build/soak/soak.json`, and exits with 1 when something did not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matrix_bench import Engine, Reference
from matrix_failures import ITEM

from ec_s3.testing.census import census
from ec_s3.testing.faults import Fault
from ec_s3.testing.lab import Lab
from ec_s3.testing.traffic import RecordedServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matrix_bench import Ask, Item

PICTURES = 200
TIER = "8MiB"  # 32 pages
FAULT_RATE = 0.05
SAMPLE_SECONDS = 10.0
FLAT = 0.02
_DRAIN_SECONDS = 15.0  # longer than anything that was under way may take
_OUTPUT = Path(__file__).parents[2] / "build" / "soak" / "soak.json"

FAULTS: tuple[dict[str, Any], ...] = (
    {"status": 503},
    {"status": 503, "retry_after": 1},
    {"status": 500},
    {"status": 403},
    {"hang": True},
    {"delay": 0.3},
    {"refuse": True},
    {"close": True},
    {"method": "PUT", "drop_response": True},
    {"method": "GET", "path": ITEM, "status": 404},
    {"method": "GET", "path": ITEM, "cut_at": 900},
    {"method": "GET", "path": ITEM, "cut_at": 900, "reset": True},
    {"method": "GET", "path": ITEM, "flip_at": 2000},
    {"method": "GET", "path": ITEM, "stall_at": 900},
    {"method": "GET", "path": ITEM, "rate": 4000},
    {"path": ITEM, "extra": b"more"},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the process held at one moment."""

    seconds: float
    resident_bytes: int
    threads: int
    descriptors: int


class Soak:
    """One run."""

    def __init__(self, engine: Engine, reference: Reference, *, seed: int) -> None:
        self._engine = engine
        self._dice = random.Random(seed)
        self._items = [reference.item(f"soak-{n}") for n in range(PICTURES)]
        self._weights = [1.0 / (n + 1) for n in range(PICTURES)]
        self.samples: list[Sample] = []
        self.requests: Counter[str] = Counter()
        self.encoded = 0
        self.wrong: list[str] = []
        self.faults_met = 0

    def run(self, minutes: float) -> None:
        """Send loads until the time is over."""
        engine = self._engine
        self._crowd()
        faults = [Fault(**fault, chance=FAULT_RATE / len(FAULTS)) for fault in FAULTS]
        engine.proxy.add(*faults)
        begun = time.monotonic()
        next_sample = begun
        while (now := time.monotonic()) < begun + 60 * minutes:
            if now >= next_sample:
                next_sample += SAMPLE_SECONDS
                self._sample(now - begun)
                engine.proxy.clear_log()
            asks = [self._ask() for _ in range(self._dice.randint(1, 8))]
            loaded = engine.run(asks, timed=False)
            self.wrong += loaded.wrong
            self.encoded += loaded.encoded
            self.requests.update(ask.kind for ask in asks)
        engine.proxy.clear()
        self.faults_met = sum(fault.met for fault in faults)

    def _crowd(self) -> None:
        """Bring every pool of threads and buffer to its working size before anything is counted."""
        for start in range(0, PICTURES, 16):
            chunk = self._items[start : start + 16]
            self.wrong += self._engine.run([self._engine.ask(i) for i in chunk], timed=False).wrong

    def _ask(self) -> Ask:
        if self._dice.random() < 0.3:
            text = self._dice.choice(("hello", "tell me a story", "what is love?"))
            return self._engine.ask(text=text, max_tokens=self._dice.choice((8, 24, 60)))
        item: Item = self._dice.choices(self._items, self._weights)[0]
        return self._engine.ask(item)

    def _sample(self, seconds: float) -> None:
        now = census(self._engine.process.pid)
        self.samples.append(
            Sample(
                seconds=round(seconds, 1),
                resident_bytes=now.resident_bytes,
                threads=now.threads,
                descriptors=now.descriptors,
            )
        )


def judge(soak: Soak, end: dict[str, float]) -> tuple[dict[str, Any], list[str]]:
    """The figures of a run, and what did not hold."""
    half = soak.samples[len(soak.samples) // 2 :]
    resident = [sample.resident_bytes for sample in half]
    threads = [sample.threads for sample in half]
    descriptors = [sample.descriptors for sample in half]
    spread = (max(resident) - min(resident)) / min(resident)
    figures = {
        "requests": dict(soak.requests),
        "encoded": soak.encoded,
        "faults": soak.faults_met,
        "wrong": len(soak.wrong),
        "resident_mib": [round(resident[0] / 2**20, 1), round(resident[-1] / 2**20, 1)],
        "resident_spread": round(spread, 4),
        "resident_slope_mib_per_hour": round(_slope(half) * 3600 / 2**20, 2),
        "threads": [min(threads), max(threads)],
        "descriptors": [min(descriptors), max(descriptors)],
        "leased_bytes": end.get("local_bytes leased", 0.0),
        "reserved_bytes": end.get("local_bytes reserved", 0.0),
        "errors": end.get("errors_total", 0.0),
        "evictions": end.get("local_evictions_total", 0.0),
    }
    complaints = list(soak.wrong[:10])
    if spread > FLAT:
        complaints.append(f"resident memory moved by {spread:.1%} in the second half")
    if threads[-1] > threads[0] + 1:
        complaints.append(f"threads went from {threads[0]} to {threads[-1]}")
    if figures["leased_bytes"] or figures["reserved_bytes"]:
        complaints.append("pages are still in use")
    if figures["errors"]:
        complaints.append("unexpected exceptions were caught")
    if not figures["evictions"] or not figures["faults"]:
        complaints.append("nothing was evicted, or no fault was met")
    return figures, complaints


def _slope(samples: Sequence[Sample]) -> float:
    """Bytes per second, by least squares."""
    if len(samples) < 2:
        return 0.0
    mean_x = sum(s.seconds for s in samples) / len(samples)
    mean_y = sum(s.resident_bytes for s in samples) / len(samples)
    above = sum((s.seconds - mean_x) * (s.resident_bytes - mean_y) for s in samples)
    below = sum((s.seconds - mean_x) ** 2 for s in samples)
    return above / below


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="ec_s3-soak-") as folder,
        RecordedServer() as server,
        Lab(server, Path(folder)) as lab,
    ):
        reference = Reference(lab, Path(folder) / "drawn")
        engine = Engine(
            lab, reference, role="ec_both", layout="one process", max_local_cpu_size=TIER
        )
        try:
            soak = Soak(engine, reference, seed=options.seed)
            soak.run(options.minutes)
            time.sleep(_DRAIN_SECONDS)
            figures, complaints = judge(soak, engine.metrics())
        finally:
            engine.close()
    figures |= {"minutes": options.minutes, "seed": options.seed}
    _OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    report = {**figures, "complaints": complaints, "samples": [asdict(s) for s in soak.samples]}
    _OUTPUT.write_text(json.dumps(report, indent=1) + "\n")
    lines = [f"{name:28} {value}" for name, value in figures.items()]
    lines += [f"NOT HELD: {complaint}" for complaint in complaints]
    lines.append("soak: " + ("FAILED" if complaints else "OK"))
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
