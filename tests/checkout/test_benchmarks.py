"""The benchmarks' own parts: data, turns, the byte server, reports and the page made of them."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import interference
import numpy as np
import pytest
from suite.client import Client, WrongTensorError
from suite.data import Items, file_shape, make
from suite.everything import benchmarks
from suite.measure import Cell, Spread, digits, speedup, take_turns
from suite.page import QUESTIONS, publish
from suite.report import Report, Usage
from suite.runner import DIRECT, OURS, Benchmark
from suite.server import ByteServer

from ec_s3.config import ECConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BENCH_OUT", str(tmp_path / "bench"))
    return tmp_path / "bench"


@pytest.fixture
def server() -> Iterator[ByteServer]:
    with ByteServer() as started:
        yield started


class Http:
    def __init__(self, server: ByteServer) -> None:
        self.connection = HTTPConnection("127.0.0.1", server.port, timeout=10)

    def __call__(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, path, body, named)
        answer = self.connection.getresponse()
        return answer.status, answer.read(), answer.headers


@pytest.fixture
def http(server: ByteServer) -> Iterator[Http]:
    client = Http(server)
    yield client
    client.connection.close()


# -- data ------------------------------------------------------------------------------------


def test_an_item_is_told_from_another_and_from_a_damaged_one() -> None:
    items = Items(make("noise", (8, 16)))
    assert items.right(300, items.bits(300))
    assert not items.right(300, items.bits(301))
    assert not items.right(300, items.bits(300 + 256))
    for place in ((0, 0), (0, 15), (7, 15)):
        damaged = items.bits(300)
        damaged[place] ^= 1
        assert not items.right(300, damaged)


def test_recorded_activations_are_tiled_to_any_shape(tmp_path: Path) -> None:
    source = tmp_path / "recorded_4x6_bf16.bin"
    np.arange(24, dtype="<u2").tofile(source)
    assert file_shape(source) == (4, 6)
    made = make("activations", (10, 12), source=source)
    assert made.shape == (10, 12)
    assert set(made.reshape(-1).tolist()) == set(range(24))
    rows = made.reshape(-1, 6)
    assert all(row[0] % 6 == 0 and (np.diff(row.astype(int)) == 1).all() for row in rows)


def test_a_file_without_its_shape_in_the_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ROWSxCHANNELS"):
        file_shape(tmp_path / "activations.bin")


def test_generated_channels_have_scales_of_their_own() -> None:
    bits = make("activations", (512, 256)).astype(np.uint32) << 16
    scales = np.log(bits.view(np.float32).std(axis=0))
    assert 0.8 < scales.std() < 1.2


# -- turns and figures -----------------------------------------------------------------------


def test_contenders_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []

    def run(label: str) -> dict[str, Any]:
        calls.append(label)
        return {"call": len(calls)}

    answers = take_turns(["a", "b"], run, least=2, most=5, seconds=0.0)
    assert calls == ["a", "b", "a", "b", "b", "a"]
    assert answers == {"a": [{"call": 3}, {"call": 6}], "b": [{"call": 4}, {"call": 5}]}


def test_there_are_as_many_rounds_as_there_is_time_for() -> None:
    answers = take_turns(["a"], lambda _: {}, least=1, most=7, seconds=1e6)
    assert len(answers["a"]) == 7


class Played(Benchmark):
    """One whose contenders answer from a table."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "argv", ["played", "--no-lmcache"])
        super().__init__("played", title="Played", notes=[], description="", seconds=0.0)

    def play(self, *, judged: bool = True) -> dict[str, Cell]:
        walls = {OURS: 1.0, DIRECT: 0.5, "other": 3.0}

        def run(label: str) -> dict[str, Any]:
            return {"wall": walls[label], "cpu": 0.1, "free": 2.0}

        return self.cell(
            {"callers": 4},
            list(walls),
            run,
            count=2,
            nbytes=10**6,
            judged=judged,
            columns=lambda cell: {"free ms": cell.free, **cell.speed_columns()},
        )


def test_a_cell_adds_a_row_for_each_system(monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    bench = Played(monkeypatch)
    bench.play()
    assert [row["system"] for row in bench.report.rows] == [OURS, DIRECT, "other"]
    first = bench.report.rows[0]
    assert {k: first[k] for k in ("callers", "free ms", "MB/s", "CPU s/GB")} == {
        "callers": 4,
        "free ms": 2.0,
        "MB/s": 2.0,
        "CPU s/GB": 50.0,
    }


@pytest.mark.parametrize(("judged", "rounds"), [(True, 5), (False, 3)])
def test_what_a_target_is_judged_by_has_five_rounds(
    monkeypatch: pytest.MonkeyPatch, out: Path, *, judged: bool, rounds: int
) -> None:
    assert len(Played(monkeypatch).play(judged=judged)[OURS].seconds) == rounds


def test_a_target_says_its_spread_and_its_cause_where_it_is_missed(
    monkeypatch: pytest.MonkeyPatch, out: Path
) -> None:
    bench = Played(monkeypatch)
    cells = bench.play()
    bench.compare("met", cells, "other", limit=3.0, cause="the cause")
    bench.compare("missed", cells, "other", limit=3.1, cause="the cause")
    bench.compare("nobody to compare with", cells, "absent", limit=1.0)
    spread = "quartiles 3.00 to 3.00; 6.00 with `s3_transport=direct`"
    assert [(t.text, t.value, t.met, t.note) for t in bench.report.targets] == [
        ("met", 3.0, True, spread),
        ("missed", 3.0, False, f"{spread}; the cause"),
    ]


def test_a_speedup_compares_the_same_rounds_and_allows_for_their_sizes() -> None:
    ours = Cell([1.0, 2.0, 4.0], [0.1, 0.1, 0.1], nbytes=200, count=2)
    other = Cell([2.0, 4.0, 8.0], [0.1, 0.1, 0.1], nbytes=100, count=1)
    assert speedup(ours, other) == Spread(4.0, 4.0, 4.0)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.123456, "0.123"), (1234.5, "1,230"), (0, "0"), (math.nan, "-"), (99.96, "100.0")],
)
def test_numbers_are_shown_with_three_figures(value: float, shown: str) -> None:
    assert digits(value) == shown


# -- the byte server -------------------------------------------------------------------------


def test_the_server_keeps_objects_under_any_path_and_serves_ranges(http: Http) -> None:
    assert http("PUT", "/bucket/a%20key", b"0123456789")[0] == 200
    status, body, headers = http("GET", "/bucket/a%20key")
    assert (status, body) == (200, b"0123456789")
    status, body, found = http("GET", "/bucket/a%20key", Range="bytes=2-4")
    assert (status, body) == (206, b"234")
    assert found["Content-Range"] == "bytes 2-4/10"
    assert http("GET", "/bucket/a%20key", Range="bytes=8-99")[1] == b"89"
    assert http("GET", "/bucket/a%20key", Range="bytes=10-")[0] == 416
    assert http("GET", "/bucket/a%20key", If_Match='"other"')[0] == 412
    assert http("GET", "/bucket/a%20key", If_Match=headers["ETag"])[0] == 200
    status, body, found = http("HEAD", "/bucket/a%20key")
    assert (status, body, found["Content-Length"]) == (200, b"", "10")


def test_the_server_refuses_a_conditional_put_of_what_is_there(http: Http) -> None:
    assert http("PUT", "/b/k", b"one", If_None_Match="*")[0] == 200
    assert http("PUT", "/b/k", b"two", If_None_Match="*")[0] == 412
    assert http("GET", "/b/k")[1] == b"one"
    assert http("DELETE", "/b/k")[0] == 204
    assert http("GET", "/b/k")[0] == 404


def test_the_server_joins_uploads_in_parts(http: Http) -> None:
    assert http("POST", "/b/k?uploads")[0] == 200
    assert http("PUT", "/b/k?partNumber=2&uploadId=1", b"world")[0] == 200
    assert http("PUT", "/b/k?partNumber=1&uploadId=1", b"hello ")[0] == 200
    assert http("POST", "/b/k?uploadId=1", b"<x/>")[0] == 200
    assert http("GET", "/b/k")[1] == b"hello world"


def test_the_server_is_set_up_from_outside(server: ByteServer, http: Http) -> None:
    http("PUT", "/b/old", b"bytes")
    assert server.control(alias={"/b/new": "/b/old"}, rate=1e9)["sizes"]["/b/new"] == 5
    assert http("GET", "/b/new")[1] == b"bytes"
    assert http("PUT", "/b/large", b"x" * 300_000)[0] == 200
    assert http("GET", "/b/large")[1] == b"x" * 300_000
    assert server.control()["requests"] == {"GET": 2, "PUT": 1}
    assert server.control(clear=True)["sizes"] == {}


# -- drivers ---------------------------------------------------------------------------------


def test_a_driver_refuses_a_wrong_tensor(server: ByteServer, tmp_path: Path, out: Path) -> None:
    data = tmp_path / "base.bin"
    make("noise", (4, 8)).tofile(data)
    client = Client(
        "boto3",
        {"shape": (4, 8), "data": str(data), "port": server.port, "endpoint": server.endpoint},
    )
    try:
        client.ready()
        assert client.measure("durable", ["x-1", "x-2"], 2)["wall"] > 0
        client.measure("get", ["x-1", "x-2", "absent-1"], 2)
        server.control(alias={"/plain/x-1": "/plain/x-2"})
        with pytest.raises(WrongTensorError, match="x-1"):
            client.measure("get", ["x-1", "x-2"], 1)
    finally:
        client.close()
    assert (out / "drivers.log").exists()


# -- reports and the page --------------------------------------------------------------------


def test_a_report_has_the_documented_form(out: Path) -> None:
    report = Report(title="Title", notes=["a note"], quick=True)
    report.rows.append({"system": "ec_s3", "MB/s": math.nan})
    report.at_least("fast", value=2.5, limit=2)
    report.at_most("slow", value=math.nan, limit=3, note="why")
    document = json.loads(report.write("name").read_text())
    assert out / "name.json" in list(out.iterdir())
    assert document["rows"] == [{"system": "ec_s3", "MB/s": None}]
    assert document["targets"] == [
        {"text": "fast", "limit": ">= 2", "value": 2.5, "met": True, "note": ""},
        {"text": "slow", "limit": "<= 3", "value": None, "met": False, "note": "why"},
    ]
    assert {"title", "notes", "quick", "beside", "machine", "versions", "date"} < document.keys()


def test_interference_is_judged_by_the_default_engine() -> None:
    default = ECConfig().engine
    rows: list[dict[str, object]] = [
        {"engine": mode, "median grows %": grows, "p99 grows %": grows}
        for mode, grows in (("nothing again", 0.5), ("thread", 40.0), ("process", 1.0))
    ]
    report = interference.report_of(rows, quick=True)
    assert f"The default is `engine: {default}`." in report.notes
    judged = next(row for row in rows if row["engine"] == default)
    for target in report.targets:
        assert target.value == judged["median grows %"]
        assert f"`engine: {default}`" in target.note


@pytest.fixture
def page(out: Path, tmp_path: Path) -> Path:
    return tmp_path / "docs" / "reference" / "benchmarks.md"


def test_the_page_shows_missed_targets_first_and_systems_side_by_side(
    out: Path, page: Path
) -> None:
    report = Report(title="Gets")
    for callers, ours in ((1, 10.0), (16, 1234.0)):
        for system, rate in (("ec_s3", ours), ("other | one", 5.0)):
            figures = {"MB/s": rate, "low": rate - 1, "high": rate + 1, "CPU s/GB": 0.5}
            report.rows.append({"callers": callers, "system": system} | figures)
    report.at_least("fast enough", value=2.5, limit=2)
    report.at_least("twice as fast", value=1.5, limit=2, note="the cause")
    report.write("gets")
    (out / "foreign.json").write_text("[1]")
    publish(page)
    text = page.read_text()
    assert "1 of 2 met" in text
    missed = "| twice as fast | >= 2 | 1.50 | the cause | [gets](#gets) |"
    assert text.index("### Missed") < text.index(missed) < text.index("### Met")
    assert "| callers | ec_s3 | other | one |" in text
    assert "| 16 | 1,230 (1,230 to 1,240) | 5.00 (4.00 to 6.00) |" in text
    assert "Shortened" not in text


def test_the_page_says_what_else_the_machine_did(
    out: Path, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, cores in (("quiet", 0.05), ("busy", 1.234)):
        monkeypatch.setattr("suite.report.beside", lambda cores=cores: cores)
        Report(title=name).write(name)
    publish(page)
    assert "other work kept busy: “busy” 1.23\n" in page.read_text()


def test_work_of_its_own_children_is_not_beside_a_benchmark() -> None:
    before = Usage.now()
    spin = "import time\nwhile time.process_time() < 0.35: pass"  # counted in steps of 10 ms
    subprocess.run([sys.executable, "-c", spin], check=True)
    after = Usage.now()
    assert after.own - before.own >= 0.3
    assert after.machine > before.machine


def test_rows_are_shown_in_the_unit_they_have(out: Path, page: Path) -> None:
    report = Report(title="Host tier")
    report.rows += [
        {"what": "get", "system": "ec_s3", "MB/s": 10.0, "us": None},
        {"what": "lease", "system": "ec_s3", "MB/s": None, "us": 3.05},
    ]
    report.write("host")
    publish(page)
    speeds, _, leases = page.read_text().partition("Microseconds per operation")
    assert "| get | 10.0 |" in speeds
    assert "lease" not in speeds
    assert "| lease | 3.05 |" in leases


def test_the_page_has_one_section_per_question_in_a_readers_order(out: Path, page: Path) -> None:
    for name in ("another", "codec", "ttft"):
        Report(title="Other").write(name)
    publish(page)
    headings = [line for line in page.read_text().splitlines() if line.startswith("## ")]
    assert headings == [
        f"## {QUESTIONS['ttft']}",
        f"## {QUESTIONS['codec']}",
        "## Other",
    ]


def test_small_pictures_go_into_the_page(out: Path, page: Path) -> None:
    Report(title="Gets").write("gets")
    (out / "gets-1.png").write_bytes(b"small")
    (out / "gets-2.png").write_bytes(b"large" * 100_000)
    publish(page)
    assert "![Gets](images/bench-gets-1.png)" in page.read_text()
    assert "gets-2" not in page.read_text()
    assert [p.name for p in (page.parent / "images").iterdir()] == ["bench-gets-1.png"]


def test_every_benchmark_has_its_question_and_says_how_long_it_takes() -> None:
    scripts = benchmarks([])
    assert {script.stem for script in scripts} == set(QUESTIONS)
    for script in scripts:
        usage = script.read_text().partition("from __future__")[0]
        assert re.search(r"--quick\].* (minutes?|s); quick: \d+", usage), script.stem
