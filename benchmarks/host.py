"""The host tier: gets, puts and leases of items in memory.

    python benchmarks/host.py [--quick] [--activations FILE]

The limit is a copy in memory: into a new tensor for a get, which returns one of the caller's own,
and into memory that is in use already for a put.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from suite import setup
from suite.client import Client, Clients
from suite.measure import Cell, digits, speedup, take_turns
from suite.plots import bars
from suite.report import Report

CALLERS = (1, 4, 16)
LABELS = {
    "ec_s3": "ec_s3",
    "ec_s3_blocking": "ec_s3 blocking",
    "lmcache_ec": "LMCache ECCacheEngine",
    "memory": "memory copy",
}
COPY = "memory copy"
SLOTS = 40
"""Items that fit: both caches evict during the puts."""
NOTES = [
    "Items in host memory, no bucket; the cache holds 40 items and evicts. `ec_s3` is "
    "`EncoderCache` with tasks, `ec_s3 blocking` is `ECCacheEngine` with threads, LMCache's is "
    "its `ECCacheEngine` with threads. All return a tensor of the caller's own; the C "
    "library's allocator is told to keep freed memory (up to 32 MiB at a time), so that up to that "
    "size page faults do not count. A lease takes an "
    "item and gives it back without a copy.",
]


def count_of(nbytes: int, callers: int) -> int:
    return max(callers, 8 if nbytes > 16e6 else 16)


class Load:
    def __init__(self, clients: Clients, nbytes: int) -> None:
        self.clients = clients
        self.nbytes = nbytes
        self.puts = 0
        self.names = [f"kept-{i}" for i in range(16)]

    def fill(self) -> None:
        """Touch all memory of every cache, by more puts than fit."""
        for label in self.clients.all:
            names = [f"fill-{i % 16}" if label == COPY else f"fill{i}-{i % 16}" for i in range(56)]
            self.clients[label].measure("put", names, 1)

    def keep(self) -> None:
        for client in self.clients.all.values():
            client.measure("put", self.names, 1)

    def run(self, label: str, *, what: str, callers: int) -> dict[str, Any]:
        count = count_of(self.nbytes, callers)
        if what == "lease":
            return self.clients[label].measure("lease", self.names * 64, 1)
        names = self.names[:count]
        if what == "put":
            self.puts += 1
            names = [f"new{self.puts}-{i}" for i in range(count)]
        return self.clients[label].measure(what, names, callers)


def measure_shape(report: Report, shape: tuple[int, int], args: Any) -> None:
    nbytes = shape[0] * shape[1] * 2
    systems = [s for s in LABELS if not (args.no_lmcache and s == "lmcache_ec")]
    # Rounded as both caches do, so that 40 items fit in both.
    room = SLOTS * (-(-nbytes // (256 << 10)) * (256 << 10))
    stage = setup.Stage.set_up(
        shape, "activations", server=None, source=args.activations, memory=room
    )
    with stage, Clients(*(Client(s, stage.settings, label=LABELS[s]) for s in systems)) as clients:
        load = Load(clients, nbytes)
        load.fill()
        for what in ("put", "get", "lease"):
            load.keep()
            for callers in CALLERS if what != "lease" else (1,):
                labels = [k for k in clients.all if what != "lease" or k == "ec_s3 blocking"]
                answers = take_turns(
                    labels,
                    partial(load.run, what=what, callers=callers),
                    rounds=5 if args.quick else 11,
                )
                count = count_of(nbytes, callers) if what != "lease" else 16 * 64
                cells = {
                    k: Cell.of(a, nbytes=count * nbytes, count=count) for k, a in answers.items()
                }
                add_rows(report, cells, shape=shape, what=what, callers=callers)


def add_rows(
    report: Report, cells: dict[str, Cell], *, shape: tuple[int, int], what: str, callers: int
) -> None:
    nbytes = shape[0] * shape[1] * 2
    for label, cell in cells.items():
        report.rows.append(
            {
                "shape": setup.named(shape),
                "what": what,
                "callers": callers,
                "system": label,
                "MB/s": cell.rate.median if what != "lease" else None,
                "low": cell.rate.low if what != "lease" else None,
                "high": cell.rate.high if what != "lease" else None,
                "us": cell.latency_ms.median * 1e3,
                "CPU us": cell.cpu_ms * 1e3,
            }
        )
    text = f"host tier {what}, {setup.named(shape)}, {callers} callers"
    if what == "lease":
        value = cells["ec_s3 blocking"].latency_ms.median * 1e3
        report.at_most(f"lease of {setup.named(shape)}, microseconds", value=value, limit=20)
        return
    ours = cells["ec_s3 blocking"]
    if LABELS["lmcache_ec"] in cells:
        ratio = speedup(ours, cells[LABELS["lmcache_ec"]])
        report.at_least(
            f"{text}: times LMCache's speed",
            value=ratio.median,
            limit=1.0,
            note=f"quartiles {digits(ratio.low)} to {digits(ratio.high)}",
        )
    if nbytes >= 7e6:
        ratio = speedup(ours, cells[COPY])
        report.at_least(f"{text}: times the speed of a copy", value=ratio.median, limit=0.9)


def main() -> None:
    args = setup.options("Gets, puts and leases in the host tier.")
    report = Report(title="Host tier", notes=list(NOTES), quick=args.quick)
    if not args.no_lmcache:
        setup.install_lmcache()
    for shape in setup.shapes(args):
        measure_shape(report, shape, args)
        report.show(
            shape=">10",
            what="<5",
            callers=">2",
            system="<22",
            us="10.1f",
            CPU_us="10.1f",
        )
    report.write("host")
    for what in ("get", "put"):
        bars(
            f"host-{what}",
            [r for r in report.rows if r["what"] == what],
            panels=("callers",),
            group="shape",
            value="MB/s",
            label="MB/s",
            title=f"Host tier: {what}",
        )
    report.show_targets()


if __name__ == "__main__":
    main()
