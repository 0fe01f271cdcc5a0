"""`ec-s3 index`: what a folder holds, where its servers look for it."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from ec_s3.cli.app import app
from ec_s3.index import Index, read_index, tag_of
from ec_s3.keys import Namespace, identifier_digest
from ec_s3.signing import parse_keys

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

    from ec_s3.signing import Keyring

SPACE = Namespace(model="org/model", dtype="bfloat16")
NAME = SPACE.prefix.rpartition("/")[2]
KEY = "key:" + "ab" * 32


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("EC_S3_", "LMCACHE_")):
            monkeypatch.delenv(name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for item in ("a", "b", "c"):
        path = tmp_path / SPACE.object_key(item)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"whatever")
    (tmp_path / SPACE.manifest_key).write_bytes(b"{}")
    return tmp_path


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["--url", f"file://{folder}", *arguments])


def read(folder: Path, keyring: Keyring | None = None) -> Index:
    body = (folder / SPACE.index_key).read_bytes()
    return read_index(body, namespace=NAME, now=time.time(), keyring=keyring)


@pytest.mark.parametrize("name", [NAME, SPACE.id, f"{SPACE.prefix}/"])
def test_index_lists_the_items_and_replaces_the_one_before(folder: Path, name: str) -> None:
    for items in (3, 2):
        result = run(folder, "--json", "index", name)
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout)
        size = (folder / SPACE.index_key).stat().st_size
        assert (record["namespace"], record["items"], record["bytes"]) == (NAME, items, size)
        assert record["signed"] is False
        index = read(folder)
        assert len(index) == items
        assert tag_of(identifier_digest("a")) in index
        assert time.time() - 60 < index.made <= time.time()
        (folder / SPACE.object_key("b")).unlink(missing_ok=True)


def test_index_is_signed_where_objects_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EC_S3_SIGNING_KEY", KEY)
    result = run(folder, "index", NAME)
    assert result.exit_code == 0, result.output
    assert "items    3" in result.stdout
    assert "signed with key" in result.stdout
    assert len(read(folder, parse_keys(KEY))) == 3


def test_index_of_an_empty_folder_says_that_nothing_is_there(folder: Path) -> None:
    other = Namespace(model="org/model", weight_version="next")
    result = run(folder, "--json", "index", other.id)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["items"] == 0


def test_index_of_what_is_no_namespace_is_refused(folder: Path) -> None:
    result = run(folder, "index", "nonsense")
    assert result.exit_code == 2
    assert not list(folder.rglob("index.bin"))


def test_an_index_is_not_shown_as_an_item(folder: Path) -> None:
    run(folder, "index", NAME)
    (line,) = run(folder, "--json", "ls").stdout.splitlines()
    assert json.loads(line)["objects"] == 3
