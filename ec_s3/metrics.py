"""The recorder of the metrics, which speaks to Prometheus and to vLLM.

What may be recorded is the table in `metric_table`. A `Stats` may be used from any thread or loop;
it never does I/O, and never imports prometheus_client until asked to register.

Locking: one lock per `Stats` guards its four maps; nothing is called while it is held.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ec_s3.metric_table import METRICS, Kind, Metric

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as PrometheusFamily

Data = dict[str, float | list[list[float]]]
"""Increments that travel between processes as JSON or msgpack: series to value, or to the counts
and sums of a histogram's buckets. A series is its metric's name and label values, joined by `|`."""


@dataclass(slots=True)
class _Histogram:
    counts: list[int]
    sums: list[float]

    def add(self, counts: Sequence[float], sums: Sequence[float]) -> None:
        self.counts = [a + int(b) for a, b in zip(self.counts, counts, strict=True)]
        self.sums = [a + b for a, b in zip(self.sums, sums, strict=True)]


_Key = tuple[str, tuple[str, ...]]


class Stats:
    """Records metrics in memory. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[_Key, float] = {}
        self._histograms: dict[_Key, _Histogram] = {}
        self._pending: dict[_Key, float] = {}  # increments of counters, new values of gauges
        self._fresh: dict[_Key, _Histogram] = {}

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Increase a counter.

        Raises:
            KeyError: no such counter, or a label that it does not allow.
        """
        key = _series(name, "counter", tuple(labels.items()))
        with self._lock:
            self._increase(key, value)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge.

        Raises:
            KeyError: as `add`.
        """
        key = _series(name, "gauge", tuple(labels.items()))
        with self._lock:
            self._assign(key, value)

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Record one observation in a histogram.

        Raises:
            KeyError: as `add`.
        """
        key = _series(name, "histogram", tuple(labels.items()))
        bucket = bisect_left(METRICS[name].buckets, seconds)
        with self._lock:
            for histogram in self._targets(key):
                histogram.counts[bucket] += 1
                histogram.sums[bucket] += seconds

    def snapshot(self) -> dict[str, float]:
        """Everything as one flat map, zeros included.

        Keys join name and label values: `hits_local`, `load_seconds_remote_sum`, `..._count`.
        """
        with self._lock:
            values = dict(self._values)
            sums = {key: (sum(h.sums), sum(h.counts)) for key, h in self._histograms.items()}
        flat: dict[str, float] = {}
        for key in _declared(values, sums):
            name = "_".join((key[0], *key[1]))
            if METRICS[key[0]].kind == "histogram":
                flat[f"{name}_sum"], flat[f"{name}_count"] = sums.get(key, (0.0, 0))
            else:
                flat[name] = values.get(key, 0)
        return flat

    def drain(self) -> Data:
        """What changed since the last drain; empty when nothing did. For `merge` elsewhere."""
        with self._lock:
            pending, self._pending = self._pending, {}
            fresh, self._fresh = self._fresh, {}
        data: Data = {_join(key): value for key, value in pending.items()}
        for key, histogram in fresh.items():
            data[_join(key)] = [[float(count) for count in histogram.counts], histogram.sums]
        return data

    def merge(self, data: Mapping[str, float | Sequence[Sequence[float]]]) -> None:
        """Add what another `Stats` has drained; gauges take the newer value.

        Raises:
            KeyError: a series that the table does not have.
        """
        for series, value in data.items():
            key, kind = _key_of(series)
            with self._lock:
                if not isinstance(value, int | float):
                    counts, sums = value
                    for histogram in self._targets(key):
                        histogram.add(counts, sums)
                elif kind == "counter":
                    self._increase(key, value)
                else:
                    self._assign(key, value)

    def _increase(self, key: _Key, value: float) -> None:
        """Of a counter; under the lock."""
        self._values[key] = self._values.get(key, 0) + value
        if value:
            self._pending[key] = self._pending.get(key, 0) + value

    def _assign(self, key: _Key, value: float) -> None:
        """Of a gauge; under the lock."""
        if self._values.get(key) != value:
            self._values[key] = self._pending[key] = value

    def _targets(self, key: _Key) -> Iterator[_Histogram]:
        """The histogram since the start and the one since the last drain; under the lock."""
        for histograms in (self._histograms, self._fresh):
            if key not in histograms:
                histograms[key] = _empty(METRICS[key[0]])
            yield histograms[key]

    def families(self, prefix: str = "ec_s3_") -> Iterator[PrometheusFamily]:
        """The current values as Prometheus metric families; needs prometheus_client."""
        from prometheus_client.metrics_core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        with self._lock:
            values = dict(self._values)
            histograms = {key: (list(h.counts), sum(h.sums)) for key, h in self._histograms.items()}
        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        keys = list(_declared(values, histograms))
        for metric in METRICS.values():
            name, labels = f"{prefix}{metric.name}", list(metric.labels)
            mine = [key for key in keys if key[0] == metric.name]
            if metric.kind == "histogram":
                histogram = HistogramMetricFamily(name, metric.help, labels=labels)
                for key in mine:
                    counts, total = histograms.get(key, (_empty(metric).counts, 0.0))
                    histogram.add_metric(key[1], _cumulative(metric, counts), total)
                yield histogram
            else:
                family = kinds[metric.kind](name, metric.help, labels=labels)
                for key in mine:
                    family.add_metric(key[1], values.get(key, 0))
                yield family


def register(registry: CollectorRegistry, stats: Stats, *, prefix: str = "ec_s3_") -> None:
    """Let a Prometheus registry read `stats` whenever it is scraped."""

    class Collector:
        def collect(self) -> Iterator[PrometheusFamily]:
            return stats.families(prefix)

    registry.register(Collector())


def combine(first: Data, second: Data) -> Data:
    """Two drained maps as one, the second being the newer."""
    if first.keys().isdisjoint(second):
        return {**first, **second}
    both = Stats()
    both.merge(first)
    both.merge(second)
    return both.drain()


def parse_series(series: str) -> tuple[Metric, dict[str, str]]:
    """The metric and the labels of a series in a drained map.

    Raises:
        KeyError: the table has no such series.
    """
    name, *values = series.split("|")
    metric = METRICS[name]
    if len(values) != len(metric.labels):
        raise KeyError(series)
    labels = dict(zip(metric.labels, values, strict=True))
    metric.series(labels)
    return metric, labels


def observations(metric: Metric, value: Sequence[Sequence[float]]) -> Iterator[float]:
    """Observations with the same bucket counts and sum as a drained histogram.

    For recorders that take one observation at a time, such as the classes that vLLM passes in.
    """
    counts, sums = value
    for bound, count, total in zip((*metric.buckets, math.inf), counts, sums, strict=True):
        for _ in range(int(count)):
            yield min(total / count, bound)


@lru_cache(maxsize=4096)  # this is most of what counting costs
def _series(name: str, kind: Kind, labels: tuple[tuple[str, str], ...]) -> _Key:
    metric = METRICS[name]
    if metric.kind != kind:
        raise KeyError(f"{name} is a {metric.kind}, not a {kind}")
    return name, metric.series(dict(labels))


def _empty(metric: Metric) -> _Histogram:
    size = len(metric.buckets) + 1
    return _Histogram([0] * size, [0.0] * size)


@lru_cache(maxsize=4096)
def _key_of(series: str) -> tuple[_Key, Kind]:
    metric, labels = parse_series(series)
    return (metric.name, tuple(labels.values())), metric.kind


@lru_cache(maxsize=4096)
def _join(key: _Key) -> str:
    return "|".join((key[0], *key[1]))


def _declared(*recorded: Mapping[_Key, object]) -> Iterator[_Key]:
    """Every series that is declared or recorded, in the table's order."""
    known: dict[_Key, None] = {
        (metric.name, row): None for metric in METRICS.values() for row in metric.all_series()
    }
    extra = (key for keys in recorded for key in keys if key not in known)
    return iter({**known, **dict.fromkeys(extra)})


def _cumulative(metric: Metric, counts: Sequence[int]) -> list[tuple[str, float]]:
    """Buckets as Prometheus counts them: each with everything below its bound."""
    bounds = [*(str(bound) for bound in metric.buckets), "+Inf"]
    return [(bound, float(sum(counts[: i + 1]))) for i, bound in enumerate(bounds)]
