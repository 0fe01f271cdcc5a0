"""The metrics: one table, and a recorder that speaks to Prometheus and to vLLM.

`METRICS` drives registration, the reference page and the dashboard's test. A `Stats` may be used
from any thread or loop; it never does I/O, and never imports prometheus_client until asked to
register.

Locking: one lock per `Stats` guards its three maps; nothing is called while it is held.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ec_s3.types import MissReason, PutOutcome, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as PrometheusFamily

Kind = Literal["counter", "gauge", "histogram"]
Data = dict[str, float | list[list[float]]]
"""Increments that travel between processes as JSON or msgpack: series to value, or to the counts
and sums of a histogram's buckets. A series is its metric's name and label values, joined by `|`."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row of the table.

    Attributes:
        name: without prefix, and for counters without `_total`.
        kind: what Prometheus calls its type.
        help: one sentence.
        labels: label names to their allowed values; an empty tuple allows any.
        buckets: upper bounds of a histogram, the infinite one left out.
    """

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()

    def series(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """Label values in the table's order.

        Raises:
            KeyError: a label is missing, unknown, or has a value that is not allowed.
        """
        if labels.keys() != self.labels.keys():
            raise KeyError(f"{self.name} has the labels {list(self.labels)}, not {list(labels)}")
        for label, allowed in self.labels.items():
            if allowed and labels[label] not in allowed:
                raise KeyError(f"{self.name}: {label} may not be {labels[label]!r}")
        return tuple(str(labels[label]) for label in self.labels)


def _counter(name: str, text: str, **labels: Sequence[str]) -> Metric:
    return Metric(name=name, kind="counter", help=text, labels=_allowed(labels))


def _gauge(name: str, text: str, **labels: Sequence[str]) -> Metric:
    return Metric(name=name, kind="gauge", help=text, labels=_allowed(labels))


def _seconds(name: str, text: str, **labels: Sequence[str]) -> Metric:
    return Metric(name=name, kind="histogram", help=text, labels=_allowed(labels), buckets=SECONDS)


def _allowed(labels: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    return {label: tuple(str(value) for value in values) for label, values in labels.items()}


_TIERS = tuple(Tier)
_OPERATIONS = ("get", "put", "head", "list", "delete")
_REFUSALS = ("timeout", "throttled", "denied", "unreachable", "changed", "failed")

METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        _counter("queries", "Items asked for."),
        _counter("hits", "Items found, by the tier that had them.", tier=_TIERS),
        _counter("misses", "Items asked for and not delivered.", reason=tuple(MissReason)),
        _seconds("load_seconds", "Time from a query to its tensor in memory.", tier=_TIERS),
        _counter("load_bytes", "Tensor bytes loaded.", tier=_TIERS),
        _seconds(
            "save_seconds",
            "Time of one stage of a save: copy to host memory, encode, write to the stores.",
            stage=("copy", "encode", "store"),
        ),
        _counter(
            "rejected_puts",
            "Puts not taken.",
            reason=("no_room", "too_large", "first_sight", "request_local", "dtype", "closed"),
        ),
        _counter(
            "uploads",
            "Uploads that ended.",
            outcome=(*PutOutcome, "queue_full", "evicted", "denied", "failed", "error", "closed"),
        ),
        _counter(
            "upload_bytes", "Bytes uploaded, before and after encoding.", kind=("raw", "stored")
        ),
        _gauge("upload_queue_items", "Items waiting for their upload or being uploaded."),
        _gauge("upload_queue_bytes", "Bytes held for uploads."),
        _counter(
            "disk_writes", "Writes to the disk tier.", outcome=("written", "skipped", "failed")
        ),
        _counter(
            "remote_requests",
            "Requests to the bucket; `rested` ones were not sent because the breaker was open.",
            op=_OPERATIONS,
            outcome=("ok", "absent", *_REFUSALS, "cancelled", "rested"),
        ),
        _seconds("remote_seconds", "Time of one request to the bucket.", op=_OPERATIONS),
        _gauge("breaker_open", "1 while the bucket is left alone after failures, else 0."),
        _counter("corrupt_objects", "Stored objects refused on reading.", tier=_TIERS),
        _counter("repaired_objects", "Refused objects replaced by a good one."),
        _gauge(
            "local_bytes",
            "Host memory by state.",
            state=("capacity", "populated", "used", "reserved", "leased", "dirty"),
        ),
        _counter(
            "local_evictions",
            "Entries evicted from host memory; dirty ones were not yet uploaded.",
            kind=("clean", "dirty"),
        ),
        _gauge("pinned", "1 when host memory is registered with CUDA, else 0."),
        _gauge("deferred_requests", "Requests that wait for a fetch."),
        _counter(
            "given_up",
            "Fetches that a request stopped waiting for.",
            reason=("deadline", "limit", "no_room", "mismatch", "rank_gone"),
        ),
        _counter("saved_encoder_seconds", "Encoder time that hits replaced, where it is known."),
        _counter(
            "errors",
            "Unexpected exceptions; each is a bug.",
            where=("scheduler", "worker", "engine", "fetch", "upload", "control", "link", "port"),
        ),
        _gauge(
            "info",
            "Always 1; its labels name the release and the format that it writes.",
            version=(),
            wire=(),
        ),
    )
}
"""Every metric by name. Unknown names and label values are a KeyError: a programming error."""


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
        self._drained: dict[_Key, float] = {}
        self._fresh: dict[_Key, _Histogram] = {}

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Increase a counter.

        Raises:
            KeyError: no such counter, or a label that it does not allow.
        """
        key = (name, _metric(name, "counter").series(labels))
        with self._lock:
            self._values[key] = self._values.get(key, 0) + value

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge.

        Raises:
            KeyError: as `add`.
        """
        key = (name, _metric(name, "gauge").series(labels))
        with self._lock:
            self._values[key] = value

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Record one observation in a histogram.

        Raises:
            KeyError: as `add`.
        """
        metric = _metric(name, "histogram")
        key = (name, metric.series(labels))
        bucket = bisect_left(metric.buckets, seconds)
        with self._lock:
            for histogram in self._targets(key):
                histogram.counts[bucket] += 1
                histogram.sums[bucket] += seconds

    def snapshot(self) -> dict[str, float]:
        """Everything as one flat map, zeros included.

        Keys join name and label values: `hits_local`, `load_seconds_local_sum`, `..._count`.
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
        data: Data = {}
        with self._lock:
            for key, value in self._values.items():
                before = self._drained.get(key)
                if value != before:
                    counter = METRICS[key[0]].kind == "counter"
                    data[_join(key)] = value - (before or 0) if counter else value
            self._drained = dict(self._values)
            fresh, self._fresh = self._fresh, {}
        for key, histogram in fresh.items():
            data[_join(key)] = [[float(count) for count in histogram.counts], histogram.sums]
        return data

    def merge(self, data: Mapping[str, float | Sequence[Sequence[float]]]) -> None:
        """Add what another `Stats` has drained; gauges take the newer value.

        Raises:
            KeyError: a series that the table does not have.
        """
        for series, value in data.items():
            metric, labels = parse_series(series)
            key = (metric.name, tuple(labels.values()))
            with self._lock:
                if not isinstance(value, int | float):
                    counts, sums = value
                    for histogram in self._targets(key):
                        histogram.add(counts, sums)
                elif metric.kind == "counter":
                    self._values[key] = self._values.get(key, 0) + value
                else:
                    self._values[key] = value

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


def _metric(name: str, kind: Kind) -> Metric:
    metric = METRICS[name]
    if metric.kind != kind:
        raise KeyError(f"{name} is a {metric.kind}, not a {kind}")
    return metric


def _empty(metric: Metric) -> _Histogram:
    size = len(metric.buckets) + 1
    return _Histogram([0] * size, [0.0] * size)


def _join(key: _Key) -> str:
    return "|".join((key[0], *key[1]))


def _declared(*recorded: Mapping[_Key, object]) -> Iterator[_Key]:
    """Every series that is declared or recorded, in the table's order."""
    known = {key: None for metric in METRICS.values() for key in _closed(metric)}
    extra = (key for keys in recorded for key in keys if key not in known)
    return iter({**known, **dict.fromkeys(extra)})


def _closed(metric: Metric) -> list[_Key]:
    """The series of a metric whose label values are all declared."""
    rows: list[tuple[str, ...]] = [()]
    for allowed in metric.labels.values():
        rows = [(*row, value) for row in rows for value in allowed]
    return [(metric.name, row) for row in rows]


def _cumulative(metric: Metric, counts: Sequence[int]) -> list[tuple[str, float]]:
    """Buckets as Prometheus counts them: each with everything below its bound."""
    bounds = [*(str(bound) for bound in metric.buckets), "+Inf"]
    return [(bound, float(sum(counts[: i + 1]))) for i, bound in enumerate(bounds)]
