from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.testing import CliRunner

from ec_s3 import __version__
from ec_s3.cli import demo
from ec_s3.cli.app import app
from ec_s3.cli.output import Output, human_bytes, human_seconds, printable
from ec_s3.control import Control
from ec_s3.keys import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ec_s3.testing.moto import S3Server


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("EC_S3_", "LMCACHE_", "VLLM_PLUGINS")):
            monkeypatch.delenv(name)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def commands() -> Iterator[tuple[list[str], Any]]:
    """Every command with its names, those of groups included."""
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        below = getattr(command, "commands", {})
        for inner, leaf in below.items():
            yield [name, inner], leaf
        if not below or command.invoke_without_command:
            yield [name], command


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class TestStart:
    def test_help_loads_neither_torch_nor_an_sdk_nor_vllm(self) -> None:
        code = (
            "import sys\n"
            "from ec_s3.cli.app import app\n"
            "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
            "heavy = {'torch', 'vllm', 'boto3', 'botocore', 'aiobotocore', 'numpy'}\n"
            "sys.exit(', '.join(heavy & set(sys.modules)) or None)\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert result.returncode == 0, result.stderr

    def test_version(self) -> None:
        assert run("--version").stdout == f"ec-s3 {__version__}\n"

    def test_without_a_command_help_is_shown(self) -> None:
        assert "doctor" in run().output

    def test_every_command_explains_itself_and_gives_an_example_of_itself(self) -> None:
        found = list(commands())
        assert len(found) >= 20
        for names, command in found:
            result = run(*names, "--help")
            assert result.exit_code == 0
            assert "Usage" in result.output
            example = (command.epilog or "").removeprefix("Example: ec-s3 ")
            assert example != command.epilog, names
            at = example.index(" ".join(names))
            assert not example[:at] or example.startswith("--"), "only global options before it"


class TestExitCodes:
    def test_wrong_settings_are_2_and_nothing_is_done(self) -> None:
        result = run("--url", "redis://x", "ls")
        assert result.exit_code == 2
        assert "unknown scheme" in result.stderr

    def test_no_store_is_2(self) -> None:
        assert run("ls").exit_code == 2

    def test_unknown_options_are_2(self) -> None:
        assert run("ls", "--nonsense").exit_code == 2

    def test_a_missing_configuration_file_is_2(self, tmp_path: Any) -> None:
        assert run("--config", str(tmp_path / "none.yaml"), "ls").exit_code == 2

    def test_an_unreachable_store_is_3_and_programs_can_read_why(self) -> None:
        url = f"s3://bucket/p?endpoint=http://127.0.0.1:{free_port()}"
        result = run("--json", "--url", url, "ls")
        assert result.exit_code == 3
        assert json.loads(result.stdout)["error"] == "RemoteUnavailableError"


class TestDemo:
    def test_options_reach_the_demo_and_its_code_comes_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: dict[str, object] = {}

        def fake(**options: object) -> int:
            seen.update(options)
            return 1

        monkeypatch.setattr(demo, "run", fake)
        assert run("--json", "demo", "--model", "llava", "--dtype", "float16").exit_code == 1
        assert seen == {"workdir": None, "model": ["llava"], "dtype": ["float16"], "json": True}


def findings(*arguments: str, code: int = 0) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    result = run("--json", *arguments, "doctor")
    assert result.exit_code == code, result.output
    report = json.loads(result.stdout)
    return report, {check["check"]: check for check in report["checks"]}


class TestDoctor:
    def test_a_good_bucket_passes_and_is_left_clean(self, s3_server: S3Server, bucket: str) -> None:
        report, checks = findings("--url", f"s3://{bucket}/p?endpoint={s3_server.url}")
        assert checks["credentials"]["detail"] == "found: env"
        for name in ("endpoint", "clock", "list", "write", "read", "range", "latency", "delete"):
            assert checks[name]["status"] == "ok", checks[name]
        assert report["sources"]["url"] == "argument"
        assert "testing" not in json.dumps(report)
        client = s3_server.client()
        assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
        client.close()

    def test_a_missing_bucket_fails_with_a_remedy(self, s3_server: S3Server) -> None:
        url = f"s3://no-such-bucket/p?endpoint={s3_server.url}"
        _, checks = findings("--url", url, code=1)
        assert checks["write"]["status"] == "failed"
        assert "bucket" in checks["write"]["remedy"]
        assert checks["read"]["status"] == "skipped"

    def test_missing_credentials_fail_with_a_remedy(
        self, s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        _, checks = findings("--url", f"s3://{bucket}?endpoint={s3_server.url}", code=1)
        assert checks["credentials"]["detail"] == "none found"
        assert "AWS_ACCESS_KEY_ID" in checks["credentials"]["remedy"]

    def test_an_unreachable_endpoint_is_found_once(self) -> None:
        url = f"s3://bucket?endpoint=http://127.0.0.1:{free_port()}"
        _, checks = findings("--url", url, code=1)
        assert checks["endpoint"]["status"] == "failed"
        assert [c["status"] for c in checks.values()].count("failed") == 1

    def test_a_clock_far_off_fails(
        self, s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import ec_s3.cli.doctor as doctor

        monkeypatch.setattr(doctor, "server_time", lambda url, config: 1_000_000.0)
        _, checks = findings("--url", f"s3://{bucket}?endpoint={s3_server.url}", code=1)
        assert checks["clock"]["status"] == "failed"

    def test_people_read_what_failed_and_what_to_do_within_80_columns(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        url = f"s3://bucket?endpoint=http://127.0.0.1:{free_port()}"
        result = run("--url", url, "doctor")
        assert result.exit_code == 1
        assert "failed  endpoint" in result.stdout
        assert "-> check endpoint in url" in result.stdout
        assert max(len(line) for line in result.stdout.splitlines()) <= 80

    def test_what_the_control_document_says_is_shown(self, tmp_path: Path) -> None:
        url = f"file://{tmp_path}"
        space = Namespace(model="m")
        path = tmp_path / space.control_key
        path.parent.mkdir(parents=True)
        document = Control(enabled=False, deleted={"5a" * 32: time.time() + 100}, valid_after=1.0)
        path.write_bytes(document.pack())
        _, checks = findings("--url", url)
        assert checks["control"]["status"] == "note"
        name = space.prefix.removeprefix("v1/")
        for said in (name, "switched off", "1970-01-01", "1 item", "ec-s3 control"):
            assert said in checks["control"]["detail"] + checks["control"]["remedy"]
        path.write_bytes(Control(deleted={"5a" * 32: 1.0}).pack())
        assert findings("--url", url)[1]["control"]["status"] == "ok"
        path.write_bytes(b"{}")
        assert findings("--url", url, code=1)[1]["control"]["status"] == "failed"

    def test_memory_only_is_no_failure(self) -> None:
        _, checks = findings()
        assert checks["store"]["status"] == "skipped"

    def test_every_setting_is_shown_with_its_source_and_no_secret(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("EC_S3_SALT", "hunter2")
        text = run("doctor").output
        assert "hunter2" not in text
        assert "environment EC_S3_SALT" in text
        report, _ = findings()
        assert "hunter2" not in json.dumps(report)
        assert report["settings"]["max_local_cpu_size"] == 1 << 30

    def test_a_disk_tier_without_room_is_noted(
        self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("EC_S3_LOCAL_DISK", str(tmp_path / "cache"))
        monkeypatch.setenv("EC_S3_MAX_LOCAL_DISK_SIZE", "900TiB")
        _, checks = findings()
        assert checks["disk tier"]["status"] == "note"
        assert not (tmp_path / "cache").exists()

    def test_a_plugin_list_without_ours_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import ec_s3.cli.doctor as doctor

        class Point:
            name = "ec_s3"

        monkeypatch.setattr(doctor, "entry_points", lambda group: [Point()])
        monkeypatch.setenv("VLLM_PLUGINS", "other")
        _, checks = findings(code=1)
        assert checks["vLLM plugin"]["status"] == "failed"


class TestOutput:
    def test_sizes_and_durations_read_well(self) -> None:
        assert [human_bytes(n) for n in (0, 999, 1024, 1536, 1 << 30)] == [
            "0 B",
            "999 B",
            "1 KiB",
            "1.5 KiB",
            "1 GiB",
        ]
        assert [human_seconds(s) for s in (0.25, 2, 600, 3 * 3600, 864000)] == [
            "250 ms",
            "2 s",
            "10 min",
            "3 h",
            "10 d",
        ]

    def test_control_characters_are_written_out(self) -> None:
        assert printable("a\x1b[0m\u202eb\x00\n") == r"a\x1b[0m\u202eb\x00\n"

    def test_a_title_is_no_markup(self, capsys: pytest.CaptureFixture[str]) -> None:
        Output().table("In [red]EUR[/]", ("a",), [("b" * 20,)])
        assert "In [red]EUR[/]" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("typed", "confirmed"), [("1234", True), ("1,234", True), ("12", False), (None, False)]
    )
    def test_a_person_types_the_number_as_it_is_shown(
        self,
        typed: str | None,
        confirmed: bool,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        answer = io.StringIO("" if typed is None else f"{typed}\n")
        monkeypatch.setattr(answer, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", answer)
        assert Output().confirm("1,234 objects", expected="1234") is confirmed
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", "1,234 objects\n> ")

    def test_nobody_confirms_where_there_is_no_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", None)
        assert not Output().confirm("one object", expected="1")

    def test_an_interrupt_ends_the_wait_for_a_person(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Interrupted(io.StringIO):
            def isatty(self) -> bool:
                return True

            def readline(self, *_: Any) -> str:  # type: ignore[override]  # typeshed's base has bytes
                signal.raise_signal(signal.SIGINT)
                return "1"

        monkeypatch.setattr(sys, "stdin", Interrupted())

        answers: list[bool] = []

        async def ask() -> None:
            answers.append(Output().confirm("one object", expected="1"))

        with pytest.raises(KeyboardInterrupt):
            asyncio.run(ask())
        assert not answers

    @pytest.mark.parametrize("options", [(), ("--json",)])
    def test_a_reader_that_goes_ends_a_listing_quietly(
        self, options: tuple[str, ...], tmp_path: Path
    ) -> None:
        (tmp_path / "v1").mkdir()
        for number in range(3000):  # more than a pipe holds
            (tmp_path / "v1" / f"{number}-{'x' * 100}").touch()
        command = [sys.executable, "-m", "ec_s3.cli.app", *options]
        with subprocess.Popen(
            [*command, "--url", f"file://{tmp_path}", "ls", "v1/"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 141

    @pytest.mark.parametrize("arguments", [("ls",), ("du",), ("--json", "du")])
    def test_a_reader_that_has_gone_is_no_finding(
        self, arguments: tuple[str, ...], tmp_path: Path
    ) -> None:
        path = tmp_path / Namespace(model="org/model").object_key("a")
        path.parent.mkdir(parents=True)
        path.touch()
        command = [sys.executable, "-m", "ec_s3.cli.app", "--url", f"file://{tmp_path}"]
        reading, writing = os.pipe()
        os.close(reading)
        try:
            done = subprocess.run(
                [*command, *arguments], stdout=writing, stderr=subprocess.PIPE, check=False
            )
        finally:
            os.close(writing)
        assert done.returncode == 141
        assert b"Error" not in done.stderr

    def test_a_name_that_the_terminals_encoding_lacks_is_shown_all_the_same(
        self, tmp_path: Path
    ) -> None:
        space = Namespace(model="\u6a21\u578b")
        for key in (space.object_key("a"), space.manifest_key):
            (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / key).write_bytes(space.manifest())
        shown = subprocess.run(
            [sys.executable, "-m", "ec_s3.cli.app", "--url", f"file://{tmp_path}", "ls"],
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            check=True,
        )
        assert rb"\u6a21\u578b" in shown.stdout

    def test_records_are_one_ascii_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        Output(json=True).record({"text": "a\nb\u202e"})
        text = capsys.readouterr().out
        assert text.isascii()
        assert text.count("\n") == 1
