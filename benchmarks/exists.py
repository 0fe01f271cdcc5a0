"""Existence checks, and gets of what is not there.

    python benchmarks/exists.py [--quick]

Nothing is remembered from earlier rounds: every check costs the system what it costs the first
time. Items are small, as only their existence is asked for.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from suite import setup
from suite.client import Client
from suite.measure import Cell, digits, speedup, take_turns
from suite.plots import bars
from suite.report import Report
from suite.server import ByteServer

SHAPE = (32, 64)  # LMCache stores whole pages of 4 KiB only
ITEMS = 128
RAW = "raw HTTP HEAD"
NOTES = [
    "`present` and `absent`: checks of 128 items that are, and are not, in the bucket; `miss`: "
    "gets of 128 that are not. ms of CPU are the client's, per check.",
    "LMCache's check blocks the event loop of its storage manager, so its callers wait for one "
    "another; 16 of its callers make fewer checks here, as a round would take seconds.",
]


def count_of(label: str, *, delay: int, callers: int) -> int:
    """Checks in one round: about a tenth of a second of them, and at least one per caller."""
    if delay == 0:
        return ITEMS // 2
    if label == "LMCache" or callers == 1:
        return max(callers, 10)
    return ITEMS if callers > 4 else 32


def main() -> None:
    args = setup.options("Existence checks and misses.")
    report = Report(title="Existence checks and misses", notes=list(NOTES), quick=args.quick)
    if not args.no_lmcache:
        setup.install_lmcache()
    stored = [f"item-{i}" for i in range(ITEMS)]
    absent = [f"absent-{i}" for i in range(ITEMS)]
    with ByteServer() as server, setup.Stage.set_up(SHAPE, "noise", server=server) as stage:
        raw = Client("raw_http", stage.settings, label=RAW)
        lmcache = not args.no_lmcache
        with setup.open_clients(stage, without=[], lmcache=lmcache, also=[raw]) as clients:
            systems = [label for label in clients.all if label != RAW]
            for label in systems:
                if label in ("ec_s3", "LMCache", "boto3"):  # the others share these objects
                    clients[label].measure("durable", stored, 4)
            paths = list(clients["boto3"].ask(do="paths", names=stored).values())
            for what, delay, callers in cases(args.quick):
                server.control(delay=delay / 1e3)

                def check(
                    label: str, *, what: str, counts: dict[str, int], callers: int
                ) -> dict[str, Any]:
                    client, count = clients[label], counts[label]
                    if label == RAW:
                        return client.measure("contains", paths[:count], callers)
                    client.ask(do="forget")
                    names = stored if what == "present" else absent
                    verb = "get" if what == "miss" else "contains"
                    return client.measure(verb, names[:count], callers)

                labels = systems + ([RAW] if what == "present" else [])
                counts = {k: count_of(k, delay=delay, callers=callers) for k in labels}
                answers = take_turns(
                    labels,
                    partial(check, what=what, counts=counts, callers=callers),
                    rounds=3 if args.quick else 7,
                )
                cells = {k: Cell.of(a, nbytes=0, count=counts[k]) for k, a in answers.items()}
                add_rows(report, cells, what=what, delay=delay, callers=callers)
                report.show(
                    what="<8",
                    delay_ms=">2",
                    callers=">2",
                    system="<16",
                    per_second="8.1f",
                    low="8.1f",
                    high="8.1f",
                    CPU_ms="6.3f",
                )
    report.write("exists")
    bars(
        "exists",
        [r for r in report.rows if r["delay ms"] == 20],
        panels=("what",),
        group="callers",
        value="per second",
        label="per second",
        title="Existence checks and misses per second, 20 ms per request",
        log=True,
    )
    report.show_targets()


def cases(quick: bool) -> list[tuple[str, int, int]]:
    """What, delay in ms, callers."""
    callers = (1, 16) if quick else (1, 4, 16)
    return [(w, d, c) for w in ("present", "absent", "miss") for d in (0, 20) for c in callers]


def add_rows(
    report: Report, cells: dict[str, Cell], *, what: str, delay: int, callers: int
) -> None:
    for label, cell in cells.items():
        report.rows.append(
            {
                "what": what,
                "delay ms": delay,
                "callers": callers,
                "system": label,
                "per second": cell.per_second.median,
                "low": cell.per_second.low,
                "high": cell.per_second.high,
                "CPU ms": cell.cpu_ms,
            }
        )
    if what in ("present", "absent") and (delay, callers) == (20, 16) and "LMCache" in cells:
        direct = speedup(cells[setup.DIRECT], cells["LMCache"])
        report.at_least(
            f"existence checks, 16 callers, 20 ms per request, {what}: times LMCache's rate",
            value=speedup(cells["ec_s3"], cells["LMCache"]).median,
            limit=15.0,
            note=f"{digits(direct.median)} with `s3_transport=direct`",
        )


if __name__ == "__main__":
    main()
