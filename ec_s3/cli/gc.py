"""`gc`: find what no server will use again, and delete it when told to.

One coroutine on an open store. Without `--yes` it only looks. It takes nothing whose owner may
still be there: no folder that was written to of late, no format of a newer release, no object and
no upload that is not ours, and never a control document.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from ec_s3.cli.control import spared
from ec_s3.cli.crew import each
from ec_s3.cli.deleting import Spool, delete_shown
from ec_s3.cli.garbage import Finding, Reason, Rules, judge
from ec_s3.cli.inventory import DAY, is_document, survey
from ec_s3.cli.invocation import with_store
from ec_s3.cli.namespaces import describe_all, withheld
from ec_s3.cli.output import ExitCode, Output, counted, human_bytes, human_seconds
from ec_s3.cli.removal import parse_age
from ec_s3.cli.targets import ROOT, items, namespace_of
from ec_s3.errors import FrameError, FrameVersionError, RemoteError

if TYPE_CHECKING:
    from ec_s3.cli.inventory import Inventory
    from ec_s3.config import ECConfig
    from ec_s3.multiparts import Multiparts
    from ec_s3.store import Store
    from ec_s3.types import ObjectInfo

commands = typer.Typer()

UPLOAD_SECONDS = DAY
"""Age from which an unfinished upload is taken for abandoned; none takes hours."""

_AT_ONCE = 64
_LEAD_BYTES = 64


@commands.command("gc", epilog="Example: ec-s3 gc --older-than 14d, and with --yes to delete")
def _gc(
    context: typer.Context,
    older_than: Annotated[
        str,
        typer.Option(
            help="Leave namespaces alone that were written to within this time, as in `30d`."
        ),
    ] = "30d",
    idle: Annotated[
        str | None,
        typer.Option(help="Also namespaces that nothing was written to for so long, used or not."),
    ] = None,
    formats: Annotated[
        bool,
        typer.Option(
            "--formats", help="Also objects of formats that no reader knows: one request each."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it nothing is.")] = False,
) -> None:
    """Find what no server will use again, and with --yes delete it.

    That is: namespaces of older weights or without a description, formats that no reader knows, and
    multipart uploads that never ended.
    """

    async def run(store: Store, out: Output, config: ECConfig) -> int:
        rules = Rules(
            older_than=parse_age(older_than),
            idle=None if idle is None else parse_age(idle),
            formats=formats,
        )
        multiparts = _multiparts(config)
        try:
            return await gc(store, out, rules, multiparts=multiparts, yes=yes)
        finally:
            if multiparts is not None:
                await multiparts.aclose()

    with_store(context, run)


async def gc(
    store: Store, out: Output, rules: Rules, *, multiparts: Multiparts | None, yes: bool
) -> ExitCode:
    """Report what can go; with `yes` delete it.

    Raises:
        RemoteError: the store failed.
    """
    inventory = await survey(store, out)
    described = await describe_all(store, (name.partition("/")[0] for name in inventory.folders))
    hidden = await withheld(store, inventory.documented - described.keys())
    for folder in hidden:
        out.note(f"{folder} is not judged: its description is there, but may not be read")
    findings = judge(inventory, described, rules, hidden=hidden)
    blind = bool(hidden)
    with Spool() as spool:
        if rules.formats:
            doomed = {finding.place for finding in findings}
            findings += await _old_formats(store, out, inventory, doomed=doomed, spool=spool)
        try:
            findings += await _uploads(multiparts)
        except RemoteError as error:
            blind = True
            out.note(f"unfinished uploads are not looked at: {error}")
        _report(out, findings, dry=not yes)
        if not yes:
            return ExitCode.FINDING if blind else ExitCode.OK
        complete = await _delete(store, out, findings, multiparts)
    return ExitCode.FINDING if blind or not complete else ExitCode.OK


async def _old_formats(
    store: Store, out: Output, inventory: Inventory, *, doomed: set[str], spool: Spool
) -> list[Finding]:
    """Objects in formats before those that this release reads, in folders that stay."""
    finding = Finding(Reason.FORMAT, ROOT, keys=spool)
    with out.progress("reading", sum(f.objects for f in inventory.folders.values())) as advance:

        async def look(info: ObjectInfo) -> None:
            advance(1)
            folder = f"{info.key.rsplit('/', 3)[0]}/"
            if folder not in doomed and await _is_of_old_format(store, info.key):
                spool.add(info.key, info.size)
                finding.objects += 1
                finding.nbytes += info.size
                finding.newest = max(finding.newest, info.modified)

        await each(items(store, ROOT), look, at_once=_AT_ONCE)
    return [finding] if finding.objects else []


async def _is_of_old_format(store: Store, key: str) -> bool:
    from ec_s3.cli.crew import patiently
    from ec_s3.header import READABLE_VERSIONS, read_header

    found = await patiently(
        lambda: store.get(key, into=lambda n: memoryview(bytearray(n)), length=_LEAD_BYTES)
    )
    if found is None:
        return False
    try:
        read_header(found.body, max_tensor_bytes=1)
    except FrameVersionError as error:
        return error.version < min(READABLE_VERSIONS)
    except FrameError:  # cut off behind its version, or damaged, which is for `verify`
        return False
    return False


def _multiparts(config: ECConfig) -> Multiparts | None:
    """The unfinished uploads of the configured store, None where it has no such thing."""
    from ec_s3.url import S3Location

    location = config.location()
    if not isinstance(location, S3Location):
        return None
    from ec_s3.multiparts import Multiparts  # the SDK takes a third of a second to import

    return Multiparts(location, config.s3_options())


async def _uploads(multiparts: Multiparts | None) -> list[Finding]:
    """Unfinished uploads of items that were begun a day ago or earlier."""
    if multiparts is None:
        return []
    finding = Finding(Reason.UPLOAD)
    async for upload in multiparts.list():
        if namespace_of(upload.key) is not None and upload.started < time.time() - UPLOAD_SECONDS:
            finding.objects += 1
            finding.nbytes += await multiparts.size(upload)
            finding.newest = max(finding.newest, upload.started)
            finding.uploads.append(upload)
    return [finding] if finding.uploads else []


def _report(out: Output, findings: list[Finding], *, dry: bool) -> None:
    objects, nbytes = sum(f.objects for f in findings), sum(f.nbytes for f in findings)
    if out.json:
        for finding in findings:
            out.record(finding.facts())
        if dry:
            out.record({"dry_run": True, "objects": objects, "bytes": nbytes})
        return
    rows = [
        (
            finding.reason.value,
            finding.place or "-",
            finding.model or "-",
            finding.objects,
            human_bytes(finding.nbytes),
            human_seconds(max(0.0, time.time() - finding.newest)),
        )
        for finding in findings
    ]
    if rows:
        out.table("", ("Why", "Where", "Model", "Objects", "Stored", "Newest"), rows)
    out.line(f"{counted(objects, 'object')}, {human_bytes(nbytes)} can go")
    if dry and rows:
        out.note("nothing was deleted; --yes does it")


async def _delete(
    store: Store, out: Output, findings: list[Finding], multiparts: Multiparts | None
) -> bool:
    """Delete what was found; whether nothing of it is left."""
    with Spool() as spool:
        for finding in findings:
            if finding.keys is not None:
                for key in finding.keys:
                    spool.add(key, 0)
            elif finding.place:
                await _set_aside(store, out, finding, spool)
        total = await delete_shown(store, out, spool)
    aborted = 0
    for upload in (upload for finding in findings for upload in finding.uploads):
        assert multiparts is not None
        try:
            await multiparts.abort(upload)
            aborted += 1
        except RemoteError as error:
            total.failed[f"{upload.key} (unfinished upload)"] = str(error)
    if out.json:
        record = {"dry_run": False, "deleted": total.deleted, "aborted": aborted}
        out.record({**record, "failed": total.failed, "untried": total.untried})
    else:
        total.report(out)
        out.line(
            f"{counted(total.deleted, 'object')} deleted, "
            f"{counted(aborted, 'upload')} aborted, {len(total.failed):,} failed"
        )
    return total.complete


def _is_ours(key: str) -> bool:
    return namespace_of(key) is not None or is_document(key)


async def _set_aside(store: Store, out: Output, finding: Finding, spool: Spool) -> None:
    """Collect the keys of a place, unless somebody has begun to write there again."""
    with Spool() as keys:
        async for info in store.list(finding.place):
            if namespace_of(info.key) is not None and info.modified > finding.newest:
                out.note(f"{finding.place} was written to meanwhile, and is left alone")
                return
            if _is_ours(info.key) and not spared(info.key, finding.place):
                keys.add(info.key, info.size)
        for key in keys:
            spool.add(key, 0)
