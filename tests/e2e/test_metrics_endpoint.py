"""A real server's `/metrics`: what the connector did is there, once, and nothing secret with it."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ec_s3.metric_table import METRICS, Metric
from ec_s3.testing.tiny_models import MODELS
from ec_s3.testing.vllm_server import MODEL, VLLMServer, picture, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ec_s3.testing.lab import Lab

PREFIX = "vllm:ec_s3_"
PICTURE = "china-0"
SECONDS = 60.0

STILL = {
    *("breaker_open", "corrupt_objects", "repaired_objects", "errors", "given_up", "switched_off"),
    *("local_evictions", "rejected_puts", "pinned", "unusable_inputs"),
    *("index_items", "index_answers", "refreshed_objects", "audits"),
    *("warm_start_items", "warm_start_bytes", "warm_start_running"),
}
"""Metrics that stay at zero where nothing goes wrong, nothing is full and there is no index."""

PASSING = {"deferred_requests", "upload_queue_items", "upload_queue_bytes"}
"""Gauges that were not zero for a moment, which the page may have caught."""

Labels = frozenset[tuple[str, str]]


class Page:
    """The samples of ec_s3 on a page of metrics, parsed as Prometheus does."""

    def __init__(self, body: str) -> None:
        self.body = body
        self.lines = [line for line in body.splitlines() if line.startswith(PREFIX)]
        self.values: dict[tuple[str, Labels], float] = {}
        self.families = Counter[str]()
        for family in text_string_to_metric_families(body):
            if family.name.startswith(PREFIX) and not family.name.endswith("_created"):
                self.families[family.name.removeprefix(PREFIX)] += 1
                for sample in family.samples:
                    name = sample.name.removeprefix(PREFIX)
                    self.values[name, frozenset(sample.labels.items())] = sample.value

    def value(self, name: str, **labels: str) -> float | None:
        """One sample; vLLM's own labels are added."""
        wanted = {"model_name": MODEL, "engine": "0", **labels}
        return self.values.get((name, frozenset(wanted.items())))

    def moved(self) -> set[str]:
        """Metrics of the table with a value other than zero."""
        seen = {name for (name, _), value in self.values.items() if value}
        return {metric.name for metric in METRICS.values() if seen & set(_names(metric))}


def _names(metric: Metric) -> tuple[str, ...]:
    suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[metric.kind]
    return (f"{metric.name}{suffix}",)


class Bench:
    """Servers on one prefix of the bucket."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.prefix = f"metrics-{folder.name}"
        self._folder = folder
        self._model = MODELS["llava"].make(folder / "model", dtype="float32")
        self._servers: list[VLLMServer] = []

    def start(self, *arguments: str) -> VLLMServer:
        number = len(self._servers)
        server = VLLMServer(
            self._model,
            workdir=self._folder,
            name=f"server-{number}",
            role="ec_both",
            settings={
                "url": self.lab.server.location(self.prefix),
                "local_disk": str(self._folder / f"disk-{number}"),
            },
            arguments=arguments,
        )
        self._servers.append(server)
        return server.wait()

    def ask(self, server: VLLMServer) -> tuple[int, ...]:
        return server.chat([picture(self.lab.pictures[PICTURE]), text()]).tokens

    def page(self, server: VLLMServer, done: Callable[[Page], object]) -> Page:
        """The page once it tells of what is done.

        vLLM takes statistics in its steps; what has ended since the last one comes with the next.
        """
        deadline = time.monotonic() + SECONDS
        while True:
            server.chat([text("hello")])
            page = Page(server.get("/metrics").body)
            if done(page):
                return page
            assert time.monotonic() < deadline, "\n".join(page.lines)
            time.sleep(0.5)

    def kill(self) -> None:
        for server in self._servers:
            server.kill()


@pytest.fixture
def bench(lab: Lab, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(lab, tmp_path)
    yield made
    made.kill()


def assert_sound(page: Page, lab: Lab) -> None:
    """Every metric is there, every sample once, with vLLM's labels, and nothing that is secret."""
    assert page.families == Counter(METRICS.keys())
    series = [line.rpartition(" ")[0] for line in page.lines]
    assert len(set(series)) == len(series), "a sample twice"
    for _, labels in page.values:
        assert {("model_name", MODEL), ("engine", "0")} <= labels
        assert "pid" not in dict(labels)
    ours = "\n".join(page.lines)
    for secret in (lab.server.bucket, "AKIA", "testing", "http://", "secret"):
        assert secret not in ours


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="1-api"),
        pytest.param(("--api-server-count", "2"), id="2-apis", marks=pytest.mark.slow),
    ],
)
def test_cold_and_warm_server_tell_what_they_did(
    bench: Bench, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "1")
    cold = bench.start(*arguments)
    encoded = bench.ask(cold)
    bench.lab.wait_for_uploads(bench.prefix, 1)
    before = bench.page(cold, lambda page: page.value("uploads_total", outcome="written") == 1)
    assert_sound(before, bench.lab)
    cold.stop()

    assert before.value("queries_total") == 1
    assert before.value("misses_total", reason="absent") == 1
    assert before.value("deferral_seconds_count", outcome="absent") == 1
    assert before.value("encode_seconds_count") == 1
    assert before.value("serving") == 1
    stored = before.value("upload_bytes_total", kind="stored")

    warm = bench.start(*arguments)
    loaded = bench.ask(warm)
    after = bench.page(
        warm,
        lambda page: (
            page.value("fetch_seconds_count", phase="copy") == 1  # of the scheduler's process
            and page.value("hits_total", tier="remote") == 1  # of the engine's
        ),
    )
    assert_sound(after, bench.lab)
    if not arguments:  # with several API processes vLLM writes no interval lines
        bench.page(warm, lambda _: "From bucket=1" in warm.log.read_text())
        lines = re.findall(r"EC Transfer metrics: (.*)", warm.log.read_text())
        assert all(re.fullmatch(r"Items=\d+(, [A-Z][\w ()%]*=[\d.]+)*", line) for line in lines)
        assert sum("Items=1" in line for line in lines) == 1
    warm.stop()

    assert loaded == encoded
    assert after.value("queries_total") == 1
    assert after.value("hits_total", tier="remote") == 1
    assert after.value("deferral_seconds_count", outcome="ready") == 1
    for phase in METRICS["fetch_seconds"].labels["phase"]:
        assert after.value("fetch_seconds_count", phase=phase) == 1, phase
    assert after.value("download_bytes_total", kind="stored") == stored
    saved = after.value("saved_encoder_seconds_total")
    assert saved is not None
    assert 0 < saved == before.value("encode_seconds_sum")
    moved = before.moved() | after.moved()
    assert moved - PASSING == METRICS.keys() - STILL - PASSING
