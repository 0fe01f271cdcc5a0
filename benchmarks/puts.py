"""Puts to the bucket: until the caller is free, and until the object is stored.

python benchmarks/puts.py [--quick] [--activations FILE]      4 minutes; quick: 40 s
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from suite import setup
from suite.runner import BUCKET, Benchmark
from suite.server import ByteServer

LOADS = ((0, 1), (0, 16), (20, 1), (20, 4), (20, 16))
"""Milliseconds of delay, and callers."""

NOTES = [
    "Every put is of a new item; the server's memory is emptied before each turn. `free ms`: "
    "until the call returns, per put, as one caller sees it; `MB/s`: tensor bytes until the last "
    "object is stored. The SDKs' puts return when the object is stored. ec_s3 compresses (in the "
    "background), and asks before large uploads whether the object is there already; LMCache "
    "sends the tensor's bytes.",
]


def measure(bench: Benchmark, server: ByteServer, shape: tuple[int, int]) -> None:
    nbytes = shape[0] * shape[1] * 2
    turns = itertools.count()
    with bench.contenders(BUCKET, shape, memory=20 * nbytes, server=server) as clients:

        def put(label: str, *, count: int, callers: int) -> dict[str, Any]:
            server.control(clear=True)
            turn = next(turns)
            names = [f"p{turn}-{i}" for i in range(count)]
            answer = clients[label].measure("durable", names, callers)
            return answer | {"free": answer["free"] * 1e3 * callers / count}

        for delay, callers in LOADS:
            if callers == 4 and bench.args.quick:
                continue
            server.control(delay=delay / 1e3)
            count = callers if callers > 1 else 2 if nbytes > 16e6 else 4
            bench.cell(
                {"shape": setup.named(shape), "delay ms": delay, "callers": callers},
                list(clients.all),
                partial(put, count=count, callers=callers),
                count=count,
                nbytes=nbytes,
                judged=False,
                columns=lambda cell: {"free ms": cell.free, **cell.speed_columns()},
            )
        server.control(delay=0, clear=True)


def main() -> None:
    bench = Benchmark(
        "puts",
        title="Puts to the bucket",
        notes=NOTES,
        description="Puts to the bucket.",
        seconds=3.0,
    )
    with ByteServer() as server:
        for shape in bench.shapes:
            measure(bench, server, shape)
    bench.picture(
        "",
        bench.report.rows,
        panels=("delay ms", "callers"),
        group="shape",
        value="MB/s",
        title="Puts to the bucket, until durable",
    )
    bench.end()


if __name__ == "__main__":
    main()
