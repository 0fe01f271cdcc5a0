"""Cold gets: the tensor is in the bucket and nowhere else.

    python benchmarks/bucket.py [--quick] [--activations FILE]

All systems read from the same byte server and take turns. A get ends with a tensor of the
caller's own; every tensor is compared with what was stored, outside of the measured time.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from suite import setup
from suite.client import Client, Clients
from suite.measure import Cell, digits, speedup, take_turns
from suite.plots import bars
from suite.report import Report
from suite.server import ByteServer

if TYPE_CHECKING:
    import argparse

ITEMS = 16
CALLERS = (1, 4, 16)
DELAYS = (0, 20)
RAW = "raw"
BATCH = "LMCache batched_get"
STORED, TENSOR = "raw HTTP, stored bytes", "raw HTTP, tensor bytes"
COLUMNS = {
    "shape": ">10",
    "data": "<11",
    "delay_ms": ">2",
    "callers": ">2",
    "system": "<24",
    "MB/s": "8.1f",
    "low": "8.1f",
    "high": "8.1f",
    "CPU_s/GB": "6.2f",
}
NOTES = [
    "One byte server on the loopback, in a process of its own, answers each request after 0 or "
    "20 ms. MB are of tensor bytes, whatever is on the wire; CPU seconds are the client's.",
    "LMCache 0.5.6: the `get` of its `ECCacheEngine` never reaches its remote tier, and its S3 "
    "connector takes only objects that are one KV chunk. So its storage manager is called "
    "directly, with the chunk size set to the tensor's size, and the result is copied out of its "
    "memory as its engine does. It addresses buckets virtual-hosted only: the server takes any "
    "host and path. What it remembers of objects' sizes is dropped before each round, as is what "
    "ec_s3 remembers: both are to see the objects for the first time.",
    "`LMCache` is one `get` per caller, `LMCache batched_get` one call for the items of all "
    "callers: it looks their sizes up one after the other.",
    "aiobotocore and boto3 get the tensor's plain bytes, unchecked. Raw HTTP is `http.client` "
    "into a recycled buffer: the server's limit.",
]


def count_of(callers: int, nbytes: int) -> int:
    """How many gets a round has."""
    if callers == 1:
        return 3 if nbytes > 16e6 else 8
    return max(callers, 8)


class Load:
    """The contenders of one shape, opened, with everything stored."""

    def __init__(self, clients: Clients, server: ByteServer, names: list[str]) -> None:
        self.clients = clients
        self.names = names
        clients["ec_s3"].measure("durable", names, 4)
        self.stored = clients["ec_s3"].ask(do="paths", names=names)
        self.tensors = clients["boto3"].ask(do="paths", names=names)
        if "LMCache" in clients.all:
            clients["LMCache"].measure("durable", names, 4)
            theirs = clients["LMCache"].ask(do="paths", names=names)
            server.control(alias={self.tensors[n]: theirs[n] for n in names})
        else:
            clients["boto3"].measure("durable", names, 4)
        sizes = server.control()["sizes"]
        self.wire = sizes[self.stored[names[0]]]

    def get(self, label: str, *, callers: int, count: int) -> dict[str, Any]:
        """One round of one contender."""
        names = self.names[:count]
        if label in (STORED, TENSOR):
            paths = self.stored if label == STORED else self.tensors
            return self.clients[RAW].measure("get", [paths[n] for n in names], callers)
        client = self.clients["LMCache" if label == BATCH else label]
        client.ask(do="forget")
        return client.measure("get_batch" if label == BATCH else "get", names, callers)


def measure_shape(
    report: Report, args: argparse.Namespace, server: ByteServer, shape: tuple[int, int], kind: str
) -> dict[tuple[int, int, str], Cell]:
    """All cells of one shape, by delay, callers and label."""
    cells: dict[tuple[int, int, str], Cell] = {}
    nbytes = shape[0] * shape[1] * 2
    memory = max(256 << 20, ITEMS * nbytes * 3 // 2)
    stage = setup.Stage.set_up(shape, kind, server=server, source=args.activations, memory=memory)
    chosen = (1, 16) if args.quick or kind == "noise" else CALLERS
    server.control(clear=True, delay=0, rate=0)
    with stage:
        raw = Client("raw_http", stage.settings, label=RAW)
        lmcache = not args.no_lmcache
        with setup.open_clients(
            stage, without=["ec_s3_blocking"], lmcache=lmcache, also=[raw]
        ) as clients:
            load = Load(clients, server, [f"item-{i}" for i in range(ITEMS)])
            everyone = [label for label in clients.all if label != RAW] + [STORED, TENSOR]
            for delay in DELAYS:
                for callers in chosen:
                    server.control(delay=delay / 1e3)
                    count = count_of(callers, nbytes)
                    labels = everyone + ([BATCH] if callers > 1 and "LMCache" in everyone else [])
                    answers = take_turns(
                        labels,
                        partial(load.get, callers=callers, count=count),
                        rounds=3 if args.quick or callers == 4 else 5,
                    )
                    for label in labels:
                        cell = Cell.of(answers[label], nbytes=count * nbytes, count=count)
                        cells[delay, callers, label] = cell
                        report.rows.append(row(shape, kind, delay, callers, label, cell, load.wire))
            server.control(delay=0)
    return cells


def row(
    shape: tuple[int, int],
    kind: str,
    delay: int,
    callers: int,
    label: str,
    cell: Cell,
    wire: int,
) -> dict[str, Any]:
    nbytes = shape[0] * shape[1] * 2
    stored = wire if label.startswith("ec_s3") or label == STORED else nbytes
    rate = cell.rate
    return {
        "shape": setup.named(shape),
        "data": kind,
        "delay ms": delay,
        "callers": callers,
        "system": label,
        "MB/s": rate.median,
        "low": rate.low,
        "high": rate.high,
        "CPU s/GB": cell.cpu_per_gb,
        "stored/raw": stored / nbytes,
    }


def judge(report: Report, shape: tuple[int, int], cells: dict[tuple[int, int, str], Cell]) -> None:
    """The targets of the issue for one shape."""
    if (20, 1, "LMCache") not in cells:
        return
    name = setup.named(shape)
    asked = [(16, "LMCache"), (16, BATCH)]
    if shape[0] * shape[1] * 2 < 16e6:  # the two smaller ones
        asked.insert(0, (1, "LMCache"))
    for callers, label in asked:
        other = cells[20, callers, label]
        direct = speedup(cells[20, callers, setup.DIRECT], other).median
        report.at_least(
            f"cold get {name}, 20 ms per request, callers: {callers}; times the MB/s of {label}",
            value=speedup(cells[20, callers, "ec_s3"], other).median,
            limit=2.0 if callers == 1 else 3.0,
            note=f"{digits(direct)} with `s3_transport=direct`",
        )


def main() -> None:
    args = setup.options("Cold gets from the bucket.")
    report = Report(title="Cold gets from the bucket", notes=list(NOTES), quick=args.quick)
    if not args.no_lmcache:
        setup.install_lmcache()
    with ByteServer() as server:
        for shape in setup.shapes(args):
            cells = measure_shape(report, args, server, shape, "activations")
            judge(report, shape, cells)
            report.show(**COLUMNS)
        if not args.quick:
            measure_shape(report, args, server, (1024, 3584), "noise")
            report.show(**COLUMNS)
    report.write("bucket")
    for delay in DELAYS:
        bars(
            f"bucket-{delay}ms",
            [r for r in report.rows if r["delay ms"] == delay and r["data"] == "activations"],
            panels=("callers",),
            group="shape",
            value="MB/s",
            label="MB/s of tensor bytes",
            title=f"Cold gets from the bucket, {delay} ms per request",
        )
    report.show_targets()


if __name__ == "__main__":
    main()
