"""Items on a disk, when host memory has nothing: gets, and puts.

python benchmarks/disk.py [--quick] [--activations FILE]      150 s; quick: 40
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite import setup
from suite.measure import Cell
from suite.report import out_folder
from suite.runner import OURS, Benchmark, Contender

if TYPE_CHECKING:
    from collections.abc import Iterator

ITEMS = 16
PUTS = 4
LABELS = {OURS: "ec_s3", "LMCache": "lmcache_ec", "ECExampleConnector": "example"}
NOTES = [
    "The file system is that of the checkout; the page cache is warm, and nothing waits for the "
    "device, so this is the software's cost. ec_s3 reads its compressed objects and checks every "
    "byte. LMCache reads by its storage manager, as the `get` of its `ECCacheEngine` stops at its "
    "host tier's no. vLLM's ECExampleConnector maps a safetensors file, and the tensor is copied "
    "out of it, as on a CPU it would otherwise be read later.",
    "`put` is until the bytes are with the file system.",
]


@contextmanager
def folders() -> Iterator[dict[str, Path]]:
    """One empty folder per system."""
    root = Path(tempfile.mkdtemp(prefix="ec_s3-disk-", dir=out_folder()))
    try:
        yield {label: root / system for label, system in LABELS.items()}
    finally:
        shutil.rmtree(root, ignore_errors=True)


def files_of(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def measure(bench: Benchmark, shape: tuple[int, int]) -> None:
    nbytes = shape[0] * shape[1] * 2
    names = [f"item-{i}" for i in range(ITEMS)]
    turns = itertools.count()
    with folders() as places:
        table = {k: Contender(s, {"folder": str(places[k])}) for k, s in LABELS.items()}
        with bench.contenders(table, shape, memory=2 * ITEMS * nbytes) as clients:
            for client in clients.all.values():
                client.measure("durable", names, 1)
            kept = {label: files_of(places[label]) for label in clients.all}

            def run(label: str, *, what: str, callers: int, count: int) -> dict[str, Any]:
                client = clients[label]
                if what == "get":
                    client.ask(do="forget")
                    return client.measure("get", names[:count], callers)
                turn = next(turns)
                answer = client.measure("durable", [f"p{turn}-{i}" for i in range(count)], callers)
                for path in files_of(places[label]) - kept[label]:
                    path.unlink()  # before the kernel writes it to the device
                return answer

            for what, callers in (("get", 1), ("get", 4), ("get", 16), ("put", 1)):
                count = max(callers, PUTS)
                bench.cell(
                    {"shape": setup.named(shape), "what": what, "callers": callers},
                    list(clients.all),
                    partial(run, what=what, callers=callers, count=count),
                    count=count,
                    nbytes=nbytes,
                    judged=False,
                    columns=Cell.speed_columns,
                )


def main() -> None:
    bench = Benchmark(
        "disk",
        title="Items on a disk",
        notes=NOTES,
        description="Gets and puts of items on a disk.",
        seconds=3.0,
    )
    for shape in bench.shapes:
        measure(bench, shape)
    bench.picture(
        "",
        bench.report.rows,
        panels=("what", "callers"),
        group="shape",
        value="MB/s",
        title="Items on a disk",
    )
    bench.end()


if __name__ == "__main__":
    main()
