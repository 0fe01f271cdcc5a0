"""Cold gets: the tensor is in the bucket and nowhere else.

    python benchmarks/bucket.py [--quick] [--activations FILE]      6 minutes; quick: 1

All systems read from the same byte server and take turns. A get ends with a tensor of the
caller's own; every tensor is compared with what was stored, outside of the measured time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from suite import setup
from suite.measure import Cell
from suite.runner import (
    BLOCKING,
    BUCKET,
    LMCACHE,
    RAW,
    RAW_HTTP,
    STORED,
    TENSOR,
    Benchmark,
    Shelf,
)
from suite.server import ByteServer

ITEMS = 16
DELAYS = (0, 20)
LOADS = ((0, 1), (0, 16), (20, 1), (20, 4), (20, 16))
"""Milliseconds of delay, and callers."""

BATCH = "LMCache batched_get"
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
CAUSE = (
    "LMCache asks twice per item (HEAD, then GET), ec_s3 once: a delay alone makes the ratio 2; "
    "what is left is CPU time, which clients and server share"
)


def count_of(callers: int, nbytes: int) -> int:
    """How many gets a round has."""
    if callers == 1:
        return 3 if nbytes > 16e6 else 8
    return max(callers, 8)


def measure(bench: Benchmark, server: ByteServer, shape: tuple[int, int], kind: str) -> None:
    nbytes = shape[0] * shape[1] * 2
    memory = max(256 << 20, ITEMS * nbytes * 3 // 2)
    short = bench.args.quick or kind == "noise"
    server.control(clear=True, delay=0, rate=0)
    with bench.contenders(
        BUCKET | {RAW: RAW_HTTP}, shape, kind=kind, memory=memory, server=server, without={BLOCKING}
    ) as clients:
        shelf = Shelf(clients, server, [f"item-{i}" for i in range(ITEMS)])

        def get(label: str, *, callers: int, count: int) -> dict[str, Any]:
            if label != BATCH:
                return shelf.get(label, callers=callers, count=count)
            clients[LMCACHE].ask(do="forget")
            return clients[LMCACHE].measure("get_batch", shelf.names[:count], callers)

        everyone = [label for label in clients.all if label != RAW] + [STORED, TENSOR]
        for delay, callers in LOADS:
            if callers == 4 and short:
                continue
            server.control(delay=delay / 1e3)
            count = count_of(callers, nbytes)
            batch = [BATCH] if callers > 1 and LMCACHE in everyone else []
            cells = bench.cell(
                {"shape": setup.named(shape), "data": kind, "delay ms": delay, "callers": callers},
                everyone + batch,
                partial(get, callers=callers, count=count),
                count=count,
                nbytes=nbytes,
                judged=delay > 0 and callers != 4 and kind == "activations",
                columns=Cell.speed_columns,
            )
            if delay and kind == "activations":
                judge(bench, setup.named(shape), callers, cells, small=nbytes < 16e6)
        server.control(delay=0)


def judge(
    bench: Benchmark, shape: str, callers: int, cells: dict[str, Cell], *, small: bool
) -> None:
    """The targets of one load at 20 ms."""
    text = f"cold get {shape}, 20 ms per request, callers: {callers}; times the MB/s of"
    if callers == 16:
        bench.compare(f"{text} LMCache", cells, LMCACHE, limit=3.0, cause=CAUSE)
        bench.compare(f"{text} {BATCH}", cells, BATCH, limit=3.0, cause=CAUSE)
    elif callers == 1 and small:
        bench.compare(f"{text} LMCache", cells, LMCACHE, limit=2.0, cause=CAUSE)


def main() -> None:
    bench = Benchmark(
        "bucket",
        title="Cold gets from the bucket",
        notes=NOTES,
        description="Cold gets from the bucket.",
        seconds=4.0,
    )
    with ByteServer() as server:
        for shape in bench.shapes:
            measure(bench, server, shape, "activations")
        if not bench.args.quick:
            measure(bench, server, (1024, 3584), "noise")
    for delay in DELAYS:
        rows = bench.report.rows
        bench.picture(
            f"-{delay}ms",
            [r for r in rows if r["delay ms"] == delay and r["data"] == "activations"],
            panels=("callers",),
            group="shape",
            value="MB/s",
            title=f"Cold gets from the bucket, {delay} ms per request",
        )
    bench.end()


if __name__ == "__main__":
    main()
