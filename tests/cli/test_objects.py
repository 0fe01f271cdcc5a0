from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from ec_s3.cli.app import app
from ec_s3.cli.output import Output
from ec_s3.directory import DirectoryStore
from ec_s3.keys import Namespace
from ec_s3.tensors import as_bytes, spec_of
from ec_s3.types import ItemMeta
from ec_s3.wire import encode

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

SPACE = Namespace(model="org/model", dtype="bfloat16")
OTHER = Namespace(model="org/other", dtype="float16")
STRANGE = "\x1b[31mred\u202e[bold]"


def item(identifier: str, space: Namespace = SPACE) -> tuple[str, bytes, torch.Tensor]:
    dtype = torch.bfloat16 if space.dtype == "bfloat16" else torch.float16
    tensor = torch.randn(8, 16).to(dtype)
    frame = encode(
        spec_of(tensor),
        [as_bytes(tensor)],
        identifier=identifier,
        namespace=space.id,
        meta=ItemMeta(encode_seconds=0.25, placeholder={"grid": [1, 2]}),
        created=1_700_000_000.0,
    )
    return space.object_key(identifier), b"".join(bytes(part) for part in frame.parts), tensor


class Bucket:
    """A folder as the store, with a few objects in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, torch.Tensor] = {}

    def put(self, key: str, body: bytes) -> None:
        async def write() -> None:
            store = DirectoryStore(self.folder)
            await store.put(key, [body], if_absent=False)
            await store.aclose()

        asyncio.run(write())

    def add(self, identifier: str, space: Namespace = SPACE) -> str:
        key, body, tensor = item(identifier, space)
        self.put(key, body)
        self.tensors[key] = tensor
        return key

    def files(self) -> list[str]:
        files = (p.name for p in self.folder.rglob("*") if p.is_file())
        return sorted(name for name in files if name != "control.json")

    def run(self, *arguments: str, typed: str | None = None) -> Result:
        return CliRunner().invoke(app, ["--url", f"file://{self.folder}", *arguments], input=typed)

    def records(self, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
        result = self.run("--json", *arguments)
        assert result.exit_code == code, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


class TestLs:
    def test_namespaces_are_summed_up(self, bucket: Bucket) -> None:
        bucket.add("a")
        bucket.add("b")
        bucket.add("a", OTHER)
        bucket.put(SPACE.manifest_key, SPACE.manifest())
        records = bucket.records("ls")
        assert {r["namespace"]: r["objects"] for r in records} == {SPACE.id: 2, OTHER.id: 1}
        assert SPACE.id in bucket.run("ls").stdout.replace("\n", "")

    def test_objects_below_a_prefix_have_one_line_with_the_whole_key(self, bucket: Bucket) -> None:
        keys = {bucket.add("a"), bucket.add("b")}
        bucket.add("a", OTHER)
        assert {r["key"] for r in bucket.records("ls", SPACE.prefix)} == keys
        lines = bucket.run("ls", SPACE.prefix).stdout.splitlines()
        assert {line.split()[-1] for line in lines} == keys

    def test_an_empty_store_is_no_error_and_an_empty_prefix_is_a_finding(
        self, bucket: Bucket
    ) -> None:
        assert bucket.records("ls") == []
        assert bucket.run("ls", "v1/nothing").exit_code == 1


class TestStat:
    def test_a_key_a_unique_prefix_and_an_identifier_name_the_same_object(
        self, bucket: Bucket
    ) -> None:
        key = bucket.add("a")
        by_key = bucket.records("stat", key)
        assert by_key == bucket.records("stat", key[:-20])
        assert by_key == bucket.records("stat", "--identifier", "a", "--namespace", SPACE.id)
        (facts,) = by_key
        assert facts["identifier"] == "a"
        assert facts["shape"] == [8, 16]
        assert facts["tensor_bytes"] == 256
        assert facts["encode_seconds"] == 0.25
        assert facts["placeholder"] == {"grid": [1, 2]}

    def test_an_identifier_cannot_play_with_the_terminal(self, bucket: Bucket) -> None:
        key = bucket.add(STRANGE)
        text = bucket.run("stat", key).stdout
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert r"\x1b[31mred\u202e[bold]" in text

    def test_an_absent_object_is_a_finding(self, bucket: Bucket) -> None:
        assert bucket.run("stat", SPACE.object_key("a")).exit_code == 1
        assert bucket.records("stat", SPACE.object_key("a"), code=1)[0]["error"] == "absent"

    def test_a_prefix_of_several_objects_is_refused(self, bucket: Bucket) -> None:
        bucket.add("a")
        bucket.add("b")
        result = bucket.run("stat", SPACE.prefix)
        assert result.exit_code == 2
        assert "more than one object" in result.stderr

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["--identifier", "a"],
            ["key", "--identifier", "a", "--namespace", SPACE.id],
            ["--identifier", "a", "--namespace", "nonsense"],
        ],
    )
    def test_unclear_targets_are_wrong_usage(self, arguments: list[str], bucket: Bucket) -> None:
        assert bucket.run("stat", *arguments).exit_code == 2

    def test_a_damaged_header_is_a_finding(self, bucket: Bucket) -> None:
        key, body, _ = item("a")
        bucket.put(key, body[:20] + b"\xff" + body[21:])
        (record,) = bucket.records("stat", key, code=1)
        assert record["error"].startswith("Frame")


class TestGet:
    def test_the_tensor_comes_back_bit_by_bit(self, bucket: Bucket, tmp_path: Path) -> None:
        key = bucket.add("a")
        file = tmp_path / "out.safetensors"
        assert bucket.run("get", key, "-o", str(file)).exit_code == 0
        with safe_open(file, framework="pt") as opened:
            tensor = opened.get_tensor("encoder_output")
            assert opened.metadata()["identifier"] == '"a"'
        assert torch.equal(tensor, bucket.tensors[key])

    def test_a_file_is_replaced_only_when_forced(self, bucket: Bucket, tmp_path: Path) -> None:
        key = bucket.add("a")
        file = tmp_path / "out.safetensors"
        file.write_text("mine")
        assert bucket.run("get", key, "-o", str(file)).exit_code == 2
        assert file.read_text() == "mine"
        assert bucket.run("get", key, "-o", str(file), "--force").exit_code == 0
        assert file.read_bytes() != b"mine"

    def test_a_damaged_object_leaves_no_file(self, bucket: Bucket, tmp_path: Path) -> None:
        key, body, _ = item("a")
        bucket.put(key, body[:-1] + bytes([body[-1] ^ 1]))
        assert bucket.run("get", key, "-o", str(tmp_path / "out")).exit_code == 1
        assert not (tmp_path / "out").exists()

    def test_a_folder_that_does_not_exist_is_wrong_usage(
        self, bucket: Bucket, tmp_path: Path
    ) -> None:
        key = bucket.add("a")
        assert bucket.run("get", key, "-o", str(tmp_path / "no" / "out")).exit_code == 2


class TestVerify:
    def test_good_objects_are_counted(self, bucket: Bucket) -> None:
        bucket.add("a")
        bucket.add("b", OTHER)
        bucket.put(SPACE.manifest_key, SPACE.manifest())
        assert bucket.records("verify", "v1/") == [{"checked": 2, "bad": 0}]

    def test_every_kind_of_bad_object_is_named_and_the_rest_still_checked(
        self, bucket: Bucket
    ) -> None:
        bucket.add("good")
        bodies = {name: item(name)[1] for name in ("flipped", "cut", "grown", "moved")}
        damaged = {
            "flipped": bodies["flipped"][:-1] + bytes([bodies["flipped"][-1] ^ 1]),
            "cut": bodies["cut"][:-7],
            "grown": bodies["grown"] + b"x",
            "moved": item("another")[1],
            "empty": b"",
        }
        for name, body in damaged.items():
            bucket.put(SPACE.object_key(name), body)
        *bad, summary = bucket.records("verify", "v1/", code=1)
        assert summary == {"checked": 6, "bad": 5}
        assert {record["key"] for record in bad} == {SPACE.object_key(name) for name in damaged}

    def test_an_object_above_the_cap_is_not_read(
        self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = bucket.add("a")
        monkeypatch.setenv("EC_S3_MAX_ITEM_SIZE", "128")
        (record, _) = bucket.records("verify", key, code=1)
        assert record["error"] == "FrameTooLargeError"

    def test_nothing_to_verify_is_a_finding(self, bucket: Bucket) -> None:
        assert bucket.run("verify", "v1/").exit_code == 1


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
        assert bucket.records("rm", SPACE.prefix, "--yes") == [{"deleted": 2, "failed": {}}]
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
