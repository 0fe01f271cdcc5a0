"""One prewarm job as the command line asks for it: wired, run, told.

One job on one event loop. vLLM is started by the job, and only when there is something to encode. A
first SIGINT, SIGTERM or SIGHUP ends the job after the batch under way, a second one at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ec_s3.cli.output import ExitCode, Output, counted, human_bytes, human_seconds
from ec_s3.errors import ConfigError
from ec_s3.prewarm.encoding import EncoderSettings
from ec_s3.prewarm.estimate import Limits, estimate
from ec_s3.prewarm.expect import read_expected
from ec_s3.prewarm.isolation import open_encoder
from ec_s3.prewarm.job import Wanted, opened
from ec_s3.prewarm.media import local_path
from ec_s3.prewarm.report import Outcome
from ec_s3.prewarm.runner import REQUESTS_AN_UPLOAD, Listeners, Mode
from ec_s3.prices import read_prices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ec_s3.config import ECConfig
    from ec_s3.prewarm.estimate import Estimate
    from ec_s3.prewarm.manifest import BadEntry
    from ec_s3.prewarm.report import Report
    from ec_s3.prewarm.runner import Job
    from ec_s3.prewarm.shard import Shard

SHOWN_FAILURES = 20
"""Entries that are named on standard error; `--errors` has all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line asks for; see its options.

    Attributes:
        connector: settings that it gives for all of ec_s3.
    """

    model: str
    media: str
    options: tuple[str, ...] = ()
    expect: str | None = None
    errors: Path | None = None
    report: Path | None = None
    shard: Shard
    index: bool
    dry_run: bool = False
    batch_size: int = 32
    max_requests: float | None = None
    prices: Path | None = None
    connector: Mapping[str, str]


async def run_job(request: Request, config: ECConfig, out: Output) -> ExitCode:
    """Run the job that was asked for, and tell what became of it.

    Raises:
        ConfigError: there is nothing to do, vLLM cannot be started, or it does not fit a server.
        OSError: a file cannot be written.
    """
    _check_files(request)
    prices = read_prices(request.prices)
    wanted = Wanted(
        media=request.media,
        open_encoder=lambda: open_encoder(_encoder_settings(request, out)),
        mode=Mode(request.batch_size, request.dry_run, request.index),
        shard=request.shard,
        max_requests=request.max_requests,
        expected=await read_expected(request.expect, config) if request.expect else None,
    )
    with tempfile.TemporaryDirectory(prefix="ec_s3-prewarm-") as scratch:
        async with opened(wanted, config, scratch=Path(scratch)) as job:
            if request.report is not None:
                # Now, not after hours, it is told if it cannot be; a killed job's report is empty.
                request.report.write_text("", encoding="utf-8")
            with (
                _failures(request.errors, out) as failed,
                out.progress("prewarm", job.total) as advance,
                _stopped_by_signals(job, out, scratch),
            ):
                report = await job.run(Listeners(failed=failed, advance=advance))
    reckoned = None
    if request.dry_run:
        limits = Limits(requests=request.max_requests, upload_bytes=config.upload_rate)
        reckoned = estimate(
            report.tally, prices=prices, limits=limits, requests_an_item=REQUESTS_AN_UPLOAD
        )
    return _tell(out, request, report, reckoned)


def _check_files(request: Request) -> None:
    """Make sure that no file is written over the manifest, or over another one."""
    taken = {os.path.realpath(local_path(request.media)): "the manifest"}
    for option, path in (("--errors", request.errors), ("--report", request.report)):
        if path is None or (path.exists() and not path.is_file()):  # such as /dev/stdout
            continue
        other = taken.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ConfigError(f"{option}={path} is {other}, which it would overwrite")


def _encoder_settings(request: Request, out: Output) -> EncoderSettings:
    workdir = None
    if sys.stderr.isatty() and not out.json:  # a bar is drawn there
        workdir = Path(tempfile.mkdtemp(prefix="ec_s3-prewarm-log-"))
        out.note(f"vLLM's log is in {workdir}")
    return EncoderSettings(
        model=request.model,
        arguments=request.options,
        connector=request.connector,
        workdir=workdir,
        batch_size=request.batch_size,
    )


@contextlib.contextmanager
def _failures(path: Path | None, out: Output) -> Iterator[Callable[[BadEntry], None]]:
    """Tells of entries that failed: the first on standard error, all of them in the file."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("wb", buffering=0)) if path is not None else None
        shown = 0
        whole = True

        def write(entry: BadEntry) -> None:
            nonlocal whole
            row = {"uri": entry.uri, "line": entry.line, "reason": entry.reason}
            line = json.dumps(row).encode() + b"\n"
            try:  # unbuffered: a killed job's file is as far as the job was
                if file is None or file.write(line) == len(line):
                    return
                reason = "only a part of an entry could be written"
            except OSError as error:
                reason = str(error)
            if whole:
                out.note(f"{path} lacks entries: {reason}")
            whole = False

        def failed(entry: BadEntry) -> None:
            nonlocal shown
            shown += 1
            write(entry)
            if shown <= SHOWN_FAILURES:
                out.note(f"line {entry.line}: {entry.uri or '(no uri)'}: {entry.reason}")
            elif shown == SHOWN_FAILURES + 1:
                out.note("... and more; --errors FILE has all of them")

        yield failed


@contextlib.contextmanager
def _stopped_by_signals(job: Job, out: Output, scratch: str) -> Iterator[None]:
    """A first signal ends the job after its batch; a second one, at once, whatever is under way."""
    loop = asyncio.get_running_loop()
    signals = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup, a shell's background
    ]
    told = False

    def stop(number: signal.Signals) -> None:
        nonlocal told
        if told:  # the encoder's process ends with this one
            shutil.rmtree(scratch, ignore_errors=True)
            out.show_cursor()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        told = True
        job.stop("told to stop")

    try:
        for number in signals:
            loop.add_signal_handler(number, stop, number)
    except (RuntimeError, ValueError):
        pass  # not the main thread: whoever runs this has signals of its own
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _tell(out: Output, request: Request, report: Report, reckoned: Estimate | None) -> ExitCode:
    """Print the report, write it where that was asked for, and say how the command ends."""
    record = {
        "model": request.model,
        "media": request.media,
        "shard": str(request.shard),
        "dry_run": request.dry_run,
        **report.record(),
        **({"missing": report.tally.missing, **reckoned.record()} if reckoned else {}),
    }
    unwritten = None
    if request.report is not None:
        try:
            request.report.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            unwritten = error  # it is told all the same
    if out.json:
        out.record(record)
    else:
        rows = _rows(report, reckoned)
        out.table(f"prewarm of {request.media}", ("", ""), rows)
    if report.stopped:
        out.note(f"stopped: {report.stopped}; run it again to go on")
    if unwritten is not None:
        raise unwritten
    if report.unreachable:
        return ExitCode.REMOTE
    codes = {Outcome.ALL: ExitCode.OK, Outcome.SOME: ExitCode.FINDING}
    return codes.get(report.outcome, ExitCode.NOTHING)


def _rows(report: Report, reckoned: Estimate | None) -> list[tuple[str, str]]:
    tally = report.tally
    done = tally.encoded + tally.present + tally.duplicates
    entries = [f"{tally.entries:,}"]
    entries += [counted(number, kind) for kind, number in sorted(tally.modalities.items())]
    nbytes = human_bytes(tally.output_bytes)
    rows = [
        ("namespace", report.namespace or "-"),
        ("entries", ", ".join([*entries, human_bytes(tally.media_bytes)])),
        ("encoded", f"{tally.encoded:,}, {nbytes} before compression"),
        ("in the bucket before", f"{tally.present:,}"),
        ("duplicates", f"{tally.duplicates:,}"),
        ("failed", f"{tally.failed:,}"),
    ]
    if reckoned is not None:
        rows[2:3] = _estimate_rows(report, reckoned)
    else:
        pace = done / max(report.seconds, 1e-3)
        rows.append(("time", f"{human_seconds(report.seconds)}, {pace:.3g} entries/s"))
    rows.append(("requests", f"{report.requests:,}, {report.retries:,} of them again"))
    if report.index is not None:
        items, size = report.index
        rows.append(("index", f"{counted(items, 'item')}, {human_bytes(size)}"))
    return rows


def _estimate_rows(report: Report, reckoned: Estimate) -> list[tuple[str, str]]:
    tally = report.tally
    basis = "assumed: no stored item tells" if reckoned.assumed else "as stored items took"
    money = reckoned.currency
    return [
        ("to encode", f"{tally.missing:,}, {human_bytes(tally.output_bytes)} before compression"),
        ("estimated time", human_seconds(reckoned.seconds)),
        ("  of it encoding", f"{human_seconds(reckoned.encode_seconds)} ({basis})"),
        (
            "estimated cost",
            f"{reckoned.encoding + reckoned.requests:.2f} {money} once, "
            f"{reckoned.storage_month:.2f} {money} a month",
        ),
    ]
