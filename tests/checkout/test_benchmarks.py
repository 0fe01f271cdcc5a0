"""The benchmarks' own parts: data, turns, the byte server, reports and the page made of them."""

from __future__ import annotations

import json
import math
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from suite.client import Client, WrongTensorError
from suite.data import Items, file_shape, make
from suite.measure import Cell, Spread, digits, speedup, take_turns
from suite.page import load, render
from suite.report import Report
from suite.server import ByteServer

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

    answers = take_turns(["a", "b"], run, rounds=2)
    assert calls == ["a", "b", "a", "b", "b", "a"]
    assert answers == {"a": [{"call": 3}, {"call": 6}], "b": [{"call": 4}, {"call": 5}]}


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
    assert {"title", "notes", "quick", "machine", "versions", "date"} < document.keys()


def test_the_page_shows_targets_and_systems_side_by_side(out: Path) -> None:
    report = Report(title="Gets")
    for callers, ours in ((1, 10.0), (16, 1234.0)):
        for system, rate in (("ec_s3", ours), ("other | one", 5.0)):
            figures = {"MB/s": rate, "low": rate - 1, "high": rate + 1, "CPU s/GB": 0.5}
            report.rows.append({"callers": callers, "system": system} | figures)
    report.at_least("twice as fast", value=1.5, limit=2, note="the cause")
    report.write("gets")
    (out / "gets-1.png").touch()
    (out / "foreign.json").write_text("[1]")
    page = render(load(out))
    assert "0 of 1 met" in page
    assert "| **missed** | twice as fast | >= 2 | 1.50 | the cause |" in page
    assert "| callers | ec_s3 | other | one |" in page
    assert "| 16 | 1,230 (1,230 to 1,240) | 5.00 (4.00 to 6.00) |" in page
    assert "`gets-1.png`" in page
    assert "Shortened" not in page
