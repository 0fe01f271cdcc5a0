"""The host tier: gets, puts and leases of items in memory.

    python benchmarks/host.py [--quick] [--activations FILE]      3 minutes; quick: 30 s

The limit is a copy in memory: into a new tensor for a get, which returns one of the caller's own,
and into memory that is in use already for a put.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

from suite import setup
from suite.runner import BLOCKING, OURS, Benchmark, Contender

if TYPE_CHECKING:
    from suite.client import Clients
    from suite.measure import Cell

CALLERS = (1, 4, 16)
LMCACHE, COPY = "LMCache ECCacheEngine", "memory copy"
TABLE = {
    OURS: Contender("ec_s3"),
    BLOCKING: Contender("ec_s3_blocking"),
    LMCACHE: Contender("lmcache_ec"),
    COPY: Contender("memory"),
}
KEPT = 16
SLOTS = 24
"""Items that fit: both caches evict during the puts."""

PAGE = 256 << 10
NOTES = [
    "Items in host memory, no bucket; the cache holds 24 items and evicts. `ec_s3` is "
    "`EncoderCache` with tasks, `ec_s3 blocking` is `ECCacheEngine` with threads, LMCache's is "
    "its `ECCacheEngine` with threads. All return a tensor of the caller's own; the C library's "
    "allocator is told to keep freed memory, so that page faults do not count. A lease takes an "
    "item and gives it back without a copy, microseconds each.",
]


CAUSE = (
    "beside the copy, ec_s3 takes 10 us of Python for a get and 20 for a put; it copies in the "
    "calling thread, torch's copies take a thread per core where one is free"
)


def count_of(nbytes: int, callers: int) -> int:
    """Operations in a round: at least some milliseconds of copying, at most 16 large tensors."""
    return max(callers, 8 if nbytes > 16e6 else min(64, int(128e6 / nbytes)))


class Load:
    def __init__(self, clients: Clients, nbytes: int) -> None:
        self._clients = clients
        self._nbytes = nbytes
        self._puts = itertools.count()
        self._kept = [f"kept-{i}" for i in range(KEPT)]

    def fill(self) -> None:
        """Touch all memory of every cache, by more puts than fit."""
        for client in self._clients.all.values():
            for _ in range(0, 2 * SLOTS, KEPT):
                client.measure("put", self._new(KEPT), 1)

    def keep(self) -> None:
        """Put the items that are got."""
        for client in self._clients.all.values():
            client.measure("put", self._kept, 1)

    def _new(self, count: int) -> list[str]:
        turn = next(self._puts)
        return [f"new{turn}.{i}-{i % KEPT}" for i in range(count)]

    def run(self, label: str, *, what: str, callers: int) -> dict[str, Any]:
        client = self._clients[label]
        if what == "lease":
            return client.measure("lease", self._kept * 64, 1)
        count = count_of(self._nbytes, callers)
        names = self._new(count) if what == "put" else (self._kept * count)[:count]
        return client.measure(what, names, callers)


def measure(bench: Benchmark, shape: tuple[int, int]) -> None:
    nbytes = shape[0] * shape[1] * 2
    # Rounded as both caches do, so that as many items fit in both.
    with bench.contenders(TABLE, shape, memory=SLOTS * -(-nbytes // PAGE) * PAGE) as clients:
        load = Load(clients, nbytes)
        load.fill()
        for what in ("put", "get", "lease"):
            load.keep()
            for callers in CALLERS if what != "lease" else (1,):
                cells = bench.cell(
                    {"shape": setup.named(shape), "what": what, "callers": callers},
                    list(clients.all) if what != "lease" else [BLOCKING],
                    partial(load.run, what=what, callers=callers),
                    count=count_of(nbytes, callers) if what != "lease" else KEPT * 64,
                    nbytes=nbytes,
                    columns=lease_columns if what == "lease" else columns,
                )
                judge(bench, f"{what}, {setup.named(shape)}, {callers} callers", cells, nbytes)


def columns(cell: Cell) -> dict[str, Any]:
    return {**cell.speed_columns(), "us": None, "CPU us": None}


def lease_columns(cell: Cell) -> dict[str, Any]:
    nothing = dict.fromkeys(cell.speed_columns())
    return {**nothing, "us": cell.latency_ms.median * 1e3, "CPU us": cell.cpu_ms * 1e3}


def judge(bench: Benchmark, text: str, cells: dict[str, Cell], nbytes: int) -> None:
    if COPY not in cells:
        value = cells[BLOCKING].latency_ms.median * 1e3
        bench.report.at_most(f"host tier {text}: microseconds", value=value, limit=20)
        return
    text = f"host tier {text}: times the speed of"
    bench.compare(f"{text} LMCache", cells, LMCACHE, ours=BLOCKING, limit=1.0, cause=CAUSE)
    if nbytes >= 7e6:
        bench.compare(f"{text} a copy", cells, COPY, ours=BLOCKING, limit=0.9, cause=CAUSE)


def main() -> None:
    bench = Benchmark(
        "host",
        title="Host tier",
        notes=NOTES,
        description="Gets, puts and leases in the host tier.",
        seconds=4.0,
    )
    for shape in bench.shapes:
        measure(bench, shape)
    for what in ("get", "put"):
        bench.picture(
            f"-{what}",
            [r for r in bench.report.rows if r["what"] == what],
            panels=("callers",),
            group="shape",
            value="MB/s",
            title=f"Host tier: {what}",
        )
    bench.end()


if __name__ == "__main__":
    main()
