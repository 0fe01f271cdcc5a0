"""Cold gets through a link of 2 Gbit/s: what compression is worth where the wire is the limit.

    python benchmarks/link.py [--quick] [--activations FILE]      2 minutes; quick: 20 s

The byte server sends all bodies through one token bucket. One caller, larger objects.
"""

from __future__ import annotations

from functools import partial

from suite import setup
from suite.measure import Cell
from suite.runner import BLOCKING, BUCKET, RAW, RAW_HTTP, STORED, TENSOR, Benchmark, Shelf
from suite.server import ByteServer

RATE = 2e9 / 8
ITEMS = 4
LARGE = 4e6
"""Stored bytes from which on a target holds: a tensor of about 8 MB."""

NOTES = [
    "The byte server paces all bodies together to 2 Gbit/s in pieces of 64 KiB. MB are of tensor "
    "bytes; one caller. `wire MB/s` is of stored bytes; the targets compare it with a raw GET of "
    "the same stored bytes, round by round.",
]


def measure(bench: Benchmark, server: ByteServer, shape: tuple[int, int]) -> None:
    nbytes = shape[0] * shape[1] * 2
    server.control(clear=True, delay=0, rate=0)
    with bench.contenders(
        BUCKET | {RAW: RAW_HTTP},
        shape,
        memory=2 * ITEMS * nbytes,
        server=server,
        without={BLOCKING, "aiobotocore"},
    ) as clients:
        shelf = Shelf(clients, server, [f"item-{i}" for i in range(ITEMS)])
        server.control(rate=RATE)
        cells = bench.cell(
            {"shape": setup.named(shape)},
            [label for label in clients.all if label != RAW] + [STORED, TENSOR],
            partial(shelf.get, callers=1, count=ITEMS),
            count=ITEMS,
            nbytes=nbytes,
            columns=Cell.speed_columns,
        )
    for row in bench.report.rows[-len(cells) :]:
        row["stored/raw"] = shelf.stored(row["system"], nbytes) / nbytes
        row["wire MB/s"] = row["MB/s"] * row["stored/raw"]
    if shelf.wire < LARGE:
        return
    text = f"{setup.named(shape)}, 2 Gbit/s, {nbytes / 1e6:.0f} MB: times the speed of a raw GET of"
    bench.compare(f"{text} the stored bytes", cells, STORED, limit=0.9)
    bench.compare(f"{text} the tensor's bytes", cells, TENSOR, limit=1.3)


def main() -> None:
    bench = Benchmark(
        "link",
        title="A link of 2 Gbit/s",
        notes=NOTES,
        description="Cold gets through a link of 2 Gbit/s.",
        seconds=15.0,
    )
    with ByteServer() as server:
        for shape in bench.shapes[1:]:
            measure(bench, server, shape)
    bench.picture(
        "",
        bench.report.rows,
        panels=(),
        group="shape",
        value="MB/s",
        title="Cold gets through a link of 2 Gbit/s, one caller",
    )
    bench.end()


if __name__ == "__main__":
    main()
