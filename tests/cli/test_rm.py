"""`rm`: what was named goes and nothing else, and running servers hear of it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import TYPE_CHECKING

import pytest
import torch
from cli_bucket import OTHER, SPACE, Bucket, Listing, Refusing, item, traced_peak
from typer.testing import CliRunner

from ec_s3.cli import crew
from ec_s3.cli.app import app
from ec_s3.cli.control import DELETED_SECONDS
from ec_s3.cli.deleting import Spool, delete_keys, delete_shown
from ec_s3.cli.output import Output
from ec_s3.cli.removal import Selection, rm
from ec_s3.cli.targets import Target
from ec_s3.config import ECConfig
from ec_s3.control import MAX_DELETED, Control, load, parse_control
from ec_s3.directory import DirectoryStore
from ec_s3.engine import EncoderCache
from ec_s3.keys import Namespace, bind, identifier_digest
from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import DeleteReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ec_s3.testing.moto import S3Server

DAY = 86_400.0


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "PAUSE_SECONDS", 0.001)


def control_of(bucket: Bucket, space: Namespace = SPACE) -> Control:
    return parse_control((bucket.folder / space.control_key).read_bytes())


class TestRm:
    def test_without_yes_and_without_a_terminal_nothing_goes(self, bucket: Bucket) -> None:
        bucket.add("a")
        result = bucket.run("rm", "v1/", typed="1\n")
        assert result.exit_code == 2
        assert "nothing deleted" in result.stderr
        assert len(bucket.files()) == 1

    @pytest.mark.parametrize(("typed", "code", "left"), [("2", 0, 0), ("1", 2, 2), ("y", 2, 2)])
    def test_at_a_terminal_only_the_typed_number_deletes(
        self, typed: str, code: int, left: int, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket.add("a")
        bucket.add("b")
        monkeypatch.setattr(Output, "confirm", lambda _self, _text, expected: typed == expected)
        assert bucket.run("rm", "v1/").exit_code == code
        assert len(bucket.files()) == left

    def test_with_yes_a_prefix_goes_and_nothing_else(self, bucket: Bucket) -> None:
        bucket.add("a")
        bucket.add("b")
        kept = bucket.add("a", OTHER)
        [record] = bucket.records("rm", SPACE.prefix, "--yes")
        assert (record["deleted"], record["failed"], record["told"]) == (2, {}, True)
        assert bucket.files() == [kept.rpartition("/")[2]]

    def test_one_item_by_its_identifier(self, bucket: Bucket) -> None:
        bucket.add("a")
        bucket.add("b")
        arguments = ("rm", "--identifier", "a", "--namespace", SPACE.id, "--yes")
        assert bucket.run(*arguments).exit_code == 0
        assert bucket.files() == [SPACE.object_key("b").rpartition("/")[2]]

    def test_an_absent_key_is_a_finding(self, bucket: Bucket) -> None:
        assert bucket.run("rm", SPACE.object_key("a"), "--yes").exit_code == 1

    def test_no_target_is_wrong_usage(self, bucket: Bucket) -> None:
        bucket.add("a")
        assert bucket.run("rm", "--yes").exit_code == 2
        assert len(bucket.files()) == 1

    def test_a_namespace_goes_with_its_documents_but_what_servers_follow(
        self, bucket: Bucket
    ) -> None:
        bucket.add("a")
        bucket.describe(SPACE)
        neighbour = Namespace(model="org/model", revision="r2")
        kept = bucket.add("a", neighbour)
        assert bucket.run("rm", "--namespace", SPACE.prefix, "--yes").exit_code == 0
        assert bucket.stored() == [kept]
        assert (bucket.folder / SPACE.control_key).exists()


class TestAge:
    def test_only_items_of_that_age_go_and_documents_stay(self, bucket: Bucket) -> None:
        bucket.add("old", age=40 * DAY)
        young = bucket.add("young", age=20 * DAY)
        bucket.add("old", OTHER, age=40 * DAY)
        bucket.put(SPACE.manifest_key, SPACE.manifest(), age=40 * DAY)
        [record] = bucket.records("rm", "--older-than", "30d", "--yes")
        assert record["deleted"] == 2
        assert bucket.stored() == sorted([young, SPACE.manifest_key])
        assert control_of(bucket).deletes(identifier_digest("old"), now=time.time())

    def test_age_is_combined_with_a_namespace(self, bucket: Bucket) -> None:
        bucket.add("old", age=40 * DAY)
        kept = bucket.add("old", OTHER, age=40 * DAY)
        arguments = ("rm", "--namespace", SPACE.id, "--older-than", "30d", "--yes")
        assert bucket.run(*arguments).exit_code == 0
        assert bucket.stored() == [kept]

    def test_age_may_count_from_the_encoding(self, bucket: Bucket) -> None:
        now = time.time()
        bucket.add("old", created=now - 40 * DAY)
        young = bucket.add("young", created=now - 20 * DAY, age=50 * DAY)
        arguments = ("rm", "--older-than", "30d", "--by", "created", "--yes")
        assert bucket.records(*arguments)[0]["deleted"] == 1
        assert bucket.stored() == [young]

    def test_nothing_of_that_age_is_no_finding(self, bucket: Bucket) -> None:
        bucket.add("a")
        [record] = bucket.records("rm", "--older-than", "1d", "--yes")
        assert record["deleted"] == 0

    async def test_an_object_of_unknown_age_is_not_old(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = MemoryStore()
        store.objects[SPACE.object_key("a")] = b"x"
        selection = Selection(before=time.time())
        assert await rm(store, Output(json=True), selection, yes=True) == 0
        assert len(store.objects) == 1
        assert '"deleted": 0' in capsys.readouterr().out

    @pytest.mark.parametrize("age", ["", "soon", "-1d", "3 weeks", "30", "0.5", "6m", "6 M"])
    def test_what_is_no_age_is_wrong_usage(self, bucket: Bucket, age: str) -> None:
        bucket.add("a", age=100 * DAY)
        assert bucket.run("rm", "--older-than", age, "--yes").exit_code == 2
        assert len(bucket.stored()) == 1

    @pytest.mark.parametrize("age", ["0", "0s", "5 min", "1H", "3600s"])
    def test_an_age_says_its_unit(self, bucket: Bucket, age: str) -> None:
        bucket.add("a", age=2 * DAY)
        [record] = bucket.records("rm", "--older-than", age, "--yes")
        assert record["deleted"] == 1

    @pytest.mark.parametrize("filters", [(), ("--older-than", "1d"), ("--cache-salt-file", "salt")])
    def test_an_empty_key_does_not_select_everything(
        self, bucket: Bucket, filters: tuple[str, ...]
    ) -> None:
        bucket.add("a", age=100 * DAY)
        result = bucket.run("rm", "", *filters, "--yes")
        assert result.exit_code == 2
        assert len(bucket.stored()) == 1


class TestTenant:
    def secret(self, bucket: Bucket, text: str = "hunter2\n") -> str:
        path = bucket.folder.parent / "salt"
        path.write_text(text, encoding="utf-8")
        return str(path)

    def test_items_under_a_requests_salt_go_and_no_others(self, bucket: Bucket) -> None:
        for space in (SPACE, OTHER):
            bucket.add(bind("a", "hunter2"), space)
        kept = [bucket.add(name) for name in ("a", bind("a", "other"), "hunter2")]
        arguments = ("rm", "--cache-salt-file", self.secret(bucket), "--yes")
        result = bucket.run(*arguments)
        assert result.exit_code == 0, result.output
        assert "hunter2" not in result.output
        assert bucket.stored() == sorted(kept)
        digest = identifier_digest(bind("a", "hunter2"))
        assert list(control_of(bucket).deleted) == [digest]

    def test_one_item_under_a_requests_salt_is_found_by_its_identifier(
        self, bucket: Bucket
    ) -> None:
        bucket.add(bind("a", "hunter2"))
        kept = [bucket.add(name) for name in ("a", bind("b", "hunter2"))]
        name = ("--identifier", "a", "--namespace", SPACE.id)
        arguments = ("rm", *name, "--cache-salt-file", self.secret(bucket), "--yes")
        assert bucket.records(*arguments)[0]["deleted"] == 1
        assert bucket.stored() == sorted(kept)

    def test_an_object_that_does_not_tell_whose_it_is_stays_and_is_named(
        self, bucket: Bucket
    ) -> None:
        bucket.add(bind("a", "hunter2"))
        broken = SPACE.object_key("broken")
        bucket.put(broken, b"no object of ours")
        arguments = ("rm", "--cache-salt-file", self.secret(bucket), "--yes")
        [record] = bucket.records(*arguments, code=1)
        assert (record["deleted"], record["unclear"]) == (1, 1)
        result = bucket.run(*arguments)
        assert result.exit_code == 1
        assert broken in result.stderr

    def test_namespaces_of_a_deployments_salt_go_and_no_others(self, bucket: Bucket) -> None:
        mine = [Namespace(model=f"org/{name}", salt="hunter2") for name in ("x", "y")]
        for space in (*mine, SPACE):
            bucket.add("a", space)
            bucket.describe(space)
        result = bucket.run("rm", "--salt-file", self.secret(bucket, "hunter2"), "--yes")
        assert result.exit_code == 0, result.output
        assert bucket.stored() == sorted([SPACE.object_key("a"), SPACE.manifest_key])
        for space in mine:
            assert control_of(bucket, space).valid_after > time.time()
        [again] = bucket.records("rm", "--salt-file", self.secret(bucket, "hunter2"), "--yes")
        assert (again["deleted"], again["unclear"]) == (0, 0)

    def test_servers_are_told_of_a_tenant_whose_items_have_expired(self, bucket: Bucket) -> None:
        space = Namespace(model="org/model", salt="hunter2")
        bucket.describe(space)
        bucket.add("b", OTHER)
        bucket.describe(OTHER)
        [record] = bucket.records("rm", "--salt-file", self.secret(bucket), "--yes")
        assert (record["deleted"], record["told"]) == (1, True)
        assert control_of(bucket, space).valid_after > time.time()
        assert not list((bucket.folder / OTHER.prefix).glob("control.json"))

    def test_a_namespace_that_does_not_say_whose_it_is_is_named(self, bucket: Bucket) -> None:
        bucket.add("a")
        result = bucket.run("rm", "--salt-file", self.secret(bucket), "--yes")
        assert result.exit_code == 1
        assert "does not say whose it is" in result.stderr
        assert len(bucket.stored()) == 1

    @pytest.mark.parametrize("text", ["", "\n"])
    def test_an_empty_salt_is_wrong_usage(self, bucket: Bucket, text: str) -> None:
        bucket.add("a")
        for option in ("--salt-file", "--cache-salt-file"):
            assert bucket.run("rm", option, self.secret(bucket, text), "--yes").exit_code == 2
        assert len(bucket.stored()) == 1

    def test_a_missing_file_and_a_name_beside_the_salt_are_wrong_usage(
        self, bucket: Bucket
    ) -> None:
        bucket.add("a")
        assert bucket.run("rm", "--salt-file", "/no/such/file", "--yes").exit_code == 2
        arguments = ("rm", "v1/", "--salt-file", self.secret(bucket), "--yes")
        assert bucket.run(*arguments).exit_code == 2
        assert len(bucket.stored()) == 1

    def test_a_salt_is_in_no_representation(self) -> None:
        selection = Selection(salt="hunter2")
        assert "hunter2" not in repr(selection)
        assert "hunter2" not in repr(Selection(cache_salt="hunter2", before=1.0))


class TestServers:
    def test_a_whole_namespace_is_also_declared_invalid_for_a_minute_ahead(
        self, bucket: Bucket
    ) -> None:
        bucket.add("a")
        now = time.time()
        assert bucket.run("rm", "--namespace", SPACE.prefix, "--yes").exit_code == 0
        control = control_of(bucket)
        assert now + 55 < control.valid_after < now + 90
        assert control.deletes(identifier_digest("a"), now=now + DELETED_SECONDS - 60)

    def test_a_part_of_a_namespace_invalidates_nothing_else(self, bucket: Bucket) -> None:
        bucket.add("a")
        other = Namespace(model=SPACE.model, dtype="float16")
        bucket.add("a", other)
        assert bucket.run("rm", "--namespace", SPACE.id, "--yes").exit_code == 0
        assert control_of(bucket).valid_after == 0
        assert len(bucket.stored()) == 1

    async def test_more_items_than_a_document_holds_are_covered_when_all_go(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = Listing(2 * MAX_DELETED, folders=1, distinct=2 * MAX_DELETED)
        [space] = store.spaces
        selection = Selection(target=Target(namespace=space.prefix))
        assert await rm(store, Output(json=True), selection, yes=True) == 0
        control = await load(store, space.control_key)
        assert control is not None
        assert control.valid_after > time.time()
        selection = Selection(target=Target(namespace=space.prefix), before=1.8e9)
        assert await rm(store, Output(json=True), selection, yes=True) == 1
        assert "do not fit" in capsys.readouterr().err

    def test_an_item_that_only_servers_hold_is_forgotten_too(self, bucket: Bucket) -> None:
        bucket.folder.mkdir()
        name = ("--identifier", "a", "--namespace", SPACE.id)
        result = bucket.run("rm", *name)
        assert result.exit_code == 1
        assert "--yes" in result.stderr
        assert not list(bucket.folder.rglob("control.json"))
        assert bucket.run("rm", *name, "--yes").exit_code == 1
        assert control_of(bucket).deletes(identifier_digest("a"), now=time.time())

    def test_a_namespace_that_only_servers_hold_is_forgotten_too(self, bucket: Bucket) -> None:
        bucket.folder.mkdir()
        name = ("--namespace", SPACE.id.partition("/")[0])
        assert "--yes" in bucket.run("rm", *name).stderr
        assert not list(bucket.folder.rglob("control.json"))
        assert bucket.run("rm", *name, "--yes").exit_code == 1
        assert control_of(bucket).valid_after > time.time()

    @pytest.mark.parametrize("way", ["identifier", "namespace", "age"])
    async def test_a_running_engine_forgets_and_does_not_store_again(
        self, bucket: Bucket, way: str
    ) -> None:
        names = {
            "identifier": ("--identifier", "a", "--namespace", SPACE.id),
            "namespace": ("--namespace", SPACE.prefix),
            "age": ("--namespace", SPACE.id, "--older-than", "0s"),
        }
        tensor = torch.ones(4, 8, dtype=torch.bfloat16)
        config = ECConfig().model_copy(
            update={"max_local_cpu_size": 1 << 24, "blocking_timeout": 20.0, "flush_timeout": 10.0}
        )
        store = DirectoryStore(bucket.folder)
        cache = await EncoderCache.open(config, SPACE, store=store)
        try:
            assert await cache.put("a", tensor)
            assert (await cache.flush()).complete
            assert await cache.get("a") is not None
            result = await asyncio.to_thread(bucket.run, "rm", *names[way], "--yes")
            assert result.exit_code == 0
            assert cache.governor.poll is not None
            await cache.governor.poll.look()
            assert await cache.get("a") is None
            await cache.put("a", tensor)
            assert (await cache.flush()).complete
        finally:
            await cache.close()
        assert SPACE.object_key("a") not in bucket.stored()


class TestDeleting:
    async def delete(self, store: MemoryStore, keys: list[str]) -> tuple[int, dict[str, str], int]:
        result = await delete_keys(store, keys, advance=lambda _: None)
        return result.deleted, result.failed, result.untried

    async def test_refused_keys_are_tried_again_and_the_rest_named(self) -> None:
        keys = [SPACE.object_key(str(number)) for number in range(1000)]
        store = Refusing({keys[3]: 2, keys[700]: 99})
        store.objects = dict.fromkeys(keys, b"x")
        assert await self.delete(store, keys) == (999, {keys[700]: "503 SlowDown"}, 0)
        assert list(store.objects) == [keys[700]]
        assert max(store.batches) == 250
        assert store.batches.count(1) >= 3

    async def test_a_description_goes_last_and_only_when_all_else_is_gone(self) -> None:
        stuck = SPACE.object_key("stuck")
        store = Refusing({stuck: 4})
        with Spool() as spool:
            for key in (SPACE.manifest_key, stuck, SPACE.object_key("a")):
                await store.put(key, [b"x"])
                spool.add(key, 1)
            assert spool.count == 3
            result = await delete_shown(store, Output(), spool)
            assert sorted(result.failed) == sorted([stuck, SPACE.manifest_key])
            assert result.deleted == 1
            assert sorted(store.objects) == sorted([stuck, SPACE.manifest_key])
            result = await delete_shown(store, Output(), spool)
        assert (result.deleted, result.complete, store.objects) == (3, True, {})

    async def test_who_breaks_off_is_told_how_far_it_came(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class Stopping(MemoryStore):
            batches = 0

            async def delete(self, keys: Sequence[str]) -> DeleteReport:
                self.batches += 1
                if self.batches == 3:
                    raise asyncio.CancelledError
                return await super().delete(keys)

        keys = [SPACE.object_key(str(number)) for number in range(2000)]
        with Spool() as spool:
            for key in keys:
                spool.add(key, 1)
            with pytest.raises(asyncio.CancelledError):
                await delete_shown(Stopping(), Output(), spool)
        said = capsys.readouterr().err
        assert re.search(r"at least [1-9][\d,]* of 2,000 objects gone; run it again", said)

    async def test_a_store_that_refuses_everything_is_left_alone(self) -> None:
        keys = [SPACE.object_key(str(number)) for number in range(5000)]
        store = Refusing(dict.fromkeys(keys, 99))
        deleted, failed, untried = await self.delete(store, keys)
        assert deleted == 0
        assert 0 < len(failed) <= 4 * 250
        assert len(failed) + untried == 5000

    async def test_batches_run_at_once(self) -> None:
        running, most = 0, []

        class Watched(MemoryStore):
            async def delete(self, keys: Sequence[str]) -> DeleteReport:
                nonlocal running
                running += 1
                most.append(running)
                report = await super().delete(keys)
                running -= 1
                return report

        await self.delete(Watched(), [SPACE.object_key(str(number)) for number in range(3000)])
        assert max(most) == 4

    async def test_partial_failure_is_named_and_ends_with_1(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stuck = SPACE.object_key("stuck")
        store = Refusing({stuck: 99})
        await store.put(stuck, [b"x"])
        await store.put(SPACE.object_key("a"), [b"x"])
        selection = Selection(target=Target("v1/"))
        assert await rm(store, Output(), selection, yes=True) == 1
        output = capsys.readouterr().out
        assert f"{stuck}: 503 SlowDown" in output
        assert "1 deleted, 1 failed" in output
        assert await rm(store, Output(json=True), selection, yes=True) == 1
        assert json.loads(capsys.readouterr().out)["failed"] == {stuck: "503 SlowDown"}

    async def test_many_objects_go_in_the_memory_of_a_few(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class Counting(Listing):
            gone = 0

            async def delete(self, keys: Sequence[str]) -> DeleteReport:
                self.gone += len(keys)
                return DeleteReport(tuple(keys))

        store = Counting(80_000, distinct=20_000, trace_at=0)
        selection = Selection(before=1.8e9)
        assert await rm(store, Output(json=True), selection, yes=True) == 1
        assert store.gone == 80_000
        output = capsys.readouterr()
        assert json.loads(output.out)["deleted"] == 80_000
        assert "are not told" in output.err, "documents hold 10,000 each"
        assert traced_peak() < 8 << 20, "most of it for these"

    def test_a_spool_gives_back_what_was_set_aside_any_number_of_times(self) -> None:
        with Spool() as spool:
            spool.add("v1/a", 3)
            spool.add("v1/b", 4)
            assert list(spool) == list(spool) == ["v1/a", "v1/b"]
            assert (spool.count, spool.nbytes) == (2, 7)


class TestS3:
    @pytest.fixture
    def proxy(self, s3_server: S3Server) -> Iterator[FaultServer]:
        with FaultServer(upstream=s3_server.url) as server:
            yield server

    @pytest.fixture
    def cloud(self, s3_server: S3Server, proxy: FaultServer) -> str:
        """URL of a bucket with three items, behind the proxy."""
        name = s3_server.create_bucket()
        client = s3_server.client()
        for identifier in "abc":
            key, body, _ = item(identifier)
            client.put_object(Bucket=name, Key=f"p/{key}", Body=body)
        client.close()
        return f"s3://{name}/p?endpoint={proxy.url}&region=us-east-1"

    def run(self, url: str, *arguments: str, code: int) -> dict[str, object]:
        result = CliRunner().invoke(app, ["--json", "--url", url, *arguments])
        assert result.exit_code == code, result.output
        record: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
        return record

    def test_one_denied_key_is_named_and_the_rest_goes(
        self, proxy: FaultServer, cloud: str
    ) -> None:
        proxy.add(Fault(method="DELETE", path=identifier_digest("b"), status=403))
        record = self.run(cloud, "rm", "v1/", "--yes", code=1)
        failed = record["failed"]
        assert isinstance(failed, dict)
        assert list(failed) == [SPACE.object_key("b")]
        assert "grant s3:DeleteObject" in failed[SPACE.object_key("b")]
        assert record["deleted"] == 2
        assert self.run(cloud, "verify", "v1/", code=0)["checked"] == 1

    def test_an_item_that_may_not_be_read_is_named_and_not_taken_for_somebody_elses(
        self, proxy: FaultServer, cloud: str, tmp_path: Path
    ) -> None:
        salt = tmp_path / "salt"
        salt.write_text("hunter2")
        path = f"^[^?]*{identifier_digest('b')}"  # and no listing
        proxy.add(Fault(method="GET", path=path, status=403))
        record = self.run(cloud, "rm", "--cache-salt-file", str(salt), "--yes", code=1)
        assert (record["deleted"], record["unclear"]) == (0, 1)

    def test_a_slower_pace_is_kept_until_all_are_gone(self, proxy: FaultServer, cloud: str) -> None:
        proxy.add(Fault(method="DELETE", path=identifier_digest("b"), status=503, times=4))
        record = self.run(cloud, "rm", "v1/", "--yes", code=0)
        assert (record["deleted"], record["failed"]) == (3, {})
        assert proxy.count("DELETE") == 3 + 4
