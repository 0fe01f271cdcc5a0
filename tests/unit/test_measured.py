"""What the engine measures on its way: phases of a fetch, bytes, encoder time saved, warnings."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import pytest
import torch

from ec_s3.chunks import RANGE_BYTES
from ec_s3.config import ECConfig
from ec_s3.directory import DirectoryStore
from ec_s3.engine import EncoderCache
from ec_s3.errors import RemoteDeniedError, RemoteUnavailableError
from ec_s3.guard import GuardedStore
from ec_s3.keys import Namespace
from ec_s3.metrics import Stats
from ec_s3.policy import Breaker
from ec_s3.port import Ready, ThreadPort
from ec_s3.quiet import REPEAT_SECONDS, Quiet
from ec_s3.testing.memory import MemoryStore
from ec_s3.testing.port_conformance import (
    NAMESPACE,
    SPEC,
    config,
    fill,
    make_slab,
    release,
    reserve,
    save,
    want,
)
from ec_s3.types import ItemMeta

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ec_s3.pages import Slab
    from ec_s3.port import EnginePort

_PHASES = ("queue", "first_byte", "body", "decode", "copy")
_SECONDS = 20.0


@pytest.fixture
def slab() -> Iterator[Slab]:
    with make_slab() as one:
        yield one


def engine(store: MemoryStore, *, disk: DirectoryStore | None = None) -> EncoderCache:
    return EncoderCache(
        ECConfig(max_local_cpu_size="64MiB"), Namespace(model="m"), store=store, disk=disk
    )


async def stored(store: MemoryStore, tensor: torch.Tensor, meta: ItemMeta | None = None) -> int:
    """Let another engine save the tensor; the object's size."""
    key = Namespace(model="m").object_key("item")
    writer = MemoryStore()  # an engine closes its store
    async with engine(writer) as cache:
        assert await cache.put("item", tensor, meta=meta)
        assert (await cache.flush(_SECONDS)).complete
    await store.put(key, [writer.objects[key]])
    return len(writer.objects[key])


class TestFetch:
    async def test_a_small_item_is_one_of_each_phase(self) -> None:
        store, tensor = MemoryStore(), torch.ones(64, 64, dtype=torch.bfloat16)
        nbytes = await stored(store, tensor)
        async with engine(store) as cache:
            assert await cache.get("item") is not None
            stats = cache.stats()
        assert [stats[f"fetch_seconds_{phase}_count"] for phase in _PHASES] == [1, 1, 1, 1, 1]
        assert stats["download_bytes_raw"] == tensor.nbytes
        assert stats["download_bytes_stored"] == nbytes

    async def test_a_large_item_is_one_wait_and_a_read_for_each_range(self) -> None:
        store = MemoryStore()
        noise = torch.randint(-(2**15), 2**15, (RANGE_BYTES * 2,), dtype=torch.int16)
        await stored(store, noise.view(torch.bfloat16))
        async with engine(store) as cache:
            assert await cache.get("item") is not None
            stats = cache.stats()
        assert stats["fetch_seconds_queue_count"] == 1
        ranges = stats["fetch_seconds_first_byte_count"]
        assert ranges >= 2
        assert stats["fetch_seconds_body_count"] == stats["fetch_seconds_decode_count"] == ranges

    async def test_first_byte_is_the_wait_for_the_answer_not_for_the_body(self) -> None:
        class Slow(MemoryStore):
            async def _enter(self, verb: str, *keys: str) -> None:
                if verb == "get":
                    time.sleep(0.05)  # noqa: ASYNC251  the only task of the loop
                await super()._enter(verb, *keys)

        store = Slow()
        await stored(store, torch.ones(64, 64, dtype=torch.bfloat16))
        async with engine(store) as cache:
            assert await cache.get("item") is not None
            stats = cache.stats()
        assert stats["fetch_seconds_first_byte_sum"] >= 0.05
        assert stats["fetch_seconds_body_sum"] < stats["fetch_seconds_first_byte_sum"]

    async def test_an_item_from_disk_counts_as_no_traffic_with_the_bucket(
        self, tmp_path: Path
    ) -> None:
        store, tensor = MemoryStore(), torch.ones(64, 64, dtype=torch.bfloat16)
        disk = DirectoryStore(tmp_path)
        async with engine(store, disk=disk) as cache:
            assert await cache.put("item", tensor)
            assert (await cache.flush(_SECONDS)).complete
        async with engine(MemoryStore(), disk=DirectoryStore(tmp_path)) as cache:
            assert await cache.get("item") is not None
            stats = cache.stats()
        assert stats["hits_disk"] == 1
        assert stats["load_bytes_disk"] == tensor.nbytes
        assert stats["download_bytes_stored"] == stats["fetch_seconds_body_count"] == 0


class TestEncoderTime:
    async def test_a_hit_saves_what_the_item_once_cost(self) -> None:
        store = MemoryStore()
        await stored(store, torch.ones(8, 8, dtype=torch.bfloat16), ItemMeta(encode_seconds=1.5))
        async with engine(store) as cache:
            assert await cache.get("item") is not None
            assert await cache.get("item") is not None
            assert cache.stats()["saved_encoder_seconds"] == 3.0

    def test_a_hit_through_the_port_saves_it_too(self, slab: Slab) -> None:
        port = ThreadPort(config(None), NAMESPACE, slab)
        try:
            granted = reserve(port, "a")
            assert granted.extents is not None
            fill(slab, granted.extents, SPEC, granted.ticket)
            port.filled(granted.ticket, SPEC, ItemMeta(encode_seconds=1.5))
            assert [hit(port, "a"), hit(port, "a")] == [True, True]
            assert drained(port)["saved_encoder_seconds"] == 3.0
        finally:
            port.close(0.0)

    def test_an_item_of_unknown_cost_saves_nothing(self, slab: Slab) -> None:
        port = ThreadPort(config(None), NAMESPACE, slab)
        try:
            granted = reserve(port, "a")
            assert granted.extents is not None
            port.filled(granted.ticket, SPEC, ItemMeta())
            assert hit(port, "a")
            seen = drained(port)
            assert (seen["hits_local"], seen["saved_encoder_seconds"]) == (1, 0)
        finally:
            port.close(0.0)

    def test_what_the_port_is_asked_for_is_counted_once(self, slab: Slab) -> None:
        port = ThreadPort(config(None), NAMESPACE, slab)
        try:
            save(port, slab, "a")
            assert hit(port, "a")
            assert not hit(port, "b")
            seen = drained(port)
            assert (seen["queries"], seen["hits_local"], seen["misses_absent"]) == (2, 1, 1)
        finally:
            port.close(0.0)


def hit(port: EnginePort, name: str) -> bool:
    """Ask for an item and give it back."""
    event = want(port, name)
    release(port, event)
    return isinstance(event, Ready)


def drained(port: EnginePort) -> dict[str, float]:
    stats = Stats()
    stats.merge(port.drain_stats())
    return stats.snapshot()


class TestWarnings:
    def test_the_first_of_a_cause_is_due_and_then_one_a_minute(self) -> None:
        now = 0.0
        quiet = Quiet(lambda: now)
        assert quiet.due("a") == 0
        assert quiet.due("b") == 0
        assert [quiet.due("a"), quiet.due("a")] == [None, None]
        now = REPEAT_SECONDS
        assert quiet.due("a") == 2
        assert quiet.due("a") is None
        now = 2 * REPEAT_SECONDS
        assert quiet.due("b") == 0, "nothing was left out"

    def test_a_lasting_cause_is_due_once_until_all_is_well_and_never_twice_a_minute(self) -> None:
        now = 0.0
        quiet = Quiet(lambda: now, once=True)
        assert [quiet.due(), quiet.due()] == [0, None]
        quiet.over()
        assert quiet.due() is None
        now = REPEAT_SECONDS
        assert [quiet.due(), quiet.due()] == [2, None]
        now = 3 * REPEAT_SECONDS
        assert quiet.due() is None

    async def test_a_failing_bucket_is_named_once_and_its_rest_begins_and_ends_in_the_log(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Failing(MemoryStore):
            error: Exception | None = RemoteDeniedError("403 from b", operation="get", key="k")

            async def _enter(self, verb: str, *keys: str) -> None:
                await super()._enter(verb, *keys)
                if self.error is not None:
                    raise self.error

        now, store, stats = 0.0, Failing(), Stats()
        guarded = GuardedStore(
            store,
            breaker=Breaker(threshold=2, first_pause=1.0),
            stats=stats,
            max_reads=2,
            clock=lambda: now,
        )

        async def read() -> None:
            await guarded.get("k", into=lambda n: memoryview(bytearray(n)))

        caplog.set_level(logging.WARNING)
        for _ in range(5):
            with pytest.raises(RemoteDeniedError):
                await read()
        store.error = RemoteUnavailableError("refused", operation="get", key="k")
        for _ in range(4):
            with pytest.raises(RemoteUnavailableError):
                await read()
        now, store.error = 30.0, None
        await read()
        assert [record.getMessage() for record in caplog.records] == [
            "a request to the bucket failed: 403 from b",
            "a request to the bucket failed: refused",
            "the bucket is left alone until it answers: refused",
            "the bucket answers again",
        ]
        assert stats.snapshot()["remote_requests_get_denied"] == 5
