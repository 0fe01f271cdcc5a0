"""The forms of PromQL that the dashboard uses, evaluated over a recording.

Selectors with matchers, `rate` and `increase` over a window, `sum`, `min`, `max` and `count` with
and without `by`, `histogram_quantile`, `/` and a comparison with a number. Anything else is an
error. Counters may start again; a rate is the increase between the first and the last sample of
the window over the time between them, without Prometheus' extrapolation to its edges.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]

STALE_SECONDS = 60.0
"""A sample speaks for so long, unless another one follows."""

_TOKEN = re.compile(
    r"\s*(?:(?P<string>\"[^\"]*\")|(?P<name>[a-zA-Z_][\w:]*)|(?P<number>\d+(?:\.\d+)?)"
    r"|(?P<range>\[[^\]]+\])|(?P<sign>=~|!~|!=|>=|<=|[(){},=/<>]))"
)
_TOTALS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "min": min,
    "max": max,
    "count": lambda values: float(len(values)),
}
_MATCHES: dict[str, Callable[[str, str], bool]] = {
    "=": lambda value, wanted: value == wanted,
    "!=": lambda value, wanted: value != wanted,
    "=~": lambda value, wanted: re.fullmatch(wanted, value) is not None,
    "!~": lambda value, wanted: re.fullmatch(wanted, value) is None,
}


@dataclass
class Recording:
    """Samples by metric and labels, each a time in seconds and a value, in order of time."""

    series: dict[str, dict[Labels, list[tuple[float, float]]]] = field(default_factory=dict)

    def add(self, time: float, name: str, labels: dict[str, str], value: float) -> None:
        """Note a sample, later than those before it."""
        of_name = self.series.setdefault(name, {})
        of_name.setdefault(frozenset(labels.items()), []).append((time, value))

    def times(self) -> list[float]:
        """When something was sampled."""
        found = {
            time
            for of_name in self.series.values()
            for samples in of_name.values()
            for time, _ in samples
        }
        return sorted(found)


def evaluate(
    expression: str, recording: Recording, time: float, windows: dict[str, float]
) -> Vector:
    """The value of an expression at a time.

    Args:
        expression: PromQL.
        recording: what it is about.
        time: when.
        windows: seconds of what stands between brackets, such as `$__rate_interval`.

    Raises:
        ValueError: a form that is not understood.
    """
    return _Evaluation(expression, recording, time, windows).value()


class _Evaluation:
    def __init__(
        self, expression: str, recording: Recording, time: float, windows: dict[str, float]
    ) -> None:
        self._tokens = list(_tokens(expression))
        self._recording = recording
        self._time = time
        self._windows = windows

    def value(self) -> Vector:
        found = self._operations()
        if self._tokens:
            raise ValueError(f"not understood: {' '.join(self._tokens)}")
        return found

    def _operations(self) -> Vector:
        left = self._term()
        while self._tokens and self._tokens[0] in {"/", ">", "<", ">=", "<="}:
            sign = self._tokens.pop(0)
            if sign == "/":
                right = self._term()
                left = {k: v / right[k] for k, v in left.items() if right.get(k)}
                continue
            bound = float(self._tokens.pop(0))
            keeps = {"<": lambda v, b: v < b, ">": lambda v, b: v > b}.get(
                sign, lambda v, b, s=sign: v >= b if s == ">=" else v <= b
            )
            left = {k: v for k, v in left.items() if keeps(v, bound)}
        return left

    def _term(self) -> Vector:
        name = self._tokens.pop(0)
        if name in _TOTALS:
            return self._aggregation(_TOTALS[name])
        if name in {"rate", "increase"}:
            self._take("(")
            metric, matchers = self._selector(self._tokens.pop(0))
            window = self._windows[self._tokens.pop(0).strip("[]")]
            self._take(")")
            return self._growth(metric, matchers, window, per_second=name == "rate")
        if name == "histogram_quantile":
            self._take("(")
            share = float(self._tokens.pop(0))
            self._take(",")
            buckets = self._operations()
            self._take(")")
            return _quantile(share, buckets)
        metric, matchers = self._selector(name)
        return self._now(metric, matchers)

    def _aggregation(self, total: Callable[[list[float]], float]) -> Vector:
        kept: set[str] = set()
        if self._tokens[0] == "by":
            self._tokens.pop(0)
            self._take("(")
            while (token := self._tokens.pop(0)) != ")":
                kept |= {token} - {","}
        self._take("(")
        inner = self._operations()
        self._take(")")
        groups: dict[Labels, list[float]] = {}
        for labels, value in inner.items():
            group = frozenset(label for label in labels if label[0] in kept)
            groups.setdefault(group, []).append(value)
        return {labels: total(values) for labels, values in groups.items()}

    def _selector(self, metric: str) -> tuple[str, list[tuple[str, str, str]]]:
        matchers = []
        if self._tokens and self._tokens[0] == "{":
            self._tokens.pop(0)
            while (label := self._tokens.pop(0)) != "}":
                if label == ",":
                    continue
                sign, wanted = self._tokens.pop(0), self._tokens.pop(0).strip('"')
                matchers.append((label, sign, ".*" if wanted.startswith("$") else wanted))
        return metric, matchers

    def _chosen(
        self, metric: str, matchers: list[tuple[str, str, str]]
    ) -> Iterable[tuple[Labels, list[tuple[float, float]]]]:
        for labels, samples in self._recording.series.get(metric, {}).items():
            values = dict(labels)
            if all(_MATCHES[sign](values.get(k, ""), wanted) for k, sign, wanted in matchers):
                yield labels, samples

    def _now(self, metric: str, matchers: list[tuple[str, str, str]]) -> Vector:
        found = {}
        for labels, samples in self._chosen(metric, matchers):
            last = [v for t, v in samples if self._time - STALE_SECONDS < t <= self._time]
            if last:
                found[labels] = last[-1]
        return found

    def _growth(
        self, metric: str, matchers: list[tuple[str, str, str]], window: float, *, per_second: bool
    ) -> Vector:
        found = {}
        for labels, samples in self._chosen(metric, matchers):
            inside = [(t, v) for t, v in samples if self._time - window <= t <= self._time]
            if len(inside) < 2:
                continue
            pairs = pairwise(inside)
            grown = sum(b if b < a else b - a for (_, a), (_, b) in pairs)
            found[labels] = grown / (inside[-1][0] - inside[0][0]) if per_second else grown
        return found

    def _take(self, token: str) -> None:
        if not self._tokens or self._tokens.pop(0) != token:
            raise ValueError(f"{token} is missing")


def _tokens(expression: str) -> Iterable[str]:
    place = 0
    while place < len(expression.rstrip()):
        found = _TOKEN.match(expression, place)
        if found is None:
            raise ValueError(f"not understood: {expression[place:]}")
        place = found.end()
        yield found.group().strip()


def _quantile(share: float, buckets: Vector) -> Vector:
    """As Prometheus has it: linear within the bucket where the share lies."""
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        others = frozenset(label for label in labels if label[0] != "le")
        groups.setdefault(others, []).append((float(dict(labels)["le"]), count))
    found = {labels: _within(share, sorted(bounds)) for labels, bounds in groups.items()}
    return {labels: value for labels, value in found.items() if value is not None}


def _within(share: float, bounds: Sequence[tuple[float, float]]) -> float | None:
    wanted = share * bounds[-1][1]
    if not wanted:
        return None
    low, below = 0.0, 0.0
    for high, count in bounds:
        if count >= wanted:
            if high == float("inf"):
                return low
            return low + (high - low) * (wanted - below) / (count - below)
        low, below = high, count
    return None
