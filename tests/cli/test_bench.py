from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from ec_s3.cli import bench
from ec_s3.cli.app import app
from ec_s3.cli.bench import Bandwidth, Item, Latency, judge
from ec_s3.cli.output import ExitCode, Output
from ec_s3.errors import RemoteDeniedError, RemoteUnavailableError
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import DeleteReport

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typer.testing import Result

    from ec_s3.store import Buffer
    from ec_s3.testing.moto import S3Server
    from ec_s3.types import PutOutcome

ITEM = Item(tokens=1024, width=3584, encode_seconds=0.080)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little to move: this is no measurement."""
    monkeypatch.setattr(bench, "LARGE_BYTES", 64 << 10)
    monkeypatch.setattr(bench, "SMALL_ROUNDS", 5)
    monkeypatch.setattr(bench, "SETTLE_SECONDS", 0.0)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


class TestCommand:
    def test_a_bucket_is_measured_and_left_as_it_was(
        self, s3_server: S3Server, bucket: str
    ) -> None:
        url = f"s3://{bucket}/p?endpoint={s3_server.url}"
        result = run("--json", "--url", url, "bench", "--tokens", "64", "--width", "64")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert [one["request"] for one in found["latency"]] == ["HEAD", "GET small"]
        assert all(0 < one["p50"] <= one["p99"] for one in found["latency"])
        moved = [(one["request"], one["parallel"]) for one in found["bandwidth"]]
        assert moved == [(name, n) for n in (1, 4, 16) for name in ("PUT", "GET")]
        assert all(one["rate"] > 0 for one in found["bandwidth"])
        assert found["verdict"]["item"] == {"tokens": 64, "width": 64, "encode_seconds": 0.08}
        client = s3_server.client()
        assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
        client.close()
        written = {r.path for r in s3_server.log if r.method == "PUT" and f"/{bucket}/" in r.path}
        assert all(path.startswith(f"/{bucket}/p/bench/") for path in written)

    def test_people_are_told_first_how_much_will_be_written(self, tmp_path: Path) -> None:
        result = run("--url", f"file://{tmp_path}", "bench")
        assert result.exit_code == 0
        assert "writes up to" in result.stderr.splitlines()[0]
        assert "1024 x 3584" in result.stdout
        assert "p99" in result.stdout
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]


class Leaky(MemoryStore):
    """Goes wrong after so many large puts."""

    def __init__(self, error: Exception | None, after: int = 5) -> None:
        super().__init__()
        self.error = error
        self.after = after
        self.stuck = asyncio.Event()

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        if_match: str | None = None,
    ) -> PutOutcome:
        outcome = await super().put(key, parts, if_absent=if_absent, if_match=if_match)
        if self.calls["put"] > self.after:
            if self.error is not None:
                raise self.error
            self.stuck.set()
            await asyncio.Event().wait()
        return outcome


class TestCleaningUp:
    async def test_an_error_leaves_nothing_behind(self) -> None:
        store = Leaky(RemoteUnavailableError("gone", operation="put"))
        with pytest.raises(RemoteUnavailableError):
            await bench.bench(store, Output(), ITEM)
        assert store.calls["put"] > 5
        assert not store.objects

    async def test_an_interruption_leaves_nothing_behind(self) -> None:
        store = Leaky(None)
        task = asyncio.ensure_future(bench.bench(store, Output(), ITEM))
        async with asyncio.timeout(30):
            await store.stuck.wait()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert task.cancelled()
        assert not store.objects

    async def test_a_put_that_overtakes_its_removal_is_removed_again(self) -> None:
        class Late(Leaky):
            async def delete(self, keys: Sequence[str]) -> DeleteReport:
                report = await super().delete(keys)
                if len(keys) > 1 and self.calls["delete"] == 2:
                    self.objects[keys[0]] = b"late"
                return report

        store = Late(RemoteUnavailableError("gone", operation="put"))
        with pytest.raises(RemoteUnavailableError):
            await bench.bench(store, Output(), ITEM)
        assert store.calls["delete"] == 3
        assert not store.objects

    async def test_who_may_not_delete_writes_nothing_large(self) -> None:
        class Kept(MemoryStore):
            async def delete(self, keys: Sequence[str]) -> DeleteReport:
                return DeleteReport((), dict.fromkeys(keys, "denied"))

        store = Kept()
        with pytest.raises(RemoteDeniedError, match="DeleteObject"):
            await bench.bench(store, Output(), ITEM)
        assert max(map(len, store.objects.values())) < 100

    async def test_what_could_not_be_removed_is_said(self, capsys: Any) -> None:
        class Once(MemoryStore):
            async def delete(self, keys: Sequence[str]) -> DeleteReport:
                if self.calls.get("delete"):
                    raise RemoteUnavailableError("gone", operation="delete")
                return await super().delete(keys)

        assert await bench.bench(Once(), Output(), ITEM) is ExitCode.FINDING
        assert "could not be removed" in capsys.readouterr().err

    async def test_a_slow_store_is_given_up_in_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench, "SECONDS", 0.01)
        store = Leaky(None, after=2)
        async with asyncio.timeout(30):
            assert await bench.bench(store, Output(json=True), ITEM) is ExitCode.OK
        assert not store.objects


def verdict(latency: float, rate: float, *, slowest: float | None = None) -> Any:
    small = Latency("GET small", 100, latency, slowest or latency)
    rates = [Bandwidth("GET", parallel, 8, rate * parallel) for parallel in (1, 4, 16)]
    return judge(ITEM, [small], rates)


class TestVerdict:
    def test_a_near_bucket_beats_the_encoder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench, "LARGE_BYTES", 8 << 20)
        found = verdict(0.020, 90e6 * 2)
        assert found.fetch
        assert found.fetch_p50 == pytest.approx(0.020 + ITEM.stored_bytes / 180e6)
        assert found.text.startswith("fetch: ")

    def test_a_far_one_does_not(self) -> None:
        found = verdict(0.200, 10e6)
        assert not found.fetch
        assert "throughput" in found.text

    def test_a_tail_that_is_slower_than_the_encoder_is_told(self) -> None:
        found = verdict(0.001, 1e9, slowest=0.5)
        assert found.fetch
        assert "policy latency" in found.text

    def test_nothing_that_came_in_time_is_no_infinity(self) -> None:
        assert json.dumps(verdict(0.001, 0.0).fetch_p50, allow_nan=False)
