"""`du`: objects, stored and raw bytes, by namespace and by age, as a table, records or a picture.

One coroutine on an open store, which changes nothing. Stored sizes are counted; raw ones stand in
headers, of which a sample is read, and the output says how many.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003  typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from ec_s3.cli.crew import each
from ec_s3.cli.inventory import AGES, DAY, survey
from ec_s3.cli.invocation import with_store
from ec_s3.cli.namespaces import describe_all
from ec_s3.cli.output import ExitCode, Output, counted, human_bytes
from ec_s3.cli.targets import ROOT
from ec_s3.cli.usage_picture import AGE_NAMES, Bar, draw
from ec_s3.errors import ConfigError, FrameError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ec_s3.cli.inventory import Folder, Inventory
    from ec_s3.config import ECConfig
    from ec_s3.store import Store
    from ec_s3.types import ObjectInfo

commands = typer.Typer()

_AT_ONCE = 32


@commands.command("du", epilog="Example: ec-s3 du --picture usage.svg")
def _du(
    context: typer.Context,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Beginning of keys.")] = ROOT,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw it into this file, an SVG picture.")
    ] = None,
) -> None:
    """Add up objects, stored and raw bytes by namespace and age."""

    async def run(store: Store, out: Output, _config: ECConfig) -> int:
        return await du(store, out, prefix=prefix, picture=picture)

    with_store(context, run)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one namespace and dtype takes.

    Attributes:
        namespace: `Namespace.id`.
        model: empty when that is not known.
        folder: what the listing showed.
        raw_bytes: tensor bytes, None when no header could be read.
        sampled: headers that were read for that; all of them, and the number is exact.
    """

    namespace: str
    model: str
    folder: Folder
    raw_bytes: int | None
    sampled: int

    @property
    def exact(self) -> bool:
        """Whether the raw size is counted, not estimated."""
        return self.sampled == self.folder.objects

    def facts(self, now: float) -> dict[str, object]:
        """For programs."""
        folder = self.folder
        bounds: list[int | None] = [*AGES, None]
        return {
            "namespace": self.namespace,
            "model": self.model or None,
            "objects": folder.objects,
            "stored_bytes": folder.nbytes,
            "raw_bytes": self.raw_bytes,
            "sampled": self.sampled,
            "exact": self.exact,
            "oldest_days": round((now - folder.oldest) / DAY, 3),
            "newest_days": round((now - folder.newest) / DAY, 3),
            "ages": [
                {"up_to_days": days, "objects": objects, "stored_bytes": nbytes}
                for days, objects, nbytes in zip(
                    bounds, folder.age_objects, folder.age_bytes, strict=True
                )
            ],
        }


async def du(
    store: Store, out: Output, *, prefix: str = ROOT, picture: Path | None = None
) -> ExitCode:
    """Report what the store holds.

    Raises:
        ConfigError: the picture is to be no SVG.
        RemoteError: the store failed.
    """
    if picture is not None and picture.suffix != ".svg":
        raise ConfigError(f"{picture}: pictures are SVG; choose a name that ends in .svg")
    inventory = await survey(store, out, prefix)
    described = await describe_all(store, (name.partition("/")[0] for name in inventory.folders))
    sizes = await _sample(store, out, inventory)
    usages = []
    for namespace, folder in inventory.folders.items():
        description = described.get(namespace.partition("/")[0])
        model = "" if description is None else description.model
        raw, sampled = _raw(folder, sizes.get(namespace, []))
        usages.append(Usage(namespace, model, folder, raw, sampled))
    usages.sort(key=lambda usage: -usage.folder.nbytes)
    _report(out, usages, inventory)
    if picture is not None:
        draw([_bar(usage) for usage in usages], picture, moment=inventory.now)
        out.note(f"drawn into {picture}")
    return ExitCode.OK


async def _sample(
    store: Store, out: Output, inventory: Inventory
) -> dict[str, list[tuple[int, int]]]:
    """Stored and raw size of some items, by namespace; what cannot be read is left out."""
    from ec_s3.cli.reading import Demands, header_of
    from ec_s3.lookup import MAX_TENSOR_BYTES

    anything = Demands(MAX_TENSOR_BYTES, None)
    sizes: dict[str, list[tuple[int, int]]] = {}
    folders = inventory.folders

    async def read(item: tuple[str, ObjectInfo]) -> None:
        namespace, info = item
        try:
            header = await header_of(store, info.key, anything)
        except FrameError:
            header = None
        if header is not None:
            pair = (header.object_bytes, header.tensor_bytes)
            sizes.setdefault(namespace, []).append(pair)
        advance(1)

    async def sampled() -> AsyncIterator[tuple[str, ObjectInfo]]:
        for namespace, folder in folders.items():
            for info in folder.sample:
                yield namespace, info

    total = sum(len(folder.sample) for folder in folders.values())
    with out.progress("reading headers", total) as advance:
        await each(sampled(), read, at_once=_AT_ONCE)
    return sizes


def _raw(folder: Folder, sizes: list[tuple[int, int]]) -> tuple[int | None, int]:
    """Raw size of all items, in proportion to those of known size, and how many these are."""
    stored = sum(pair[0] for pair in sizes)
    if not stored:
        return None, 0
    raw = sum(pair[1] for pair in sizes)
    if len(sizes) == folder.objects:
        return raw, len(sizes)
    return round(raw * folder.nbytes / stored), len(sizes)


def _bar(usage: Usage) -> Bar:
    fingerprint, _, dtype = usage.namespace.rpartition("-")[2].partition("/")
    label = f"{usage.model} {fingerprint[:8]} {dtype}" if usage.model else usage.namespace
    return Bar(label, tuple(usage.folder.age_bytes), usage.raw_bytes)


def _report(out: Output, usages: list[Usage], inventory: Inventory) -> None:
    objects = sum(usage.folder.objects for usage in usages)
    stored = sum(usage.folder.nbytes for usage in usages)
    sampled = sum(usage.sampled for usage in usages)
    raws = [usage.raw_bytes for usage in usages if usage.raw_bytes is not None]
    raw = sum(raws) if len(raws) == len(usages) else None
    exact = all(usage.exact for usage in usages)
    if out.json:
        for usage in usages:
            out.record(usage.facts(inventory.now))
        total: dict[str, object] = {"objects": objects, "stored_bytes": stored, "raw_bytes": raw}
        foreign = inventory.foreign
        out.record({"total": {**total, "sampled": sampled, "exact": exact, "foreign": foreign}})
        return
    rows = [
        (
            usage.namespace,
            usage.model or "-",
            usage.folder.objects,
            human_bytes(usage.folder.nbytes),
            "-" if usage.raw_bytes is None else human_bytes(usage.raw_bytes),
        )
        for usage in usages
    ]
    if rows:
        out.table("", ("Namespace", "Model", "Objects", "Stored", "Raw"), rows)
        _report_ages(out, usages)
    raw_text = "unknown" if raw is None else human_bytes(raw)
    out.line(f"{counted(objects, 'object')}: {human_bytes(stored)} stored, {raw_text} raw")
    if objects and not exact:
        out.note(f"raw sizes are estimated from the headers of {counted(sampled, 'object')}")
    if inventory.foreign:
        out.note(f"{counted(inventory.foreign, 'object')} that ec_s3 did not write")
    out.note(f"as of {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(inventory.now))}")


def _report_ages(out: Output, usages: list[Usage]) -> None:
    counts = [sum(column) for column in zip(*(u.folder.age_objects for u in usages), strict=True)]
    sizes = [sum(column) for column in zip(*(u.folder.age_bytes for u in usages), strict=True)]
    rows = [
        (name, count, human_bytes(nbytes))
        for name, count, nbytes in zip(AGE_NAMES, counts, sizes, strict=True)
    ]
    out.table("", ("Age", "Objects", "Stored"), rows)
