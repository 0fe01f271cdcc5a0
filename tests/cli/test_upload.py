from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner
from unlistable import make_unlistable

from ec_s3.cli.app import app
from ec_s3.ingest import tensor_files
from ec_s3.intake import Source
from ec_s3.keys import Namespace

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

    from ec_s3.testing.moto import S3Server

SPACE = Namespace(model="org/model", dtype="bfloat16")


def tensor() -> torch.Tensor:
    return torch.randn(8, 16).bfloat16()


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Two files: one with three items, one with a single item, in a folder of its own."""
    folder = tmp_path / "outputs"
    (folder / "more").mkdir(parents=True)
    save_file({f"{n:064x}": tensor() for n in range(3)}, folder / "many.safetensors")
    save_file({f"{9:064x}": tensor()}, folder / "more" / "one.safetensors")
    (folder / "notes.txt").write_text("no tensors")
    return folder


class Command:
    def __init__(self, url: str) -> None:
        self.url = url

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["--url", self.url, *arguments])

    def records(self, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
        result = self.run("--json", *arguments)
        assert result.exit_code == code, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Command:
    return Command(f"file://{tmp_path / 'bucket'}")


def test_a_folder_of_files_is_uploaded_once_and_found_the_next_time(
    s3_server: S3Server, bucket: str, outputs: Path
) -> None:
    command = Command(f"s3://{bucket}/p?endpoint={s3_server.url}")
    (report,) = command.records("upload", str(outputs), "--model", "org/model")
    assert (report["written"], report["present"], report["failed"]) == (4, 0, 0)
    assert report["namespace"] == SPACE.id
    (again,) = command.records("upload", str(outputs), "--model", "org/model")
    assert (again["written"], again["present"]) == (0, 4)
    listed = command.records("ls")
    assert [(one["namespace"], one["objects"]) for one in listed] == [(SPACE.id, 4)]


def test_what_came_about_is_shown_as_a_table(folder: Command, outputs: Path) -> None:
    result = folder.run("upload", str(outputs), "--model", "org/model", "--parallel", "2")
    assert result.exit_code == 0
    assert "written    4" in result.stdout
    assert SPACE.id in result.stdout


def test_options_make_the_namespace(folder: Command, outputs: Path) -> None:
    options = {
        "revision": "r1",
        "encoder_config": "0123456789abcdef",
        "quantization": "fp8",
        "weight_version": "w2",
        "adapter": "a3",
        "hash_scheme": "h4",
    }
    space = Namespace(model="org/model", **options)
    given = [p for name, v in options.items() for p in (f"--{name.replace('_', '-')}", v)]
    (report,) = folder.records("upload", str(outputs), "--model", "org/model", *given)
    assert report["namespace"] == space.id


def test_an_exported_item_goes_back_under_its_identifier(
    folder: Command, outputs: Path, tmp_path: Path
) -> None:
    folder.records("upload", str(outputs), "--model", "org/model")
    name = f"{9:064x}"
    exported = tmp_path / "picture.safetensors"
    item = ("--identifier", name, "--namespace", SPACE.id)
    folder.records("get", *item, "-o", str(exported))
    assert folder.run("rm", *item, "--yes").exit_code == 0
    other = Command(f"file://{tmp_path / 'other'}")
    other.records("upload", str(exported), "--model", "org/model")
    assert other.records("stat", *item)[0]["identifier"] == name
    # Of another model it would be a wrong tensor.
    refused = other.records("upload", str(exported), "--model", "org/other", code=4)
    assert "made for" in refused[0]["error"]


def test_a_bad_file_is_named_and_the_others_are_stored(folder: Command, outputs: Path) -> None:
    (outputs / "bad.safetensors").write_bytes(b"\xff" * 100)
    save_file({f"{7:064x}": torch.zeros(2, 2)}, outputs / "float.safetensors")
    *bad, report = folder.records("upload", str(outputs), "--model", "org/model", code=1)
    assert (report["written"], report["failed"]) == (4, 2)
    assert {one["item"] for one in bad} == {str(outputs / "bad.safetensors"), f"{7:064x}"}
    result = folder.run("upload", str(outputs), "--model", "org/model")
    assert result.exit_code == 1
    assert "float32" in result.stdout


def test_when_nothing_could_be_stored_the_exit_code_says_so(
    folder: Command, tmp_path: Path
) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"")
    path = str(tmp_path / "bad.safetensors")
    assert folder.run("upload", path, "--model", "org/model").exit_code == 4


def test_wrong_usage_does_nothing(folder: Command, outputs: Path, tmp_path: Path) -> None:
    assert "--model" in folder.run("upload", str(outputs)).stderr
    for arguments in (
        [str(outputs)],
        [str(tmp_path / "none"), "--model", "org/model"],
        [str(outputs), "--model", "org/model", "--dtype", "complex64"],
        [str(outputs), "--model", "org/model", "--rate", "fast"],
    ):
        assert folder.run("upload", *arguments).exit_code == 2
    assert folder.records("ls") == []


def test_a_store_that_refuses_is_exit_code_3(
    s3_server: S3Server, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Command(f"s3://no-such-bucket/p?endpoint={s3_server.url}")
    assert command.run("upload", str(outputs), "--model", "org/model").exit_code == 3


def test_names_cannot_play_with_the_terminal(folder: Command, tmp_path: Path) -> None:
    save_file({"\x1b[31mred": torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    result = folder.run("upload", str(tmp_path / "a.safetensors"), "--model", "org/model")
    assert "\x1b" not in result.output


@pytest.mark.parametrize("json_wanted", [True, False])
def test_secrets_are_never_shown(
    folder: Command, outputs: Path, monkeypatch: pytest.MonkeyPatch, json_wanted: bool
) -> None:
    monkeypatch.setenv("EC_S3_SALT", "hush-hush-salt")
    monkeypatch.setenv("EC_S3_SIGNING_KEY", f"k1:{'ab' * 32}")
    (outputs / "bad.safetensors").write_bytes(b"\xff" * 100)
    mode = ["--json"] if json_wanted else []
    result = folder.run(*mode, "upload", str(outputs), "--model", "org/model")
    assert result.exit_code == 1
    assert "hush-hush-salt" not in result.output
    assert "ab" * 32 not in result.output


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float32, torch.int16, torch.int64, torch.bool, torch.float8_e4m3fn],
)
def test_the_size_of_a_tensor_is_known_before_it_is_read(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    save_file({"a": torch.zeros(3, 5).to(dtype)}, tmp_path / "a.safetensors")
    (source,) = tensor_files([tmp_path], SPACE)
    assert isinstance(source, Source)
    assert source.nbytes == 15 * dtype.itemsize == source.load().nbytes


def test_folder_that_cannot_be_listed_is_not_left_out_in_silence(
    folder: Command, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_unlistable(monkeypatch, "more")
    failed, report = folder.records("upload", str(outputs), "--model", "org/model", code=1)
    assert failed["item"] == str(outputs / "more")
    assert "cannot be listed" in failed["error"]
    assert (report["written"], report["failed"]) == (3, 1)
