"""Cold gets through a link of 2 Gbit/s: what compression is worth where the wire is the limit.

    python benchmarks/link.py [--quick] [--activations FILE]

The byte server sends all bodies through one token bucket. One caller, larger objects.
"""

from __future__ import annotations

from typing import Any

from suite import setup
from suite.client import Client
from suite.measure import Cell, digits, speedup, take_turns
from suite.plots import bars
from suite.report import Report
from suite.server import ByteServer

RATE = 2e9 / 8
ITEMS = 4
RAW = "raw"
STORED, TENSOR = "raw HTTP, stored bytes", "raw HTTP, tensor bytes"
NOTES = [
    "The byte server paces all bodies together to 2 Gbit/s in pieces of 64 KiB. MB are of tensor "
    "bytes; one caller. `of the wire` is the rate of stored bytes over that of a raw GET of the "
    "same stored bytes, round by round.",
]


def measure_shape(report: Report, server: ByteServer, shape: tuple[int, int], args: Any) -> None:
    nbytes = shape[0] * shape[1] * 2
    names = [f"item-{i}" for i in range(ITEMS)]
    server.control(clear=True, delay=0, rate=0)
    stage = setup.Stage.set_up(
        shape, "activations", server=server, source=args.activations, memory=8 * nbytes
    )
    with stage:
        raw = Client("raw_http", stage.settings, label=RAW)
        without = ["ec_s3_blocking", "aiobotocore"]
        lmcache = not args.no_lmcache
        with setup.open_clients(stage, without=without, lmcache=lmcache, also=[raw]) as clients:
            systems = [label for label in clients.all if label != RAW]
            paths = {}
            for label in systems:
                clients[label].measure("durable", names, 4)
                paths[label] = clients[label].ask(do="paths", names=names)
            wire = server.control(rate=RATE)["sizes"][paths["ec_s3"][names[0]]]

            def get(label: str) -> dict[str, Any]:
                if label in (STORED, TENSOR):
                    stored = paths["ec_s3" if label == STORED else "boto3"]
                    return clients[RAW].measure("get", list(stored.values()), 1)
                clients[label].ask(do="forget")
                return clients[label].measure("get", names, 1)

            answers = take_turns([*systems, STORED, TENSOR], get, rounds=3 if args.quick else 5)
    cells = {k: Cell.of(a, nbytes=ITEMS * nbytes, count=ITEMS) for k, a in answers.items()}
    add_rows(report, shape, cells, wire=wire)


def add_rows(report: Report, shape: tuple[int, int], cells: dict[str, Cell], *, wire: int) -> None:
    nbytes = shape[0] * shape[1] * 2
    for label, cell in cells.items():
        stored = wire if label.startswith("ec_s3") or label == STORED else nbytes
        report.rows.append(
            {
                "shape": setup.named(shape),
                "system": label,
                "MB/s": cell.rate.median,
                "low": cell.rate.low,
                "high": cell.rate.high,
                "wire MB/s": cell.rate.median * stored / nbytes,
                "stored/raw": stored / nbytes,
                "CPU s/GB": cell.cpu_per_gb,
            }
        )
    text = f"{setup.named(shape)}, 2 Gbit/s, {nbytes / 1e6:.0f} MB: times the speed of a raw GET of"
    if wire < 4e6:
        return
    for what, label, limit in (("stored", STORED, 0.9), ("tensor's", TENSOR, 1.3)):
        direct = speedup(cells[setup.DIRECT], cells[label])
        report.at_least(
            f"{text} the {what} bytes",
            value=speedup(cells["ec_s3"], cells[label]).median,
            limit=limit,
            note=f"{digits(direct.median)} with `s3_transport=direct`",
        )


def main() -> None:
    args = setup.options("Cold gets through a link of 2 Gbit/s.")
    report = Report(title="A link of 2 Gbit/s", notes=list(NOTES), quick=args.quick)
    if not args.no_lmcache:
        setup.install_lmcache()
    with ByteServer() as server:
        for shape in setup.shapes(args)[1:]:
            measure_shape(report, server, shape, args)
            report.show(**{"shape": ">10", "system": "<24", "MB/s": "8.1f", "wire_MB/s": "8.1f"})
    report.write("link")
    bars(
        "link",
        report.rows,
        panels=(),
        group="shape",
        value="MB/s",
        label="MB/s of tensor bytes",
        title="Cold gets through a link of 2 Gbit/s, one caller",
    )
    report.show_targets()


if __name__ == "__main__":
    main()
