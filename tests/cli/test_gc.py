"""`gc`: it finds what nobody uses, takes it only when told to, and nothing beside it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from cli_bucket import LAST, MILLION, OTHER, SPACE, Bucket, Listing, Refusing, item, traced_peak
from typer.testing import CliRunner

from ec_s3.cli import crew
from ec_s3.cli import gc as module
from ec_s3.cli.app import app
from ec_s3.cli.garbage import Rules
from ec_s3.cli.gc import gc
from ec_s3.cli.namespaces import _parse
from ec_s3.cli.output import Output
from ec_s3.multiparts import Multiparts
from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.url import S3Location, S3Options, parse_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ec_s3.keys import Namespace
    from ec_s3.testing.moto import S3Server
    from ec_s3.types import ObjectInfo

DAY = 86_400.0
RULES = Rules(older_than=30 * DAY)
PART = b"x" * (5 << 20)


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "PAUSE_SECONDS", 0.001)


def fill(bucket: Bucket, space: Namespace, *, days: float, described: bool = True) -> None:
    for name in ("a", "b"):
        bucket.add(name, space, age=days * DAY)
    if described:
        bucket.describe(space)


def reasons(bucket: Bucket, *arguments: str) -> dict[str, str]:
    """Why each place can go."""
    *found, _ = bucket.records("gc", *arguments)
    return {record["place"]: record["reason"] for record in found}


class TestFindings:
    def test_an_unknown_namespace_is_found_when_nobody_writes_to_it(self, bucket: Bucket) -> None:
        fill(bucket, SPACE, days=40, described=False)
        fill(bucket, OTHER, days=2, described=False)
        assert reasons(bucket) == {f"{SPACE.prefix}/": "no description"}
        assert reasons(bucket, "--older-than", "1d") == {
            f"{SPACE.prefix}/": "no description",
            f"{OTHER.prefix}/": "no description",
        }

    @pytest.mark.parametrize(
        "change",
        [
            {"weight_version": "v2"},
            {"revision": "r2"},
            {"encoder_config": "c2"},
            {"hash_scheme": "h2"},
        ],
    )
    def test_older_weights_are_found_once_newer_ones_are_written(
        self, bucket: Bucket, change: dict[str, Any]
    ) -> None:
        fill(bucket, SPACE, days=40)
        assert reasons(bucket) == {}
        fill(bucket, replace(SPACE, **change), days=35)
        assert reasons(bucket) == {f"{SPACE.prefix}/": "older weights"}
        [record, _] = bucket.records("gc")
        assert (record["model"], record["objects"]) == ("org/model", 2)

    @pytest.mark.parametrize(
        "change",
        [{"model": "org/x"}, {"salt": "tenant"}, {"adapter": "a"}, {"quantization": "fp8"}],
    )
    def test_another_model_tenant_adapter_or_quantisation_supersedes_nothing(
        self, bucket: Bucket, change: dict[str, Any]
    ) -> None:
        fill(bucket, SPACE, days=40)
        fill(bucket, replace(SPACE, **change), days=1)
        assert reasons(bucket) == {}

    def test_old_weights_that_are_still_written_stay(self, bucket: Bucket) -> None:
        fill(bucket, SPACE, days=40)
        bucket.add("new", SPACE, age=3 * DAY)
        fill(bucket, replace(SPACE, revision="r2"), days=1)
        assert reasons(bucket) == {}

    def test_a_namespace_that_is_only_read_stays_unless_idle_ones_are_meant(
        self, bucket: Bucket
    ) -> None:
        fill(bucket, SPACE, days=100)
        assert reasons(bucket) == {}
        assert reasons(bucket, "--idle", "90d") == {f"{SPACE.prefix}/": "not written to"}

    def test_a_description_of_another_namespace_is_none(self, bucket: Bucket) -> None:
        fill(bucket, SPACE, days=40, described=False)
        bucket.put(SPACE.manifest_key, OTHER.manifest())
        assert reasons(bucket) == {f"{SPACE.prefix}/": "no description"}

    def test_what_lies_outside_our_key_scheme_is_no_garbage(self, bucket: Bucket) -> None:
        for key in ("v0/whatever", "v2/whatever", "notes.txt"):
            bucket.put(key, b"x" * 10)
        assert bucket.records("gc")[-1] == {"dry_run": True, "objects": 0, "bytes": 0}
        assert bucket.run("gc", "--yes").exit_code == 0
        assert bucket.stored() == ["notes.txt", "v0/whatever", "v2/whatever"]

    def test_formats_that_no_reader_knows_are_found_on_demand_and_newer_ones_are_not(
        self, bucket: Bucket
    ) -> None:
        kept = bucket.add("good")
        for name, version in (("old", 0), ("newer", 9)):
            body = bytearray(item(name)[1])
            body[16] = version
            bucket.put(SPACE.object_key(name), bytes(body))
        bucket.put(SPACE.object_key("damaged"), b"no object of ours")
        assert reasons(bucket) == {}
        [record, _] = bucket.records("gc", "--formats")
        assert (record["reason"], record["objects"]) == ("old format", 1)
        assert bucket.run("gc", "--formats", "--yes").exit_code == 0
        left = [kept, *(SPACE.object_key(name) for name in ("newer", "damaged"))]
        assert bucket.stored() == sorted(left)

    @pytest.mark.parametrize("option", ["--older-than", "--idle"])
    def test_what_is_no_age_is_wrong_usage(self, bucket: Bucket, option: str) -> None:
        assert bucket.run("gc", option, "long").exit_code == 2

    @pytest.mark.parametrize("age", ["30", "6m"])
    def test_an_age_without_a_clear_unit_is_wrong_usage(self, bucket: Bucket, age: str) -> None:
        assert bucket.run("gc", "--older-than", age).exit_code == 2
        assert bucket.run("gc", "--idle", age).exit_code == 2

    def test_a_description_nested_too_deep_is_none(self, bucket: Bucket) -> None:
        fill(bucket, SPACE, days=40, described=False)
        for depth in range(880, 1000):
            nested = "[" * depth + "]" * depth
            assert _parse(f'{{"namespace": {{"model": {nested}}}}}'.encode(), "x-0") is None


class TestDeleting:
    def test_what_is_not_ours_stays_in_a_folder_that_goes(self, bucket: Bucket) -> None:
        fill(bucket, SPACE, days=40, described=False)
        bucket.put(SPACE.index_key, b"index", age=40 * DAY)
        foreign = [f"{SPACE.prefix}/{name}" for name in ("notes.txt", "bfloat16/00/photo.jpg")]
        for key in foreign:
            bucket.put(key, b"x", age=40 * DAY)
        *_, total = bucket.records("gc", "--yes")
        assert total["deleted"] == 3
        assert bucket.stored() == sorted(foreign)

    def test_nothing_goes_without_yes(self, bucket: Bucket) -> None:
        fill(bucket, SPACE, days=40, described=False)
        before = bucket.stored()
        result = bucket.run("gc")
        assert result.exit_code == 0
        assert "no description" in result.stdout
        assert "nothing was deleted" in result.stderr
        assert bucket.stored() == before

    def test_a_folder_goes_with_its_documents_but_what_servers_follow(self, bucket: Bucket) -> None:
        newer = replace(SPACE, revision="r2")
        fill(bucket, SPACE, days=40)
        fill(bucket, newer, days=1)
        bucket.put(SPACE.index_key, b"index")
        bucket.run("control", "disable", SPACE.id)
        *_, total = bucket.records("gc", "--yes")
        assert total == {
            "dry_run": False, "deleted": 4, "aborted": 0, "failed": {}, "untried": 0
        }  # fmt: skip
        assert all(key.startswith(f"{newer.prefix}/") for key in bucket.stored())
        assert (bucket.folder / SPACE.control_key).exists(), "a switch stays where it was"
        assert bucket.records("gc")[-1]["objects"] == 0
        assert "4 objects" not in bucket.run("gc", "--yes").stdout

    async def test_a_folder_that_is_written_to_meanwhile_is_left_alone(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class Busy(Listing):
            rounds = 0

            async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
                self.rounds += prefix.startswith("v1/")
                async for info in super().list(prefix):
                    later = time.time() if self.rounds > 1 else info.modified
                    yield replace(info, modified=later)

            async def delete(self, keys: Any) -> Any:
                raise AssertionError("nothing may be deleted")

        store = Busy(20, folders=1)
        assert await gc(store, Output(), RULES, multiparts=None, yes=True) == 0
        assert "written to meanwhile" in capsys.readouterr().err

    async def test_partial_failure_is_named_and_ends_with_1(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stuck = SPACE.object_key("stuck")
        rules = replace(RULES, older_than=0.0)
        store = Refusing({stuck: 99})
        for key in (stuck, SPACE.object_key("other")):
            await store.put(key, [b"x"])
        assert await gc(store, Output(json=True), rules, multiparts=None, yes=True) == 1
        total = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (total["deleted"], total["failed"]) == (1, {stuck: "503 SlowDown"})
        await gc(store, Output(), rules, multiparts=None, yes=True)
        assert f"{stuck}: 503 SlowDown" in capsys.readouterr().out

    async def test_a_million_objects_are_judged_and_deleted_in_flat_memory(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class Counting(Listing):
            gone = 0

            async def delete(self, keys: Any) -> Any:
                self.gone += len(keys)
                return await super().delete([])

        store = Counting(MILLION, trace_at=2 * MILLION - LAST)
        code = await gc(store, Output(json=True), RULES, multiparts=None, yes=True)
        assert code == 0
        assert store.gone == MILLION
        assert traced_peak() < 1 << 18
        assert capsys.readouterr().out.count("no description") == 4


class Cloud:
    """A bucket on the embedded S3 server, with uploads that never ended."""

    def __init__(self, server: S3Server, bucket: str) -> None:
        self.client = server.client()
        self.bucket = bucket
        self.url = f"s3://{bucket}/p?endpoint={server.url}&region=us-east-1"

    def begin(self, key: str, parts: int = 1) -> str:
        answer = self.client.create_multipart_upload(Bucket=self.bucket, Key=key)
        upload: str = answer["UploadId"]
        for number in range(1, parts + 1):
            self.client.upload_part(
                Bucket=self.bucket, Key=key, UploadId=upload, PartNumber=number, Body=PART
            )
        return upload

    def unfinished(self) -> set[str]:
        answer = self.client.list_multipart_uploads(Bucket=self.bucket)
        return {entry["Key"] for entry in answer.get("Uploads", ())}

    def records(self, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
        result = CliRunner().invoke(app, ["--json", "--url", self.url, *arguments])
        assert result.exit_code == code, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]


class TestDenied:
    def test_a_namespace_whose_description_may_not_be_read_is_left_alone(
        self, s3_server: S3Server
    ) -> None:
        with FaultServer(upstream=s3_server.url) as proxy:
            name = s3_server.create_bucket()
            client = s3_server.client()
            key, body, _ = item("a")
            client.put_object(Bucket=name, Key=f"p/{key}", Body=body)
            client.put_object(Bucket=name, Key=f"p/{SPACE.manifest_key}", Body=SPACE.manifest())
            client.close()
            proxy.add(Fault(method="GET", path="namespace.json", status=403))
            url = f"s3://{name}/p?endpoint={proxy.url}&region=us-east-1"
            arguments = ["--json", "--url", url, "gc", "--older-than", "0s", "--yes"]
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 1, result.output
            assert json.loads(result.stdout.splitlines()[-1])["deleted"] == 0
            assert "may not be read" in result.stderr


class TestUploads:
    @pytest.fixture
    def cloud(self, s3_server: S3Server, bucket: str) -> Any:
        opened = Cloud(s3_server, bucket)
        yield opened
        opened.client.close()

    @pytest.fixture
    def bucket(self, s3_server: S3Server) -> str:
        return s3_server.create_bucket()

    def test_abandoned_uploads_of_ours_are_found_and_aborted(
        self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ours = [f"p/{SPACE.object_key(name)}" for name in ("a", "b")]
        foreign = {"p/somebody.else", f"q/{SPACE.object_key('a')}"}
        cloud.begin(ours[0], parts=2)
        cloud.begin(ours[1], parts=0)
        for key in foreign:
            cloud.begin(key)
        with monkeypatch.context() as patch:
            patch.setattr(module, "UPLOAD_SECONDS", 1e10)  # the server says that all are from 2010
            assert cloud.records("gc", "--yes")[-1]["aborted"] == 0, "they may be under way"
        [record, total] = cloud.records("gc")
        assert (record["reason"], record["objects"]) == ("unfinished upload", 2)
        assert record["bytes"] == 2 * len(PART) == total["bytes"]
        assert cloud.unfinished() == {*ours, *foreign}
        *_, total = cloud.records("gc", "--yes")
        assert (total["aborted"], total["failed"]) == (2, {})
        assert cloud.unfinished() == foreign

    async def test_an_upload_that_ended_meanwhile_is_no_error(self, cloud: Cloud) -> None:
        location = parse_url(cloud.url)
        assert isinstance(location, S3Location)
        multiparts = Multiparts(location, S3Options())
        upload_id = cloud.begin(f"p/{SPACE.object_key('a')}")
        [upload] = [found async for found in multiparts.list()]
        assert (upload.key, upload.upload_id) == (SPACE.object_key("a"), upload_id)
        assert 0 < upload.started < time.time()
        assert await multiparts.size(upload) == len(PART)
        await multiparts.abort(upload)
        await multiparts.abort(upload)
        assert await multiparts.size(upload) == 0
        await multiparts.aclose()
        await multiparts.aclose()
