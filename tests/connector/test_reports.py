"""What ranks tell of their copies and their encoder, and what the interval's log line says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from ec_s3.connector import stopwatch as stopwatch_module
from ec_s3.connector import worker as worker_module
from ec_s3.connector.link import Answer, RankHub, RankLink
from ec_s3.connector.log_line import log_line
from ec_s3.connector.messages import LoadOrder, SaveOrder, StepMetadata
from ec_s3.connector.reports import RankReports
from ec_s3.connector.stopwatch import HostStopwatch, StreamStopwatch, stopwatch
from ec_s3.connector.worker import Worker
from ec_s3.metrics import Stats
from ec_s3.pages import Slab
from ec_s3.testing.port_conformance import until
from ec_s3.types import Extent, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

_PAGE = 256 << 10
_SPEC = TensorSpec("float32", (4, 8))


class Clock:
    """Seconds that a test gives by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stopwatch_module, "time", made)
    monkeypatch.setattr(worker_module, "time", made)
    return made


class Told:
    """A link that keeps what it is told."""

    def __init__(self, *_: object, **__: object) -> None:
        self.answers: list[dict[str, Any]] = []

    def answer(self, kind: str, number: int, **more: Any) -> None:
        self.answers.append({"kind": kind, "number": number, **more})

    def redirect(self, name: str) -> None: ...

    def close(self) -> None: ...


class Rank:
    """A worker part on the CPU that has mapped a slab."""

    def __init__(self, slab: Slab, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(worker_module, "RankLink", Told)
        self.worker = Worker("hub", rank=0, device=torch.device("cpu"))
        self.told: Any = self.worker._link
        self.worker._prepare(slab, "n")

    def save(self, name: str) -> float | None:
        metadata = self.metadata
        self.worker.save(metadata, name, torch.zeros(_SPEC.shape))
        seconds: float | None = self.told.answers[-1]["encode_seconds"]
        return seconds

    def begin(self, *names: str, encodes: int, cached: bool = False) -> None:
        saves = [
            SaveOrder(i, name, _SPEC, (Extent(i * _PAGE, _PAGE),), cached)
            for i, name in enumerate(names)
        ]
        self.metadata = StepMetadata("n", "hub", [], saves, encodes)
        self.worker.begin(self.metadata, saves=True)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    with Slab.create(8 * _PAGE) as slab:
        slab.populate()
        yield Rank(slab, monkeypatch)


class TestEncoderTime:
    def test_runs_from_the_last_load_to_the_first_output(self, rank: Rank, clock: Clock) -> None:
        rank.begin("a", encodes=1)
        clock.now = 5.0  # the loads
        rank.worker.load(rank.metadata, {})
        clock.now = 7.0
        assert rank.save("a") == 2.0

    def test_an_engine_that_only_encodes_starts_with_the_step(
        self, rank: Rank, clock: Clock
    ) -> None:
        rank.begin("a", encodes=1)
        clock.now = 2.0
        assert rank.save("a") == 2.0

    def test_is_shared_out_among_the_items_of_the_step(self, rank: Rank, clock: Clock) -> None:
        rank.begin("a", "b", encodes=2)
        clock.now = 2.0
        first = rank.save("a")
        clock.now = 9.0  # copying the first one is not encoding the second
        assert (first, rank.save("b")) == (1.0, 1.0)

    def test_items_that_are_not_saved_have_their_share(self, rank: Rank, clock: Clock) -> None:
        rank.begin("a", encodes=4)
        clock.now = 2.0
        assert rank.save("a") == 0.5

    def test_an_output_of_an_earlier_step_has_taken_no_time_in_this_one(
        self, rank: Rank, clock: Clock
    ) -> None:
        rank.begin("a", encodes=0, cached=True)
        clock.now = 2.0
        assert rank.save("a") is None

    def test_every_step_is_measured_anew(self, rank: Rank, clock: Clock) -> None:
        rank.begin("a", encodes=1)
        clock.now = 2.0
        rank.save("a")
        rank.begin("b", encodes=1)
        clock.now = 5.0
        assert rank.save("b") == 3.0

    def test_nobody_measures_when_nothing_is_saved(self, rank: Rank) -> None:
        rank.begin(encodes=3)
        rank.worker.load(rank.metadata, {})
        assert rank.worker._watch is None

    def test_only_the_first_stop_counts(self, clock: Clock) -> None:
        watch = HostStopwatch()
        assert watch.seconds() is None
        clock.now = 1.0
        watch.stop()
        clock.now = 4.0
        watch.stop()
        assert watch.seconds() == 1.0

    def test_on_cuda_two_events_of_the_compute_stream_are_compared(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recorded: list[object] = []
        passed = False

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object) -> None:
                recorded.append(stream)

            def query(self) -> bool:
                return passed

            def elapsed_time(self, end: Event) -> float:
                assert end is not self
                return 1500.0

        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("compute", device))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        device = torch.device("cuda", 2)
        watch = stopwatch(device)
        assert isinstance(watch, StreamStopwatch)
        assert watch.seconds() is None
        watch.stop()
        watch.stop()
        assert watch.seconds() is None, "the device is not there yet"
        passed = True
        assert watch.seconds() == 1.5
        assert recorded == [("compute", device)] * 2


class TestReports:
    def test_copies_and_the_encoder_are_counted_and_every_answer_goes_on(self) -> None:
        stats, passed = Stats(), list[Answer]()
        reports = RankReports(1, stats, then=passed.append)
        answers = [
            Answer(0, "mapped", pinned=False),
            Answer(0, "loaded", 1, True, copy_seconds=0.25),
            Answer(0, "saved", 2, True, copy_seconds=0.5, encode_seconds=2.0),
            Answer(0, "saved", 3, False, copy_seconds=9.0, encode_seconds=9.0),
            Answer(0, "failed", 0),
            Answer(0, "gone"),
        ]
        for answer in answers:
            reports.take(answer)
        assert passed == answers
        seen = stats.snapshot()
        assert seen["fetch_seconds_copy_sum"] == 0.25
        assert seen["save_seconds_copy_sum"] == 0.5
        assert (seen["encode_seconds_sum"], seen["encode_seconds_count"]) == (2.0, 1)
        assert seen["errors_worker"] == 1
        assert seen["pinned"] == 0

    def test_memory_is_pinned_when_every_rank_says_so(self) -> None:
        stats = Stats()
        reports = RankReports(2, stats, then=lambda _: None)
        reports.take(Answer(0, "mapped", pinned=True))
        assert stats.snapshot()["pinned"] == 0
        reports.take(Answer(1, "mapped", pinned=True))
        assert stats.snapshot()["pinned"] == 1

    def test_what_a_rank_measured_arrives_at_the_other_end(self) -> None:
        answers: list[Answer] = []
        with Slab.create(_PAGE) as slab:
            hub = RankHub(
                "ec_s3-test-reports",
                nonce="n",
                slab=slab,
                world=1,
                on_answer=answers.append,
                on_request=lambda *_: None,
            )
            mapped: list[Slab] = []

            def prepare(theirs: Slab, _: str) -> bool:
                mapped.append(theirs)
                return True

            link = RankLink(hub.address, rank=0, prepare=prepare)
            try:
                until(lambda: answers, "the rank's report")
                link.answer("saved", 7, nonce="n", done=True, copy_seconds=0.5, encode_seconds=None)
                link.answer("failed", 0, nonce="n", done=False)
                until(lambda: len(answers) == 3, "both answers")
            finally:
                link.close()
                hub.close()
                mapped[0].close()
        assert answers[:3] == [
            Answer(0, "mapped", pinned=True),
            Answer(0, "saved", 7, True, copy_seconds=0.5),
            Answer(0, "failed", 0),
        ]

    def test_a_worker_tells_of_its_own_errors(self, rank: Rank) -> None:
        rank.worker.report_error()
        assert rank.told.answers == [{"kind": "failed", "number": 0, "nonce": "n", "done": False}]

    def test_a_load_tells_how_long_it_took(self, rank: Rank) -> None:
        order = LoadOrder(3, "a", _SPEC, (Extent(0, _PAGE),))
        metadata = StepMetadata("n", "hub", [order], [])
        rank.worker.begin(metadata, saves=True)
        rank.worker.load(metadata, {})
        (answer,) = rank.told.answers
        assert (answer["kind"], answer["number"], answer["done"]) == ("loaded", 3, True)
        assert answer["copy_seconds"] >= 0
        assert answer["encode_seconds"] is None


class TestLogLine:
    def test_a_quiet_interval_is_one_number(self) -> None:
        assert log_line({}) == {"Items": 0}

    def test_a_busy_one_has_units_and_no_zeros(self) -> None:
        stats = Stats()
        stats.add("queries", 4)
        stats.add("hits", tier="local")
        stats.add("hits", 2, tier="remote")
        stats.add("misses", reason="absent")
        stats.observe("load_seconds", 0.1, tier="remote")
        stats.observe("load_seconds", 0.2, tier="remote")
        stats.add("download_bytes", 1_500_000, kind="stored")
        stats.observe("deferral_seconds", 0.05, outcome="ready")
        stats.observe("deferral_seconds", 0.15, outcome="deadline")
        stats.add("given_up", reason="deadline")
        stats.add("saved_encoder_seconds", 1.234)
        stats.add("uploads", outcome="written")
        stats.add("uploads", 2, outcome="queue_full")
        stats.add("upload_bytes", 2_000_000, kind="stored")
        stats.add("remote_requests", op="get", outcome="denied")
        stats.add("remote_requests", 2, op="get", outcome="ok")
        stats.set("upload_queue_items", 3)
        assert log_line(stats.drain()) == {
            "Items": 4,
            "Hit rate (%)": 75,
            "From host memory": 1,
            "From bucket": 2,
            "Avg bucket fetch (ms)": 150,
            "Downloaded (MB)": 1.5,
            "Deferred": 2,
            "Avg deferral (ms)": 100,
            "Given up waiting": 1,
            "Encoder time saved (s)": 1.23,
            "Uploaded": 1,
            "Uploaded (MB)": 2,
            "Uploads lost": 2,
            "Uploads waiting": 3,
            "Bucket failures": 1,
        }

    def test_trouble_is_in_it(self) -> None:
        stats = Stats()
        stats.set("breaker_open", 1)
        stats.add("corrupt_objects", tier="remote")
        stats.add("errors", where="upload")
        line = log_line(stats.drain())
        assert (line["Bucket left alone"], line["Bad objects"], line["Errors"]) == (1, 1, 1)
