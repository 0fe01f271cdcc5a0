"""Bulk upload of tensors made elsewhere: its rate against the store's own, its memory, its queue.

    python benchmarks/uploads.py [--quick]      4 minutes; quick: 30 s

2,000 tensors of 1 MB go into the embedded S3 server, which runs in a process of its own. By turns
`upload_items`' pipeline takes them, from an iterable that makes each when it is asked for, and the
bare store is given as many objects that were encoded before, so many at a time as the pipeline may
send. Resident memory is sampled while the pipeline runs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import threading
import time
import urllib.request
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from suite.measure import Cell, take_turns
from suite.report import Report

from ec_s3 import ECConfig, Namespace
from ec_s3.ingest import ingest
from ec_s3.intake import Source
from ec_s3.remote import open_store
from ec_s3.tensors import as_bytes, spec_of
from ec_s3.types import ItemMeta
from ec_s3.wire import encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from ec_s3.store import Store
    from ec_s3.wire import Frame

SHAPE = (500, 1000)
NBYTES = SHAPE[0] * SHAPE[1] * 2
ITEMS, QUICK_ITEMS = 2000, 200
BOUND_BYTES = 64 << 20
BOUND_ITEMS = 64
SPACE = Namespace(model="benchmark", dtype="bfloat16")
PIPELINE, STORE = "upload", "store.put"
LEAST_SHARE = 0.8
SAMPLE_SECONDS = 0.01
NOTES = [
    "1 MB tensors of bfloat16 noise, each a new item. `store.put` sends objects that were encoded "
    "before; `upload` makes each tensor, encodes it and sends it, as many at a time. Both are "
    f"clients of the same moto server. `upload_queue_size` is {BOUND_BYTES >> 20} MiB, "
    f"`upload_queue_items` {BOUND_ITEMS}; `grown MiB` is the largest growth of resident memory "
    "while the pipeline ran."
]


def serve(link: Connection) -> None:
    """In a process of its own: the embedded server, until the other side hangs up."""
    import logging

    from ec_s3.testing.moto import S3Server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with S3Server() as server:
        link.send(server.url)
        try:
            link.recv()
        except EOFError:
            return


class Server:
    """The embedded server; each `empty` gives it a new bucket and drops all others."""

    def __enter__(self) -> Self:
        os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = "1024"  # bodies into files
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,))
        self._process.start()
        theirs.close()
        self.url: str = self._link.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        self._process.join(10)

    def empty(self) -> None:
        for method, path in (("POST", "/moto-api/reset"), ("PUT", "/bench")):
            request = urllib.request.Request(self.url + path, method=method, data=b"")
            urllib.request.urlopen(request, timeout=60).close()


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Memory:
    """Samples resident memory on a thread."""

    def __enter__(self) -> Self:
        self._before = self._most = resident()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            self._most = max(self._most, resident())

    @property
    def grown(self) -> int:
        return self._most - self._before


class Load:
    """The same items for both contenders, under names of each turn's own."""

    def __init__(self, server: Server, config: ECConfig, count: int) -> None:
        self._server = server
        self._config = config
        self._count = count
        self._turns = itertools.count()
        self._noise = torch.randn(SHAPE).bfloat16()
        self._frame = self._encoded()

    def _encoded(self) -> Frame:
        return encode(
            spec_of(self._noise),
            [as_bytes(self._noise)],
            identifier="0" * 64,
            namespace=SPACE.id,
            meta=ItemMeta(),
            created=time.time(),
        )

    def run(self, label: str) -> dict[str, Any]:
        self._server.empty()
        turn = next(self._turns)
        names = [f"{turn:032x}{n:032x}" for n in range(self._count)]
        return asyncio.run(self._run(label, names))

    async def _run(self, label: str, names: list[str]) -> dict[str, Any]:
        store = open_store(self._config)
        assert store is not None
        await store.head("warm")
        cpu, started = time.process_time(), time.perf_counter()
        try:
            with Memory() as memory:
                if label == PIPELINE:
                    more = await self._upload(store, names)
                else:
                    await self._put(store, names)
                    more = {"items": 0, "bytes": 0}
            seconds = time.perf_counter() - started
        finally:
            await store.aclose()
        return {
            "wall": seconds,
            "cpu": time.process_time() - cpu,
            "grown": memory.grown,
            **more,
        }

    async def _upload(self, store: Store, names: list[str]) -> dict[str, Any]:
        def made() -> Iterator[Source]:
            for name in names:
                tensor = self._noise.clone()
                yield Source(name, NBYTES, partial(torch.detach, tensor), held=True)

        report = await ingest(store, made(), self._config, SPACE)
        # An overloaded server may store what it answers too late, and then say that it is there.
        assert report.written + report.present == len(names), report
        return {"items": report.most_items, "bytes": report.most_bytes}

    async def _put(self, store: Store, names: list[str]) -> None:
        waiting = iter(names)

        async def work() -> None:
            for name in waiting:
                await store.put(SPACE.object_key(name), self._frame.parts)

        await asyncio.gather(*(work() for _ in range(self._config.max_uploads)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Bulk upload of tensors made elsewhere.")
    parser.add_argument("--quick", action="store_true", help="few items, few rounds")
    args = parser.parse_args()
    torch.set_num_threads(1)  # two for a copy of 1 MB wait for each other longer than they copy
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "testing")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "testing")
    count = QUICK_ITEMS if args.quick else ITEMS
    report = Report(title="Bulk upload", notes=NOTES, quick=args.quick)
    with Server() as server:
        measure(report, server, 16, count=count, rounds=2 if args.quick else 3)
    report.show()
    report.write("uploads")
    report.show_targets()


def measure(report: Report, server: Server, parallel: int, *, count: int, rounds: int) -> None:
    config = ECConfig(
        url=f"s3://bench/p?endpoint={server.url}",
        max_uploads=parallel,
        upload_queue_size=BOUND_BYTES,
        upload_queue_items=BOUND_ITEMS,
    )
    load = Load(server, config, count)
    found = take_turns([STORE, PIPELINE], load.run, least=rounds, most=rounds, seconds=0.0)
    cells = {
        label: Cell.of(answers, nbytes=count * NBYTES, count=count)
        for label, answers in found.items()
    }
    most = {
        label: {name: max(a[name] for a in answers) for name in ("grown", "items", "bytes")}
        for label, answers in found.items()
    }
    for label, cell in cells.items():
        report.rows.append(
            {
                "at a time": parallel,
                "system": label,
                "MB/s": cell.rate.median,
                "low": cell.rate.low,
                "high": cell.rate.high,
                "CPU s/GB": cell.cpu_per_gb,
                "grown MiB": most[label]["grown"] / 2**20,
                "most items": most[label]["items"],
                "most MiB": most[label]["bytes"] / 2**20,
            }
        )
    judge(report, parallel, cells, most[PIPELINE])


def judge(report: Report, parallel: int, cells: dict[str, Cell], most: dict[str, float]) -> None:
    where = f"{parallel} at a time"
    report.at_least(
        f"rate of an upload over the store's own PUT rate, {where}",
        value=cells[PIPELINE].rate.median / cells[STORE].rate.median,
        limit=LEAST_SHARE,
    )
    bounded = partial(report.at_most, note="the largest of all rounds")
    bounded(
        f"MiB that resident memory grows by, {where}, of upload_queue_size",
        value=most["grown"] / 2**20,
        limit=BOUND_BYTES / 2**20,
    )
    bounded(f"items under way, {where}", value=most["items"], limit=BOUND_ITEMS)


if __name__ == "__main__":
    main()
