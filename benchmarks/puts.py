"""Puts to the bucket: until the caller is free, and until the object is stored.

python benchmarks/puts.py [--quick] [--activations FILE]
"""

from __future__ import annotations

from functools import partial
from typing import Any

from suite import setup
from suite.measure import Cell, Spread, take_turns
from suite.plots import bars
from suite.report import Report
from suite.server import ByteServer

NOTES = [
    "Every put is of a new item. `free ms`: until the call returns, per put, as one caller sees "
    "it; `durable MB/s`: tensor bytes until the last object is stored. The SDKs' puts return when "
    "the object is stored. ec_s3 compresses (in the background), and asks before large uploads "
    "whether the object is there already; LMCache sends the tensor's bytes.",
]


def measure_shape(report: Report, server: ByteServer, shape: tuple[int, int], args: Any) -> None:
    nbytes = shape[0] * shape[1] * 2
    stage = setup.Stage.set_up(
        shape, "activations", server=server, source=args.activations, memory=24 * nbytes
    )
    turns = iter(range(10000))
    with stage, setup.open_clients(stage, without=[], lmcache=not args.no_lmcache) as clients:
        for delay in (0, 20):
            for callers in (1, 16):
                count = 16 if callers == 16 else 4
                server.control(delay=delay / 1e3, clear=True)

                def put(label: str, *, count: int, callers: int) -> dict[str, Any]:
                    turn = next(turns)
                    names = [f"p{turn}-{i}" for i in range(count)]
                    return clients[label].measure("durable", names, callers)

                answers = take_turns(
                    list(clients.all),
                    partial(put, count=count, callers=callers),
                    rounds=3 if args.quick else 5,
                )
                for label, found in answers.items():
                    cell = Cell.of(found, nbytes=count * nbytes, count=count)
                    free = Spread.of([a["free"] * 1e3 * callers / count for a in found])
                    report.rows.append(
                        {
                            "shape": setup.named(shape),
                            "delay ms": delay,
                            "callers": callers,
                            "system": label,
                            "free ms": free.median,
                            "MB/s": cell.rate.median,
                            "low": cell.rate.low,
                            "high": cell.rate.high,
                            "CPU s/GB": cell.cpu_per_gb,
                        }
                    )
        server.control(delay=0, clear=True)


def main() -> None:
    args = setup.options("Puts to the bucket.")
    report = Report(title="Puts to the bucket", notes=list(NOTES), quick=args.quick)
    if not args.no_lmcache:
        setup.install_lmcache()
    with ByteServer() as server:
        for shape in setup.shapes(args)[:: 1 if args.quick else 2]:
            measure_shape(report, server, shape, args)
            report.show(
                shape=">10",
                delay_ms=">2",
                callers=">2",
                system="<16",
                **{"free_ms": "8.2f", "MB/s": "8.1f", "low": "8.1f", "high": "8.1f"},
                **{"CPU_s/GB": "6.2f"},
            )
    report.write("puts")
    bars(
        "puts",
        report.rows,
        panels=("delay ms", "callers"),
        group="shape",
        value="MB/s",
        label="MB/s until durable",
        title="Puts to the bucket, until durable",
    )
    report.show_targets()


if __name__ == "__main__":
    main()
