"""Engines whose bucket is down, and how they are seen to be usable, down and well again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ec_s3.config import ECConfig
from ec_s3.engine import EncoderCache
from ec_s3.errors import RemoteError
from ec_s3.keys import Namespace
from ec_s3.metrics import Stats
from ec_s3.policy import Breaker
from ec_s3.testing import port_conformance
from ec_s3.tickets import Absent, Ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ec_s3.pages import Slab
    from ec_s3.port import EnginePort

NAMESPACE = Namespace(model="org/model")
USABLE_SECONDS = 2.0
"""The most that an engine may take until it is usable, whatever its endpoint does."""
_SECONDS = 60.0


@pytest.fixture
def impatient_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of this process's engines, every 0.05 to 0.2 s."""
    monkeypatch.setattr(
        "ec_s3.wiring.Breaker", partial(Breaker, first_pause=0.05, longest_pause=0.2)
    )


def tensor(seed: int, rows: int = 64) -> torch.Tensor:
    """An item of its own for each seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 256, generator=generator).to(torch.bfloat16)


def url(bucket: str, endpoint: str) -> str:
    """A prefix of a bucket."""
    return f"s3://{bucket}/p?endpoint={endpoint}&region=us-east-1"


def config(bucket: str, endpoint: str, transport: str, **more: object) -> ECConfig:
    """Settings of an engine that waits for little."""
    values: dict[str, Any] = {
        "url": url(bucket, endpoint),
        "s3_transport": transport,
        "max_local_cpu_size": 32 << 20,
        "connect_timeout": 0.3,
        "read_timeout": 0.3,
        "blocking_timeout": 1.0,
        "negative_ttl": 0.0,
        "flush_timeout": 0.0,
        **more,
    }
    return ECConfig(**values)


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for something that must come; the condition may be a coroutine function."""
    give_up = time.monotonic() + _SECONDS
    while True:
        done = condition()
        if await done if hasattr(done, "__await__") else done:
            return
        assert time.monotonic() < give_up, what
        await asyncio.sleep(0.02)


async def fill(settings: ECConfig, *names: str) -> None:
    """Put items numbered from 0 into a bucket that is up."""
    async with EncoderCache(settings, NAMESPACE) as cache:
        for seed, name in enumerate(names):
            assert await cache.put(name, tensor(seed))
        assert (await cache.flush(20.0)).complete


@contextlib.asynccontextmanager
async def opened(
    settings: ECConfig, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[EncoderCache]:
    """An engine that has been opened, has taken an item and has answered, all in time."""
    seconds = []
    for _ in range(3):  # another process may take the machine for seconds
        caplog.clear()
        started = time.monotonic()
        async with EncoderCache(settings, NAMESPACE) as cache:
            assert await cache.put("mine", tensor(99))
            assert await cache.get("a") is None
            seconds.append(time.monotonic() - started)
            if seconds[-1] < USABLE_SECONDS:
                yield cache
                return
    raise AssertionError(f"usable after {seconds} s")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was warned of; nothing worse was said."""
    records = [record for record in caplog.records if record.name.startswith("ec_s3")]
    assert [record.getMessage() for record in records if record.levelno > logging.WARNING] == []
    return [record.getMessage() for record in records if record.levelno == logging.WARNING]


async def is_down(cache: EncoderCache) -> None:
    """Without the bucket: said so, and nothing is taken for granted."""
    await until(lambda: cache.stats()["breaker_open"] == 1, "the tier is not reported down")
    assert not await cache.contains("a")
    with pytest.raises(RemoteError):
        await cache.is_shared("a")
    counted = cache.stats()
    assert counted.get("uploads_written", 0) == counted.get("uploads_exists", 0) == 0


async def recovers(cache: EncoderCache) -> None:
    """The bucket's item is found, and what was put meanwhile is stored."""

    async def found() -> bool:
        return equal(await cache.get("a"), tensor(0))

    await until(found, "the tier does not recover")
    await until(lambda: cache.stats()["breaker_open"] == 0, "the tier is reported down for ever")
    assert (await cache.flush(30.0)).complete
    counted = cache.stats()
    # A server that stood still may have taken an upload that was given up.
    assert counted.get("uploads_written", 0) + counted.get("uploads_exists", 0) == 1


def equal(got: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Whether a get was a hit, which has to be right."""
    if got is None:
        return False
    assert torch.equal(got, expected)
    return True


# -- the connector's engine ------------------------------------------------------------------------


def port_opened(
    open_port: Callable[[], EnginePort], slab: Slab, *, own_process: bool
) -> EnginePort:
    """A connector's engine that has taken an item and has answered, all in time."""
    seconds = []
    for attempt in range(3):  # another process may take the machine for seconds
        started = time.monotonic()
        port = open_port()
        if own_process:  # starting Python takes longer than that
            started = time.monotonic()
        body = port_conformance.save(port, slab, f"mine-{attempt}")
        ready = port_conformance.want(port, f"mine-{attempt}")
        assert isinstance(ready, Ready)
        assert port_conformance.read(slab, ready.extents, port_conformance.SPEC) == body
        port_conformance.release(port, ready)
        seconds.append(time.monotonic() - started)
        if seconds[-1] < USABLE_SECONDS:
            # A request waits for this no longer than `fetch_timeout`; the port itself knows none.
            assert isinstance(port_conformance.want(port, "a"), Absent)
            return port
        port.close(0.0)
    raise AssertionError(f"usable after {seconds} s")


def port_is_down(port: EnginePort) -> None:
    """It says so."""
    told = Stats()

    def down() -> bool:
        told.merge(port.drain_stats())
        return told.snapshot().get("breaker_open") == 1

    port_conformance.until(down, "the tier is not reported down")


def port_recovers(port: EnginePort) -> None:
    """The bucket's item is found, and what was saved meanwhile is stored."""
    give_up = time.monotonic() + _SECONDS
    while not isinstance(answer := port_conformance.want(port, "a"), Ready):
        assert time.monotonic() < give_up, "the tier does not recover"
        time.sleep(0.05)
    port_conformance.release(port, answer)
    assert port.close(30.0).complete
