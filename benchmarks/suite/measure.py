"""Rounds in which the contenders take turns, and what is left of them: medians and quartiles."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value; of fewer than three, low and high are the extremes."""
        if len(values) < 3:
            return cls(statistics.median(values), min(values), max(values))
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{digits(self.median)} ({digits(self.low)} to {digits(self.high)})"


def digits(value: float, *, figures: int = 3) -> str:
    """A number with three significant figures, without exponent."""
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    places = figures - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(0, places)}f}"


def take_turns(
    labels: Sequence[str],
    run: Callable[[str], dict[str, Any]],
    *,
    least: int,
    most: int,
    seconds: float,
) -> dict[str, list[dict[str, Any]]]:
    """Let every contender run once per round; the first of a round changes from round to round.

    A round that does not count comes first: it warms up, and tells how many rounds there is time
    for.

    Args:
        labels: the contenders.
        run: runs one.
        least: rounds that count, however long they take.
        most: rounds that count, however short they are.
        seconds: what the rounds should take together.

    Returns:
        By label, the answers of the rounds that count.
    """
    begun = time.perf_counter()
    for label in labels:
        run(label)
    rounds = int(seconds / (time.perf_counter() - begun))
    answers: dict[str, list[dict[str, Any]]] = {label: [] for label in labels}
    for turn in range(min(most, max(least, rounds))):
        start = turn % len(labels)
        for label in [*labels[start:], *labels[:start]]:
            answers[label].append(run(label))
    return answers


@dataclass(slots=True)
class Cell:
    """One contender's figures in one load."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    nbytes: int = 0
    count: int = 0
    free: float = math.nan
    """Milliseconds until the caller was free, where that is measured."""

    @classmethod
    def of(cls, answers: Sequence[dict[str, Any]], *, nbytes: int, count: int) -> Cell:
        """From a driver's answers; `nbytes` and `count` are those of one round."""
        return cls(
            [a["wall"] for a in answers],
            [a["cpu"] for a in answers],
            nbytes=nbytes,
            count=count,
            free=statistics.median(a.get("free", math.nan) for a in answers),
        )

    @property
    def rate(self) -> Spread:
        """MB/s."""
        return Spread.of([self.nbytes / 1e6 / s for s in self.seconds])

    @property
    def per_second(self) -> Spread:
        """Operations per second."""
        return Spread.of([self.count / s for s in self.seconds])

    @property
    def latency_ms(self) -> Spread:
        """Milliseconds per operation of a single caller."""
        return Spread.of([s * 1e3 / self.count for s in self.seconds])

    @property
    def cpu_per_gb(self) -> float:
        """Client CPU seconds per GB."""
        return statistics.median(self.cpu) / (self.nbytes / 1e9) if self.nbytes else math.nan

    @property
    def cpu_ms(self) -> float:
        """Client CPU milliseconds per operation."""
        return statistics.median(self.cpu) * 1e3 / self.count

    def speed_columns(self) -> dict[str, Any]:
        """What a table of gets or puts shows of it."""
        return {"MB/s": self.rate.median, **_ends(self.rate), "CPU s/GB": self.cpu_per_gb}

    def check_columns(self) -> dict[str, Any]:
        """What a table of requests without a body shows of it."""
        found = self.per_second
        return {"per second": found.median, **_ends(found), "CPU ms": self.cpu_ms}


def _ends(spread: Spread) -> dict[str, float]:
    return {"low": spread.low, "high": spread.high}


def speedup(ours: Cell, other: Cell) -> Spread:
    """How many times as fast ours is, round by round, as both ran under the same conditions."""
    pairs = zip(ours.seconds, other.seconds, strict=True)
    scale = (ours.nbytes or ours.count) / (other.nbytes or other.count)
    return Spread.of([b / a * scale for a, b in pairs])
