"""The commands on running servers: `control show`, `disable`, `enable`, `invalidate-before`.

Each is one coroutine on an open store, which reads or changes a namespace's control document and
nothing else. `announce` tells servers what `rm` is about to delete.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from ec_s3.cli.invocation import NamespaceArgument, with_store
from ec_s3.cli.output import ExitCode, Output, counted, human_seconds
from ec_s3.control import MAX_DELETED, Control, edit, load
from ec_s3.errors import CapacityError, ConfigError, ECS3Error, InvalidKeyError, RemoteError
from ec_s3.keys import CONTROL_NAME, KEY_VERSION, parse_key
from ec_s3.permissions import SPARED_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ec_s3.config import ECConfig
    from ec_s3.store import Store

commands = typer.Typer(
    help="Tell the running servers of a namespace what holds from now on.", no_args_is_help=True
)

DELETED_SECONDS = 3600.0
"""How long a deleted item may not come back: all servers have heard of it long before."""

AHEAD_SECONDS = 60.0
"""How far a clock may be ahead of this one."""

_LISTED = 10_000
_FREE = {"cache": "on", "objects count": "all", "deleted": "none"}


@commands.command("show", epilog="Example: ec-s3 control show org-model-0123456789abcdef")
def _show(context: typer.Context, namespace: NamespaceArgument) -> None:
    """Say what holds for the servers of a namespace."""

    async def run(store: Store, out: Output, _config: ECConfig) -> int:
        return await show(store, out, namespace)

    with_store(context, run)


@commands.command("disable", epilog="Example: ec-s3 control disable org-model-0123456789abcdef")
def _disable(context: typer.Context, namespace: NamespaceArgument) -> None:
    """Switch the cache off on every server of a namespace."""
    _switch(context, namespace, enabled=False)


@commands.command("enable", epilog="Example: ec-s3 control enable org-model-0123456789abcdef")
def _enable(context: typer.Context, namespace: NamespaceArgument) -> None:
    """Switch the cache on again."""
    _switch(context, namespace, enabled=True)


def _switch(context: typer.Context, namespace: str, *, enabled: bool) -> None:
    async def run(store: Store, out: Output, _config: ECConfig) -> int:
        return await switch(store, out, namespace, enabled=enabled)

    with_store(context, run)


@commands.command(
    "invalidate-before",
    epilog="Example: ec-s3 control invalidate-before org-model-0123456789abcdef now",
)
def _invalidate(
    context: typer.Context,
    namespace: NamespaceArgument,
    time: Annotated[
        str,
        typer.Argument(metavar="TIME", help="`now`, 2026-01-31T12:00:00Z, or seconds; 0: none."),
    ],
) -> None:
    """Let objects made before a time no longer count."""

    async def run(store: Store, out: Output, _config: ECConfig) -> int:
        return await invalidate(store, out, namespace, time)

    with_store(context, run)


async def show(store: Store, out: Output, namespace: str) -> ExitCode:
    """Say what holds for a namespace."""
    control = await load(store, _key(namespace)) or Control()
    _report(out, namespace, control)
    return ExitCode.OK


async def switch(store: Store, out: Output, namespace: str, *, enabled: bool) -> ExitCode:
    """Switch every server of a namespace on or off."""
    return await _change(store, out, namespace, lambda control: replace(control, enabled=enabled))


async def invalidate(store: Store, out: Output, namespace: str, before: str) -> ExitCode:
    """Let objects made before a time no longer count."""
    valid_after = parse_time(before)
    if valid_after > time.time() + AHEAD_SECONDS:
        raise ConfigError(f"{before} is in the future: until then no new object would count either")
    return await _change(
        store, out, namespace, lambda control: replace(control, valid_after=valid_after)
    )


async def in_force(store: Store) -> tuple[int, dict[str, str]]:
    """The namespaces that some of the store's first objects are of, and what restricts them.

    Returns:
        How many there are, and for those whose document restricts anything what it says.

    Raises:
        ControlError: what lies in a document's place is none.
        RemoteError: the store failed.
    """
    keys: dict[str, str] = {}
    seen = 0
    async for info in store.list(f"v{KEY_VERSION}/"):
        seen += 1
        if seen > _LISTED:
            break
        namespace = info.key.split("/")[1]
        with contextlib.suppress(InvalidKeyError):
            keys.setdefault(namespace, _key(namespace))
    found = {}
    for namespace, key in keys.items():
        control = await load(store, key) or Control()
        said = {name: text for name, text in _said(control).items() if text != _FREE[name]}
        if said:
            found[namespace] = ", ".join(f"{name} {text}" for name, text in said.items())
    return len(keys), found


def parse_time(text: str) -> float:
    """Seconds since the epoch of `now`, a date and time of ISO 8601, or a number of seconds.

    A time without a zone is UTC.

    Raises:
        ConfigError: none of these, or before the epoch, which no document can say.
    """
    if text == "now":
        return time.time()
    if text.isascii() and text.replace(".", "", 1).isdigit():
        return float(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is no time: give now, 2026-01-31T12:00:00Z, or seconds since 1970"
        ) from None
    seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if seconds < 0:
        raise ConfigError(f"{text!r} is before 1970; 0 lets objects of any time count")
    return seconds


def spared(key: str, named: str) -> bool:
    """Whether `rm` leaves a key alone: a document that holds, unless exactly it is named."""
    return key.endswith(f"/{CONTROL_NAME}") and key != named


async def announce(store: Store, out: Output, keys: Iterable[str], *, whole: bool = False) -> bool:
    """Tell running servers that items are deleted, so that none brings them back; whether it could.

    A namespace whose servers cannot be told is named in a note.

    Args:
        store: where the documents lie.
        out: takes the notes.
        keys: of the items; of others no more than the folder counts, and that when it is `whole`.
        whole: nothing of their namespaces shall be left, so that whatever was made up to now does
            not count either, whether it is in the bucket or still in a server's memory.
    """
    folders: dict[str, list[str]] = {}
    full: set[str] = set()
    for key in keys:
        if key.rsplit("/", 3)[0] in full:
            continue
        try:
            parsed = parse_key(key)
        except InvalidKeyError:
            if whole:  # a folder may hold documents alone, and its servers still have items
                with contextlib.suppress(InvalidKeyError):
                    folders.setdefault(_key(key), [])
            continue
        digests = folders.setdefault(parsed.control_key, [])
        digests.append(parsed.digest)
        if len(digests) > MAX_DELETED:  # one more than fits tells that they do not
            full.add(key.rsplit("/", 3)[0])
    told = True
    for control_key, digests in folders.items():
        now = time.time()

        def add(control: Control, digests: list[str] = digests, now: float = now) -> Control:
            return _without(control, digests, now=now, whole=whole)

        told &= await _tell(store, out, control_key, add)
    return told


async def announce_all(store: Store, out: Output, namespace: str) -> bool:
    """Tell running servers that nothing of a namespace counts that was made up to now."""
    now = time.time()
    return await _tell(
        store, out, _key(namespace), lambda control: _without(control, [], now=now, whole=True)
    )


async def _tell(
    store: Store, out: Output, control_key: str, change: Callable[[Control], Control]
) -> bool:
    try:
        _note_if_taken(out, await edit(store, control_key, change))
    except ECS3Error as error:
        out.note(f"running servers are not told ({control_key}): {error}")
        return False
    return True


def _without(control: Control, digests: list[str], *, now: float, whole: bool) -> Control:
    """The document after a deletion.

    Raises:
        CapacityError: it cannot name all of them.
    """
    if whole:
        # What a server uploads before it hears of this is younger than now.
        control = replace(control, valid_after=max(control.valid_after, now + AHEAD_SECONDS))
    try:
        return control.with_deleted(digests, until=now + DELETED_SECONDS, now=now)
    except CapacityError:
        if whole:
            return control
        raise


def _key(namespace: str) -> str:
    """Key of a namespace's control document.

    Raises:
        InvalidKeyError: no namespace as `ls` shows it, with or without its dtype.
    """
    name = namespace.strip("/").removeprefix(f"v{KEY_VERSION}/").partition("/")[0]
    return parse_key(f"v{KEY_VERSION}/{name}/bfloat16/00/{'0' * 64}").control_key


async def _change(
    store: Store, out: Output, namespace: str, change: Callable[[Control], Control]
) -> ExitCode:
    def lean(control: Control) -> Control:
        return change(control).with_deleted((), until=0.0, now=time.time())

    control = await edit(store, _key(namespace), lean, again=True)
    _report(out, namespace, control)
    _note_if_taken(out, control)
    if await _is_empty(store, namespace):
        out.note(f"nothing is stored in {namespace}: is that its name, as `ec-s3 ls` shows it?")
    if not out.json:
        out.note("running servers follow within a minute")
    return ExitCode.OK


async def _is_empty(store: Store, namespace: str) -> bool:
    """Whether a namespace holds nothing but its control document, as far as that can be seen."""
    key = _key(namespace)
    with contextlib.suppress(RemoteError):
        async for info in store.list(key.removesuffix(CONTROL_NAME)):
            if info.key != key:
                return False
        return True
    return False


def _note_if_taken(out: Output, control: Control) -> None:
    """Say so if a lifecycle rule takes a switched-off document, which deletions have made large."""
    if not control.enabled and len(control.pack()) >= SPARED_BYTES:
        out.note(
            "the deleted items make the document so large that a lifecycle rule removes it, and "
            "the switch with it, like an item: say `ec-s3 control disable` again in an hour"
        )


def _report(out: Output, namespace: str, control: Control) -> None:
    now = time.time()
    deleted = {digest: until for digest, until in control.deleted.items() if now < until}
    if out.json:
        out.record(
            {
                "namespace": namespace,
                "enabled": control.enabled,
                "valid_after": control.valid_after,
                "deleted": deleted,
            }
        )
        return
    for name, text in _said(control).items():
        out.line(f"{name:<15}{text}")


def _said(control: Control) -> dict[str, str]:
    """A document as a person reads it."""
    now = time.time()
    said = dict(_FREE)
    if not control.enabled:
        said["cache"] = "switched off"
    if control.valid_after:
        moment = datetime.fromtimestamp(control.valid_after, UTC)
        said["objects count"] = f"if made since {moment:%Y-%m-%d %H:%M:%S} UTC"
    deleted = [until for until in control.deleted.values() if now < until]
    if deleted:
        last = human_seconds(max(deleted) - now)
        said["deleted"] = f"{counted(len(deleted), 'item')}, kept out for {last} at most"
    return said
