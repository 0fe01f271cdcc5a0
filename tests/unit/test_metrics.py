from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from ec_s3 import metric_table
from ec_s3.metric_table import METRICS
from ec_s3.metrics import Stats, combine, observations, parse_series, register
from ec_s3.types import MissReason, Tier


class TestTable:
    def test_names_are_plain_and_carry_their_unit(self) -> None:
        for name, metric in METRICS.items():
            assert re.fullmatch(r"[a-z_]+", name)
            assert not name.endswith(("_total", "_sum", "_count"))
            assert metric.kind != "histogram" or name.endswith("_seconds")
            assert (metric.kind == "histogram") == bool(metric.buckets)
            assert metric.help.endswith(".")

    def test_no_label_value_can_break_a_series_name(self) -> None:
        for metric in METRICS.values():
            for allowed in metric.labels.values():
                assert all(re.fullmatch(r"[a-z0-9_]+", value) for value in allowed)

    def test_miss_reasons_are_those_of_the_engine(self) -> None:
        assert set(METRICS["misses"].labels["reason"]) == {str(reason) for reason in MissReason}


class TestRecording:
    def test_snapshot_is_flat_and_holds_every_declared_series(self) -> None:
        stats = Stats()
        stats.add("hits", tier=Tier.LOCAL)
        stats.add("hits", 2, tier="local")
        stats.set("upload_queue_items", 7)
        stats.observe("load_seconds", 0.5, tier="remote")
        stats.observe("load_seconds", 1.5, tier="remote")
        snapshot = stats.snapshot()
        assert snapshot["hits_local"] == 3
        assert snapshot["misses_absent"] == 0
        assert snapshot["queries"] == 0
        assert snapshot["upload_queue_items"] == 7
        assert snapshot["load_seconds_remote_sum"] == 2.0
        assert snapshot["load_seconds_remote_count"] == 2
        assert snapshot["load_seconds_disk_count"] == 0
        assert "remote_requests_get_ok" in snapshot

    def test_open_label_values_appear_once_recorded(self) -> None:
        stats = Stats()
        assert not any(name.startswith("info") for name in stats.snapshot())
        stats.set("info", 1, version="1.2", wire="1")
        assert stats.snapshot()["info_1.2_1"] == 1

    @pytest.mark.parametrize(
        ("name", "labels"),
        [
            ("nonsense", {}),
            ("hits", {}),
            ("hits", {"tier": "moon"}),
            ("hits", {"tier": "local", "more": "x"}),
            ("queries", {"tier": "local"}),
            ("upload_queue_items", {}),
            ("load_seconds", {"tier": "local"}),
        ],
    )
    def test_a_misspelt_metric_is_a_key_error(self, name: str, labels: dict[str, str]) -> None:
        with pytest.raises(KeyError):
            Stats().add(name, 1, **labels)

    def test_set_and_observe_check_the_kind_too(self) -> None:
        with pytest.raises(KeyError):
            Stats().set("queries", 1)
        with pytest.raises(KeyError):
            Stats().observe("queries", 1)

    def test_many_threads_lose_nothing(self) -> None:
        stats = Stats()

        def work() -> None:
            for _ in range(500):
                stats.add("queries")
                stats.observe("remote_seconds", 0.1, op="get")

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert stats.snapshot()["queries"] == 4000
        assert stats.snapshot()["remote_seconds_get_count"] == 4000


def filled() -> Stats:
    stats = Stats()
    stats.add("hits", 3, tier="disk")
    stats.set("deferred_requests", 4)
    for seconds in (0.0004, 0.03, 0.04, 99.0):
        stats.observe("load_seconds", seconds, tier="disk")
    return stats


class TestTravel:
    def test_a_drain_is_json_and_rebuilds_the_same_numbers(self) -> None:
        stats = filled()
        data = json.loads(json.dumps(stats.drain()))
        other = Stats()
        other.merge(data)
        assert other.snapshot() == stats.snapshot()

    def test_a_drain_holds_only_what_is_new(self) -> None:
        stats = filled()
        stats.drain()
        assert stats.drain() == {}
        stats.add("hits", 2, tier="disk")
        stats.set("deferred_requests", 0)
        stats.observe("load_seconds", 0.2, tier="disk")
        data = stats.drain()
        assert data["hits|disk"] == 2
        assert data["deferred_requests"] == 0
        assert set(data) == {"hits|disk", "deferred_requests", "load_seconds|disk"}

    def test_a_drain_does_not_grow_with_the_number_of_events(self) -> None:
        stats = Stats()
        for _ in range(10_000):
            stats.observe("load_seconds", 0.2, tier="disk")
        assert len(json.dumps(stats.drain())) < 300

    def test_two_drains_combine_with_the_newer_gauge(self) -> None:
        stats = filled()
        first = stats.drain()
        stats.add("hits", 1, tier="disk")
        stats.set("deferred_requests", 1)
        both = combine(first, stats.drain())
        assert both["hits|disk"] == 4
        assert both["deferred_requests"] == 1
        assert both["load_seconds|disk"] == first["load_seconds|disk"]

    @pytest.mark.parametrize("series", ["nonsense", "hits", "hits|moon", "queries|local"])
    def test_a_foreign_series_is_a_key_error(self, series: str) -> None:
        with pytest.raises(KeyError):
            Stats().merge({series: 1})

    def test_a_series_names_its_metric_and_labels(self) -> None:
        metric, labels = parse_series("remote_requests|get|ok")
        assert (metric.name, labels) == ("remote_requests", {"op": "get", "outcome": "ok"})

    def test_histograms_can_be_replayed_one_observation_at_a_time(self) -> None:
        registry = CollectorRegistry()
        metric = METRICS["load_seconds"]
        recorder = Histogram("x", "x", buckets=metric.buckets, registry=registry)
        value = filled().drain()["load_seconds|disk"]
        assert isinstance(value, list)
        for seconds in observations(metric, value):
            recorder.observe(seconds)
        assert registry.get_sample_value("x_sum") == pytest.approx(99.0704)
        assert registry.get_sample_value("x_bucket", {"le": "0.001"}) == 1
        assert registry.get_sample_value("x_bucket", {"le": "0.05"}) == 3
        assert registry.get_sample_value("x_bucket", {"le": "+Inf"}) == 4


class TestPrometheus:
    def test_a_registry_reads_the_current_values(self) -> None:
        registry, stats = CollectorRegistry(), filled()
        register(registry, stats)
        tier = {"tier": "disk"}
        assert registry.get_sample_value("ec_s3_hits_total", tier) == 3
        assert registry.get_sample_value("ec_s3_deferred_requests") == 4
        assert registry.get_sample_value("ec_s3_load_seconds_count", tier) == 4
        assert registry.get_sample_value("ec_s3_load_seconds_bucket", {**tier, "le": "0.05"}) == 3
        stats.add("hits", tier="disk")
        assert registry.get_sample_value("ec_s3_hits_total", tier) == 4

    def test_the_exposition_is_complete_and_has_no_colons(self) -> None:
        registry = CollectorRegistry()
        register(registry, Stats())
        text = generate_latest(registry).decode()
        for name in METRICS:
            assert f"# HELP ec_s3_{name}" in text
        assert ":" not in "".join(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))

    def test_the_module_does_not_load_prometheus(self) -> None:
        code = "import sys, ec_s3.metrics; sys.exit('prometheus_client' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestSources:
    """The table says nothing that the code does not."""

    @staticmethod
    def code() -> str:
        folder = Path(metric_table.__file__).parent
        files = [p for p in folder.rglob("*.py") if p.name != "metric_table.py"]
        return "\n".join(path.read_text() for path in files)

    def test_every_metric_is_recorded_somewhere(self) -> None:
        recorded = set(re.findall(r'\b(?:add|set|observe)\(\s*"([a-z_]+)"', self.code()))
        recorded.add("namespace_info")  # set in Prometheus itself, where the server starts
        assert METRICS.keys() <= recorded

    def test_every_label_value_is_spelt_out_somewhere(self) -> None:
        named = set(re.findall(r'"([a-z_]+)"', self.code()))
        values = {v for m in METRICS.values() for allowed in m.labels.values() for v in allowed}
        assert values <= named

    def test_every_label_is_given_where_it_is_recorded(self) -> None:
        calls = re.findall(
            r'\b(?:add|set|observe)\(\s*"([a-z_]+)"((?:[^()]|\([^()]*\))*)\)', self.code()
        )
        for name, arguments in calls:
            if name in METRICS:
                given = set(re.findall(r"\b([a-z_]+)=", arguments))
                assert given == METRICS[name].labels.keys(), (name, arguments)
