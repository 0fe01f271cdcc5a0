"""EncoderCache: tiers together, deletion, eviction, metrics, start and close."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

import pytest
import torch
from stubborn import outlast

from ec_s3 import __version__
from ec_s3.config import ECConfig
from ec_s3.engine import EncoderCache
from ec_s3.errors import (
    ClosedError,
    ConfigError,
    RemoteDeniedError,
    RemoteTimeoutError,
    RemoteUnavailableError,
)
from ec_s3.fetch import Miss
from ec_s3.keys import CONTROL_NAME, Namespace
from ec_s3.local import Lease
from ec_s3.pages import Slab
from ec_s3.reader import ANYTHING, release_all
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import Expectation, FlushReport, ItemMeta, PutOutcome
from ec_s3.wire import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ec_s3.store import Buffer, GetResult
    from ec_s3.types import DeleteReport, ObjectInfo

NAMESPACE = Namespace(model="org/model")
PAGE = 256 << 10


class Bucket(MemoryStore):
    """Holds up the verbs whose gate is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.shut: dict[str, asyncio.Event] = {}
        self.inside: dict[str, int] = {"get": 0, "put": 0, "head": 0, "delete": 0}

    def hold(self, *verbs: str) -> None:
        for verb in verbs:
            self.shut[verb] = asyncio.Event()

    def let(self) -> None:
        for event in self.shut.values():
            event.set()
        self.shut.clear()

    async def _wait(self, verb: str) -> None:
        self.inside[verb] += 1
        try:
            if verb in self.shut:
                await self.shut[verb].wait()
        finally:
            self.inside[verb] -= 1

    async def get(
        self,
        key: str,
        *,
        into: Callable[[int], memoryview],
        start: int = 0,
        length: int | None = None,
        if_match: str | None = None,
        if_none_match: str | None = None,
    ) -> GetResult | None:
        result = await super().get(
            key,
            into=into,
            start=start,
            length=length,
            if_match=if_match,
            if_none_match=if_none_match,
        )
        if not key.endswith(CONTROL_NAME):
            await self._wait("get")  # after the object was read: the answer is on its way
        return result

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        if_match: str | None = None,
    ) -> PutOutcome:
        await self._wait("put")
        return await super().put(key, parts, if_absent=if_absent, if_match=if_match)

    async def head(self, key: str) -> ObjectInfo | None:
        await self._wait("head")
        return await super().head(key)

    async def delete(self, keys: Sequence[str]) -> DeleteReport:
        await self._wait("delete")
        return await super().delete(keys)

    def items(self) -> list[str]:
        return sorted(key for key in self.objects if not key.endswith(".json"))


def config(**settings: object) -> ECConfig:
    defaults: dict[str, object] = {
        "max_local_cpu_size": 8 * PAGE,
        "blocking_timeout": 10.0,
        "flush_timeout": 5.0,
    }
    return ECConfig().model_copy(update={**defaults, **settings})


def tensor(seed: int, pages: float = 0.5) -> torch.Tensor:
    rows = int(pages * PAGE / 2 / 128)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 128, generator=generator).to(torch.bfloat16)


async def opened(store: MemoryStore | None, **settings: object) -> EncoderCache:
    return await EncoderCache.open(config(**settings), NAMESPACE, store=store)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # other threads make it true
            await asyncio.sleep(0.001)


def forget(cache: EncoderCache) -> None:
    cache.tier.clear()


async def test_what_one_engine_puts_another_gets() -> None:
    store = Bucket()
    async with await opened(store) as one:
        assert await one.put("a", tensor(1), meta=ItemMeta(encode_seconds=0.5))
        assert await one.contains("a")
        assert (await one.flush()).complete
    store._closed = False  # a bucket outlives its clients
    two = await opened(store)
    got = await two.get("a")
    assert got is not None
    assert torch.equal(got, tensor(1))
    assert two.stats()["saved_encoder_seconds"] == 0.5
    await two.close()


async def test_memory_only_works_without_a_store() -> None:
    cache = await opened(None)
    assert not cache.uploads
    assert await cache.put_many({"a": tensor(1), "b": tensor(2)}) == {"a": True, "b": True}
    got = await cache.get_many(["b", "x", "a"])
    assert [item is not None for item in got] == [True, False, True]
    assert await cache.contains_many(["a", "x"]) == {"a": True, "x": False}
    assert await cache.flush() == FlushReport()
    assert cache.stats()["local_bytes_dirty"] == 0
    await cache.close()


async def test_the_result_never_aliases_the_cache() -> None:
    cache = await opened(None)
    await cache.put("a", tensor(1))
    got = await cache.get("a")
    assert got is not None
    got.zero_()
    again = await cache.get("a")
    assert again is not None
    assert torch.equal(again, tensor(1))
    await cache.close()


async def test_an_item_of_other_rows_is_a_miss() -> None:
    cache = await opened(None)
    await cache.put("a", tensor(1))
    assert await cache.get("a", expect=Expectation(rows=7)) is None
    assert cache.stats()["misses_mismatch"] == 1
    await cache.close()


async def test_the_same_identifier_under_two_salts_never_meets() -> None:
    """vllm#55439: there tenants could read each other's cached media."""
    store = Bucket()
    caches = [
        await EncoderCache.open(config(), Namespace(model="m", salt=salt), store=store)
        for salt in ("tenant 1", "tenant 2")
    ]
    await caches[0].put("a", tensor(1))
    await caches[0].flush()
    assert not await caches[1].contains("a")
    assert await caches[1].get("a") is None
    await caches[1].put("a", tensor(2))
    await caches[1].flush()
    assert len(store.items()) == 2
    for cache, seed in zip(caches, (1, 2), strict=True):
        forget(cache)
        got = await cache.get("a")
        assert got is not None
        assert torch.equal(got, tensor(seed))
    for cache in caches:
        await cache.close()


async def test_models_that_differ_by_punctuation_share_nothing() -> None:
    """LMCache 0.5.6: there `a/b` and `a_b` shared objects."""
    store = Bucket()
    models = ["a/b", "a_b", "a-b", "a%2Fb", "A/b"]
    for seed, model in enumerate(models):
        cache = await EncoderCache.open(config(), Namespace(model=model), store=store)
        await cache.put("x/y", tensor(seed))
        await cache.close()
        store._closed = False
    assert len(store.items()) == len(models)


# -- admission -----------------------------------------------------------------------------------


async def test_second_sight_uploads_what_comes_back() -> None:
    store = Bucket()
    cache = await opened(store, second_sight=True)
    assert await cache.put("a", tensor(1))
    await cache.flush()
    assert store.items() == []
    assert await cache.get("a") is not None
    assert await cache.put("a", tensor(1))
    await cache.flush()
    assert len(store.items()) == 1
    assert cache.stats()["rejected_puts_first_sight"] == 1
    await cache.close()


async def test_an_item_above_the_cap_is_neither_uploaded_nor_read() -> None:
    store = Bucket()
    other = await opened(store)
    await other.put("a", tensor(1, 1))
    await other.flush()
    cache = await opened(store, max_item_size=PAGE // 2)
    assert await cache.get("a") is None
    assert cache.stats()["misses_too_large"] == 1
    assert await cache.put("b", tensor(2, 1))
    await cache.flush()
    assert len(store.items()) == 1
    assert await cache.get("b") is not None  # the host tier has it
    assert cache.stats()["rejected_puts_too_large"] == 1
    await cache.close()
    await other.close()


async def test_one_larger_than_the_tier_goes_to_the_bucket_and_comes_back() -> None:
    store = Bucket()
    cache = await opened(store)
    assert await cache.put("a", tensor(1, 12))
    await cache.flush()
    got = await cache.get("a")
    assert got is not None
    assert torch.equal(got, tensor(1, 12))
    assert cache.stats()["local_bytes_used"] == 0
    await cache.close()


async def test_one_larger_than_the_tier_is_a_no_when_the_queue_has_no_room() -> None:
    store = Bucket()
    cache = await opened(store, upload_queue_size=PAGE)
    assert not await cache.put("a", tensor(1, 12))
    assert cache.stats()["uploads_queue_full"] == 1
    assert await cache.put("b", tensor(2))
    await cache.close()


async def test_a_put_clears_a_remembered_no() -> None:
    cache = await opened(Bucket())
    assert await cache.get("a") is None
    await cache.put("a", tensor(1))
    await cache.flush()
    forget(cache)
    assert await cache.contains("a")
    assert await cache.get("a") is not None
    await cache.close()


async def test_a_full_queue_still_keeps_the_item_here() -> None:
    store = Bucket()
    store.hold("put")
    cache = await opened(store, upload_queue_items=1, max_uploads=1)
    await cache.put("a", tensor(0))
    await until(lambda: store.inside["put"] == 1)
    assert await cache.put("b", tensor(1))
    assert await cache.put("c", tensor(2))
    assert cache.stats()["uploads_queue_full"] == 1
    assert await cache.get("c") is not None
    store.let()
    report = await cache.close()
    assert (report.pending, report.dropped) == (0, 1)


# -- eviction ------------------------------------------------------------------------------------


async def test_an_item_evicted_before_its_upload_is_gone_and_counted() -> None:
    store = Bucket()
    store.hold("put")
    cache = await opened(store, max_uploads=1, upload_queue_size=1)
    await cache.put("first", tensor(0))
    await until(lambda: store.inside["put"] == 1)
    for i in range(16):
        assert await cache.put(f"k{i}", tensor(i))
    assert await cache.get("k0") is None
    flat = cache.stats()
    assert flat["local_evictions_dirty"] > 0
    assert flat["misses_absent"] == 1
    store.let()
    await cache.flush()
    assert cache.stats()["uploads_evicted"] > 0
    assert await cache.put("k0", tensor(0))  # and a new put starts over
    await cache.flush()
    forget(cache)
    assert await cache.get("k0") is not None
    await cache.close()


async def test_evictions_are_counted_once_however_often_one_looks() -> None:
    cache = await opened(None)
    for i in range(20):
        await cache.put(f"k{i}", tensor(i, 1))
    first = cache.stats()
    assert first["local_evictions_clean"] == 12
    assert cache.stats()["local_evictions_clean"] == 12
    cache.statistics.drain()
    await cache.put("more", tensor(99, 1))
    cache.stats()
    assert cache.statistics.drain()["local_evictions|clean"] == 1
    await cache.close()


async def test_the_most_used_item_is_evicted_last() -> None:
    """LMCache 0.5.6: its "LRU" never heard of reads."""
    cache = await opened(None)
    for i in range(8):
        await cache.put(f"k{i}", tensor(i, 1))
    for _ in range(5):
        assert await cache.get("k0") is not None
    for i in range(8, 10):
        await cache.put(f"k{i}", tensor(i, 1))
    assert [await cache.contains(f"k{i}") for i in range(4)] == [True, False, False, True]
    await cache.close()


async def test_the_gauges_show_the_host_tier_by_state() -> None:
    cache = await opened(None)
    await cache.put("a", tensor(1, 2))
    reservation = cache.tier.reserve("r", PAGE)
    assert reservation is not None
    item = await cache.acquire("a")
    assert isinstance(item, Lease)
    flat = cache.stats()
    assert flat["local_bytes_capacity"] == flat["local_bytes_populated"] == 8 * PAGE
    assert flat["local_bytes_used"] == 3 * PAGE
    assert flat["local_bytes_reserved"] == PAGE
    assert flat["local_bytes_leased"] == 2 * PAGE
    assert flat[f"info_{__version__}_{FORMAT_VERSION}"] == 1
    reservation.abort()
    item.release()
    await cache.close()


# -- deletion ------------------------------------------------------------------------------------


async def test_delete_removes_from_every_tier(tmp_path: Path) -> None:
    store, disk = Bucket(), MemoryStore()
    cache = await EncoderCache.open(config(), NAMESPACE, store=store, disk=disk)
    await cache.put_many({"a": tensor(1), "b": tensor(2)})
    await cache.flush()
    report = await cache.delete(["a", "never there"])
    assert set(report.deleted) == {cache.key_of("a"), cache.key_of("never there")}
    assert store.items() == list(disk.objects) == [cache.key_of("b")]
    assert await cache.get("a") is None
    assert not await cache.contains("a")
    assert await cache.get("b") is not None
    await cache.close()


async def test_a_deleted_item_can_be_put_again() -> None:
    store = Bucket()
    cache = await opened(store)
    for _ in range(2):
        await cache.put("a", tensor(1))
        await cache.flush()
        assert store.items() == [cache.key_of("a")]
        await cache.delete(["a"])
        assert store.items() == []
    await cache.close()


@pytest.mark.parametrize("state", ["queued", "running"])
async def test_a_deletion_wins_over_an_upload_under_way(state: str) -> None:
    store = Bucket()
    store.hold("put")
    cache = await opened(store, max_uploads=1)
    if state == "queued":
        await cache.put("before", tensor(0))
        await until(lambda: store.inside["put"] == 1)
        await cache.put("a", tensor(1))
    else:
        await cache.put("a", tensor(1))
        await until(lambda: store.inside["put"] == 1)
    await cache.delete(["a"])
    store.let()
    await cache.flush()
    assert cache.key_of("a") not in store.objects
    assert await cache.get("a") is None
    assert not await cache.contains("a")
    await cache.close()


async def test_a_fetch_that_began_before_the_deletion_does_not_bring_it_back() -> None:
    store, disk = Bucket(), MemoryStore()
    cache = await EncoderCache.open(config(), NAMESPACE, store=store, disk=disk)
    await cache.put("a", tensor(1))
    await cache.flush()
    forget(cache)
    disk.objects.clear()
    store.hold("get")
    reading = asyncio.create_task(cache.get("a"))
    await until(lambda: store.inside["get"] == 1)
    await cache.delete(["a"])
    store.let()
    assert await reading is None
    assert not cache.tier.contains(cache.key_of("a"))
    assert await cache.get("a") is None
    assert disk.objects == {}
    await cache.close()


async def test_a_get_during_the_deletion_does_not_bring_it_back() -> None:
    store = Bucket()
    cache = await opened(store, negative_ttl=0.0)
    await cache.put("a", tensor(1))
    await cache.flush()
    store.hold("delete")
    deleting = asyncio.create_task(cache.delete(["a"]))
    await until(lambda: store.inside["delete"] == 1)
    assert await cache.get("a") is None
    store.let()
    await deleting
    assert await cache.get("a") is None
    await cache.close()


async def test_a_store_that_cannot_delete_does_not_keep_the_others_from_it() -> None:
    class Denied(MemoryStore):
        async def delete(self, keys: Sequence[str]) -> DeleteReport:
            raise RemoteDeniedError("no", operation="delete")

    store, disk = Bucket(), Denied()
    cache = await EncoderCache.open(config(), NAMESPACE, store=store, disk=disk)
    await cache.put("a", tensor(1))
    await cache.flush()
    with pytest.raises(RemoteDeniedError):
        await cache.delete(["a"])
    assert store.items() == []
    assert not cache.tier.contains(cache.key_of("a"))
    await cache.close()


# -- what lies in the bucket -----------------------------------------------------------------------


async def test_the_first_upload_describes_the_namespace_with_the_facts() -> None:
    store = Bucket()
    cache = await EncoderCache.open(
        config(), NAMESPACE, store=store, facts={"model_argument": "/m/x"}
    )
    assert store.objects == {}
    await cache.put("a", tensor(1))
    await cache.flush()
    assert store.objects[NAMESPACE.manifest_key] == NAMESPACE.manifest({"model_argument": "/m/x"})
    await cache.close()


async def test_facts_that_are_no_json_hurt_nothing() -> None:
    store = Bucket()
    cache = await EncoderCache.open(config(), NAMESPACE, store=store, facts={"x": object()})
    await cache.put("a", tensor(1))
    assert (await cache.flush()).complete
    assert store.items() == [cache.key_of("a")]
    assert cache.stats()["errors_upload"] == 0
    await cache.close()


async def test_a_bad_object_is_replaced_by_the_next_save() -> None:
    store = Bucket()
    cache = await opened(store)
    key = cache.key_of("a")
    await store.put(key, [b"bad"])
    assert await cache.get("a") is None
    assert await cache.put("a", tensor(1))
    await cache.flush()
    assert cache.stats()["repaired_objects"] == 1
    forget(cache)
    got = await cache.get("a")
    assert got is not None
    assert torch.equal(got, tensor(1))
    store.objects[key] = b"bad again"
    forget(cache)
    assert await cache.get("a") is None
    await cache.put("a", tensor(1))
    await cache.flush()
    assert store.objects[key] == b"bad again"  # at most once an hour
    assert cache.stats()["repaired_objects"] == 1
    await cache.close()


async def test_an_item_is_shared_as_soon_as_its_upload_is_queued() -> None:
    store = Bucket()
    store.hold("put")
    cache = await opened(store)
    assert not await cache.is_shared("a")
    await cache.put("a", tensor(1))
    assert await cache.is_shared("a")
    store.let()
    await cache.flush()
    assert await cache.is_shared("a")
    await cache.close()


async def test_whether_an_item_is_shared_is_not_waited_for_for_ever() -> None:
    store = Bucket()
    store.hold("head")
    cache = await opened(store, metadata_timeout=0.02)
    with pytest.raises(RemoteTimeoutError):
        await cache.is_shared("a")
    store.let()
    await cache.close()


# -- start and close -------------------------------------------------------------------------------


async def test_after_close_calls_are_refused() -> None:
    cache = await opened(Bucket())
    await cache.close()
    assert await cache.close() == FlushReport()
    for call in (
        lambda: cache.get("a"),
        lambda: cache.put("a", tensor(1)),
        lambda: cache.contains("a"),
        lambda: cache.delete(["a"]),
        lambda: cache.is_shared("a"),
    ):
        with pytest.raises(ClosedError):
            await call()
    with pytest.raises(ClosedError):
        cache.prefetch(["a"])
    assert cache.stats()["queries"] == 0


async def test_close_says_what_it_dropped() -> None:
    store = Bucket()
    store.hold("put")
    cache = await opened(store)
    for i in range(6):
        await cache.put(f"k{i}", tensor(i))
    report = await cache.close(timeout=0.02)
    assert report == FlushReport(uploaded=0, pending=6, dropped=6)
    assert cache.stats()["uploads_closed"] == 6


async def test_a_close_that_is_not_waited_for_comes_to_its_end() -> None:
    before = asyncio.all_tasks()
    store = Bucket()
    store.hold("put")
    cache = await opened(store)
    await cache.put("a", tensor(1))
    await until(lambda: store.inside["put"] == 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await cache.close(timeout=0.2)
    assert await cache.close() == FlushReport()
    assert asyncio.all_tasks() == before
    assert cache.stats()["uploads_closed"] == 1


async def test_a_start_that_is_called_off_leaves_nothing_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered = asyncio.Event()

    async def never(_: Slab) -> None:
        entered.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("ec_s3.engine.first_pages", never)
    before = asyncio.all_tasks()
    starting = asyncio.create_task(opened(Bucket()))
    await entered.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert asyncio.all_tasks() == before
    gc.collect()  # an unclosed slab would warn


async def test_close_answers_those_who_wait() -> None:
    store = Bucket()
    store.hold("get", "head")
    cache = await opened(store)
    waiting = [
        asyncio.ensure_future(call)
        for call in (
            cache.get("a"),
            cache.contains("b"),
            cache.acquire_many(["c", "d"], expect=ANYTHING, timeout=30),
        )
    ]
    await until(lambda: store.inside["get"] == 3)
    await cache.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [ClosedError] * 3


async def test_a_slab_that_was_passed_in_stays_open() -> None:
    with Slab.create(8 * PAGE) as slab:
        slab.populate()
        cache = await EncoderCache.open(config(), NAMESPACE, slab=slab)
        await cache.put("a", tensor(1))
        await cache.close()
        assert not slab.closed


async def test_settings_that_cannot_be_used_leave_nothing_open() -> None:
    class Unusable(MemoryStore):
        async def connect(self) -> None:
            raise ConfigError("tags: too many")

    with pytest.raises(ConfigError):
        await EncoderCache.open(config(), NAMESPACE, store=Unusable())
    gc.collect()  # an unclosed slab would warn


async def test_a_store_that_is_down_at_the_start_may_come_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.guard.CONNECT_SECONDS", 0.01)

    class Later(Bucket):
        async def connect(self) -> None:
            await asyncio.Event().wait()

    cache = await EncoderCache.open(config(), NAMESPACE, store=Later())
    assert "a store is not ready yet" in caplog.text
    await cache.put("a", tensor(1))
    assert (await cache.flush()).uploaded == 1
    await cache.close()


async def test_a_store_that_lets_go_of_nothing_does_not_hold_up_the_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.guard.CONNECT_SECONDS", 0.01)
    end = asyncio.Event()

    class Stuck(Bucket):
        async def connect(self) -> None:
            """As a folder on a dead file system does."""
            await outlast(end)
            raise RemoteUnavailableError("gone", operation="connect")

    async with asyncio.timeout(10):
        cache = await EncoderCache.open(config(), NAMESPACE, store=Stuck())
    assert "a store is not ready yet: no answer in time" in caplog.text
    await cache.put("a", tensor(1))
    assert (await cache.flush()).uploaded == 1
    end.set()
    await cache.close()


async def test_a_get_whose_caller_leaves_keeps_no_lease() -> None:
    store = Bucket()
    cache = await opened(store)
    await cache.put("a", tensor(1))
    await cache.flush()
    for delay in range(12):
        forget(cache)
        task = asyncio.create_task(cache.get("a"))
        for _ in range(delay):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await cache.get("a") is not None
    assert cache.stats()["local_bytes_leased"] == 0
    items = await cache.acquire_many(["a", "x"], expect=ANYTHING, timeout=5)
    assert isinstance(items[1], Miss)
    release_all(items)
    await cache.close()
