"""`verify`: read objects whole and check everything about them; remove the bad ones on demand.

One coroutine on an open store. Several objects at once, bounded in number and in bytes; the listing
waits for the checks, so memory does not grow with the namespace. What cannot be read is no bad
object, and what another release or setting may read is never removed.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from ec_s3.budget import ByteBudget
from ec_s3.cli.crew import each, patiently
from ec_s3.cli.deleting import Deletion, Spool, delete_shown
from ec_s3.cli.invocation import IdentifierOption, NamespaceOption, TargetArgument, with_store
from ec_s3.cli.objects import bad as say_bad
from ec_s3.cli.output import ExitCode, Output, counted, human_bytes
from ec_s3.cli.targets import Target, absent, items
from ec_s3.errors import (
    ConfigError,
    FrameError,
    FrameTooLargeError,
    FrameVersionError,
    RemoteError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ec_s3.cli.reading import Demands
    from ec_s3.config import ECConfig
    from ec_s3.store import Store
    from ec_s3.types import ObjectInfo

commands = typer.Typer()

AT_ONCE = 32
BYTES_AT_ONCE = 256 << 20
MAX_REMOVED = 100_000
"""Bad objects that one run removes."""

_CHUNK_BYTES = 1 << 20  # what decoding needs beside the object
_FAILURES_IN_A_ROW = 10
_SPARED = (FrameTooLargeError, FrameVersionError)


@commands.command(
    "verify", epilog="Example: ec-s3 verify --namespace NAMESPACE --sample 5% --remove"
)
def _verify(
    context: typer.Context,
    key: TargetArgument = "",
    identifier: IdentifierOption = None,
    namespace: NamespaceOption = None,
    sample: Annotated[
        str | None, typer.Option(help="Check so many objects, or so many percent: `500`, `2%`.")
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Delete bad objects; asks for their number first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
) -> None:
    """Read and decode objects with every check, with signing keys set also their signatures."""

    async def run(store: Store, out: Output, config: ECConfig) -> int:
        from ec_s3.cli.reading import Demands

        if yes and not remove:
            raise ConfigError("--yes has no effect without --remove")
        return await verify(
            store,
            out,
            Target(key, identifier, namespace),
            demands=Demands.of(config),
            sample=None if sample is None else parse_sample(sample),
            remove=(lambda _: True) if yes else _asker(out) if remove else None,
        )

    with_store(context, run)


@dataclass(frozen=True, slots=True)
class Sample:
    """Which objects are checked: so many, or each with a probability."""

    count: int = 0
    share: float = 0.0


@dataclass(slots=True)
class _Tally:
    """What was found so far; `bad` are keys and versions of objects that can be removed."""

    listed: int = 0
    taken: int = 0
    nbytes: int = 0
    gone: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[str, str]] = field(default_factory=list)
    unreadable: int = 0
    in_a_row: int = 0

    @property
    def checked(self) -> int:
        return self.taken - self.gone - self.unreadable

    @property
    def found(self) -> int:
        return self.reasons.total()


def parse_sample(text: str) -> Sample:
    """A sample from `500` or `2%`.

    Raises:
        ConfigError: neither.
    """
    match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)%", text.strip(), re.ASCII)
    if match is not None:
        sample = Sample(count=int(match[1] or 0), share=float(match[2] or 0) / 100)
        if sample != Sample() and sample.share <= 1:
            return sample
    raise ConfigError(f"--sample {text!r}: give a number above 0, or a percentage such as 2%")


async def verify(
    store: Store,
    out: Output,
    target: Target,
    *,
    demands: Demands,
    sample: Sample | None = None,
    remove: Callable[[int], bool] | None = None,
) -> ExitCode:
    """Read and decode objects with every check; report those that fail.

    Args:
        store: where they lie.
        out: takes the report.
        target: which objects.
        demands: what they must be.
        sample: how many of them, None for all.
        remove: asked whether so many bad objects shall be deleted; None deletes none.

    Raises:
        RemoteError: objects cannot be read, one after the other.
    """
    tally = _Tally()
    inspector = _Inspector(store, out, demands, tally)
    with out.progress("verifying", sample.count or None if sample else None) as advance:

        async def check(info: ObjectInfo) -> None:
            await inspector.check(info)
            advance(1)

        await each(_chosen(store, target.prefix(), sample, tally), check, at_once=AT_ONCE)
    if not tally.listed:
        return absent(out, target)
    deletion = None
    if tally.bad and remove is not None and remove(len(tally.bad)):
        deletion = await _remove(store, out, tally.bad)
    _summarise(out, tally, deletion)
    blind = not tally.checked and (tally.gone or tally.unreadable)
    return ExitCode.FINDING if tally.found or tally.unreadable or blind else ExitCode.OK


class _Inspector:
    """Checks objects one by one, any number at once."""

    def __init__(self, store: Store, out: Output, demands: Demands, tally: _Tally) -> None:
        self._store = store
        self._out = out
        self._demands = demands
        self._tally = tally
        self._budget = ByteBudget(BYTES_AT_ONCE)

    async def check(self, info: ObjectInfo) -> None:
        """Read an object and note what is wrong with it.

        Raises:
            RemoteError: this and several before it could not be read.
        """
        need = info.size + _CHUNK_BYTES
        await self._budget.acquire(need)
        try:
            await self._check(info)
        finally:
            self._budget.release(need)

    async def _check(self, info: ObjectInfo) -> None:
        from ec_s3.cli.reading import body_of, inspect

        tally, etag = self._tally, info.etag
        tally.taken += 1
        try:
            result = await body_of(self._store, info, self._demands)
            if result is None:
                tally.gone += 1
                return
            etag = result.info.etag
            tally.nbytes += result.info.size
            tally.in_a_row = 0
            await inspect(result, self._demands)
        except FrameError as error:
            self._bad(info.key, etag, error)
        except RemoteError as error:
            self._unreadable(info.key, error)

    def _bad(self, key: str, etag: str, error: FrameError) -> None:
        tally = self._tally
        tally.reasons[error.reason] += 1
        if not isinstance(error, _SPARED) and len(tally.bad) < MAX_REMOVED:
            tally.bad.append((key, etag))
        say_bad(self._out, key, error)

    def _unreadable(self, key: str, error: RemoteError) -> None:
        tally = self._tally
        tally.unreadable += 1
        tally.in_a_row += 1
        if tally.in_a_row >= _FAILURES_IN_A_ROW:
            raise error
        if self._out.json:
            self._out.record({"key": key, "error": type(error).__name__, "message": str(error)})
        else:
            self._out.line(f"{key}: {error}", style="yellow")


async def _chosen(
    store: Store, prefix: str, sample: Sample | None, tally: _Tally
) -> AsyncIterator[ObjectInfo]:
    kept: list[ObjectInfo] = []
    chance = random.Random()  # noqa: S311  no secret
    async for info in items(store, prefix):
        tally.listed += 1
        if sample is None or chance.random() < sample.share:
            yield info
        elif sample.count:  # a reservoir: every object stays with the same probability
            if len(kept) < sample.count:
                kept.append(info)
            elif (place := chance.randrange(tally.listed)) < sample.count:
                kept[place] = info
    for info in kept:
        yield info


def _asker(out: Output) -> Callable[[int], bool]:
    def ask(number: int) -> bool:
        question = f"{counted(number, 'bad object')}. Type the number to delete:"
        if out.confirm(question, expected=str(number)):
            return True
        out.note("nothing deleted, without --yes or the typed number")
        return False

    return ask


async def _remove(store: Store, out: Output, bad: list[tuple[str, str]]) -> Deletion:
    """Delete those that are still what was checked: a server may have repaired others."""

    async def compare(item: tuple[str, str]) -> None:
        key, etag = item
        info = await patiently(lambda: store.head(key))
        if info is not None and info.etag == etag:
            same.add(key, info.size)

    async def listed() -> AsyncIterator[tuple[str, str]]:
        for item in bad:
            yield item

    with Spool() as same:
        await each(listed(), compare, at_once=AT_ONCE)
        return await delete_shown(store, out, same)


def _summarise(out: Output, tally: _Tally, deletion: Deletion | None) -> None:
    if out.json:
        out.record(
            {
                "checked": tally.checked,
                "bad": tally.found,
                "reasons": dict(tally.reasons),
                "listed": tally.listed,
                "bytes": tally.nbytes,
                "gone": tally.gone,
                "unreadable": tally.unreadable,
                "removed": 0 if deletion is None else deletion.deleted,
                "failed": {} if deletion is None else deletion.failed,
            }
        )
        return
    if deletion is not None:
        deletion.report(out)
    kinds = ", ".join(f"{number} {reason}" for reason, number in tally.reasons.most_common())
    checked = counted(tally.checked, "object")
    if tally.listed > tally.checked:
        checked = f"{tally.checked:,} of {counted(tally.listed, 'object')}"
    parts = [f"{checked}, {human_bytes(tally.nbytes)}: "]
    parts.append(f"{tally.found} bad ({kinds})" if kinds else "none bad")
    if tally.unreadable:
        parts.append(f", {tally.unreadable} cannot be read")
    if tally.gone:
        parts.append(f", {tally.gone} gone meanwhile or not readable")
    if deletion is not None:
        parts.append(f"; {deletion.deleted} deleted")
    out.line("".join(parts))
