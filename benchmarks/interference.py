"""Interference: what moving data at full speed costs a decode-like loop in the same process.

    python benchmarks/interference.py [--quick] [--activations FILE]      2 minutes; quick: 40 s

A step is what an engine core does between two tokens, 3.3 ms of it: a third is Python (the books of
64 running requests), the rest 64-row matrix products in torch, each of which gives the interpreter
up and wants it back. Between two steps the loop does what the connector does in its hooks: it polls
the port, and asks it for the next items. Four items are always being fetched from the bucket, and
for every item that has come another one is saved and uploaded.

The modes take turns: nothing moves (twice, so that the second shows what chance does), the engine
on a thread of this process, the engine in a process of its own. The loop has the first core for
itself, and everything else the others: it is the interpreter lock, and memory, that is measured,
and not a lack of cores. Time in which the loop could run but the kernel gave its core to somebody
else is taken off and reported: the engine, which may not use that core, is not its cause.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import TYPE_CHECKING

import numpy as np
import torch
from suite.client import environment
from suite.data import make
from suite.report import Report, explanation
from suite.server import ByteServer
from suite.setup import options

from ec_s3.child import ProcessPort
from ec_s3.config import ECConfig
from ec_s3.keys import Namespace
from ec_s3.pages import Slab
from ec_s3.port import ThreadPort
from ec_s3.tickets import Absent, Granted, Ready, Want
from ec_s3.types import ItemMeta, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ec_s3.port import EnginePort

STEP_SECONDS = 3.3e-3
PYTHON_SHARE = 1 / 3
REQUESTS = 64
SHAPE = (1024, 3584)
ITEMS = 48  # more than the slab holds: each one is evicted before it is wanted again
SLAB_BYTES = 192 << 20
FETCHES = 4
TURN_STEPS = 400
SETTLE_STEPS = 40
QUIET_SECONDS = 20.0
NAMESPACE = Namespace(model="bench/interference", dtype="bfloat16")
MODES = ("nothing", "thread", "nothing again", "process")


# -- the loop ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Request:
    name: str
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    token: int
    position: int
    block: int


class Loop:
    """Steps of a fixed amount of work, found out once."""

    def __init__(self) -> None:
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._requests = [Request(f"request-{n}") for n in range(REQUESTS)]
        self._x = torch.randn(64, 256)
        self._layers = [torch.randn(256, 256) / 16 for _ in range(4)]
        books = _seconds_of(lambda: self._books(20)) / 20
        product = _seconds_of(lambda: self._products(50)) / 50
        self._rounds = max(1, round(STEP_SECONDS * PYTHON_SHARE / books))
        self._depth = max(1, round(STEP_SECONDS * (1 - PYTHON_SHARE) / product))

    def _books(self, rounds: int) -> None:
        for _ in range(rounds):
            rows: dict[str, Row] = {}
            for request in self._requests:
                request.computed += 1
                if request.computed % 16 == 1:
                    request.blocks.append(request.computed // 16)
                if len(request.blocks) > 64:
                    request.blocks.clear()
                token = hash((request.name, request.computed)) & 0xFFFF
                block = request.blocks[-1] if request.blocks else 0
                rows[request.name] = Row(request.name, token, request.computed, block)
            sorted(rows.values(), key=lambda row: row.token)

    def _products(self, depth: int) -> None:
        x = self._x
        for layer in itertools.islice(itertools.cycle(self._layers), depth):
            x = torch.relu(x @ layer)

    def step(self) -> tuple[float, float]:
        """Do one; its seconds, and for how many of them it could have run but had no core."""
        queued = self._queued()
        begun = time.perf_counter()
        self._books(self._rounds)
        self._products(self._depth)
        seconds = time.perf_counter() - begun
        return seconds, self._queued() - queued

    def _queued(self) -> float:
        return int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e9


def _seconds_of(call: Callable[[], object]) -> float:
    times = []
    for _ in range(9):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)


# -- the traffic -------------------------------------------------------------------------------


class Traffic:
    """Keeps one port busy; every method is called by the loop."""

    def __init__(self, port: EnginePort, slab: Slab, server: ByteServer, base: bytes) -> None:
        self._port = port
        self._slab = slab
        self._server = server
        self._base = base
        self._spec = TensorSpec("bfloat16", SHAPE)
        self._tickets = itertools.count(1)
        self._names = itertools.cycle([f"item-{n}" for n in range(ITEMS)])
        self._saves = itertools.count()
        self._fetching: set[int] = set()
        self._saving: dict[int, str] = {}
        self._saved: deque[str] = deque()
        self.fetched = self.saved = self.lost = 0
        self.running = False

    def fill(self) -> None:
        """Put the items that are fetched into the bucket."""
        for n in range(ITEMS):
            self._save(f"item-{n}")
            while self._saving:
                self.turn()
            if n % 8 == 7:
                self.rest()
        self._saved.clear()

    def start(self) -> None:
        self.running = True
        for _ in range(FETCHES):
            self._fetch()

    def turn(self) -> None:
        """Take the port's answers, and ask for what comes next."""
        for event in self._port.poll():
            if isinstance(event, Granted):
                self._fill(event)
            elif event.ticket in self._fetching:
                self._fetching.discard(event.ticket)
                if isinstance(event, Ready):
                    self._check(event)
                self.lost += isinstance(event, Absent)
                self._port.release(event.ticket)
                if self.running:
                    self._save(f"new-{id(self)}-{next(self._saves)}")
                    self._fetch()

    def _check(self, event: Ready) -> None:
        """Every item's ends, and all of every sixteenth: reading them all would be the load."""
        view = self._slab.view(event.extents[0])
        whole = len(event.extents) == 1 and self.fetched % 16 == 0
        length = len(self._base) if whole else 4096
        if view[:length] != self._base[:length]:
            raise SystemExit("an item came back with other bytes")
        self.fetched += 1

    def _fetch(self) -> None:
        ticket = next(self._tickets)
        self._fetching.add(ticket)
        self._port.want(Want(ticket=ticket, identifier=next(self._names), fresh=True))

    def _save(self, name: str) -> None:
        ticket = next(self._tickets)
        self._saving[ticket] = name
        self._port.reserve(ticket, name, self._spec.nbytes)

    def _fill(self, event: Granted) -> None:
        name = self._saving.pop(event.ticket)
        if event.extents is None:
            self.lost += 1
            return
        if not self.running:  # while it runs, what lay there before serves as well
            at = 0
            for extent in event.extents:
                piece = self._base[at : at + extent.nbytes]
                self._slab.view(extent)[: len(piece)] = piece
                at += len(piece)
        self._port.filled(event.ticket, self._spec, ItemMeta(encode_seconds=0.1))
        self._saved.append(name)
        self.saved += 1

    def rest(self) -> None:
        """Stop, wait until nothing moves, and drop from the bucket what was saved."""
        self.running = False
        give_up = time.monotonic() + QUIET_SECONDS
        before = self._server.control()["cpu"]
        idle = 0
        while idle < 3 and time.monotonic() < give_up:
            self.turn()
            time.sleep(0.1)
            used = self._server.control()["cpu"]
            quiet = not self._fetching and not self._saving and used - before < 0.01
            idle, before = idle + 1 if quiet else 0, used

    def moved(self) -> tuple[int, int]:
        """Bytes of tensors fetched and saved since the last call."""
        counts = self.fetched * self._spec.nbytes, self.saved * self._spec.nbytes
        self.fetched = self.saved = 0
        return counts

    def forget(self) -> None:
        """Delete from the bucket what was saved."""
        connection = HTTPConnection("127.0.0.1", self._server.port, timeout=30)
        while self._saved:
            connection.request("DELETE", f"/bench/{NAMESPACE.object_key(self._saved.popleft())}")
            connection.getresponse().read()
        connection.close()


# -- the comparison ----------------------------------------------------------------------------


@dataclass(slots=True)
class Samples:
    """Of one mode: seconds of the steps, by turn, and what was moved meanwhile."""

    turns: list[list[float]] = field(default_factory=list)
    queued: float = 0.0
    seconds: float = 0.0
    fetched: int = 0
    saved: int = 0

    def steps(self) -> list[float]:
        return [step for turn in self.turns for step in turn]


def turn(loop: Loop, traffic: Traffic | None, samples: Samples) -> None:
    """One mode's turn; it begins when its data flows."""
    if traffic is not None:
        traffic.start()
    steps: list[float] = []
    for number in range(SETTLE_STEPS + TURN_STEPS):
        if number == SETTLE_STEPS:
            steps.clear()
            begun = time.perf_counter()
            if traffic is not None:
                traffic.moved()
        seconds, queued = loop.step()
        if traffic is not None:
            traffic.turn()
        steps.append(seconds - queued)
        samples.queued += queued
    samples.seconds += time.perf_counter() - begun
    samples.turns.append(steps)
    if traffic is not None:
        fetched, saved = traffic.moved()
        samples.fetched += fetched
        samples.saved += saved
        traffic.rest()
        traffic.forget()


def percentile(steps: list[float], share: float) -> float:
    return float(np.quantile(np.asarray(steps), share))


def rows_of(found: dict[str, Samples]) -> list[dict[str, object]]:
    quiet = found["nothing"].steps()
    rows: list[dict[str, object]] = []
    for mode, samples in found.items():
        steps = samples.steps()
        median, p99 = statistics.median(steps), percentile(steps, 0.99)
        rows.append(
            {
                "engine": mode,
                "fetched MB/s": samples.fetched / 1e6 / samples.seconds,
                "saved MB/s": samples.saved / 1e6 / samples.seconds,
                "median ms": median * 1e3,
                "p99 ms": p99 * 1e3,
                "median grows %": 100 * (median / statistics.median(quiet) - 1),
                "p99 grows %": 100 * (p99 / percentile(quiet, 0.99) - 1),
                "steps": len(steps),
                "without a core s": samples.queued,
            }
        )
    return rows


def report_of(rows: list[dict[str, object]], *, quick: bool) -> Report:
    default = ECConfig().engine
    report = Report(title="Interference with a decode-like loop", quick=quick, rows=rows)
    report.notes.append(explanation(__doc__))
    report.notes.append(f"The default is `engine: {default}`.")
    row = next(row for row in rows if row["engine"] == default)
    again = next(row for row in rows if row["engine"] == "nothing again")
    for what, limit in (("median", 2.0), ("p99", 5.0)):
        name = f"{what} grows %"
        report.at_most(
            f"{what} of a step grows by at most {limit:g} % while moving data at full speed",
            value=float(str(row[name])),
            limit=limit,
            note=f"`engine: {default}`; with nothing moving, a second time: {again[name]:.1f} %",
        )
    return report


def measure(source: Path | None, *, rounds: int) -> dict[str, Samples]:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)
    base = make("activations", SHAPE, source=source).tobytes()
    found = {mode: Samples() for mode in MODES}
    with (
        ByteServer() as server,
        Slab.create(SLAB_BYTES) as ours,
        Slab.create(SLAB_BYTES) as theirs,
    ):
        ours.populate()
        theirs.populate()
        url = f"s3://bench?endpoint={server.endpoint}&region=us-east-1"
        config = ECConfig(url=url, max_local_cpu_size=SLAB_BYTES)
        thread = ThreadPort(config, NAMESPACE, ours)
        process = ProcessPort(config, NAMESPACE, theirs)
        try:
            traffic = {
                "thread": Traffic(thread, ours, server, base),
                "process": Traffic(process, theirs, server, base),
            }
            traffic["thread"].fill()
            os.sched_setaffinity(0, cores[:1])
            loop = Loop()
            gc.collect()
            gc.freeze()  # as vLLM's engine core does
            for number in range(-1, rounds):
                start = number % len(MODES)
                for mode in MODES[start:] + MODES[:start]:
                    samples = found[mode] if number >= 0 else Samples()
                    turn(loop, traffic.get(mode), samples)
            assert not sum(t.lost for t in traffic.values()), "items were lost"
        finally:
            thread.close(1.0)
            process.close(1.0)
    return found


def main() -> None:
    arguments = options(__doc__ or "")
    os.environ.update(environment())
    torch.set_num_threads(1)
    found = measure(arguments.activations, rounds=3 if arguments.quick else 12)
    rows = rows_of(found)
    for row in rows:
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()})
    print(report_of(rows, quick=arguments.quick).write("interference"))


if __name__ == "__main__":
    main()
