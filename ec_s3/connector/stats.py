"""The connector's metrics as vLLM wants them; all names come from `metrics.METRICS`.

`ECS3Stats` travels from the scheduler's process to the API process, where `ECS3PromMetrics`
registers and fills the Prometheus metrics with vLLM's own labels.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram

try:
    from vllm.distributed.ec_transfer.ec_connector.metrics import (
        ECConnectorPromMetrics,
        ECConnectorStats,
    )
except ImportError:  # vLLM 0.30 asks no connector for statistics: nobody makes these classes there
    ECConnectorPromMetrics = ECConnectorStats = object

from ec_s3.connector.identity import namespace_labels
from ec_s3.connector.log_line import log_line
from ec_s3.metric_table import METRICS
from ec_s3.metrics import combine, observations, parse_series

if TYPE_CHECKING:
    from ec_s3.metric_table import Metric

logger = logging.getLogger(__name__)

PREFIX = "vllm:ec_s3_"


class ECS3Stats(ECConnectorStats):  # type: ignore[misc]  # vLLM is untyped at this border
    """Increments since the last report; `data` is what `metrics.Stats.drain` returns."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: ECConnectorStats) -> ECS3Stats:
        """Both together, the other one being the newer."""
        self.data = combine(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What an operator wants to read in a log line; see `log_line`."""
        return log_line(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class ECS3PromMetrics(ECConnectorPromMetrics):  # type: ignore[misc]  # vLLM is untyped at this border
    """Prometheus metrics of one API process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        types = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        self._metrics: dict[str, Any] = {}
        for metric in METRICS.values():
            self._metrics[metric.name] = metric_types[types[metric.kind]](
                name=f"{PREFIX}{metric.name}",
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
                **_options(metric),
            )
            if metric.kind == "gauge":
                continue  # nothing is known yet
            # From zero on: the first failure is an increase only if there was a value before it.
            for engine in per_engine_labelvalues.values():
                for values in metric.all_series():
                    self._metrics[metric.name].labels(*engine, *values)
        self._tell_namespace(vllm_config)

    def _tell_namespace(self, vllm_config: Any) -> None:
        try:
            labels = namespace_labels(vllm_config)
        except Exception:  # the border to vLLM: a server starts without this metric, too
            logger.debug("no metric of the namespace", exc_info=True)
            return
        for engine in self.per_engine_labelvalues.values():
            self._metrics["namespace_info"].labels(*engine, *labels).set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report of an engine."""
        engine = self.per_engine_labelvalues[engine_idx]
        for series, value in transfer_stats_data.items():
            metric, labels = parse_series(series)
            child = self._metrics[metric.name].labels(*engine, *labels.values())
            if metric.kind == "counter":
                child.inc(value)
            elif metric.kind == "gauge":
                child.set(value)
            else:
                for observation in observations(metric, value):
                    child.observe(observation)


def _options(metric: Metric) -> dict[str, Any]:
    if metric.kind == "histogram":
        return {"buckets": metric.buckets}
    # With several API processes each report reaches one of them: the last one holds.
    return {"multiprocess_mode": "mostrecent"} if metric.kind == "gauge" else {}
