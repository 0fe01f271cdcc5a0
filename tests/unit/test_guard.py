"""GuardedStore: counting, the limit of reads, the breaker and how it recovers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from ec_s3.errors import (
    RemoteDeniedError,
    RemoteError,
    RemoteThrottledError,
    RemoteTimeoutError,
    RemoteUnavailableError,
)
from ec_s3.guard import GuardedStore
from ec_s3.metrics import Stats
from ec_s3.policy import Breaker
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import ObjectInfo, PutOutcome

if TYPE_CHECKING:
    from ec_s3.store import GetResult


class Moody(MemoryStore):
    """Raises `error` while there is one, and can hold reads up."""

    def __init__(self) -> None:
        super().__init__()
        self.error: RemoteError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.inside = 0
        self.most_inside = 0

    async def _enter(self, verb: str, *keys: str) -> None:
        self.inside += 1
        self.most_inside = max(self.inside, self.most_inside)
        try:
            await self.gate.wait()
        finally:
            self.inside -= 1
        await super()._enter(verb, *keys)
        if self.error is not None:
            raise self.error


@dataclass(slots=True)
class Rig:
    store: Moody = field(default_factory=Moody)
    stats: Stats = field(default_factory=Stats)
    now: float = 0.0
    guarded: GuardedStore = field(init=False)

    def __post_init__(self) -> None:
        self.guarded = GuardedStore(
            self.store,
            breaker=Breaker(threshold=3, first_pause=1.0, longest_pause=8.0),
            stats=self.stats,
            max_reads=2,
            clock=lambda: self.now,
        )

    async def get(self, key: str = "k") -> GetResult | None:
        return await self.guarded.get(key, into=lambda n: memoryview(bytearray(n)))

    async def fail(self, times: int, error: RemoteError) -> None:
        self.store.error = error
        for _ in range(times):
            with pytest.raises(type(error)):
                await self.get()
        self.store.error = None

    def count(self, op: str, outcome: str) -> float:
        return self.stats.snapshot()[f"remote_requests_{op}_{outcome}"]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def timeout() -> RemoteTimeoutError:
    return RemoteTimeoutError("silence", operation="get", key="k")


def unreachable() -> RemoteUnavailableError:
    return RemoteUnavailableError("connection refused by 10.0.0.1", operation="get", key="k")


async def test_every_verb_is_passed_on_and_counted(rig: Rig) -> None:
    assert await rig.guarded.put("k", [b"body"]) is PutOutcome.WRITTEN
    info = await rig.guarded.head("k")
    assert isinstance(info, ObjectInfo)
    result = await rig.get()
    assert result is not None
    assert bytes(result.body) == b"body"
    assert [info.key async for info in rig.guarded.list()] == ["k"]
    assert await rig.guarded.put("k", [b"x"], if_absent=False, if_match="no") is PutOutcome.CHANGED
    assert (await rig.guarded.delete(["k"])).deleted == ("k",)
    assert await rig.guarded.head("k") is None
    assert [rig.count("put", "ok"), rig.count("get", "ok"), rig.count("delete", "ok")] == [2, 1, 1]
    assert (rig.count("head", "ok"), rig.count("head", "absent")) == (1, 1)
    assert rig.stats.snapshot()["remote_seconds_get_count"] == 1
    await rig.guarded.aclose()


async def test_reads_in_flight_are_bounded(rig: Rig) -> None:
    rig.store.gate.clear()
    reads = [asyncio.create_task(rig.get()) for _ in range(4)]
    probes = [asyncio.create_task(rig.guarded.head("k")) for _ in range(4)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert rig.store.inside == 2
    rig.store.gate.set()
    await asyncio.gather(*reads, *probes)
    assert rig.store.most_inside == 2


async def test_an_unreachable_endpoint_is_left_alone_and_the_reason_is_named(rig: Rig) -> None:
    await rig.fail(3, unreachable())
    assert rig.stats.snapshot()["breaker_open"] == 1
    with pytest.raises(RemoteUnavailableError, match=r"connection refused by 10\.0\.0\.1"):
        await rig.get()
    assert rig.store.calls["get"] == 3
    assert rig.count("get", "rested") == 1
    assert rig.count("get", "unreachable") == 3


async def test_after_one_timeout_the_next_call_works(rig: Rig) -> None:
    """LMCache#1913: there the connection stayed None for good."""
    await rig.fail(1, timeout())
    assert await rig.get() is None
    assert rig.count("get", "timeout") == 1
    assert rig.stats.snapshot()["breaker_open"] == 0


async def test_the_breaker_recovers_by_itself(rig: Rig) -> None:
    """LMCache 0.5.6: an outage of 30 seconds disabled the remote tier until a restart."""
    await rig.fail(3, unreachable())
    rig.now = 1.0
    await rig.fail(1, unreachable())  # the probe; the pause doubles
    rig.now = 2.5
    with pytest.raises(RemoteUnavailableError, match="left alone"):
        await rig.get()
    rig.now = 3.0
    assert await rig.get() is None  # the endpoint is back
    assert rig.stats.snapshot()["breaker_open"] == 0
    assert await rig.get() is None


@pytest.mark.parametrize(
    "error",
    [
        RemoteDeniedError("no", operation="get", key="k"),
        RemoteThrottledError("slower", operation="get", key="k"),
    ],
)
async def test_an_endpoint_that_answers_is_never_left_alone(rig: Rig, error: RemoteError) -> None:
    await rig.fail(10, error)
    assert rig.count("get", error.reason) == 10
    assert rig.stats.snapshot()["breaker_open"] == 0


async def test_an_endpoint_that_only_runs_into_deadlines_is_left_alone(rig: Rig) -> None:
    rig.store.gate.clear()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await rig.get()
    assert rig.count("get", "cancelled") == 3
    assert rig.stats.snapshot()["breaker_open"] == 1
    rig.store.gate.set()
    rig.now = 1.0
    assert await rig.get() is None


async def test_a_cancelled_read_gives_its_place_back(rig: Rig) -> None:
    rig.store.gate.clear()
    reads = [asyncio.create_task(rig.get()) for _ in range(2)]
    await asyncio.sleep(0)
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    rig.store.gate.set()
    assert list(await asyncio.gather(rig.get(), rig.get())) == [None, None]
