"""`bench`: how fast this bucket is from this host, and whether fetching an item beats encoding it.

Measures on an open store, below a prefix of its own under `bench/`, never where items lie. Says how
much it will write before it does, stops each measurement after a while, and removes what it wrote
whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ec_s3.cli.invocation import with_store
from ec_s3.cli.output import ExitCode, Output, human_bytes, human_seconds
from ec_s3.errors import RemoteDeniedError, RemoteError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ec_s3.config import ECConfig
    from ec_s3.store import Store

commands = typer.Typer()

SMALL_BYTES = 16 << 10
LARGE_BYTES = 8 << 20
SMALL_ROUNDS = 100
PARALLEL = (1, 4, 16)
ROUNDS = {1: 4, 4: 8, 16: 16}
"""Objects of `LARGE_BYTES` that are moved at each width."""

SECONDS = 10.0
"""A measurement that takes longer is judged by what was done by then."""

REMOVE_SECONDS = 60.0
SETTLE_SECONDS = 2.0
"""After so long a store has done what it was told by a PUT that was broken off."""

STORED_SHARE = 0.7
"""Stored bytes of a bfloat16 tensor's, see docs/explanation/design.md."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of one kind of request."""

    request: str
    requests: int
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second of one kind of request, so many at a time."""

    request: str
    parallel: int
    requests: int
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What the verdict is about: a bfloat16 tensor `[tokens, width]` and its encoder's time."""

    tokens: int
    width: int
    encode_seconds: float

    @property
    def stored_bytes(self) -> int:
        """About what it takes in the bucket."""
        return round(self.tokens * self.width * 2 * STORED_SHARE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Fetch or encode.

    Attributes:
        item: of what.
        fetch_p50: seconds of a fetch, with the median latency.
        fetch_p99: with the latency that one request in a hundred exceeds.
    """

    item: Item
    fetch_p50: float
    fetch_p99: float

    @property
    def fetch(self) -> bool:
        """Whether a fetch is quicker as a rule."""
        return self.fetch_p50 < self.item.encode_seconds

    @property
    def text(self) -> str:
        """The verdict in words."""
        encode = human_seconds(self.item.encode_seconds)
        took = f"a fetch takes {human_seconds(self.fetch_p50)} against {encode} of the encoder"
        if not self.fetch:
            return f"encode: {took}; the bucket still spares the GPU (policy throughput)"
        if self.fetch_p99 >= self.item.encode_seconds:
            return f"fetch: {took}; one in a hundred is slower (policy latency gives up in time)"
        return f"fetch: {took}"


@commands.command("bench", epilog="Example: ec-s3 bench --tokens 1024 --width 3584 --encode-ms 80")
def command(
    context: typer.Context,
    tokens: Annotated[int, typer.Option(min=1, help="Rows of an item's tensor.")] = 1024,
    width: Annotated[int, typer.Option(min=1, help="Its columns.")] = 3584,
    encode_ms: Annotated[
        float, typer.Option(min=0, max=1e9, help="Milliseconds that the encoder takes for it.")
    ] = 80.0,
) -> None:
    """Measure latency and bandwidth of this bucket from here: is fetching quicker than encoding?"""
    item = Item(tokens=tokens, width=width, encode_seconds=encode_ms / 1000)

    async def run(store: Store, out: Output, _config: ECConfig) -> int:
        return await bench(store, out, item)

    with_store(context, run)


async def bench(store: Store, out: Output, item: Item) -> ExitCode:
    """Measure, clean up, report.

    Raises:
        RemoteError: the store cannot be used.
    """
    run = _Run(store, out)
    total = SMALL_BYTES * 2 + sum(ROUNDS.values()) * LARGE_BYTES
    out.note(
        f"writes up to {human_bytes(total)} in {2 + sum(ROUNDS.values())} objects below "
        f"{run.folder} and removes them"
    )
    try:
        await run.check_removal()
        latencies = await run.latencies()
        bandwidths = await run.bandwidths()
    finally:
        left = await run.remove()
    verdict = judge(item, latencies, bandwidths)
    _report(latencies, bandwidths, verdict, out)
    if left:
        out.note(f"{left} objects below {run.folder} could not be removed; `ec-s3 rm` them")
        return ExitCode.FINDING
    return ExitCode.OK


def judge(item: Item, latencies: Sequence[Latency], bandwidths: Sequence[Bandwidth]) -> Verdict:
    """What a fetch of an item takes: one answer's wait, then its bytes, in ranges side by side."""
    small = next(found for found in latencies if found.request == "GET small")
    ranges = math.ceil(item.stored_bytes / LARGE_BYTES)
    gets = {found.parallel: found.rate for found in bandwidths if found.request == "GET"}
    width = max((n for n in gets if n <= max(1, min(ranges, 4))), default=1)
    rate = gets.get(width, 0.0) or LARGE_BYTES / SECONDS  # none came in time: no quicker than this
    moving = item.stored_bytes / rate
    return Verdict(item, small.p50 + moving, small.p99 + moving)


class _Run:
    """One run: its folder, and what it has written there."""

    def __init__(self, store: Store, out: Output) -> None:
        self.folder = f"bench/{secrets.token_hex(8)}/"
        self._store = store
        self._out = out
        self._payload = secrets.token_bytes(LARGE_BYTES)
        self._keys: set[str] = set()
        self._open: set[str] = set()

    async def check_removal(self) -> None:
        """Find out before anything large is written whether it can be removed again."""
        key = f"{self.folder}first"
        await self._put(key, b"ec_s3 bench")
        report = await self._store.delete([key])
        if report.failed:
            raise RemoteDeniedError(
                f"nothing measured: {key} cannot be removed again; allow s3:DeleteObject",
                operation="delete",
                key=key,
            )
        self._keys.discard(key)

    async def latencies(self) -> list[Latency]:
        """Of requests that move next to nothing, one after the other."""
        key = f"{self.folder}small"
        await self._put(key, self._payload[:SMALL_BYTES])
        kinds: dict[str, Callable[[], Awaitable[object]]] = {
            "HEAD": lambda: self._store.head(key),
            "GET small": lambda: self._get(key, bytearray(SMALL_BYTES)),
        }
        found = []
        for name, call in kinds.items():
            await call()  # the connection
            with self._out.progress(name, SMALL_ROUNDS) as advance:
                times = await _one_by_one(call, advance)
            times.sort()
            p50, p99 = times[len(times) // 2], times[math.ceil(len(times) * 0.99) - 1]
            found.append(Latency(name, len(times), p50, p99))
        return found

    async def bandwidths(self) -> list[Bandwidth]:
        """Of large objects, a few at a time: written, then read."""
        found = []
        for parallel in PARALLEL:
            keys = [f"{self.folder}{parallel}-{n}" for n in range(ROUNDS[parallel])]
            puts = [lambda key=key: self._put(key, self._payload) for key in keys]
            found.append(await self._measure("PUT", puts, parallel))
            written = keys[: found[-1].requests] or keys[:1]
            gets = [lambda key=key: self._get(key, bytearray(LARGE_BYTES)) for key in written]
            found.append(await self._measure("GET", gets, parallel))
        return found

    async def _measure(
        self, name: str, calls: Sequence[Callable[[], Awaitable[object]]], parallel: int
    ) -> Bandwidth:
        waiting, done = iter(calls), 0
        with self._out.progress(f"{name} {parallel} at a time", len(calls)) as advance:

            async def work() -> None:
                nonlocal done
                for call in waiting:
                    await call()
                    done += 1
                    advance(1)

            started = time.perf_counter()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SECONDS):
                    await asyncio.gather(*(work() for _ in range(parallel)))
            seconds = time.perf_counter() - started
        return Bandwidth(name, parallel, done, done * LARGE_BYTES / max(seconds, 1e-9))

    async def _put(self, key: str, body: bytes) -> None:
        self._keys.add(key)  # before: one that is broken off may be stored all the same
        self._open.add(key)
        await self._store.put(key, [body], if_absent=False)
        self._open.discard(key)

    async def _get(self, key: str, buffer: bytearray) -> None:
        await self._store.get(key, into=lambda _: memoryview(buffer))

    async def remove(self) -> int:
        """Remove what was written, also while the command is being cancelled; how much is left."""
        removal = asyncio.ensure_future(self._remove())
        try:
            return await asyncio.shield(removal)
        except asyncio.CancelledError:
            await asyncio.wait({removal})
            raise

    async def _remove(self) -> int:
        with contextlib.suppress(RemoteError, TimeoutError):
            async with asyncio.timeout(REMOVE_SECONDS):
                report = await self._store.delete(sorted(self._keys))
                if self._open:  # a PUT that was broken off may have overtaken its removal
                    await asyncio.sleep(SETTLE_SECONDS)
                    report = await self._store.delete(sorted(self._keys))
                self._keys.difference_update(report.deleted)
        return len(self._keys)


async def _one_by_one(
    call: Callable[[], Awaitable[object]], advance: Callable[[int], None]
) -> list[float]:
    times: list[float] = []
    give_up = time.perf_counter() + SECONDS
    while len(times) < SMALL_ROUNDS and (not times or time.perf_counter() < give_up):
        started = time.perf_counter()
        await call()
        times.append(time.perf_counter() - started)
        advance(1)
    return times


def _report(
    latencies: Sequence[Latency], bandwidths: Sequence[Bandwidth], verdict: Verdict, out: Output
) -> None:
    if out.json:
        out.record(
            {
                "latency": [asdict(found) for found in latencies],
                "bandwidth": [asdict(found) for found in bandwidths],
                "verdict": {**asdict(verdict), "fetch": verdict.fetch, "text": verdict.text},
            }
        )
        return
    rows = [
        (found.request, found.requests, human_seconds(found.p50), human_seconds(found.p99))
        for found in latencies
    ]
    out.table("Latency", ("Request", "Number", "p50", "p99"), rows)
    out.line("")
    moved = [
        (found.request, found.parallel, found.requests, f"{found.rate / 1e6:,.0f} MB/s")
        for found in bandwidths
    ]
    size = human_bytes(LARGE_BYTES)
    out.table(f"Bandwidth, {size} objects", ("Request", "At a time", "Number", "Rate"), moved)
    out.line("")
    item = verdict.item
    out.paragraph(
        f"{item.tokens} x {item.width}: ", f"about {human_bytes(item.stored_bytes)}. {verdict.text}"
    )
