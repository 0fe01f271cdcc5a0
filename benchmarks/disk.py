"""Items on a disk, and in a file system in memory: gets when host memory has nothing, and puts.

python benchmarks/disk.py [--quick] [--activations FILE]
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite import setup
from suite.client import Client, Clients
from suite.measure import Cell, take_turns
from suite.plots import bars
from suite.report import Report, out_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

LABELS = {
    "ec_s3": "ec_s3",
    "lmcache_ec": "LMCache",
    "example": "ECExampleConnector",
}
ITEMS = 16
NOTES = [
    "`disk` is the file system of the checkout, `memory` one in memory; the page cache is warm, "
    "and nothing waits for the device, so this is the software's cost. ec_s3 reads its compressed "
    "objects and checks every byte. LMCache reads by its storage manager, as the `get` of its "
    "`ECCacheEngine` stops at its host tier's no. vLLM's ECExampleConnector maps a safetensors "
    "file, and the tensor is copied out of it, as on a CPU it would otherwise be read later.",
    "`put` is until the bytes are with the file system.",
]


@contextmanager
def folders(where: str, systems: list[str]) -> Iterator[dict[str, str]]:
    """One empty folder per system."""
    parent = setup.memory_folder() if where == "memory" else str(out_folder())
    root = Path(tempfile.mkdtemp(prefix="ec_s3-disk-", dir=parent))
    try:
        yield {system: str(root / system) for system in systems}
    finally:
        shutil.rmtree(root, ignore_errors=True)


def measure(report: Report, where: str, shape: tuple[int, int], args: Any) -> None:
    nbytes = shape[0] * shape[1] * 2
    systems = [s for s in LABELS if not (args.no_lmcache and s == "lmcache_ec")]
    stage = setup.Stage.set_up(
        shape, "activations", server=None, source=args.activations, memory=2 * ITEMS * nbytes
    )
    names = [f"item-{i}" for i in range(ITEMS)]
    puts = iter(range(1000))
    with stage, folders(where, systems) as places:
        opened = [
            Client(s, stage.settings | {"folder": places[s]}, label=LABELS[s]) for s in systems
        ]
        with Clients(*opened) as clients:
            for client in clients.all.values():
                client.measure("durable", names, 1)

            def run(label: str, *, what: str, callers: int) -> dict[str, Any]:
                client = clients[label]
                if what == "put":
                    turn = next(puts)
                    return client.measure("durable", [f"p{turn}-{i}" for i in range(4)], callers)
                client.ask(do="forget")
                return client.measure("get", names[: max(callers, 4)], callers)

            for what, callers in (("get", 1), ("get", 16), ("put", 1)):
                answers = take_turns(
                    list(clients.all),
                    partial(run, what=what, callers=callers),
                    rounds=3 if args.quick else 5,
                )
                count = 4 if what == "put" else max(callers, 4)
                for label, found in answers.items():
                    cell = Cell.of(found, nbytes=count * nbytes, count=count)
                    report.rows.append(
                        {
                            "where": where,
                            "shape": setup.named(shape),
                            "what": what,
                            "callers": callers,
                            "system": label,
                            "MB/s": cell.rate.median,
                            "low": cell.rate.low,
                            "high": cell.rate.high,
                            "CPU s/GB": cell.cpu_per_gb,
                        }
                    )


def main() -> None:
    args = setup.options("Gets and puts of items on a disk.")
    report = Report(title="Disk", notes=list(NOTES), quick=args.quick)
    if not args.no_lmcache:
        setup.install_lmcache()
    for where in ("memory", "disk"):
        for shape in setup.shapes(args)[-1:] if args.quick else setup.shapes(args)[::2]:
            measure(report, where, shape, args)
            report.show(
                where="<6",
                shape=">10",
                what="<4",
                callers=">2",
                **{"system": "<22", "MB/s": "8.1f", "low": "8.1f", "high": "8.1f"},
                **{"CPU_s/GB": "6.2f"},
            )
    report.write("disk")
    bars(
        "disk",
        report.rows,
        panels=("where", "what", "callers"),
        group="shape",
        value="MB/s",
        label="MB/s of tensor bytes",
        title="Items on a disk and in a file system in memory",
    )
    report.show_targets()


if __name__ == "__main__":
    main()
