"""`ec-s3 prewarm`: reports, files, exit codes; with an encoder that makes tensors up."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from ec_s3.cli import prewarm_job
from ec_s3.cli.app import app
from ec_s3.cli.output import Output
from ec_s3.keys import Namespace
from ec_s3.testing.encoder import PlayedEncoder

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

    from ec_s3.prewarm.encoding import EncoderSettings
    from ec_s3.testing.moto import S3Server

SPACE = Namespace(model="org/model", dtype="float32")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("EC_S3_", "LMCACHE_")):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[EncoderSettings]:
    """What encoders were started with."""
    seen: list[EncoderSettings] = []

    def open_encoder(settings: EncoderSettings) -> PlayedEncoder:
        seen.append(settings)
        facts = {"model_argument": settings.model, "mm_processor_kwargs": None}
        return PlayedEncoder(settings.connector, SPACE, facts=facts)

    monkeypatch.setattr(prewarm_job, "open_encoder", open_encoder)
    return seen


@pytest.fixture
def media(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    folder.mkdir()
    for number in range(6):
        body = io.BytesIO()
        Image.new("RGB", (4, 4), (number, 1, 2)).save(body, "PNG")
        (folder / f"{number}.png").write_bytes(body.getvalue())
    return folder


def run(tmp_path: Path, media: Path, *arguments: str) -> Result:
    (tmp_path / "bucket").mkdir(exist_ok=True)
    command = ["--url", f"file://{tmp_path}/bucket", *arguments]
    if "prewarm" not in arguments:
        command.append("prewarm")
    return CliRunner().invoke(app, [*command, "--model", "org/model", "--media", str(media)])


def record(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_report_is_a_table_for_people(tmp_path: Path, media: Path) -> None:
    result = run(tmp_path, media)
    assert result.exit_code == 0, result.output
    for text in (SPACE.id, "6, 6 images", "6, 1.5 KiB before compression", "index", "entries/s"):
        assert text in result.stdout


def test_report_is_a_line_for_programs_and_a_file(tmp_path: Path, media: Path) -> None:
    report = tmp_path / "report.json"
    result = run(tmp_path, media, "--json", "prewarm", "--report", str(report))
    found = record(result)
    assert found == json.loads(report.read_text())
    assert (found["outcome"], found["encoded"], found["entries"]) == ("all", 6, 6)
    assert (found["namespace"], found["model"]) == (SPACE.id, "org/model")
    assert (found["index_items"], found["shard"], found["stopped"]) == (6, "0/1", None)


def test_exit_code_tells_all_some_and_none(tmp_path: Path, media: Path) -> None:
    assert run(tmp_path, media).exit_code == 0
    (media / "empty.png").touch()
    assert run(tmp_path, media).exit_code == 1
    for number in range(6):
        (media / f"{number}.png").write_bytes(b"no picture")
    result = run(tmp_path, media, "--json")
    assert result.exit_code == 4
    assert record(result)["outcome"] == "none"


def test_failed_entries_are_named_and_listed_in_the_file(tmp_path: Path, media: Path) -> None:
    manifest = media / "list.jsonl"
    manifest.write_text('{"uri": "0.png"}\nnonsense\n{"uri": "absent.png"}\n')
    errors = tmp_path / "errors.jsonl"
    result = run(tmp_path, manifest, "prewarm", "--errors", str(errors))
    assert result.exit_code == 1
    rows = [json.loads(line) for line in errors.read_text().splitlines()]
    assert [(row["line"], row["uri"]) for row in rows] == [(2, ""), (3, "absent.png")]
    assert "No such file" in rows[1]["reason"]
    assert "line 2: (no uri): no JSON" in result.stderr
    assert "line 3: absent.png" in result.stderr


def test_many_failures_are_not_all_printed(tmp_path: Path, media: Path) -> None:
    manifest = media / "list.jsonl"
    manifest.write_text('{"uri": "absent.png"}\n' * 50 + '{"uri": "0.png"}\n')
    result = run(tmp_path, manifest)
    assert result.stderr.count("absent.png") == 20
    assert "--errors" in result.stderr


def test_terminal_codes_in_names_are_not_obeyed(tmp_path: Path, media: Path) -> None:
    (media / "\x1b[31mred.png").touch()
    result = run(tmp_path, media)
    assert result.exit_code == 1
    assert "\x1b[31m" not in result.output


def test_dry_run_estimates_and_starts_no_upload(tmp_path: Path, media: Path) -> None:
    result = run(tmp_path, media, "--json", "prewarm", "--dry-run")
    found = record(result)
    assert result.exit_code == 0
    assert (found["missing"], found["encoded"], found["dry_run"]) == (6, 0, True)
    assert found["encode_seconds_assumed"] is True
    assert found["estimated_encode_seconds"] == pytest.approx(0.6)
    assert found["cost_requests"] > 0
    assert found["currency"] == "USD"
    assert not list((tmp_path / "bucket").rglob("*.bin"))
    assert "estimated cost" in run(tmp_path, media, "prewarm", "--dry-run").stdout


def test_dry_run_reckons_with_what_stored_items_took(tmp_path: Path, media: Path) -> None:
    run(tmp_path, media)
    body = io.BytesIO()
    Image.new("RGB", (4, 4), (99, 1, 2)).save(body, "PNG")
    (media / "new.png").write_bytes(body.getvalue())
    found = record(run(tmp_path, media, "--json", "prewarm", "--dry-run"))
    assert (found["missing"], found["present"]) == (1, 6)
    assert found["encode_seconds_assumed"] is False
    assert found["estimated_encode_seconds"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("option", "seconds"), [(("--upload-rate", "100B/s"), 15.36), (("--max-requests", "5"), 2.4)]
)
def test_limits_set_the_estimated_time(
    tmp_path: Path, media: Path, option: tuple[str, str], seconds: float
) -> None:
    found = record(run(tmp_path, media, "--json", "prewarm", "--dry-run", *option))
    assert found["estimated_seconds"] == pytest.approx(seconds)


def test_options_of_the_server_reach_vllm(
    tmp_path: Path, media: Path, started: list[EncoderSettings]
) -> None:
    url = f"file://{tmp_path}/bucket"
    (tmp_path / "bucket").mkdir()
    command = ["--url", url, "prewarm", "--model", "org/model", "--media", str(media)]
    command += ["--upload-rate", "5MB/s", "--", "--dtype", "float32", "--revision", "main"]
    assert CliRunner().invoke(app, command).exit_code == 0
    (settings,) = started
    assert settings.arguments == ("--dtype", "float32", "--revision", "main")
    assert settings.connector == {"url": url, "upload_rate": "5MB/s"}
    assert settings.model == "org/model"


def test_shards_leave_the_index_alone_unless_told(tmp_path: Path, media: Path) -> None:
    found = [
        record(run(tmp_path, media, "--json", "prewarm", "--shard", f"{index}/2"))
        for index in range(2)
    ]
    assert sum(one["encoded"] for one in found) == 6
    assert [one["index_items"] for one in found] == [None, None]
    last = record(run(tmp_path, media, "--json", "prewarm", "--shard", "1/2", "--index"))
    assert last["index_items"] == 6


@pytest.mark.parametrize("option", [("--shard", "2/2"), ("--prices", "absent.yaml")])
def test_unusable_arguments_start_nothing(
    tmp_path: Path, media: Path, option: tuple[str, str], started: list[EncoderSettings]
) -> None:
    assert run(tmp_path, media, "prewarm", *option).exit_code == 2
    assert not started


def test_absent_media_are_an_error(tmp_path: Path) -> None:
    result = run(tmp_path, tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "nowhere" in result.stderr


def test_server_that_would_look_elsewhere_stops_the_job_before_the_first_upload(
    tmp_path: Path, media: Path
) -> None:
    other = Namespace(model="org/model", dtype="float32", revision="v2")
    expected = tmp_path / "namespace.json"
    expected.write_bytes(other.manifest({"model_argument": "org/model"}))
    result = run(tmp_path, media, "prewarm", "--expect", str(expected))
    assert result.exit_code == 2
    for text in ("revision", "v2"):
        assert text in result.stderr
    assert not list((tmp_path / "bucket").rglob("namespace.json"))


def test_server_that_looks_for_the_same_objects_is_satisfied(tmp_path: Path, media: Path) -> None:
    expected = tmp_path / "namespace.json"
    expected.write_bytes(SPACE.manifest({"model_argument": "org/model"}))
    result = run(tmp_path, media, "--json", "prewarm", "--expect", str(expected))
    assert result.exit_code == 0, result.output


def test_media_and_cache_may_both_be_buckets(s3_server: S3Server, bucket: str, media: Path) -> None:
    client = s3_server.client()
    for path in media.iterdir():
        client.put_object(Bucket=bucket, Key=f"media/{path.name}", Body=path.read_bytes())
    client.put_object(Bucket=bucket, Key="media/cut.png", Body=b"no picture")
    query = f"?endpoint={s3_server.url}&region=us-east-1"
    command = ["--json", "--url", f"s3://{bucket}/cache{query}", "prewarm", "--model", "m"]
    for given, encoded in ((f"s3://{bucket}/media", 6), (f"s3://{bucket}/media{query}", 0)):
        result = CliRunner().invoke(app, [*command, "--media", given])
        found = record(result)
        assert result.exit_code == 1, result.output
        assert (found["entries"], found["encoded"], found["failed"]) == (7, encoded, 1)
    stored = client.list_objects_v2(Bucket=bucket, Prefix=f"cache/{SPACE.prefix}/float32/")
    client.close()
    assert stored["KeyCount"] == 6


def test_bucket_that_cannot_be_reached_is_told_by_the_exit_code(media: Path) -> None:
    url = "s3://bucket/cache?endpoint=http://127.0.0.1:9&region=us-east-1"
    command = ["--json", "--url", url, "prewarm", "--model", "m", "--media", str(media)]
    result = CliRunner().invoke(app, command, env={"AWS_MAX_ATTEMPTS": "1"})
    assert result.exit_code == 3, result.output
    assert record(result)["encoded"] == 0


def test_unsigned_objects_do_not_count_where_objects_are_signed(
    tmp_path: Path, media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, media)
    monkeypatch.setenv("EC_S3_SIGNING_KEY", "key:" + "ab" * 32)
    result = run(tmp_path, media, "--json")
    assert (result.exit_code, record(result)["failed"]) == (4, 6)
    assert "unusable object" in result.stderr
    shutil.rmtree(tmp_path / "bucket")
    assert record(run(tmp_path, media, "--json"))["encoded"] == 6
    assert record(run(tmp_path, media, "--json"))["present"] == 6


def test_bar_shows_the_rate_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Output()
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(out, "_out", screen)
    with out.progress("prewarm", 100) as advance:
        for _ in range(10):
            advance(5)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]  # the StringIO above
    assert "50/100" in shown
    assert "/s" in shown


_STOPPED = """
import os, signal, sys
from ec_s3.cli import prewarm_job
from ec_s3.cli.app import app
from ec_s3.cli.output import Output
from ec_s3.keys import Namespace
from ec_s3.testing.encoder import PlayedEncoder

batches = []

def told_in_the_second(items):
    batches.append(items)
    if len(batches) == 2:
        os.kill(os.getpid(), signal.SIGTERM)

space = Namespace(model="org/model", dtype="float32")
prewarm_job.open_encoder = lambda settings: PlayedEncoder(
    settings.connector, space, on_encode=told_in_the_second
)
app()
"""


def test_job_that_is_terminated_ends_its_batch_and_reports(tmp_path: Path, media: Path) -> None:
    (tmp_path / "bucket").mkdir()
    command = [sys.executable, "-c", _STOPPED, "--json", "--url", f"file://{tmp_path}/bucket"]
    command += ["prewarm", "--model", "m", "--media", str(media), "--batch-size", "2"]
    ended = subprocess.run(command, check=False, timeout=100, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["encoded"], found["stopped"]) == (4, "told to stop")
    assert "run it again" in ended.stderr


@pytest.mark.parametrize("option", ["--errors", "--report"])
def test_manifest_is_not_written_over(tmp_path: Path, media: Path, option: str) -> None:
    manifest = media / "list.jsonl"
    manifest.write_text('{"uri": "0.png"}\n')
    (tmp_path / "linked.jsonl").symlink_to(manifest)
    for path in (manifest, tmp_path / "linked.jsonl"):
        result = run(tmp_path, manifest, "prewarm", option, str(path))
        assert result.exit_code == 2
        assert f"{option}=" in result.stderr
    assert manifest.read_text() == '{"uri": "0.png"}\n'


def test_two_files_may_not_be_one(tmp_path: Path, media: Path) -> None:
    both = ("--errors", str(tmp_path / "a"), "--report", str(tmp_path / "a"))
    assert run(tmp_path, media, "prewarm", *both).exit_code == 2
    nowhere = ("--errors", "/dev/null", "--report", "/dev/null")
    assert run(tmp_path, media, "prewarm", *nowhere).exit_code == 0


def test_report_that_cannot_be_written_is_told_before_anything_is_encoded(
    tmp_path: Path, media: Path, started: list[EncoderSettings]
) -> None:
    result = run(tmp_path, media, "prewarm", "--report", str(tmp_path / "absent" / "report.json"))
    assert result.exit_code == 2
    assert "No such file" in result.stderr
    assert not started


def test_report_of_an_earlier_run_does_not_outlive_a_job_that_is_killed(
    tmp_path: Path, media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.json"
    report.write_text('{"outcome": "all"}')

    def killed(settings: EncoderSettings) -> PlayedEncoder:
        raise SystemExit(137)

    monkeypatch.setattr(prewarm_job, "open_encoder", killed)
    assert run(tmp_path, media, "prewarm", "--report", str(report)).exit_code == 137
    assert report.read_text() == ""


def test_full_disk_costs_the_report_file_and_not_the_report(tmp_path: Path, media: Path) -> None:
    result = run(tmp_path, media, "--json", "prewarm", "--report", "/dev/full")
    assert result.exit_code == 2
    first, second = result.stdout.splitlines()
    assert json.loads(first)["encoded"] == 6
    assert "No space left" in json.loads(second)["message"]


def test_full_disk_costs_the_list_of_failures_and_not_the_job(tmp_path: Path, media: Path) -> None:
    for number in range(3):
        (media / f"a{number}.png").touch()
    result = run(tmp_path, media, "--json", "prewarm", "--errors", "/dev/full")
    assert result.exit_code == 1
    found = record(result)
    assert (found["encoded"], found["failed"], found["stopped"]) == (6, 3, None)
    assert result.stderr.count("/dev/full lacks entries") == 1


def test_encoder_writes_into_the_bucket_that_the_job_looks_into(
    tmp_path: Path, media: Path, started: list[EncoderSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/bucket"
    (tmp_path / "bucket").mkdir()
    monkeypatch.setenv("EC_S3_URL", url)
    command = ["prewarm", "--model", "m", "--media", str(media)]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert started[0].connector["url"] == url


_TOLD_TWICE = """
import os, signal, sys, threading
from ec_s3.cli import prewarm_job
from ec_s3.cli.app import app
from ec_s3.keys import Namespace
from ec_s3.prewarm.runner import Job
from ec_s3.testing.encoder import PlayedEncoder

stopping = threading.Event()
stop = Job.stop

def noticed(job, reason):
    stop(job, reason)
    stopping.set()

def told_twice(items):
    number = int(os.environ["SIGNAL"])
    os.kill(os.getpid(), number)
    stopping.wait()
    os.kill(os.getpid(), number)
    threading.Event().wait()  # an encoder that has hours to go

Job.stop = noticed
space = Namespace(model="org/model", dtype="float32")
prewarm_job.open_encoder = lambda settings: PlayedEncoder(
    settings.connector, space, on_encode=told_twice
)
app()
"""


_HEEDING = ["env", "--default-signal=HUP,INT,TERM"]
"""Whoever runs the tests may ignore some of them, as `nohup` does, and hand that on."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_second_signal_ends_the_job_at_once_and_leaves_no_media(
    tmp_path: Path, media: Path, number: signal.Signals
) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "scratch").mkdir()
    command = [*_HEEDING, sys.executable, "-c", _TOLD_TWICE, "--url", f"file://{tmp_path}/bucket"]
    command += ["prewarm", "--model", "m", "--media", str(media)]
    environment = {**os.environ, "TMPDIR": f"{tmp_path}/scratch", "SIGNAL": str(int(number))}
    ended = subprocess.run(
        command, check=False, timeout=100, capture_output=True, env=environment, text=True
    )
    assert ended.returncode == -number, ended.stderr
    assert not list((tmp_path / "scratch").glob("ec_s3-prewarm-*"))


def test_job_that_shall_outlive_its_terminal_does(tmp_path: Path, media: Path) -> None:
    (tmp_path / "bucket").mkdir()
    script = _STOPPED.replace("SIGTERM", "SIGHUP")
    command = [sys.executable, "-c", script, "--json", "--url", f"file://{tmp_path}/bucket"]
    command += ["prewarm", "--model", "m", "--media", str(media), "--batch-size", "2"]
    ignoring = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh"]
    for prefix, encoded, stopped in ((_HEEDING, 4, "told to stop"), (ignoring, 2, None)):
        ended = subprocess.run(
            [*prefix, *command], check=False, timeout=100, capture_output=True, text=True
        )
        found = json.loads(ended.stdout)
        assert (found["encoded"], found["stopped"]) == (encoded, stopped)
