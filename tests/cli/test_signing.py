"""Signing keys at the command line: `verify`, `stat`, `get` and `doctor` honour and hide them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from ec_s3.cli.app import app
from ec_s3.directory import DirectoryStore
from ec_s3.keys import Namespace
from ec_s3.signing import parse_keys
from ec_s3.types import ItemMeta, TensorSpec
from ec_s3.wire import encode

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

SPACE = Namespace(model="org/model", dtype="uint8")
A, B = (f"{name}:{digit * 64}" for name, digit in zip("ab", "12", strict=True))


class Bucket:
    """A folder as the store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, identifier: str, key: str | None) -> str:
        frame = encode(
            TensorSpec("uint8", (2, 2)),
            [memoryview(b"abcd")],
            identifier=identifier,
            namespace=SPACE.id,
            meta=ItemMeta(input_digest="5a" * 32),
            created=1.0,
            keyring=None if key is None else parse_keys(key),
        )

        async def write() -> None:
            store = DirectoryStore(self.folder)
            await store.put(SPACE.object_key(identifier), frame.parts)
            await store.aclose()

        asyncio.run(write())
        return SPACE.object_key(identifier)

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["--url", f"file://{self.folder}", *arguments])

    def records(self, *arguments: str, code: int) -> list[dict[str, Any]]:
        result = self.run("--json", *arguments)
        assert result.exit_code == code, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


def test_verify_finds_what_no_accepted_key_has_signed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, unsigned, foreign = bucket.add("1", A), bucket.add("2", None), bucket.add("3", B)
    total = bucket.records("verify", "v1/", code=0)[-1]
    assert (total["checked"], total["bad"]) == (3, 0)
    monkeypatch.setenv("EC_S3_SIGNING_KEY", A)
    *bad, total = bucket.records("verify", "v1/", code=1)
    assert (total["checked"], total["bad"]) == (3, 2)
    assert {record["key"] for record in bad} == {unsigned, foreign}
    assert {record["error"] for record in bad} == {"FrameUnsignedError"}
    assert bucket.run("verify", good).exit_code == 0
    monkeypatch.setenv("EC_S3_SIGNING_KEY", f"{B},{A}")
    total = bucket.records("verify", "v1/", code=1)[-1]
    assert (total["checked"], total["bad"]) == (3, 1)


def test_stat_says_who_signed_and_what_is_bound(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = bucket.add("1", A)
    (facts,) = bucket.records("stat", key, code=0)
    assert (facts["key_id"], facts["input_digest"]) == ("a", "5a" * 32)
    text = bucket.run("stat", key).stdout
    assert "signed by      a\n" in text
    assert "bound to       5a5a" in text
    unsigned = bucket.add("2", None)
    assert "signed by      nobody\n" in bucket.run("stat", unsigned).stdout
    monkeypatch.setenv("EC_S3_SIGNING_KEY", A)
    assert bucket.records("stat", unsigned, code=1)[0]["error"] == "FrameUnsignedError"


def test_get_writes_nothing_that_is_not_signed(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EC_S3_SIGNING_KEY", A)
    target = tmp_path / "out.safetensors"
    assert bucket.run("get", bucket.add("1", B), "-o", str(target)).exit_code == 1
    assert not target.exists()
    assert bucket.run("get", bucket.add("2", A), "-o", str(target)).exit_code == 0
    assert target.exists()


def test_doctor_shows_ids_of_keys_and_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doctor(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, "doctor"])
        assert "1111" not in result.output
        assert "2222" not in result.output
        return result.output

    assert "off: whoever can write to the store is believed" in " ".join(doctor().split())
    monkeypatch.setenv("EC_S3_SIGNING_KEY", f"{B},{A}")
    assert "on: signs with b, accepts b, a" in doctor()
    record = json.loads(doctor("--json"))
    assert record["sources"]["signing_key"] == "environment EC_S3_SIGNING_KEY"
    monkeypatch.delenv("EC_S3_SIGNING_KEY")
    path = tmp_path / "keys"
    path.write_text(A)
    monkeypatch.setenv("EC_S3_SIGNING_KEY_FILE", str(path))
    for mode, status in ((0o644, "note"), (0o600, "ok")):
        path.chmod(mode)
        checks = {check["check"]: check for check in json.loads(doctor("--json"))["checks"]}
        assert checks["signing"]["status"] == status
