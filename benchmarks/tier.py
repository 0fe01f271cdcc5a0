"""The host tier: what a hit and a put cost beside a memory copy, and what grows with its size.

    python benchmarks/tier.py [--quick]      2 minutes; quick: 30 s

Copies: `ECCacheEngine.get` takes turns with `tensor.clone()`, and `put` of an item that is not
there with a copy into memory that is used again; eight items by turns, so that neither reads from
a cache what it has just written. Growth: one operation at a time on an index of n entries of one
page each, and on the memories of n identifiers that the engine keeps; the slab itself is left out
there, as 100,000 entries have 24 GiB of it. Replacing an entry means evicting one, reserving, and
committing another. Bytes per entry are those of Python's own allocations, its key included.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from suite.data import SHAPES
from suite.report import Report, explanation, out_folder
from suite.setup import named, options

from ec_s3.blocking import ECCacheEngine
from ec_s3.config import ECConfig
from ec_s3.keys import Namespace
from ec_s3.local import LocalTier
from ec_s3.pages import PAGE_BYTES
from ec_s3.policy import Sightings
from ec_s3.presence import Presence
from ec_s3.types import ItemMeta, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NAMESPACE = Namespace(model="bench/tier", dtype="bfloat16")
SPEC = TensorSpec("bfloat16", (32, 4096))
ITEMS = 8
LARGE = 7_000_000
TIER_BYTES = 1 << 30
SAMPLES = 3000

Row = dict[str, Any]


# -- copies ------------------------------------------------------------------------------------


def copies(*, pairs: int) -> list[Row]:
    """`get` and `put` beside a plain copy, one row per shape and operation."""
    rows: list[Row] = []
    config = ECConfig(max_local_cpu_size=TIER_BYTES)
    with ECCacheEngine(config, NAMESPACE) as engine:
        while engine.stats()["local_bytes_populated"] < TIER_BYTES:
            time.sleep(0.1)
        for shape in sorted(SHAPES, key=lambda s: s[0] * s[1]):
            rows += copies_of(engine, shape, pairs=pairs)
            engine.delete([name_of(shape, n) for n in range(ITEMS)])
    return rows


def name_of(shape: tuple[int, int], number: int) -> str:
    return f"{named(shape)}-{number}"


def copies_of(engine: ECCacheEngine, shape: tuple[int, int], *, pairs: int) -> Iterator[Row]:
    tensors = [torch.randn(shape).to(torch.bfloat16) for _ in range(ITEMS)]
    targets = [torch.empty_like(tensor) for tensor in tensors]
    tier = engine._cache.tier  # noqa: SLF001  to make a name new again, in no measured time
    for number, tensor in enumerate(tensors):
        engine.put(name_of(shape, number), tensor)

    def get(number: int) -> Any:
        return engine.get(name_of(shape, number))

    def put(number: int) -> Any:
        return engine.put(name_of(shape, number), tensors[number])

    def drop(number: int) -> None:
        tier.discard(NAMESPACE.object_key(name_of(shape, number)))

    clone = paired(get, lambda n: tensors[n].clone(), pairs=pairs)
    copy = paired(put, lambda n: targets[n].copy_(tensors[n]), pairs=pairs, before=drop)
    for number, tensor in enumerate(tensors):
        if not torch.equal(engine.get(name_of(shape, number)), tensor):  # type: ignore[arg-type]  # a None fails as well
            raise SystemExit("an item came back with other bytes")
    nbytes = tensors[0].nbytes
    for operation, (ours, plain, ratio) in (("get", clone), ("put", copy)):
        yield row(
            f"{nbytes / 1e6:.1f} MB",
            operation,
            ours,
            nbytes=nbytes,
            copy_us=statistics.median(plain) * 1e6,
            share=ratio,
        )


def paired(
    ours: Callable[[int], Any],
    plain: Callable[[int], Any],
    *,
    pairs: int,
    before: Callable[[int], None] | None = None,
) -> tuple[list[float], list[float], float]:
    """Seconds of both, and the plain one's share of ours; the first of a pair changes."""
    found: dict[Callable[[int], Any], list[float]] = {ours: [], plain: []}
    numbers = itertools.cycle(range(ITEMS))
    for turn in range(pairs + ITEMS):
        for call in (ours, plain) if turn % 2 else (plain, ours):
            number = next(numbers) if call is ours else (turn * 3) % ITEMS
            if before is not None and call is ours:
                before(number)
            begun = time.perf_counter()
            result = call(number)
            seconds = time.perf_counter() - begun
            del result
            if turn >= ITEMS:
                found[call].append(seconds)
    return (
        found[ours],
        found[plain],
        statistics.median(found[plain]) / statistics.median(found[ours]),
    )


# -- growth ------------------------------------------------------------------------------------


class Room:
    """Stands in for a slab: its size, and no memory."""

    closed = False

    def __init__(self, entries: int) -> None:
        self.nbytes = self.populated_bytes = entries * PAGE_BYTES


def filled(entries: int) -> LocalTier:
    tier = LocalTier(Room(entries))  # type: ignore[arg-type]  # nobody reads or writes
    for number in range(entries):
        add(tier, f"item-{number}")
    return tier


def add(tier: LocalTier, name: str) -> None:
    reservation = tier.reserve(NAMESPACE.object_key(name), PAGE_BYTES)
    assert reservation is not None
    reservation.commit(SPEC, ItemMeta(0.1), dirty=False).release()


def tier_growth(entries: int) -> Iterator[Row]:
    size, tier = f"{entries:,} entries", filled(entries)
    order = np.random.default_rng(1).integers(0, entries, SAMPLES)
    keys = [NAMESPACE.object_key(f"item-{n}") for n in order]

    def lease(key: str) -> None:
        found = tier.lookup(key)
        assert found is not None
        found.release()

    yield row(size, "lease and release", timed(lease, keys), nbytes=tier_memory(entries))
    yield row(size, "contains", timed(tier.contains, keys))
    fresh = [f"new-{n}" for n in range(SAMPLES)]
    yield row(size, "replace", timed(lambda name: add(tier, name), fresh))


def tier_memory(entries: int) -> float:
    return memory_of(lambda: filled(entries)) / entries


def identifier_growth(known: int) -> Iterator[Row]:
    size = f"{known:,} identifiers"
    keys = [NAMESPACE.object_key(f"item-{n}") for n in range(known)]
    presence = Presence(positive_ttl=600, negative_ttl=600, max_entries=known)
    sightings = Sightings(known)
    for key in keys:
        presence.set(key, present=True, now=0.0)
        sightings.seen(key)
    some = [keys[n] for n in np.random.default_rng(2).integers(0, known, SAMPLES)]
    fresh = [NAMESPACE.object_key(f"new-{n}") for n in range(SAMPLES)]
    of_key = statistics.fmean(map(len, some)) + 49

    def remember() -> Presence:
        made = Presence(positive_ttl=600, negative_ttl=600, max_entries=known)
        for key in keys:
            made.set(key, present=True, now=0.0)
        return made

    def see() -> Sightings:
        made = Sightings(known)
        for key in keys:
            made.seen(key)
        return made

    asked = timed(lambda key: presence.get(key, now=1.0), some)
    yield row(size, "presence: ask", asked, nbytes=memory_of(remember) / known + of_key)
    told = timed(lambda key: presence.set(key, present=False, now=1.0), fresh)
    yield row(size, "presence: remember", told)
    yield row(
        size, "sightings: see", timed(sightings.seen, fresh), nbytes=memory_of(see) / known + of_key
    )


def timed(call: Callable[[str], Any], arguments: Sequence[str]) -> list[float]:
    seconds = []
    for argument in arguments:
        begun = time.perf_counter()
        call(argument)
        seconds.append(time.perf_counter() - begun)
    return seconds


def memory_of(make: Callable[[], Any]) -> float:
    """Bytes that Python holds for what is made."""
    gc.collect()
    tracemalloc.start()
    made = make()
    gc.collect()
    nbytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del made
    return nbytes


def row(
    size: str,
    operation: str,
    seconds: Sequence[float],
    *,
    nbytes: float = 0,
    copy_us: float = 0,
    share: float = 0,
) -> Row:
    return {
        "size": size,
        "operation": operation,
        "median us": statistics.median(seconds) * 1e6,
        "p99 us": float(np.quantile(seconds, 0.99)) * 1e6,
        "memory copy us": copy_us or "",
        "of a memory copy": share or "",
        "bytes each": nbytes or "",
    }


# -- the report --------------------------------------------------------------------------------


def plot(growth: dict[int, list[Row]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (times, memory) = plt.subplots(1, 2, figsize=(11, 4))
    for operation in dict.fromkeys(r["operation"] for rows in growth.values() for r in rows):
        found = {n: r for n, rows in growth.items() for r in rows if r["operation"] == operation}
        times.plot(list(found), [r["median us"] for r in found.values()], "o-", label=operation)
        if all(r["bytes each"] for r in found.values()):
            memory.plot(
                list(found), [r["bytes each"] for r in found.values()], "o-", label=operation
            )
    for axes, label in ((times, "microseconds, median"), (memory, "bytes per entry")):
        axes.set(xscale="log", xlabel="entries, or identifiers, known", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out_folder() / "tier.png", dpi=110)


def report_of(copied: list[Row], growth: dict[int, list[Row]], *, quick: bool) -> Report:
    report = Report(title="The host tier", quick=quick)
    report.notes.append(explanation(__doc__))
    report.rows += copied + [r for rows in growth.values() for r in rows]
    for operation in ("get", "put"):
        report.at_least(
            f"{operation} of 7 MB and more, as a share of a memory copy's speed, smallest",
            value=min(
                r["of a memory copy"]
                for r in copied
                if r["operation"] == operation and r["bytes each"] > LARGE
            ),
            limit=0.9,
            note="beside the copy: 10 us of Python for a get and 20 for a put, and several times"
            " that while copies, or neighbours, empty the caches",
        )
    leases = {
        n: r["median us"]
        for n, rows in growth.items()
        for r in rows
        if r["operation"].startswith("lease")
    }
    report.at_most(
        "a lease, microseconds, at any number of entries", value=max(leases.values()), limit=20.0
    )
    report.at_most(
        "a lease among the most entries, times one among the fewest",
        value=leases[max(leases)] / leases[min(leases)],
        limit=3.0,
        note="what is left is the processor's caches: the work is the same",
    )
    return report


def main() -> None:
    arguments = options(__doc__ or "")
    torch.set_num_threads(1)
    copied = copies(pairs=40 if arguments.quick else 200)
    growth: dict[int, list[Row]] = {}
    for n in (1_000, 10_000) if arguments.quick else (1_000, 10_000, 100_000):
        growth.setdefault(n, []).extend(tier_growth(n))
    for n in (1_000, 10_000) if arguments.quick else (1_000, 10_000, 100_000, 1_000_000):
        growth.setdefault(n, []).extend(identifier_growth(n))
    report = report_of(copied, growth, quick=arguments.quick)
    for line in report.rows:
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in line.items()})
    for target in report.targets:
        print(target)
    plot(growth)
    print(report.write("tier"))


if __name__ == "__main__":
    main()
