from __future__ import annotations

import asyncio
import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from ec_s3.cli.app import app
from ec_s3.cli.control import parse_time
from ec_s3.control import MAX_DELETED, Control, load, parse_control
from ec_s3.directory import DirectoryStore
from ec_s3.errors import ConfigError
from ec_s3.keys import Namespace, identifier_digest
from ec_s3.permissions import SPARED_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

SPACE = Namespace(model="org/model", dtype="bfloat16")
NAME = SPACE.id.partition("/")[0]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("EC_S3_", "LMCACHE_")):
            monkeypatch.delenv(name)


class Bucket:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["--url", f"file://{self.folder}", *arguments])

    def record(self, *arguments: str) -> dict[str, Any]:
        result = self.run("--json", *arguments)
        assert result.exit_code == 0, result.output
        [line] = result.stdout.splitlines()
        record: dict[str, Any] = json.loads(line)
        return record

    def write(self, key: str, body: bytes) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)

    def control(self, space: Namespace = SPACE) -> Control | None:
        async def read() -> Control | None:
            store = DirectoryStore(self.folder)
            try:
                return await load(store, space.control_key)
            finally:
                await store.aclose()

        return asyncio.run(read())


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


@pytest.mark.parametrize("name", [NAME, SPACE.id, SPACE.prefix, f"{SPACE.prefix}/"])
def test_the_switch_is_thrown_and_shown_whatever_the_namespace_is_called(
    bucket: Bucket, name: str
) -> None:
    assert bucket.record("control", "show", name)["enabled"] is True
    assert bucket.control() is None, "showing writes nothing"
    assert bucket.record("control", "disable", name)["enabled"] is False
    assert bucket.control() == Control(enabled=False)
    assert "switched off" in bucket.run("control", "show", name).stdout
    result = bucket.run("control", "enable", name)
    assert (result.exit_code, bucket.control()) == (0, Control())
    assert "within a minute" in result.output


def test_older_objects_are_declared_invalid_and_the_switch_stays(bucket: Bucket) -> None:
    bucket.run("control", "disable", NAME)
    before = time.time()
    record = bucket.record("control", "invalidate-before", NAME, "now")
    assert before <= record["valid_after"] <= time.time()
    assert record["enabled"] is False
    bucket.run("control", "invalidate-before", NAME, "2026-01-31T12:00:00Z")
    shown = bucket.run("control", "show", NAME).stdout
    assert "2026-01-31 12:00:00 UTC" in shown
    bucket.run("control", "invalidate-before", NAME, "0")
    control = bucket.control()
    assert control is not None
    assert control.valid_after == 0


LAPSED = {f"{i:064x}": 1.0 for i in range(100)}
"""Deletions that nobody must be told of any more: nearly 9 KB of a document."""


@pytest.mark.parametrize("verb", ["disable", "enable"])
def test_the_switch_is_small_enough_for_lifecycle_rules_to_leave_it(
    bucket: Bucket, verb: str
) -> None:
    bucket.write(SPACE.control_key, Control(deleted=LAPSED).pack())
    bucket.run("control", verb, NAME)
    assert bucket.control() == Control(enabled=verb == "enable")
    assert (bucket.folder / SPACE.control_key).stat().st_size < SPARED_BYTES


def test_a_namespace_of_which_nothing_is_there_is_pointed_out(bucket: Bucket) -> None:
    assert "nothing is stored in" in bucket.run("control", "disable", NAME).stderr
    bucket.write(SPACE.object_key("a"), b"x")
    assert "nothing is stored in" not in bucket.run("control", "disable", NAME).stderr


@pytest.mark.parametrize("when", ["1969-12-31", "0001-01-01T00:00:00+23:59"])
def test_a_time_that_no_document_can_say_breaks_none(bucket: Bucket, when: str) -> None:
    assert bucket.run("control", "invalidate-before", NAME, when).exit_code == 2
    assert bucket.run("control", "disable", NAME).exit_code == 0


def test_what_is_said_again_is_written_again(bucket: Bucket) -> None:
    """Where rules know no size, a document's age is all that keeps it."""
    bucket.run("control", "disable", NAME)
    path = bucket.folder / SPACE.control_key
    os.utime(path, (1.0, 1.0))
    assert bucket.run("control", "disable", NAME).exit_code == 0
    assert path.stat().st_mtime > 1.0


def test_a_switch_that_lifecycle_rules_would_take_is_named(bucket: Bucket) -> None:
    for number in range(100):
        bucket.write(SPACE.object_key(str(number)), b"x")
    bucket.run("control", "disable", NAME)
    result = bucket.run("rm", f"{SPACE.prefix}/bfloat16/", "--yes")
    assert result.exit_code == 0
    assert "say `ec-s3 control disable` again" in result.stderr
    result = bucket.run("control", "disable", NAME)
    assert "say `ec-s3 control disable` again" in result.stderr, "the hour is not over"
    assert "again" not in bucket.run("control", "enable", NAME).stderr


@pytest.mark.parametrize(
    "arguments", [("show",), ("disable", "x"), ("enable", "../x"), ("show", "")]
)
def test_what_is_no_namespace_is_refused(bucket: Bucket, arguments: tuple[str, ...]) -> None:
    assert bucket.run("control", *arguments).exit_code == 2
    assert not list(bucket.folder.rglob("control.json"))


@pytest.mark.parametrize(
    "when", ["tomorrow", "9999999999", "2999-01-01", "1969-12-31T23:59:59Z", "1e3", "-1", ""]
)
def test_a_time_that_cannot_be_meant_is_refused(bucket: Bucket, when: str) -> None:
    assert bucket.run("control", "invalidate-before", NAME, "--", when).exit_code == 2
    assert bucket.control() is None


def test_times_are_read_with_and_without_their_zone() -> None:
    assert parse_time("1970-01-02") == 86_400
    assert parse_time("1970-01-01T01:00:00+01:00") == 0
    assert parse_time("12.5") == 12.5
    with pytest.raises(ConfigError, match="is no time"):
        parse_time("1 day")


def test_a_document_that_is_none_is_reported_and_left_alone(bucket: Bucket) -> None:
    bucket.write(SPACE.control_key, b"{}")
    for verb in ("show", "disable"):
        result = bucket.run("control", verb, NAME)
        assert result.exit_code == 1
        assert "not of version 1" in result.output
    assert (bucket.folder / SPACE.control_key).read_bytes() == b"{}"
    assert bucket.run("rm", SPACE.control_key, "--yes").exit_code == 0
    assert bucket.run("control", "disable", NAME).exit_code == 0


# -- rm ------------------------------------------------------------------------------------------


def test_running_servers_are_told_of_what_is_deleted(bucket: Bucket) -> None:
    other = Namespace(model="org/other")
    for space in (SPACE, other):
        for name in ("a", "b"):
            bucket.write(space.object_key(name), b"x")
    bucket.run("control", "disable", NAME)
    assert bucket.run("rm", SPACE.object_key("a"), "--yes").exit_code == 0
    control = bucket.control()
    assert control is not None
    assert not control.enabled
    assert list(control.deleted) == [identifier_digest("a")]
    [until] = control.deleted.values()
    assert 3500 < until - time.time() <= 3600
    assert bucket.control(other) is None
    assert "1 item, kept out" in bucket.run("control", "show", NAME).stdout
    assert bucket.run("rm", "v1/", "--yes").exit_code == 0
    for space in (SPACE, other):
        control = bucket.control(space)
        assert control is not None, "what servers follow is not deleted with the rest"
        assert {identifier_digest("a"), identifier_digest("b")} >= set(control.deleted)
    assert not [path for path in bucket.folder.rglob("*") if len(path.name) == 64]


def test_what_has_expired_is_not_kept(bucket: Bucket) -> None:
    stale = Control(deleted={identifier_digest("old"): 1.0})
    bucket.write(SPACE.control_key, stale.pack())
    bucket.write(SPACE.object_key("a"), b"x")
    assert bucket.record("control", "show", NAME)["deleted"] == {}
    bucket.run("rm", SPACE.object_key("a"), "--yes")
    control = bucket.control()
    assert control is not None
    assert list(control.deleted) == [identifier_digest("a")]


def test_deleting_goes_on_when_servers_cannot_be_told_and_says_so(bucket: Bucket) -> None:
    full = {f"{i:064x}": time.time() + 1000 for i in range(MAX_DELETED)}
    for body, why in ((b"{}", "not of version 1"), (Control(deleted=full).pack(), "do not fit")):
        bucket.write(SPACE.control_key, body)
        bucket.write(SPACE.object_key("a"), b"x")
        result = bucket.run("rm", SPACE.object_key("a"), "--yes")
        assert result.exit_code == 1
        assert "running servers are not told" in result.output
        assert why in result.output
        assert not (bucket.folder / SPACE.object_key("a")).exists()
    assert len(parse_control((bucket.folder / SPACE.control_key).read_bytes()).deleted) == len(full)
