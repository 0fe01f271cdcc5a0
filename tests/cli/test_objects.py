"""`ls`, `stat` and `get`: what lies in the store, for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from cli_bucket import LAST, MILLION, OTHER, SPACE, Bucket, Listing, item, traced_peak
from safetensors import safe_open

from ec_s3.cli.objects import ls
from ec_s3.cli.output import Output
from ec_s3.keys import Namespace

if TYPE_CHECKING:
    from pathlib import Path

STRANGE = "\x1b[31mred\u202e[bold]"


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


class TestLs:
    def test_namespaces_are_summed_up(self, bucket: Bucket) -> None:
        bucket.add("a")
        bucket.add("b")
        bucket.add("a", OTHER)
        bucket.describe(SPACE)
        records = bucket.records("ls")
        assert {r["namespace"]: r["objects"] for r in records} == {SPACE.id: 2, OTHER.id: 1}
        assert SPACE.id in bucket.run("ls").stdout.replace("\n", "")

    def test_a_namespace_has_its_models_name_where_its_description_is_its_own(
        self, bucket: Bucket
    ) -> None:
        bucket.add("a")
        bucket.add("a", OTHER)
        bucket.describe(SPACE)
        bucket.put(OTHER.manifest_key, SPACE.manifest())
        assert [r["model"] for r in bucket.records("ls")] == ["org/model", None]
        table = bucket.run("ls").stdout
        assert "org/model" in table
        assert "oldest" not in table
        newer = Namespace(model="org/model", revision="r2", weight_version="w7")
        bucket.add("a", newer)
        bucket.describe(newer)
        lines = bucket.run("ls", "--long").stdout
        assert f"{newer.id}\n    model org/model, revision r2, weight version w7\n" in lines
        assert f"{OTHER.id}\n    model unknown\n    1 object, " in lines
        assert "oldest" in lines

    @pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"namespace": 3}', b"x" * (1 << 21)])
    def test_what_is_no_description_is_as_good_as_none(self, bucket: Bucket, body: bytes) -> None:
        bucket.add("a")
        bucket.put(SPACE.manifest_key, body)
        [record] = bucket.records("ls")
        assert (record["model"], record["objects"]) == (None, 1)

    def test_long_lines_have_exact_sizes_times_and_versions(self, bucket: Bucket) -> None:
        key = bucket.add("a")
        [record] = bucket.records("ls", SPACE.prefix)
        size, moment, etag, name = bucket.run("ls", SPACE.prefix, "--long").stdout.split()
        assert (int(size), etag, name) == (record["bytes"], record["etag"], key)
        assert moment.endswith("Z")

    async def test_a_million_objects_are_summed_up_in_flat_memory(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = Listing(MILLION, trace_at=MILLION - LAST)
        assert await ls(store, Output(json=True)) == 0
        assert store.listed == MILLION
        assert capsys.readouterr().out.count(f'"objects": {MILLION // 4},') == 4
        assert traced_peak() < 1 << 18

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

    def test_a_name_with_an_end_of_line_adds_no_line(self, bucket: Bucket) -> None:
        space = Namespace(model="org/model\nv1/forged", dtype="bfloat16")
        key = bucket.add("x\nsigned by      k1", space)
        bucket.describe(space)
        said = bucket.run("stat", key).stdout.splitlines()
        assert [line for line in said if line.startswith("signed by")] == ["signed by      nobody"]
        assert r"identifier     x\nsigned by      k1" in said
        for arguments in (("ls",), ("ls", "--long"), ("du",)):
            lines = bucket.run(*arguments).stdout.splitlines()
            assert not any(line.strip().startswith("v1/forged") for line in lines)

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
