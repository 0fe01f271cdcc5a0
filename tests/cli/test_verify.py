"""`verify`: what is damaged is named and what cannot be read is not, in bounded memory."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from cli_bucket import LAST, MILLION, OTHER, SPACE, Bucket, Listing, item, traced_peak

from ec_s3.cli import crew
from ec_s3.cli.output import Output
from ec_s3.cli.reading import Demands
from ec_s3.cli.targets import Target
from ec_s3.cli.verify import AT_ONCE, Sample, parse_sample, verify
from ec_s3.errors import ConfigError, RemoteThrottledError, RemoteUnavailableError
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import ItemMeta, TensorSpec
from ec_s3.wire import encode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ec_s3.store import GetResult

DEMANDS = Demands(1 << 20, None)
EVERYTHING = Target("v1/")


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "PAUSE_SECONDS", 0.001)


def damaged() -> dict[str, bytes]:
    bodies = {name: item(name)[1] for name in ("flipped", "cut", "grown")}
    return {
        "flipped": bodies["flipped"][:-1] + bytes([bodies["flipped"][-1] ^ 1]),
        "cut": bodies["cut"][:-7],
        "grown": bodies["grown"] + b"x",
        "moved": item("another")[1],
        "empty": b"",
    }


def newer_format() -> bytes:
    body = bytearray(item("newer")[1])
    body[16] = 9  # the format version, see docs/reference/wire-format.md
    return bytes(body)


class TestReport:
    def test_good_objects_are_counted(self, bucket: Bucket) -> None:
        bucket.add("a")
        bucket.add("b", OTHER)
        bucket.describe(SPACE)
        [record] = bucket.records("verify", "v1/")
        assert (record["checked"], record["bad"], record["listed"]) == (2, 0, 2)
        assert record["bytes"] > 0
        result = bucket.run("verify", "v1/")
        assert "2 objects" in result.stdout
        assert "none bad" in result.stdout

    def test_every_kind_of_bad_object_is_named_and_the_rest_still_checked(
        self, bucket: Bucket
    ) -> None:
        bucket.add("good")
        for name, body in damaged().items():
            bucket.put(SPACE.object_key(name), body)
        *bad, summary = bucket.records("verify", "v1/", code=1)
        assert (summary["checked"], summary["bad"]) == (6, 5)
        assert summary["reasons"] == {"corrupt": 4, "mismatch": 1}
        assert {record["key"] for record in bad} == {SPACE.object_key(name) for name in damaged()}
        assert {record["reason"] for record in bad} == {"corrupt", "mismatch"}
        result = bucket.run("verify", "v1/")
        assert "5 bad (4 corrupt, 1 mismatch)" in result.stdout
        assert SPACE.object_key("moved") in result.stdout

    def test_a_tensor_of_another_dtype_than_its_folder_is_bad(self, bucket: Bucket) -> None:
        frame = encode(
            TensorSpec("int16", (2, 2)),
            [memoryview(bytes(8))],
            identifier="a",
            namespace=SPACE.id,
            meta=ItemMeta(),
            created=1.0,
        )
        bucket.put(SPACE.object_key("a"), b"".join(bytes(part) for part in frame.parts))
        (record, _) = bucket.records("verify", "v1/", code=1)
        assert record["reason"] == "mismatch", "a server refuses it"

    def test_an_object_above_the_cap_is_not_read(
        self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = bucket.add("a")
        monkeypatch.setenv("EC_S3_MAX_ITEM_SIZE", "128")
        (record, summary) = bucket.records("verify", key, code=1)
        assert record["error"] == "FrameTooLargeError"
        assert summary["reasons"] == {"too_large": 1}

    def test_nothing_to_verify_is_a_finding(self, bucket: Bucket) -> None:
        assert bucket.run("verify", "v1/").exit_code == 1

    def test_a_namespace_is_verified_alone(self, bucket: Bucket) -> None:
        bucket.add("a")
        bucket.add("b", OTHER)
        [record] = bucket.records("verify", "--namespace", SPACE.id)
        assert record["checked"] == 1
        assert bucket.run("verify").exit_code == 2


class TestSample:
    @pytest.mark.parametrize(("sample", "checked"), [("3", 3), ("100", 8), ("100%", 8)])
    def test_so_many_objects_are_checked(self, bucket: Bucket, sample: str, checked: int) -> None:
        for number in range(8):
            bucket.add(str(number))
        [record] = bucket.records("verify", "v1/", "--sample", sample)
        assert (record["checked"], record["listed"]) == (checked, 8)

    def test_a_part_says_of_how_many(self, bucket: Bucket) -> None:
        for number in range(3):
            bucket.add(str(number))
        assert "2 of 3 objects" in bucket.run("verify", "v1/", "--sample", "2").stdout

    @pytest.mark.parametrize("text", ["0", "0%", "101%", "-3", "x", "", "3%%", "1e3"])
    def test_what_is_no_sample_is_wrong_usage(self, bucket: Bucket, text: str) -> None:
        bucket.add("a")
        assert bucket.run("verify", "v1/", "--sample", text).exit_code == 2

    def test_numbers_and_percentages_are_told_apart(self) -> None:
        assert parse_sample(" 20 ") == Sample(count=20)
        assert parse_sample("2.5%") == Sample(share=0.025)
        with pytest.raises(ConfigError, match="percentage"):
            parse_sample("2,5%")


class TestRemove:
    def fill(self, bucket: Bucket) -> str:
        kept = bucket.add("good")
        for name, body in damaged().items():
            bucket.put(SPACE.object_key(name), body)
        return kept

    def test_bad_objects_go_and_the_rest_stays(self, bucket: Bucket) -> None:
        kept = self.fill(bucket)
        *_, summary = bucket.records("verify", "v1/", "--remove", "--yes", code=1)
        assert (summary["removed"], summary["failed"]) == (5, {})
        assert bucket.stored() == [kept]
        assert not list(bucket.folder.rglob("control.json")), "they may be stored again at once"
        assert bucket.run("verify", "v1/").exit_code == 0

    @pytest.mark.parametrize(("typed", "left"), [("5", 1), ("4", 6), ("yes", 6)])
    def test_without_yes_their_number_must_be_typed(
        self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, typed: str, left: int
    ) -> None:
        self.fill(bucket)
        monkeypatch.setattr(Output, "confirm", lambda _self, _text, expected: typed == expected)
        assert bucket.run("verify", "v1/", "--remove").exit_code == 1
        assert len(bucket.stored()) == left

    def test_without_a_terminal_nothing_goes(self, bucket: Bucket) -> None:
        self.fill(bucket)
        result = bucket.run("verify", "v1/", "--remove", typed="5\n")
        assert result.exit_code == 1
        assert "nothing deleted" in result.stderr
        assert len(bucket.stored()) == 6

    def test_yes_alone_is_wrong_usage(self, bucket: Bucket) -> None:
        assert bucket.run("verify", "v1/", "--yes").exit_code == 2

    def test_what_another_release_or_limit_may_read_is_reported_and_kept(
        self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket.put(SPACE.object_key("newer"), newer_format())
        *_, summary = bucket.records("verify", "v1/", "--remove", "--yes", code=1)
        assert (summary["reasons"], summary["removed"]) == ({"version": 1}, 0)
        monkeypatch.setenv("EC_S3_MAX_ITEM_SIZE", "128")
        bucket.add("large")
        *_, summary = bucket.records("verify", "v1/", "--remove", "--yes", code=1)
        assert (summary["bad"], summary["removed"]) == (2, 0)
        assert len(bucket.stored()) == 2

    async def test_an_object_that_was_repaired_meanwhile_stays(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        key, good, _ = item("a")

        class Repairing(MemoryStore):
            async def head(self, key: str) -> Any:
                await self.put(key, [good], if_absent=False)
                return await super().head(key)

        store = Repairing()
        await store.put(key, [good[:-1]])
        code = await verify(
            store, Output(json=True), EVERYTHING, demands=DEMANDS, remove=lambda _: True
        )
        assert code == 1
        assert store.objects[key] == good
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["removed"] == 0


class Failing(MemoryStore):
    """Reads fail as `failure` says."""

    def __init__(self, failure: Callable[[str, int], Exception | None]) -> None:
        super().__init__()
        self.failure = failure
        self.reads: dict[str, int] = {}

    async def get(self, key: str, **options: Any) -> GetResult | None:
        self.reads[key] = self.reads.get(key, 0) + 1
        error = self.failure(key, self.reads[key])
        if error is not None:
            raise error
        return await super().get(key, **options)


async def filled(store: MemoryStore, count: int) -> list[str]:
    keys = []
    for number in range(count):
        key, body, _ = item(str(number))
        await store.put(key, [body])
        keys.append(key)
    return keys


class TestFailures:
    async def test_a_throttled_read_is_tried_again(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = Failing(lambda _, n: RemoteThrottledError("x", operation="get") if n < 3 else None)
        await filled(store, 5)
        assert await verify(store, Output(json=True), EVERYTHING, demands=DEMANDS) == 0
        assert set(store.reads.values()) == {3}
        assert '"checked": 5' in capsys.readouterr().out

    async def test_one_unreadable_object_is_named_and_is_no_bad_one(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = Failing(
            lambda key, _: RemoteUnavailableError("no", operation="get") if key == keys[2] else None
        )
        keys = await filled(store, 5)
        code = await verify(
            store, Output(json=True), EVERYTHING, demands=DEMANDS, remove=lambda _: True
        )
        assert code == 1
        first, summary = map(json.loads, capsys.readouterr().out.splitlines())
        assert (first["key"], first["error"]) == (keys[2], "RemoteUnavailableError")
        assert (summary["checked"], summary["bad"], summary["unreadable"]) == (4, 0, 1)
        assert keys[2] in store.objects

    async def test_a_store_that_is_gone_ends_the_run(self) -> None:
        store = Failing(lambda *_: RemoteUnavailableError("gone", operation="get"))
        await filled(store, 50)
        with pytest.raises(RemoteUnavailableError):
            await verify(store, Output(json=True), EVERYTHING, demands=DEMANDS)
        assert len(store.reads) < 50

    async def test_objects_that_are_gone_meanwhile_are_not_bad_but_seeing_none_is_a_finding(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class Vanishing(MemoryStore):
            async def get(self, key: str, **options: Any) -> GetResult | None:
                return None if key in gone else await super().get(key, **options)

        store = Vanishing()
        keys = await filled(store, 3)
        gone = {keys[0]}
        assert await verify(store, Output(json=True), EVERYTHING, demands=DEMANDS) == 0
        assert '"gone": 1' in capsys.readouterr().out
        gone = set(keys)
        assert await verify(store, Output(json=True), EVERYTHING, demands=DEMANDS) == 1


class TestScale:
    async def test_the_listing_waits_for_the_checks(self) -> None:
        ahead: list[int] = []

        class Slow(Listing):
            reads = 0

            async def get(self, key: str, **options: Any) -> GetResult | None:
                self.reads += 1
                await asyncio.sleep(0)
                ahead.append(self.listed - self.reads)
                return None

        store = Slow(2000)
        await verify(store, Output(json=True), EVERYTHING, demands=DEMANDS)
        assert store.reads == 2000
        assert max(ahead) <= AT_ONCE

    async def test_several_objects_are_read_at_once_within_a_bound_in_bytes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = __import__("ec_s3.cli.verify", fromlist=["BYTES_AT_ONCE"])
        running, most = 0, []

        class Watched(Listing):
            async def get(self, key: str, **options: Any) -> GetResult | None:
                nonlocal running
                running += 1
                for _ in range(5):
                    await asyncio.sleep(0)
                most.append(running)
                running -= 1
                return None

        await verify(Watched(200), Output(json=True), EVERYTHING, demands=DEMANDS)
        assert max(most) == AT_ONCE
        most.clear()
        monkeypatch.setattr(module, "BYTES_AT_ONCE", 3 * ((1 << 20) + 1000))
        await verify(Watched(200), Output(json=True), EVERYTHING, demands=DEMANDS)
        assert max(most) == 3

    @pytest.mark.parametrize("sample", [Sample(count=50), Sample(share=5e-5)])
    async def test_a_sample_of_a_million_objects_is_taken_in_flat_memory(
        self, sample: Sample, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = Listing(MILLION, trace_at=MILLION - LAST)
        code = await verify(store, Output(json=True), EVERYTHING, demands=DEMANDS, sample=sample)
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert code == 1, "there is none to be read"
        assert summary["listed"] == MILLION
        assert summary["gone"] == 50 or sample.share
        assert 0 < summary["gone"] < 200
        assert traced_peak() < 1 << 18
