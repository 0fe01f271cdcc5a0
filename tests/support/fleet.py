"""Processes that share a bucket: engines that look up and save, jobs that upload ahead of them.

Run as `python fleet.py engine|upload JSON`, one process each: it prints `ready`, works until its
standard input closes, and prints a `Report` as JSON. What an item holds follows from its name
alone, so every hit is checked to the bit, and a wrong one is reported.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import resource
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ec_s3 import s3, transfer
from ec_s3.blocking import ECCacheEngine
from ec_s3.config import ECConfig
from ec_s3.ingest import upload_items
from ec_s3.keys import Namespace
from ec_s3.testing.faults import FaultServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SPACE = Namespace(model="org/fleet", dtype="bfloat16")
THREADS = 2
"""Callers of each engine."""
_WIDTH = 1024
_ROWS = (4, 16, 40, 72, 150, 300, 800)
_LARGE_ROWS = 6000
_LARGE_SHARE = 50  # one item in so many
_READ_BACK = 50  # of the items that an engine has put, which it looks up in the end
_PART_BYTES = 5 << 20
_MULTIPART_BYTES = 6 << 20


def rows(name: str) -> int:
    """8 KiB to 1.6 MB, and now and then 12 MB."""
    number = int(hashlib.sha256(name.encode()).hexdigest(), 16)
    return _LARGE_ROWS if number % _LARGE_SHARE == 0 else _ROWS[number % len(_ROWS)]


def content(name: str) -> torch.Tensor:
    """The one tensor that may ever be found under a name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows(name), _WIDTH, generator=generator).to(torch.bfloat16)


def names(member: int, *, count: int) -> list[str]:
    """Half of them are everybody's, half are the member's own."""
    shared = [f"shared-{number}" for number in range(count // 2)]
    return shared + [f"own-{member}-{number}" for number in range(count - len(shared))]


@dataclass(slots=True, kw_only=True)
class Report:
    """What a process did.

    Attributes:
        puts: items that were taken.
        wrong: names of hits that were not what they had to be.
        seconds: of each look-up.
        rss: most memory so far, in bytes, after the first seconds and in the end.
        complete: whether everything that was to be uploaded is.
    """

    lookups: int = 0
    hits: int = 0
    puts: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rss: tuple[int, int] = (0, 0)
    complete: bool = False


def peak() -> int:
    """Most memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def run_engine(settings: dict[str, Any], pool: Sequence[str], stop: threading.Event) -> Report:
    """Look up, and save what is missing, until told to stop."""
    report, lock, own = Report(), threading.Lock(), set[str]()
    engine = ECCacheEngine(ECConfig(**settings), SPACE)
    _say("ready")

    def check(name: str, found: torch.Tensor | None) -> None:
        report.lookups += 1
        report.hits += found is not None
        if found is not None and not torch.equal(found, content(name)):
            report.wrong.append(name)

    def work(seed: str) -> None:
        dice = random.Random(seed)
        while not stop.is_set():
            name = dice.choice(pool)
            started = time.monotonic()
            found = engine.get(name)
            seconds = time.monotonic() - started
            put = None if found is not None else engine.put(name, content(name))
            with lock:
                check(name, found)
                report.seconds.append(seconds)
                report.puts += put is True
                if put:
                    own.add(name)
            time.sleep(0.002)

    seed = random.SystemRandom().random()
    threads = [
        threading.Thread(target=work, args=(f"{seed}-{number}",)) for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    stop.wait(2.0)
    early = peak()
    for thread in threads:
        thread.join()
    report.complete = engine.flush(60.0).complete
    for name in sorted(own)[:_READ_BACK]:
        check(name, engine.get(name))
    report.rss = (early, peak())
    engine.close(0.0)
    return report


def run_upload(settings: dict[str, Any], pool: Sequence[str], stop: threading.Event) -> Report:
    """Upload everything in an order of its own, again and again until told to stop."""
    report, early, order = Report(complete=True), 0, list(pool)
    _say("ready")

    def items() -> Iterator[tuple[str, torch.Tensor]]:
        for name in order:
            if stop.is_set():
                return
            yield name, content(name)

    while not stop.is_set():
        random.SystemRandom().shuffle(order)
        told = upload_items(items(), ECConfig(**settings), SPACE)
        report.puts += told.written
        report.complete = report.complete and not told.failures
        early = early or peak()
        stop.wait(0.2)
    report.rss = (early, peak())
    return report


def main(role: str, work: str) -> None:
    """One member of the fleet."""
    # Uploads in parts without moving gigabytes.
    s3._MULTIPART_BYTES, transfer.PART_BYTES = _MULTIPART_BYTES, _PART_BYTES
    told = json.loads(work)
    stop = threading.Event()
    run = {"engine": run_engine, "upload": run_upload}[role]

    def listen() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    _say(json.dumps(asdict(run(told["settings"], told["names"], stop))))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that reached the proxy; `status` is 0 where the server did not answer it."""

    method: str
    path: str
    nbytes: int
    status: int


class CountingProxy(FaultServer):
    """A proxy that also remembers what became of every request.

    Attributes:
        sent: in order of the answers.
    """

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.sent: list[Sent] = []

    async def _relay(self, method: str, head: bytes, body: bytes) -> Any:
        path = head.split(b" ", 2)[1].decode("latin-1")
        try:
            answer = await super()._relay(method, head, body)
        except (OSError, EOFError, asyncio.CancelledError):
            self.sent.append(Sent(method, path, len(body), 0))
            raise
        self.sent.append(Sent(method, path, len(body), answer.status))
        return answer


if __name__ == "__main__":
    main(*sys.argv[1:])
