"""`ec-s3 doctor`: every setting with its source, then checks of the store, each with its remedy.

The checks are a table; each returns a finding and may rely on those named in `needs`. They run one
after the other on one event loop, each under a deadline. They write one probe object under
`doctor/`, and once it could be removed again some small ones below a folder there; whatever
happens, they remove them, or leave 1 KiB where they may not. Never shows a credential.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import stat
import statistics
import time
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from ec_s3.cli import doctor_profile, settings
from ec_s3.cli.control import in_force
from ec_s3.cli.endpoint import credential_method, endpoint_url, server_time
from ec_s3.cli.output import ExitCode, Output, counted, human_bytes, human_seconds
from ec_s3.errors import RemoteError
from ec_s3.remote import open_store
from ec_s3.types import PutOutcome
from ec_s3.url import S3Location

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ec_s3.config import ECConfig
    from ec_s3.store import Store

CHECK_SECONDS = 60.0
_PAYLOAD_BYTES = 8 << 20
_HEADS = 5
_RANGE = (1 << 20) + 17, 4321
_SKEW_NOTED, _SKEW_REFUSED = 60.0, 600.0  # S3 refuses requests 15 minutes off


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: `ok`, `note` (works, worth knowing), `failed` or `skipped`."""

    status: str
    detail: str


@dataclass(slots=True)
class Probe:
    """What the checks share."""

    config: ECConfig
    store: Store | None
    key: str = field(default_factory=lambda: f"doctor/{secrets.token_hex(16)}")
    payload: bytes = field(default_factory=lambda: secrets.token_bytes(_PAYLOAD_BYTES))
    skew: float | None = None
    endpoint: str = ""
    removable: bool = False
    profile: doctor_profile.Profile | None = None

    @property
    def open_store(self) -> Store:
        """The store; only for checks that need `store`."""
        assert self.store is not None
        return self.store


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table.

    Attributes:
        name: what is checked.
        run: the check; a `RemoteError` from it is a failure.
        remedy: what to do when it fails or notes something.
        needs: checks that must not have failed or been skipped before.
    """

    name: str
    run: Callable[[Probe], Awaitable[Finding]]
    remedy: str
    needs: tuple[str, ...] = ()


async def examine(config: ECConfig, out: Output) -> ExitCode:
    """Show the settings, run every check, show what was found."""
    if not out.json:
        settings.table(config, out)
        out.line("")
    probe = Probe(config, open_store(config))
    try:
        results = await _run_all(probe, out)
    finally:
        if probe.store is not None:
            await probe.store.aclose()
    failed = sum(finding.status == "failed" for _, finding in results)
    if out.json:
        checks = [_record(*pair) for pair in results]
        profile = probe.profile and doctor_profile.recorded(probe.profile)
        out.record({**settings.described(config), "checks": checks, "profile": profile})
    else:
        if probe.profile is not None:
            out.line("")
            doctor_profile.show(probe.profile, out)
        notes = sum(finding.status == "note" for _, finding in results)
        out.line("")
        out.line(f"{len(results)} checks: {failed or 'none'} failed, {notes} with a note")
    return ExitCode.FINDING if failed else ExitCode.OK


async def _run_all(probe: Probe, out: Output) -> list[tuple[Check, Finding]]:
    results: list[tuple[Check, Finding]] = []
    usable: set[str] = set()
    try:
        for check in CHECKS:
            missing = [name for name in check.needs if name not in usable]
            if missing:
                finding = Finding("skipped", f"needs: {', '.join(missing)}")
            else:
                finding = await _run(check, probe)
            if finding.status in ("ok", "note"):
                usable.add(check.name)
            results.append((check, finding))
            if not out.json:
                _show(check, finding, out)
    finally:
        if "store" in usable and "delete" not in usable:
            await _clean(probe)  # even a write that failed may have left its object
    return results


async def _run(check: Check, probe: Probe) -> Finding:
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            return await check.run(probe)
    except (RemoteError, ConnectionError) as error:
        return Finding("failed", str(error))
    except TimeoutError:
        return Finding("failed", f"no answer within {CHECK_SECONDS:.0f} s")
    except Exception as error:  # noqa: BLE001  a check's border: its failure is a finding too
        return Finding("failed", f"{type(error).__name__}: {error}")


async def _clean(probe: Probe) -> None:
    with contextlib.suppress(RemoteError):  # the delete check has said so already
        await probe.open_store.delete([probe.key])


def _show(check: Check, finding: Finding, out: Output) -> None:
    style = {"ok": "green", "note": "yellow", "failed": "red", "skipped": "dim"}[finding.status]
    out.paragraph(f"{finding.status:<8}{check.name:<17}", finding.detail, style=style)
    if finding.status in ("failed", "note"):
        out.paragraph(f"{'':<8}-> ", check.remedy)


def _record(check: Check, finding: Finding) -> dict[str, object]:
    remedy = check.remedy if finding.status in ("failed", "note") else None
    return {
        "check": check.name,
        "status": finding.status,
        "detail": finding.detail,
        "remedy": remedy,
    }


async def _plugin(_: Probe) -> Finding:
    names = [point.name for point in entry_points(group="vllm.general_plugins")]
    if "ec_s3" not in names:
        return Finding("note", "the package is not installed; vLLM cannot find the connector")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "ec_s3" not in allowed.split(","):
        return Finding("failed", "VLLM_PLUGINS leaves ec_s3 out")
    return Finding("ok", "vLLM will find the connector")


async def _signing(probe: Probe) -> Finding:
    keyring = probe.config.keyring()
    if keyring is None:
        return Finding("ok", "off: whoever can write to the store is believed")
    detail = f"on: signs with {keyring.signer}, accepts {', '.join(keyring.ids)}"
    path = probe.config.signing_key_file
    if path is not None and path.stat().st_mode & stat.S_IROTH:
        return Finding("note", f"{detail}; every user of this machine can read {path}")
    return Finding("ok", detail)


async def _disk(probe: Probe) -> Finding:
    path = probe.config.local_disk
    if path is None:
        return Finding("skipped", "no disk tier")
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        return Finding("failed", f"{existing} is not writable")
    free = shutil.disk_usage(existing).free
    if free < probe.config.max_local_disk_size:
        return Finding("note", f"only {human_bytes(free)} free in {existing}")
    return Finding("ok", f"{human_bytes(free)} free in {existing}")


async def _store(probe: Probe) -> Finding:
    location = probe.config.location()
    if location is None:
        return Finding("skipped", "no url: nothing is shared between hosts or restarts")
    return Finding("ok", str(location))


async def _credentials(probe: Probe) -> Finding:
    location = probe.config.location()
    if not isinstance(location, S3Location):
        return Finding("ok", "not needed for a folder")
    method = await asyncio.to_thread(credential_method, location)
    return Finding("failed", "none found") if method is None else Finding("ok", f"found: {method}")


async def _endpoint(probe: Probe) -> Finding:
    location = probe.config.location()
    if not isinstance(location, S3Location):
        return Finding("ok", "a folder")
    url = await asyncio.to_thread(endpoint_url, location)
    probe.endpoint = url
    theirs = await asyncio.to_thread(server_time, url, probe.config)
    probe.skew = None if theirs is None else time.time() - theirs
    return Finding("ok", f"{url} answers")


async def _clock(probe: Probe) -> Finding:
    if probe.skew is None:
        return Finding("skipped", "the store tells no time")
    off = abs(probe.skew)
    status = "ok" if off < _SKEW_NOTED else "note" if off < _SKEW_REFUSED else "failed"
    return Finding(status, f"{probe.skew:+.0f} s against the endpoint's")


async def _list(probe: Probe) -> Finding:
    async for _ in probe.open_store.list():
        return Finding("ok", "allowed; the store holds objects")
    return Finding("ok", "allowed; the store is empty")


async def _control(probe: Probe) -> Finding:
    count, restricted = await in_force(probe.open_store)
    if not restricted:
        return Finding("ok", f"nothing is restricted in {counted(count, 'namespace')}")
    return Finding("note", "; ".join(f"{name}: {said}" for name, said in restricted.items()))


async def _write(probe: Probe) -> Finding:
    started = time.perf_counter()
    await probe.open_store.put(probe.key, [probe.payload])
    return Finding("ok", _speed(time.perf_counter() - started))


async def _conditional(probe: Probe) -> Finding:
    again = await probe.open_store.put(probe.key, [probe.payload])
    if again is not PutOutcome.EXISTS:
        return Finding("note", "put-if-absent is ignored")
    outcome = await probe.open_store.put(probe.key, [probe.payload], if_match='"0"')
    if outcome is not PutOutcome.CHANGED:
        return Finding("note", "put-if-absent works, put-if-match is ignored")
    return Finding("ok", "put-if-absent and put-if-match work")


async def _read(probe: Probe) -> Finding:
    started = time.perf_counter()
    body = await _get(probe)
    seconds = time.perf_counter() - started
    if body != probe.payload:
        return Finding("failed", "the bytes that came back are not those that were written")
    return Finding("ok", _speed(seconds))


async def _range(probe: Probe) -> Finding:
    start, length = _RANGE
    if await _get(probe, start=start, length=length) != probe.payload[start : start + length]:
        return Finding("failed", "a range came back wrong")
    return Finding("ok", "ranges come back right")


async def _latency(probe: Probe) -> Finding:
    times = []
    for _ in range(_HEADS):
        started = time.perf_counter()
        await probe.open_store.head(probe.key)
        times.append(time.perf_counter() - started)
    median = statistics.median(times)
    status = "ok" if median < probe.config.fetch_timeout / 4 else "note"
    return Finding(status, f"{human_seconds(median)} for a HEAD, median of {_HEADS}")


async def _delete(probe: Probe) -> Finding:
    report = await probe.open_store.delete([probe.key])
    for reason in report.failed.values():
        if "s3:DeleteObject" not in reason:  # the right that the error names where it is lacking
            return Finding("failed", reason)
        await probe.open_store.put(probe.key, [probe.payload[:1024]], if_absent=False)
        return Finding("note", reason)
    if await probe.open_store.head(probe.key) is not None:
        return Finding("failed", "the object is still there")
    probe.removable = True
    return Finding("ok", "allowed")


async def _profile(probe: Probe) -> Finding:
    location = probe.config.location()
    if not isinstance(location, S3Location):
        return Finding("ok", "a folder does all that is asked of a store")
    probe.profile = await doctor_profile.find_out(
        probe.config,
        location,
        probe.endpoint,
        folder=f"{probe.key}.d",
        writable=probe.removable,
        store=probe.open_store,
    )
    return Finding(*doctor_profile.verdict(probe.profile))


async def _get(probe: Probe, *, start: int = 0, length: int | None = None) -> bytes:
    result = await probe.open_store.get(
        probe.key, into=lambda n: memoryview(bytearray(n)), start=start, length=length
    )
    return b"" if result is None else bytes(result.body)


def _speed(seconds: float) -> str:
    rate = _PAYLOAD_BYTES / max(seconds, 1e-9) / 1e6
    return f"{human_bytes(_PAYLOAD_BYTES)} in {human_seconds(seconds)}, {rate:.0f} MB/s"


CHECKS = (
    Check(
        "vLLM plugin",
        _plugin,
        "install ec-s3 in vLLM's environment; add ec_s3 to VLLM_PLUGINS if that is set",
    ),
    Check("signing", _signing, "take the rights to read it from others (chmod o-r)"),
    Check("disk tier", _disk, "free space, lower max_local_disk_size, or choose another directory"),
    Check("store", _store, "set url"),
    Check(
        "credentials",
        _credentials,
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or give the machine a role",
        ("store",),
    ),
    Check(
        "endpoint",
        _endpoint,
        "check endpoint in url, name resolution, firewall and proxy; for a private certificate"
        " authority set ca_bundle",
        ("store",),
    ),
    Check("clock", _clock, "set this machine's clock; S3 refuses 15 minutes", ("endpoint",)),
    Check(
        "list",
        _list,
        "allow s3:ListBucket; serving works without it, `ls` and `verify` do not",
        ("endpoint",),
    ),
    Check(
        "control",
        _control,
        "nothing to do if it is meant; `ec-s3 control` shows and changes it, and a control.json "
        "that is no document can be removed with `ec-s3 rm`",
        ("list",),
    ),
    Check(
        "write",
        _write,
        "check the bucket's name and the credentials; allow s3:PutObject",
        ("endpoint",),
    ),
    Check(
        "conditional put",
        _conditional,
        "nothing to do: hosts that encode one item at the same time may both upload it",
        ("write",),
    ),
    Check("read", _read, "allow s3:GetObject; look for a proxy that changes bodies", ("write",)),
    Check("range", _range, "look for a proxy that drops the Range header", ("read",)),
    Check("latency", _latency, "choose a nearer endpoint, or raise fetch_timeout", ("write",)),
    Check(
        "delete",
        _delete,
        "nothing to do for servers and jobs: only a maintainer deletes, what stays in doctor/ too",
        ("write",),
    ),
    Check(
        "profile",
        _profile,
        "no gap loses an item or mixes two up, see docs/reference/store-profiles.md; probes that "
        "stay behind can be deleted by hand",
        ("endpoint",),
    ),
)
"""Every check in order."""
