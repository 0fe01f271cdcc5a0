"""The engine against stores that fail: each test names what must come out."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ec_s3.blocking import ECCacheEngine
from ec_s3.config import ECConfig
from ec_s3.keys import Namespace
from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import FlushReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ec_s3.testing.moto import S3Server

NAMESPACE = Namespace(model="org/model")
ROOT = Path(__file__).parents[2]
PAGE = 256 << 10
ITEMS = "/bfloat16/"  # requests for items, not for what describes or controls them


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK waits up to seconds between attempts, and so do uploads; tests need not."""
    monkeypatch.setattr(
        "botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.001
    )
    monkeypatch.setattr("ec_s3.uploads.spread", lambda _: 0.01)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultServer]:
    with FaultServer(s3_server.url) as server:
        yield server


def tensor(seed: int, rows: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 256, generator=generator).to(torch.bfloat16)


def same(got: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return got is not None and torch.equal(got, expected)


def until(condition: Callable[[], bool], *, seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not come to pass"
        time.sleep(0.01)


class Bench:
    """Opens engines on one bucket, directly or through the proxy, and closes them."""

    def __init__(self, bucket: str, server: S3Server, proxy: FaultServer) -> None:
        self.bucket, self.server, self.proxy = bucket, server, proxy
        self.client = server.client()
        self.engines: list[ECCacheEngine] = []

    def open(self, *, bucket: str = "", faults: bool = True, **settings: object) -> ECCacheEngine:
        endpoint = self.proxy.url if faults else self.server.url
        values: dict[str, object] = {
            "url": f"s3://{bucket or self.bucket}/p?endpoint={endpoint}&region=us-east-1",
            "max_local_cpu_size": 64 * PAGE,
            "connect_timeout": 5.0,
            "read_timeout": 10.0,
            "blocking_timeout": 30.0,
            "flush_timeout": 30.0,
            **settings,
        }
        self.engines.append(ECCacheEngine(ECConfig(**values), NAMESPACE))
        return self.engines[-1]

    def key(self, identifier: str) -> str:
        return f"p/{NAMESPACE.object_key(identifier)}"

    def write(self, identifier: str, body: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=self.key(identifier), Body=body)

    def read(self, identifier: str) -> bytes:
        body: bytes = self.client.get_object(Bucket=self.bucket, Key=self.key(identifier))[
            "Body"
        ].read()
        return body

    def remove(self, identifier: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=self.key(identifier))

    def fill(self, *identifiers: str) -> None:
        """Put items numbered from 0, past the proxy."""
        engine = self.open(faults=False)
        for seed, identifier in enumerate(identifiers):
            assert engine.put(identifier, tensor(seed))
        report = engine.close()
        assert (report.pending, report.dropped) == (0, 0)
        assert engine.stats()["uploads_written"] == len(identifiers)
        self.proxy.clear()


@pytest.fixture
def bench(bucket: str, s3_server: S3Server, proxy: FaultServer) -> Iterator[Bench]:
    made = Bench(bucket, s3_server, proxy)
    yield made
    proxy.clear()
    for engine in made.engines:
        engine.close(0)
    made.client.close()


# -- a bucket that misbehaves --------------------------------------------------------------------


def test_a_cold_item_is_one_get_and_no_head(bench: Bench) -> None:
    bench.fill("a")
    assert same(bench.open().get("a"), tensor(0))
    assert (bench.proxy.count("", ITEMS), bench.proxy.count("GET", ITEMS)) == (1, 1)


def test_a_large_item_is_read_in_ranges_of_one_version(bench: Bench) -> None:
    large = tensor(7, rows=50_000)
    engine = bench.open(faults=False)
    engine.put("large", large)
    assert engine.flush(30).complete
    assert same(bench.open().get("large"), large)
    first, *rest = (request for request in bench.proxy.log if re.search(ITEMS, request.path))
    assert len(rest) >= 2
    assert not first.header("If-Match")
    assert {request.header("If-Match") != "" for request in rest} == {True}


def test_every_call_returns_though_the_server_never_answers(bench: Bench) -> None:
    """LMCache PR #1960: `contains` waited 25 s there with a limit of 10 s."""
    bench.fill("a")
    bench.proxy.add(Fault(hang=True))
    engine = bench.open(upload_queue_items=1, max_uploads=1)
    assert engine.get("a", timeout=0.05) is None
    assert not engine.contains("a", timeout=0.05)
    assert engine.contains_many(["a", "b"], timeout=0.05) == {"a": False, "b": False}
    assert [engine.put(f"k{i}", tensor(i)) for i in range(4)] == [True] * 4
    assert not engine.flush(0.05).complete
    report = engine.close(0.05)
    assert report.pending > 0
    assert report.dropped == 4  # what was pending, and what the full queue had refused
    assert engine.stats()["misses_timeout"] == 1


def test_after_one_stalled_answer_the_next_call_works(bench: Bench) -> None:
    """LMCache#1913: after one timeout the connection object stayed None there."""
    bench.fill("a", "b")
    bench.proxy.add(Fault(method="GET", path=ITEMS, stall_at=100, times=1))
    engine = bench.open(read_timeout=1.5)
    got = engine.get("a")
    assert got is None or same(got, tensor(0))
    assert same(engine.get("b"), tensor(1))
    assert same(engine.get("a"), tensor(0))


def test_stalled_answers_among_many_cost_no_more_than_themselves(bench: Bench) -> None:
    """aiobotocore#738: a few calls among thousands hung there for ever."""
    names = [f"k{i}" for i in range(30)]
    bench.fill(*names)
    for skip in (2, 7, 7):
        bench.proxy.add(Fault(method="GET", path=ITEMS, hang=True, skip=skip, times=1))
    got = bench.open(read_timeout=1.5).get_many(names)
    right = [same(item, tensor(seed)) for seed, item in enumerate(got)]
    assert right.count(True) >= 27
    assert all(ok or item is None for ok, item in zip(right, got, strict=True))


def test_the_bucket_comes_back_by_itself_after_an_outage(bench: Bench) -> None:
    """LMCache 0.5.6: a short outage disabled the remote tier there until a restart."""
    names = [f"k{i}" for i in range(10)]
    bench.fill(*names)
    engine = bench.open(negative_ttl=0.0)
    bench.proxy.refuse()
    assert engine.get_many(names) == [None] * 10
    assert engine.put("during", tensor(99))
    assert same(engine.get("during"), tensor(99))
    assert engine.stats()["breaker_open"] == 1
    bench.proxy.accept()
    until(lambda: same(engine.get("k0"), tensor(0)))
    assert engine.stats()["breaker_open"] == 0
    assert engine.flush(20).complete
    assert same(bench.open(faults=False).get("during"), tensor(99))


def test_an_engine_starts_though_nothing_listens(bench: Bench) -> None:
    """obstore#490: there a wrong endpoint meant minutes of waiting."""
    bench.proxy.refuse()
    engine = bench.open()
    assert engine.get("a") is None
    assert engine.put("a", tensor(1))
    assert same(engine.get("a"), tensor(1))
    assert engine.close(0.05).dropped == 1


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(403, "denied"), (500, "failed"), (503, "failed")],
)
def test_an_upload_that_the_server_refuses_is_not_taken_for_done(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, status: int, outcome: str
) -> None:
    """LMCache#4483: there an upload with a bad status counted as done."""
    monkeypatch.setattr("ec_s3.uploads.RETRY_SECONDS", 0.2)
    bench.proxy.add(Fault(method="PUT", status=status))
    engine = bench.open()
    assert engine.put("a", tensor(0))
    report = engine.flush(30)
    assert report == FlushReport(dropped=1)
    assert engine.stats()[f"uploads_{outcome}"] == 1
    other = bench.open(faults=False)
    assert not other.contains("a")
    assert other.get("a") is None
    assert same(engine.get("a"), tensor(0))


def test_a_bucket_that_does_not_exist_is_said_once_and_hurts_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """LMCache#3376: hundreds of lines there, and an assertion took the engine down."""
    engine = bench.open(bucket="no-such-bucket-here")
    for i in range(10):
        assert engine.put(f"k{i}", tensor(i))
    assert engine.flush(30).dropped == 10
    assert engine.get("other") is None
    lines = [r.getMessage() for r in caplog.records if "given up" in r.getMessage()]
    assert len(lines) == 1
    assert "no-such-bucket-here" in lines[0]
    assert "testing" not in lines[0]


# -- objects that are not what they should be ----------------------------------------------------


def _flip(body: bytes, at: int) -> bytes:
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(lambda body, _: b"", "corrupt", id="Mooncake#3465: zero bytes"),
        pytest.param(lambda body, _: _flip(body, len(body) // 2), "corrupt", id="flipped"),
        pytest.param(lambda body, _: body[:-1000], "corrupt", id="truncated"),
        pytest.param(lambda body, _: body + bytes(65536), "corrupt", id="LMCache#3831: grown"),
        pytest.param(lambda body, _: random.Random(1).randbytes(len(body)), "corrupt", id="random"),
        pytest.param(lambda _, other: other, "mismatch", id="another item's"),
    ],
)
def test_a_bad_object_is_a_miss_and_the_next_save_repairs_it(
    bench: Bench, damage: Callable[[bytes, bytes], bytes], reason: str
) -> None:
    bench.fill("a", "b", "c")
    bench.write("a", damage(bench.read("a"), bench.read("b")))
    engine = bench.open(faults=False)
    assert [same(item, tensor(i + 1)) for i, item in enumerate(engine.get_many(["b", "c"]))] == [
        True,
        True,
    ]
    assert engine.get("a") is None
    assert not engine.contains("a")
    flat = engine.stats()
    assert flat[f"misses_{reason}"] == 1
    assert flat["corrupt_objects_remote"] == 1
    assert same(engine.get("b"), tensor(1))
    assert same(engine.get("c"), tensor(2))

    assert engine.put("a", tensor(0))
    assert engine.flush(20).complete
    assert engine.stats()["repaired_objects"] == 1
    assert same(bench.open(faults=False).get("a"), tensor(0))


def test_a_byte_flipped_on_the_way_is_found_and_the_object_read_again(bench: Bench) -> None:
    bench.fill("a")
    bench.proxy.add(Fault(method="GET", path=ITEMS, flip_at=50_000, times=1))
    engine = bench.open()
    assert same(engine.get("a"), tensor(0))
    assert bench.proxy.count("GET", ITEMS) == 2
    assert engine.stats()["corrupt_objects_remote"] == 0


def test_an_object_whose_bytes_are_flipped_again_and_again_is_a_miss(bench: Bench) -> None:
    bench.fill("a")
    bench.proxy.add(Fault(method="GET", path=ITEMS, flip_at=50_000))
    engine = bench.open(negative_ttl=0.0)
    assert engine.get("a") is None
    assert bench.proxy.count("GET", ITEMS) == 2
    assert engine.stats()["misses_corrupt"] == 1
    bench.proxy.clear()
    assert same(engine.get("a"), tensor(0))


def test_an_object_removed_by_a_lifecycle_rule_is_noticed_and_uploaded_again(
    bench: Bench,
) -> None:
    """LMCache#4745: there existence stayed "yes" for ever and each load ended in a 404."""
    bench.fill("a")
    engine = bench.open(faults=False)
    assert engine.contains("a")
    bench.remove("a")
    assert engine.get("a") is None
    assert not engine.contains("a")
    assert engine.put("a", tensor(0))
    assert engine.flush(20).complete
    assert engine.stats()["uploads_written"] == 1
    assert same(bench.open(faults=False).get("a"), tensor(0))


def test_several_engines_save_one_item_once(bench: Bench) -> None:
    """vllm-ascend PR #16953: LMCache uploads once per rank, and again on every put."""
    engines = [bench.open() for _ in range(4)]
    for engine in engines:
        for _ in range(2):
            assert engine.put("a", tensor(0))
            assert engine.flush(20).complete
    written = [engine.stats()["uploads_written"] for engine in engines]
    exists = [engine.stats()["uploads_exists"] for engine in engines]
    assert sorted(written) == [0, 0, 0, 1]
    assert sum(exists) == 7
    assert same(bench.open(faults=False).get("a"), tensor(0))


# -- processes -----------------------------------------------------------------------------------

WRITER = """
    import sys, torch
    from ec_s3 import ECCacheEngine, ECConfig, Namespace

    folder, count, same_key = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "same"
    engine = ECCacheEngine(
        ECConfig(url=f"file://{folder}", max_local_cpu_size="64MiB"),
        Namespace(model="org/model"),
    )
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(count):
        generator = torch.Generator().manual_seed(0 if same_key else i)
        tensor = torch.randn(256, 256, generator=generator).to(torch.bfloat16)
        engine.put("k0" if same_key else f"k{i}", tensor)
    print("put", flush=True)
    report = engine.close()
    print(report.pending, report.dropped, flush=True)
"""


def writer(folder: Path, count: int, kind: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), str(count), kind],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_after_a_kill_amid_writes_only_whole_entries_are_there(tmp_path: Path) -> None:
    """LMCache#4991: a failed store stayed visible there and later loads gave garbage."""
    with writer(tmp_path / "bucket", 100, "many") as process:
        assert line(process) == "ready"
        say(process)
        assert line(process) == "put"
        until(lambda: any((tmp_path / "bucket").rglob("v1/*/bfloat16/*/*")))
        process.send_signal(signal.SIGKILL)
    names = [f"k{i}" for i in range(100)]
    config = ECConfig(url=f"file://{tmp_path}/bucket", max_local_cpu_size=64 * PAGE)
    with ECCacheEngine(config, NAMESPACE) as engine:
        there = engine.contains_many(names)
        got = engine.get_many(names)
        assert engine.stats()["corrupt_objects_remote"] == 0
    assert any(there.values())
    for seed, (name, item) in enumerate(zip(names, got, strict=True)):
        assert (item is not None) == there[name]
        assert item is None or torch.equal(item, tensor(seed))


def test_many_processes_that_save_one_key_leave_one_whole_object(tmp_path: Path) -> None:
    processes = [writer(tmp_path / "bucket", 5, "same") for _ in range(3)]
    try:
        assert [line(process) for process in processes] == ["ready"] * 3
        for process in processes:
            say(process)
        assert [line(process) for process in processes] == ["put"] * 3
        assert [line(process) for process in processes] == ["0 0"] * 3
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    files = [path for path in (tmp_path / "bucket").rglob("v1/*/bfloat16/*/*") if path.is_file()]
    assert len(files) == 1
    config = ECConfig(url=f"file://{tmp_path}/bucket", max_local_cpu_size=64 * PAGE)
    with ECCacheEngine(config, NAMESPACE) as engine:
        assert same(engine.get("k0"), tensor(0))


def test_an_exit_with_uploads_queued_for_s3_flushes_them(bench: Bench) -> None:
    code = """
        import sys, torch
        from ec_s3 import ECCacheEngine, ECConfig, Namespace

        engine = ECCacheEngine(
            ECConfig(url=sys.argv[1], max_local_cpu_size="64MiB", flush_timeout=30),
            Namespace(model="org/model"),
        )
        for i in range(10):
            engine.put(f"k{i}", torch.full((64, 128), i, dtype=torch.bfloat16))
    """
    # By name, as a real endpoint is: names are resolved on a thread pool that also ends at exit.
    endpoint = bench.server.url.replace("127.0.0.1", "localhost")
    url = f"s3://{bench.bucket}/p?endpoint={endpoint}&region=us-east-1"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    got = bench.open(faults=False).get_many([f"k{i}" for i in range(10)])
    assert [item is not None and bool((item == i).all()) for i, item in enumerate(got)] == [
        True
    ] * 10


# -- the disk tier -------------------------------------------------------------------------------


def disk_config(folder: Path) -> ECConfig:
    return ECConfig().model_copy(update={"local_disk": folder, "max_local_cpu_size": 64 * PAGE})


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("v1/*/bfloat16/*/*") if path.is_file()]


def test_the_disk_tier_is_found_again_after_a_restart(tmp_path: Path) -> None:
    """LMCache#1788: its disk index was in memory only, and the files stayed as orphans."""
    with ECCacheEngine(disk_config(tmp_path), NAMESPACE) as engine:
        engine.put("a", tensor(1))
    with ECCacheEngine(disk_config(tmp_path), NAMESPACE) as engine:
        assert engine.contains("a")
        assert same(engine.get("a"), tensor(1))
        assert engine.stats()["hits_disk"] == 1


def _as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(Path.unlink, id="deleted"),
        pytest.param(_as_directory, id="a directory instead"),
        pytest.param(lambda path: os.truncate(path, 100), id="truncated"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.write_bytes(os.urandom(5000)), id="other bytes"),
    ],
)
def test_a_damaged_disk_tier_is_a_miss_and_is_mended(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    """LMCache#1313: a file removed from disk took its engine core down."""
    with ECCacheEngine(disk_config(tmp_path), NAMESPACE) as engine:
        engine.put_many({"a": tensor(1), "b": tensor(2)})
    (path,) = (path for path in files_of(tmp_path) if path.name == _digest("a"))
    damage(path)
    with ECCacheEngine(disk_config(tmp_path), NAMESPACE) as engine:
        assert engine.get("a") is None
        assert same(engine.get("b"), tensor(2))
        if path.is_dir():
            shutil.rmtree(path)
        assert engine.put("a", tensor(1))
        assert engine.flush(10).complete
        assert engine.stats()["local_bytes_leased"] == 0
    with ECCacheEngine(disk_config(tmp_path), NAMESPACE) as engine:
        assert same(engine.get("a"), tensor(1))


def _digest(identifier: str) -> str:
    return NAMESPACE.object_key(identifier).rsplit("/", 1)[1]


# -- memory under pressure -----------------------------------------------------------------------


def test_every_hit_matches_its_key_under_constant_eviction(tmp_path: Path) -> None:
    """LMCache#4385: its disk tier returned other conversations' data, without an error."""
    config = disk_config(tmp_path).model_copy(update={"max_local_cpu_size": 16 * PAGE})
    wrong: list[str] = []
    hits = [0]

    def work(engine: ECCacheEngine, seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(150):
            number = choice.randrange(200)
            if choice.random() < 0.4:
                engine.put(f"k{number}", torch.full((40, 64), number, dtype=torch.bfloat16))
                continue
            got = engine.get(f"k{number}")
            if got is not None:
                hits[0] += 1
                if got.shape != (40, 64) or not bool((got == number).all()):
                    wrong.append(f"k{number}")

    with ECCacheEngine(config, NAMESPACE, store=MemoryStore()) as engine:
        threads = [threading.Thread(target=work, args=(engine, i)) for i in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: engine.stats()["local_bytes_leased"] == 0)  # uploads may be at work
        flat = engine.stats()
        assert flat["errors_fetch"] == flat["errors_upload"] == 0
        assert flat["local_evictions_clean"] + flat["local_evictions_dirty"] > 0
    assert wrong == []
    assert hits[0] > 100


def test_ten_thousand_items_stay_within_their_memory() -> None:
    """dynamo#14452: the cache was a plain dictionary there and grew without a limit."""
    config = ECConfig().model_copy(update={"max_local_cpu_size": 64 * PAGE})
    small = torch.ones((4, 64), dtype=torch.bfloat16)
    with ECCacheEngine(config, NAMESPACE) as engine:
        for i in range(10_000):
            assert engine.put(f"k{i}", small)
        flat = engine.stats()
        assert flat["local_bytes_used"] == flat["local_bytes_capacity"] == 64 * PAGE
        assert flat["local_evictions_clean"] == 10_000 - 64
        assert engine.contains("k9999")
        assert engine.contains("k9936")
        assert not engine.contains("k9935")
