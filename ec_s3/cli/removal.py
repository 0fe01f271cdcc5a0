"""`rm`: delete objects by key, identifier, namespace, age or tenant, and tell running servers.

One coroutine on an open store. What is to go is set aside first, counted and confirmed, then told
to the servers of its namespaces, then deleted. Salts are read from files, never from the command
line, and appear nowhere.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path  # noqa: TC003  typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from ec_s3.cli.control import announce, announce_all, spared
from ec_s3.cli.crew import each
from ec_s3.cli.deleting import Deletion, Spool, delete_shown
from ec_s3.cli.inventory import survey
from ec_s3.cli.invocation import IdentifierOption, NamespaceOption, with_store
from ec_s3.cli.namespaces import describe_all
from ec_s3.cli.output import ExitCode, Output, counted, human_bytes
from ec_s3.cli.targets import ROOT, Target, absent, matching, namespace_of
from ec_s3.errors import ConfigError, FrameError
from ec_s3.keys import bind, salt_hmac, salted_names
from ec_s3.sources import parse_duration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ec_s3.config import ECConfig
    from ec_s3.header import Header
    from ec_s3.store import Store
    from ec_s3.types import ObjectInfo

commands = typer.Typer()

AT_ONCE = 64


class Since(StrEnum):
    """What an object's age counts from."""

    MODIFIED = "modified"
    CREATED = "created"


@commands.command("rm", epilog="Example: ec-s3 rm --namespace NAMESPACE --older-than 30d")
def _rm(
    context: typer.Context,
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="Object key, or the beginning of keys.")
    ] = None,
    identifier: IdentifierOption = None,
    namespace: NamespaceOption = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only items of at least this age: `30d`, `12h`.")
    ] = None,
    by: Annotated[
        Since, typer.Option(help="Age since the object was written, or its item encoded.")
    ] = Since.MODIFIED,
    cache_salt_file: Annotated[
        Path | None,
        typer.Option(help="Only items of requests whose `cache_salt` is in this file."),
    ] = None,
    salt_file: Annotated[
        Path | None,
        typer.Option(help="All namespaces of the tenant whose `salt` is in this file."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
) -> None:
    """Delete objects, also from running servers; asks for their number first."""

    async def run(store: Store, out: Output, _config: ECConfig) -> int:
        if key == "":  # a script's unset variable must not select everything
            raise ConfigError("the key is empty: leave it out to mean every namespace")
        selection = Selection(
            target=Target(key or "", identifier, namespace),
            before=None if older_than is None else time.time() - parse_age(older_than),
            since=by,
            cache_salt=_secret(cache_salt_file),
            salt=_secret(salt_file),
        )
        return await rm(store, out, selection, yes=yes)

    with_store(context, run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is to go.

    Attributes:
        target: where; may name nothing when another field does.
        before: only items from before this time, in seconds since the epoch.
        since: what that time is compared with.
        cache_salt: only items under this salt of requests.
        salt: only namespaces under this salt of a deployment.

    Raises:
        ConfigError: nothing is named, or two fields exclude each other.
    """

    target: Target = field(default_factory=Target)
    before: float | None = None
    since: Since = Since.MODIFIED
    cache_salt: str | None = field(default=None, repr=False)
    salt: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.salt is not None and self.target.names_something:
            raise ConfigError("--salt-file finds its namespaces itself: name nothing beside it")
        if not self.filters and self.salt is None:
            self.target.prefix()  # complains

    @property
    def filters(self) -> bool:
        """Whether items are chosen one by one."""
        return self.before is not None or (
            self.cache_salt is not None and self.target.identifier is None
        )

    @property
    def reads_headers(self) -> bool:
        """Whether an item's header must be read to know."""
        by_salt = self.cache_salt is not None and self.target.identifier is None
        return by_salt or (self.before is not None and self.since is Since.CREATED)

    def named(self) -> Target:
        """The target; an identifier as it is stored under the salt of its requests."""
        target = self.target
        if target.identifier is None:
            return target
        return Target(
            target.text, bind(target.identifier, self.cache_salt), namespace=target.namespace
        )

    def decides(self, info: ObjectInfo) -> bool | None:
        """Whether an item goes, None when its header must tell."""
        by_listing = self.before is not None and self.since is Since.MODIFIED
        if by_listing and not _is_before(info.modified, self.before):
            return False
        return None if self.reads_headers else True

    def admits(self, header: Header) -> bool:
        """Whether an item with this header goes."""
        by_header = self.before is not None and self.since is Since.CREATED
        if by_header and not _is_before(header.created, self.before):
            return False
        if self.cache_salt is None or self.target.identifier is not None:
            return True
        return header.identifier.startswith(salted_names(self.cache_salt))


def _is_before(moment: float, limit: float | None) -> bool:
    """Whether a time lies before another; one that is not known (0.0) does not."""
    return limit is not None and 0.0 < moment < limit


def parse_age(text: str) -> float:
    """Seconds of an age such as `30d`.

    Raises:
        ConfigError: it is none, or its unit is left to a guess: 30 would be seconds and 6m minutes
            to us, and days and months to whoever loses what is younger.
    """
    age = text.strip()
    try:
        seconds = parse_duration(age)
    except ValueError:
        seconds = math.nan
    if age[-1:].isdigit() and seconds > 0:
        seconds = math.nan
    if math.isnan(seconds) or re.fullmatch(r"[\d. ]+m", age, re.IGNORECASE):
        raise ConfigError(
            f"{text!r} is no age: give a number with its unit (s, min, h or d), as in 12h or 30d"
        )
    return seconds


async def rm(store: Store, out: Output, selection: Selection, *, yes: bool) -> ExitCode:
    """Delete objects, after `--yes` or their typed number, and tell running servers.

    Raises:
        ConfigError: not confirmed; nothing is deleted.
        RemoteError: the store failed.
    """
    prefixes, unclear = await _places(store, out, selection)
    with Spool() as spool:
        unclear += await _set_aside(store, out, selection, prefixes, spool)
        if not spool.count:
            return await _nothing(store, out, selection, prefixes, unclear=unclear, yes=yes)
        objects = counted(spool.count, "object")
        question = f"{objects}, {human_bytes(spool.nbytes)}. Type the number to delete:"
        if not yes and not out.confirm(question, expected=str(spool.count)):
            raise ConfigError(f"nothing deleted: {objects}, without --yes or the typed number")
        whole = not selection.filters and all(map(_holds_whole_folders, prefixes))
        told = await announce(store, out, spool, whole=whole)
        deletion = await delete_shown(store, out, spool)
        _report(out, deletion, nbytes=spool.nbytes, told=told, unclear=unclear)
    return ExitCode.OK if told and deletion.complete and not unclear else ExitCode.FINDING


async def _places(store: Store, out: Output, selection: Selection) -> tuple[list[str], int]:
    """How the keys begin that are looked at, and how many folders might belong there too."""
    if selection.salt is None:
        target = selection.named()
        return [target.prefix() if target.names_something else ROOT], 0
    inventory = await survey(store, out)
    folders = {name.partition("/")[0] for name in inventory.folders} | inventory.documented
    described = await describe_all(store, folders)
    unknown = folders - described.keys()
    for folder in sorted(unknown):
        out.note(f"{folder} does not say whose it is: it has no namespace.json of its own")
    wanted = salt_hmac(selection.salt)
    own = (name for name, text in sorted(described.items()) if text.text("salt") == wanted)
    return [f"{ROOT}{name}/" for name in own], len(unknown)


async def _set_aside(
    store: Store, out: Output, selection: Selection, prefixes: list[str], spool: Spool
) -> int:
    """Collect the keys that go; how many items might, but cannot be read."""
    from ec_s3.cli.reading import Demands, header_of
    from ec_s3.lookup import MAX_TENSOR_BYTES

    anything = Demands(MAX_TENSOR_BYTES, None)  # also what no server would take
    unclear = 0

    async def look(info: ObjectInfo) -> None:
        nonlocal unclear
        goes = selection.decides(info)
        if goes is None:
            try:
                header = await header_of(store, info.key, anything)
            except FrameError as error:
                unclear += 1
                out.note(f"{info.key} tells nothing of itself: {error}")
                return
            if header is None and await _is_listed(store, info.key):
                unclear += 1
                out.note(f"{info.key} may not be read")
                return
            goes = header is not None and selection.admits(header)
        if goes:
            spool.add(info.key, info.size)

    with out.progress("looking") as advance:

        async def candidates() -> AsyncIterator[ObjectInfo]:
            for prefix in prefixes:
                async for info in matching(store, prefix):
                    advance(1)
                    document = selection.filters and namespace_of(info.key) is None
                    if not document and not spared(info.key, prefix):
                        yield info

        if selection.reads_headers:
            await each(candidates(), look, at_once=AT_ONCE)
        else:
            async for info in candidates():
                await look(info)
    return unclear


async def _is_listed(store: Store, key: str) -> bool:
    """Whether an object is there: a store's refusal to show it looks like its absence."""
    async for info in store.list(key):
        if info.key == key:
            return True
    return False


async def _nothing(
    store: Store,
    out: Output,
    selection: Selection,
    prefixes: list[str],
    *,
    unclear: int,
    yes: bool,
) -> ExitCode:
    """Nothing in the bucket is to go; an item that was named may still be in servers' memory."""
    if selection.filters or selection.salt is not None:
        _report(out, Deletion(), nbytes=0, told=True, unclear=unclear)
        return ExitCode.FINDING if unclear else ExitCode.OK
    [key] = prefixes
    namespace = selection.target.namespace
    whole = namespace is not None and _holds_whole_folders(key)
    if not yes and (whole or namespace_of(key) is not None):
        out.note("with --yes running servers are told to forget it all the same")
    elif yes and namespace is not None and whole:
        await announce_all(store, out, namespace)
    elif yes:
        await announce(store, out, [key])
    return absent(out, selection.named())


def _holds_whole_folders(prefix: str) -> bool:
    """Whether nothing of a namespace's folder lies beside what begins like this."""
    return prefix.rstrip("/").count("/") <= 1


def _report(out: Output, deletion: Deletion, *, nbytes: int, told: bool, unclear: int) -> None:
    if out.json:
        record = {"deleted": deletion.deleted, "failed": deletion.failed, "bytes": nbytes}
        out.record({**record, "told": told, "untried": deletion.untried, "unclear": unclear})
        return
    deletion.report(out)
    if unclear:
        out.note(f"{unclear:,} more may belong here, and are left: see above")
    out.line(f"{deletion.deleted:,} deleted, {len(deletion.failed):,} failed")
    if deletion.deleted and told:
        out.note("running servers follow within a minute")


def _secret(path: Path | None) -> str | None:
    """The text in a file without the end of its line.

    Raises:
        ConfigError: it is empty, or no text.
        OSError: it cannot be read.
    """
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: the salt is no UTF-8 text") from None
    if not text:
        raise ConfigError(f"{path} is empty: a salt was expected")
    return text
