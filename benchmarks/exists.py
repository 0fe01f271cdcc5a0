"""Existence checks, and gets of what is not there.

    python benchmarks/exists.py [--quick]      2 minutes; quick: 40 s

Nothing is remembered from earlier rounds: every check costs the system what it costs the first
time. Items are small, as only their existence is asked for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from suite.measure import Cell
from suite.runner import BUCKET, LMCACHE, OURS, Benchmark, Contender
from suite.server import ByteServer

SHAPE = (32, 64)  # LMCache stores whole pages of 4 KiB only
ITEMS = 512
RAW = "raw HTTP HEAD"
NOTES = [
    "`present` and `absent`: checks of items that are, and are not, in the bucket; `miss`: gets of "
    "items that are not. ms of CPU are the client's, per check.",
    "LMCache's check blocks the event loop of its storage manager, so its callers wait for one "
    "another; 16 of its callers make fewer checks here, as a round would take seconds.",
]
CAUSE = "the delay alone bounds the ratio at 16; an SDK's request costs 0.6 ms of CPU beside it"


def count_of(label: str, *, delay: int, callers: int) -> int:
    """Checks in one round: at least one per caller.

    Of many callers so many that it hardly counts when, at a round's end, not all are at work.
    """
    if delay == 0:
        return 64
    if label == LMCACHE or callers == 1:
        return max(callers, 10)
    return ITEMS if callers > 4 else 32


def measure(bench: Benchmark, server: ByteServer) -> None:
    stored = [f"item-{i}" for i in range(ITEMS)]
    absent = [f"absent-{i}" for i in range(ITEMS)]
    table = BUCKET | {RAW: Contender("raw_http")}
    with bench.contenders(table, SHAPE, kind="noise", memory=64 << 20, server=server) as clients:
        for label in (OURS, LMCACHE, "boto3"):  # the others share these objects
            if label in clients.all:
                clients[label].measure("durable", stored, 4)
        paths = list(clients["boto3"].ask(do="paths", names=stored).values())

        def check(label: str, *, what: str, counts: dict[str, int], callers: int) -> dict[str, Any]:
            client, count = clients[label], counts[label]
            if label == RAW:
                return client.measure("contains", paths[:count], callers)
            client.ask(do="forget")
            names = stored if what == "present" else absent
            return client.measure("get" if what == "miss" else "contains", names[:count], callers)

        for what, delay, callers in cases(quick=bench.args.quick):
            server.control(delay=delay / 1e3)
            labels = [label for label in clients.all if label != RAW or what == "present"]
            counts = {k: count_of(k, delay=delay, callers=callers) for k in labels}
            cells = bench.cell(
                {"what": what, "delay ms": delay, "callers": callers},
                labels,
                partial(check, what=what, counts=counts, callers=callers),
                count=counts,
                columns=Cell.check_columns,
            )
            if what != "miss" and (delay, callers) == (20, 16):
                text = "existence checks, 16 callers, 20 ms per request"
                text = f"{text}, {what}: times LMCache's rate"
                bench.compare(text, cells, LMCACHE, limit=15.0, cause=CAUSE)


def cases(*, quick: bool) -> list[tuple[str, int, int]]:
    """What, delay in ms, callers."""
    loads = [(0, 1), (0, 16), (20, 1), *([] if quick else [(20, 4)]), (20, 16)]
    return [(what, *load) for what in ("present", "absent", "miss") for load in loads]


def main() -> None:
    bench = Benchmark(
        "exists",
        title="Existence checks and misses",
        notes=NOTES,
        description="Existence checks and misses.",
        seconds=4.0,
    )
    with ByteServer() as server:
        measure(bench, server)
    bench.picture(
        "",
        [r for r in bench.report.rows if r["delay ms"] == 20],
        panels=("what",),
        group="callers",
        value="per second",
        title="Existence checks and misses per second, 20 ms per request",
        log=True,
    )
    bench.end()


if __name__ == "__main__":
    main()
