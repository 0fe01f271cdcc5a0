"""`cost`: what the stored items cost, what they save, and how often each must be used to pay.

One coroutine on an open store, which it lists once and of which it reads the headers of a sample.
Memory is that of the samples, whatever the number of objects. Changes nothing.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path  # noqa: TC003  typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from ec_s3.cli.invocation import with_store
from ec_s3.cli.output import ExitCode, Output, counted, human_bytes, human_seconds
from ec_s3.errors import FrameError, InvalidKeyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ec_s3.config import ECConfig
    from ec_s3.prices import Prices
    from ec_s3.store import Store
    from ec_s3.types import ObjectInfo

commands = typer.Typer()

SAMPLE = 64
READS_AT_ONCE = 16


@dataclass(slots=True)
class _Folder:
    """What the listing says of a namespace, and a fair sample of its objects."""

    objects: int = 0
    nbytes: int = 0
    sample: list[ObjectInfo] = field(default_factory=list)

    def add(self, info: ObjectInfo, dice: random.Random, limit: int) -> None:
        self.objects += 1
        self.nbytes += info.size
        if len(self.sample) < limit:
            self.sample.append(info)
        elif (at := dice.randrange(self.objects)) < limit:
            self.sample[at] = info


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What no bucket tells.

    Attributes:
        reuses: how often each item is fetched from the bucket in a month.
        months: how long an item is kept.
        encode_seconds: what the encoder takes for an item, where no object says it.
    """

    reuses: float
    months: float
    encode_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """A namespace's costs in a month, and what they buy.

    Attributes:
        namespace: `<slug>-<fingerprint>/<dtype>`.
        objects: how many there are.
        stored_bytes: their size in the bucket.
        raw_bytes: the size of their tensors, from the sample; None when unknown.
        sampled: headers that were read.
        encode_seconds: the encoder's mean time for an item; None when unknown.
        storage: of all objects for a month.
        requests: of their fetches in a month.
        transfer: of the bytes of these fetches.
        writing: of storing all objects once.
        saved: what the encoder would have cost in place of these fetches; None when unknown.
        gpu_seconds_saved: its seconds.
        break_even: fetches that pay for one item; None when unknown, or when none ever do.
        pays: whether a fetch costs less than an encode; None when unknown.
    """

    namespace: str
    objects: int
    stored_bytes: int
    raw_bytes: int | None
    sampled: int
    encode_seconds: float | None
    storage: float
    requests: float
    transfer: float
    writing: float
    saved: float | None
    gpu_seconds_saved: float | None
    break_even: float | None
    pays: bool | None


@commands.command("cost", epilog="Example: ec-s3 cost --prices my.yaml --reuses 20")
def command(
    context: typer.Context,
    *,
    prices: Annotated[
        Path | None, typer.Option(help="YAML file with the prices that differ from the shipped.")
    ] = None,
    reuses: Annotated[
        float,
        typer.Option(min=0, max=1e9, help="Fetches of each item from the bucket in a month."),
    ] = 1.0,
    months: Annotated[
        float,
        typer.Option(min=0, max=1e9, help="How long an item is kept, for the break-even."),
    ] = 1.0,
    encode_ms: Annotated[
        float | None,
        typer.Option(
            min=0, max=1e9, help="The encoder's time for an item, where objects do not say it."
        ),
    ] = None,
    sample: Annotated[
        int, typer.Option(min=1, max=10_000, help="Objects of each namespace to read headers of.")
    ] = SAMPLE,
) -> None:
    """Say what the stored items cost a month, what they save, and when they pay."""
    seconds = None if encode_ms is None else encode_ms / 1000
    assumptions = Assumptions(reuses=reuses, months=months, encode_seconds=seconds)

    async def run(store: Store, out: Output, _config: ECConfig) -> int:
        from ec_s3.prices import read_prices

        listed = read_prices(prices)
        return await cost(store, out, prices=listed, assumptions=assumptions, sample=sample)

    with_store(context, run)


async def cost(
    store: Store, out: Output, *, prices: Prices, assumptions: Assumptions, sample: int = SAMPLE
) -> ExitCode:
    """Reckon for every namespace; see the module."""
    folders = await _survey(store, out, sample)
    bills = []
    with out.progress("reading headers", sum(len(f.sample) for f in folders.values())) as advance:
        for namespace, folder in folders.items():
            seconds, ratio, read = await _inspect(store, folder.sample)
            advance(len(folder.sample))
            if seconds is None:
                seconds = assumptions.encode_seconds
            bills.append(_bill(namespace, folder, seconds, ratio, read, prices, assumptions))
    if out.json:
        for bill in bills:
            out.record(asdict(bill))
        out.record(_total(bills, prices, assumptions))
        return ExitCode.OK
    _show(bills, prices, assumptions, out)
    return ExitCode.OK


async def _survey(store: Store, out: Output, sample: int) -> dict[str, _Folder]:
    from ec_s3.keys import KEY_VERSION, parse_key

    folders: dict[str, _Folder] = {}
    dice = random.Random(0)  # noqa: S311  a sample is no secret, and the same one each time is handy
    with out.progress("listing") as advance:
        async for info in store.list(f"v{KEY_VERSION}/"):
            advance(1)
            try:
                namespace = parse_key(info.key).namespace
            except InvalidKeyError:
                continue  # a document of the folder
            folders.setdefault(namespace, _Folder()).add(info, dice, sample)
    return folders


async def _inspect(
    store: Store, sample: Iterable[ObjectInfo]
) -> tuple[float | None, float | None, int]:
    """Mean encode seconds, tensor bytes a stored byte, and how many headers could be read."""
    from ec_s3.lookup import header_at

    free = asyncio.Semaphore(READS_AT_ONCE)

    async def read(info: ObjectInfo) -> tuple[float | None, int, int] | None:
        async with free:
            try:
                header = await header_at(store, info.key)
            except FrameError:
                return None  # `verify` is for those
        if header is None:
            return None
        return header.meta.encode_seconds, header.tensor_bytes, info.size

    found = [one for one in await asyncio.gather(*map(read, sample)) if one is not None]
    seconds = [one[0] for one in found if one[0] is not None]
    raw, stored = sum(one[1] for one in found), sum(one[2] for one in found)
    mean = sum(seconds) / len(seconds) if seconds else None
    return mean, (raw / stored if stored else None), len(found)


def _bill(
    namespace: str,
    folder: _Folder,
    seconds: float | None,
    ratio: float | None,
    read: int,
    prices: Prices,
    assumptions: Assumptions,
) -> Bill:
    mean, fetches = folder.nbytes / folder.objects, folder.objects * assumptions.reuses
    spared = None if seconds is None else fetches * seconds
    break_even = pays = None
    if seconds is not None:
        break_even = prices.break_even(mean, seconds, months=assumptions.months)
        pays = break_even is not None
    return Bill(
        namespace=namespace,
        objects=folder.objects,
        stored_bytes=folder.nbytes,
        raw_bytes=None if ratio is None else round(folder.nbytes * ratio),
        sampled=read,
        encode_seconds=seconds,
        storage=prices.month(folder.nbytes),
        requests=fetches * prices.requests(mean),
        transfer=fetches * prices.transfer(mean),
        writing=folder.objects * prices.store(mean),
        saved=None if spared is None else prices.encoding(spared),
        gpu_seconds_saved=spared,
        break_even=break_even,
        pays=pays,
    )


def _total(bills: list[Bill], prices: Prices, assumptions: Assumptions) -> dict[str, object]:
    money = {
        name: sum(getattr(bill, name) or 0.0 for bill in bills)
        for name in ("storage", "requests", "transfer", "writing", "saved", "gpu_seconds_saved")
    }
    return {
        "total": {
            "objects": sum(bill.objects for bill in bills),
            "stored_bytes": sum(bill.stored_bytes for bill in bills),
            **money,
        },
        "prices": asdict(prices),
        "assumptions": asdict(assumptions),
    }


def _show(bills: list[Bill], prices: Prices, assumptions: Assumptions, out: Output) -> None:
    rows = [
        (
            bill.namespace,
            bill.objects,
            human_bytes(bill.stored_bytes),
            "unknown" if bill.encode_seconds is None else human_seconds(bill.encode_seconds),
            _money(bill.storage + bill.requests + bill.transfer),
            "unknown" if bill.saved is None else _money(bill.saved),
            _uses(bill),
        )
        for bill in bills
    ]
    columns = ("Namespace", "Objects", "Stored", "Encode", "Costs a month", "Saves", "Pays after")
    out.table(f"In {prices.currency}", columns, rows)
    out.line("")
    for lead, text in _lines(bills, prices, assumptions):
        out.paragraph(f"{lead:<11}", text)
    if any(bill.encode_seconds is None for bill in bills):
        out.note("some objects do not say what their encoding took: give --encode-ms")


def _lines(
    bills: list[Bill], prices: Prices, assumptions: Assumptions
) -> Iterable[tuple[str, str]]:
    """What each figure is made of."""
    objects = sum(bill.objects for bill in bills)
    stored = sum(bill.stored_bytes for bill in bills)
    fetches = objects * assumptions.reuses
    unit = prices.currency
    yield (
        "storage",
        f"{_money(sum(b.storage for b in bills))} a month: {human_bytes(stored)} at "
        f"{prices.storage_gb_month:g} {unit} a GB",
    )
    yield (
        "requests",
        f"{_money(sum(b.requests for b in bills))} a month: {fetches:,.0f} fetches "
        f"({assumptions.reuses:g} of each item), one GET for each 8 MiB, at "
        f"{prices.get_per_1000:g} {unit} a thousand; what host memory answers costs nothing",
    )
    yield (
        "transfer",
        f"{_money(sum(b.transfer for b in bills))} a month: "
        f"{human_bytes(stored * assumptions.reuses)} at {prices.transfer_gb:g} {unit} a GB",
    )
    yield (
        "writing",
        f"{_money(sum(b.writing for b in bills))} once: {counted(objects, 'object')} at "
        f"{prices.put_per_1000:g} {unit} a thousand PUTs; a HEAD before those above 1 MiB",
    )
    seconds = sum(b.gpu_seconds_saved or 0.0 for b in bills)
    yield (
        "saved",
        f"{_money(sum(b.saved or 0.0 for b in bills))} a month: {human_seconds(seconds)} of the "
        f"encoder that these fetches spare, at {prices.gpu_hour:g} {unit} an hour; its times are "
        f"from the headers of {counted(sum(b.sampled for b in bills), 'object')}",
    )
    yield (
        "pays after",
        "so many fetches of an item earn its PUT and its storage for "
        f"{assumptions.months:g} month{'' if assumptions.months == 1 else 's'}",
    )
    yield "prices", f"{prices.source}, {prices.as_of}; --prices FILE replaces any of them"


def _uses(bill: Bill) -> str:
    if bill.pays is None:
        return "unknown"
    if bill.break_even is None:
        return "never"
    digits = ".2g" if bill.break_even < 10 else ",.0f"
    return f"{bill.break_even:{digits}} fetches"


def _money(amount: float) -> str:
    return f"{amount:,.2f}" if amount >= 0.1 or amount == 0 else f"{amount:.2g}"
