"""The warm start: what it loads, in which order, and who goes before it."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import torch

from ec_s3.config import ECConfig
from ec_s3.control import Control
from ec_s3.directory import DirectoryStore
from ec_s3.engine import EncoderCache
from ec_s3.errors import RemoteDeniedError
from ec_s3.keys import CONTROL_NAME, Namespace, identifier_digest
from ec_s3.local import LocalTier
from ec_s3.pages import PAGE_BYTES, Slab
from ec_s3.tensors import as_bytes
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import ItemMeta, TensorSpec
from ec_s3.warmup import newest
from ec_s3.wire import encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    import pytest

    from ec_s3.store import GetResult
    from ec_s3.types import ObjectInfo

NAMESPACE = Namespace(model="org/model", dtype="float32")
OTHER = Namespace(model="org/other", dtype="float32")
SPEC = TensorSpec("float32", (64, 1024))
"""Exactly a page, to count with."""


def content(name: str) -> torch.Tensor:
    return torch.randn(*SPEC.shape, generator=torch.Generator().manual_seed(len(name)))


def encoded(name: str, *, space: Namespace = NAMESPACE, created: float = 1.0) -> bytes:
    frame = encode(
        SPEC,
        [as_bytes(content(name))],
        identifier=name,
        namespace=space.id,
        meta=ItemMeta(),
        created=created,
    )
    return b"".join(frame.parts)


class Bucket(MemoryStore):
    """Holds up reads of items while `gate` is shut; notes their keys."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.inside = 0
        self.read: list[str] = []
        self.error: Exception | None = None

    def store(self, name: str, *, age: float = 0.0, **how: object) -> str:
        key = how.get("space", NAMESPACE).object_key(name)  # type: ignore[attr-defined]  # a namespace
        self.objects[key] = encoded(name, **how)  # type: ignore[arg-type]  # passed through
        self._versions[key] = (f'"{name}"', 1e9 - age)
        return str(key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        if self.error is not None:
            raise self.error
        async for info in super().list(prefix):
            yield info

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
        if not key.endswith(CONTROL_NAME):
            self.read.append(key)
            self.inside += 1
            try:
                await self.gate.wait()
            finally:
                self.inside -= 1
        return await super().get(
            key,
            into=into,
            start=start,
            length=length,
            if_match=if_match,
            if_none_match=if_none_match,
        )


@asynccontextmanager
async def engine(
    store: MemoryStore | None,
    *,
    pages: int = 8,
    disk: DirectoryStore | None = None,
    **settings: object,
) -> AsyncIterator[EncoderCache]:
    values = {"max_local_cpu_size": pages * PAGE_BYTES, "warm_start": "1GiB", **settings}
    config = ECConfig.from_mapping(values)
    async with EncoderCache(config, NAMESPACE, store=store, disk=disk) as cache:
        yield cache


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  other threads make it true
            await asyncio.sleep(0.001)


async def done(cache: EncoderCache) -> dict[str, float]:
    await until(lambda: not cache.stats()["warm_start_running"])
    return cache.stats()


def held(cache: EncoderCache, *names: str) -> list[bool]:
    return [cache.tier.contains(NAMESPACE.object_key(name)) for name in names]


# -- which objects ---------------------------------------------------------------------------------


async def test_the_newest_objects_that_fit_are_chosen_out_of_all() -> None:
    store = Bucket()
    keys = [store.store(f"{i}", age=(i * 7) % 10) for i in range(10)]
    by_age = sorted(range(10), key=lambda i: (i * 7) % 10)
    found = await newest(store, NAMESPACE.prefix, nbytes=3 * PAGE_BYTES)
    assert [info.key for info in found.objects] == [keys[i] for i in by_age[:3]]
    assert found.whole
    assert len((await newest(store, NAMESPACE.prefix, nbytes=1 << 40)).objects) == 10


async def test_what_is_no_item_is_not_chosen() -> None:
    store = Bucket()
    store.objects[NAMESPACE.manifest_key] = b"{}"
    store.objects[f"{NAMESPACE.prefix}/float32/nonsense"] = b"x"
    assert (await newest(store, NAMESPACE.prefix, nbytes=1 << 40)).objects == []


async def test_a_huge_namespace_is_listed_in_bounded_time_and_memory() -> None:
    class Huge(MemoryStore):
        """A million objects and more, none of which exist."""

        listed = 0

        async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
            from ec_s3.types import ObjectInfo

            for i in range(1 << 40):
                self.listed = i
                yield ObjectInfo(f"{prefix}{i:064x}", 1000, "", float(i))
                if not i % 100:
                    await asyncio.sleep(0)

    store = Huge()
    prefix = f"{NAMESPACE.prefix}/float32/00/"
    found = await newest(store, prefix, nbytes=5 * PAGE_BYTES, most=1000)
    assert [info.modified for info in found.objects] == [999.0, 998.0, 997.0, 996.0, 995.0]
    assert not found.whole
    found = await newest(store, prefix, nbytes=5 * PAGE_BYTES, seconds=0.05)
    assert len(found.objects) == 5
    assert not found.whole


# -- what is loaded --------------------------------------------------------------------------------


async def test_items_of_the_bucket_are_there_before_they_are_asked_for() -> None:
    bucket = Bucket()
    for name in ("a", "bb", "ccc"):
        bucket.store(name)
    bucket.store("dddd", space=OTHER)
    async with engine(bucket) as cache:
        stats = await done(cache)
        assert stats["warm_start_items_loaded"] == 3
        assert stats["warm_start_bytes_remote"] == 3 * SPEC.nbytes
        assert stats["queries"] == stats["hits_remote"] == stats["load_seconds_remote_count"] == 0
        read = len(bucket.read)
        for name in ("a", "bb", "ccc"):
            assert torch.equal(await cache.get(name), content(name))  # type: ignore[arg-type]  # not None
        assert len(bucket.read) == read == 3
        assert cache.stats()["hits_local"] == 3


async def test_no_more_is_loaded_than_was_asked_for() -> None:
    bucket = Bucket()
    for i in range(6):
        bucket.store("x" * (i + 1), age=i)
    async with engine(bucket, warm_start=2 * SPEC.nbytes) as cache:
        assert (await done(cache))["warm_start_items_loaded"] == 2
        assert held(cache, "x", "xx", "xxx") == [True, True, False]


async def test_the_disk_tier_comes_first_and_what_it_holds_is_not_fetched(tmp_path: Path) -> None:
    bucket, disk = Bucket(), DirectoryStore(tmp_path)
    key = bucket.store("a")
    bucket.store("bb")
    await disk.put(key, [bucket.objects[key]])
    async with engine(bucket, disk=disk) as cache:
        stats = await done(cache)
        assert stats["warm_start_bytes_disk"] == stats["warm_start_bytes_remote"] == SPEC.nbytes
        assert stats["warm_start_items_present"] == 1
        assert bucket.read == [NAMESPACE.object_key("bb")]
        assert await disk.head(NAMESPACE.object_key("bb")) is None, "the disk's order stays"


async def test_the_start_does_not_wait_for_it_and_the_end_ends_it() -> None:
    bucket = Bucket()
    bucket.store("a")
    bucket.gate.clear()
    async with engine(bucket) as cache:
        await until(lambda: bucket.inside == 1)
        assert cache.stats()["warm_start_running"] == 1
        assert await cache.put("other", content("other"))
        bucket.gate.set()
        assert (await cache.flush()).complete
        bucket.gate.clear()
    assert cache.tier.stats().leased_bytes == cache.tier.stats().reserved_bytes == 0


async def test_nothing_that_a_request_brought_is_evicted_for_it() -> None:
    bucket = Bucket()
    for i in range(8):
        bucket.store("x" * (i + 1), age=i)
    bucket.gate.clear()
    async with engine(bucket, pages=4) as cache:
        await until(lambda: bucket.inside > 0)
        for i in range(3):
            assert await cache.put(f"mine-{i}" + "y" * i, content("y"))
        bucket.gate.set()
        stats = await done(cache)
        assert stats["warm_start_items_loaded"] == 1
        assert stats["local_evictions_clean"] == stats["local_evictions_dirty"] == 0
        # And what is brought later replaces it first.
        assert await cache.put("last", content("z"))
        assert all(held(cache, *(f"mine-{i}" + "y" * i for i in range(3)), "last"))


async def test_it_waits_while_anything_is_fetched_for_a_request() -> None:
    bucket = Bucket()
    for i in range(5):
        bucket.store("x" * (i + 1), age=i)
    asked = bucket.store("asked for", age=100)
    bucket.gate.clear()
    async with engine(bucket, pages=16) as cache:
        await until(lambda: bucket.inside == 2)  # as many at once
        request = asyncio.create_task(cache.get("asked for"))
        await until(lambda: bucket.inside == 3)
        bucket.read.clear()
        held_back = asyncio.Event()
        real, bucket.gate = bucket.gate, held_back  # what is asked for from now on
        assert len(bucket.read) == 0
        real.set()
        assert torch.equal(await request, content("asked for"))  # type: ignore[arg-type]  # not None
        held_back.set()
        assert (await done(cache))["warm_start_items_loaded"] == 5
        assert asked not in bucket.read, "it was there when its turn came"


async def test_a_request_shares_a_fetch_that_is_under_way() -> None:
    bucket = Bucket()
    bucket.store("a")
    bucket.gate.clear()
    async with engine(bucket) as cache:
        await until(lambda: bucket.inside == 1)
        request = asyncio.create_task(cache.get("a"))
        await asyncio.sleep(0)
        bucket.gate.set()
        assert torch.equal(await request, content("a"))  # type: ignore[arg-type]  # not None
        assert len(bucket.read) == 1


async def test_what_a_request_has_shared_is_not_the_first_to_go() -> None:
    bucket = Bucket()
    bucket.store("a", age=1)
    bucket.store("bb", age=0)
    bucket.gate.clear()
    async with engine(bucket, pages=2) as cache:
        await until(lambda: bucket.inside == 2)
        request = asyncio.create_task(cache.get("a"))
        await asyncio.sleep(0)
        bucket.gate.set()
        assert await request is not None
        await done(cache)
        assert held(cache, "a", "bb") == [True, True]
        assert await cache.put("mine", content("mine"))
        assert held(cache, "a", "bb", "mine") == [True, False, True]


async def test_a_request_makes_the_room_that_the_warm_start_may_not_make() -> None:
    bucket = Bucket()
    bucket.store("a")
    bucket.gate.clear()
    async with engine(bucket, pages=1) as cache:
        await until(lambda: bucket.inside == 1)
        assert await cache.put("mine", content("mine"))
        await until(lambda: cache.tier.stats().dirty_bytes == 0)
        request = asyncio.create_task(cache.get("a"))
        await asyncio.sleep(0)
        bucket.gate.set()
        assert torch.equal(await request, content("a"))  # type: ignore[arg-type]  # not None


async def test_memory_that_is_still_being_populated_is_waited_for() -> None:
    bucket = Bucket()
    for i in range(4):
        bucket.store("x" * (i + 1))
    config = ECConfig.from_mapping({"warm_start": "1GiB"})
    with Slab.create(8 * PAGE_BYTES) as slab:
        async with EncoderCache(config, NAMESPACE, store=bucket, slab=slab) as cache:
            await until(lambda: bucket.calls.get("list"))
            assert bucket.read == []
            slab.populate()
            assert (await done(cache))["warm_start_items_loaded"] == 4


# -- what is not loaded ----------------------------------------------------------------------------


async def test_what_an_operator_has_deleted_or_outdated_is_not_loaded() -> None:
    bucket = Bucket()
    deleted = bucket.store("deleted", created=100.0)
    bucket.store("old", created=10.0)
    bucket.store("new", created=100.0)
    control = Control(valid_after=50.0, deleted={identifier_digest("deleted"): time.time() + 999})
    await bucket.put(NAMESPACE.control_key, [control.pack()])
    async with engine(bucket) as cache:
        assert (await done(cache))["warm_start_items_loaded"] == 1
        assert held(cache, "deleted", "old", "new") == [False, False, True]
        assert deleted not in bucket.read


async def test_an_object_that_holds_another_item_than_its_key_names_is_not_loaded() -> None:
    bucket = Bucket()
    bucket.objects[NAMESPACE.object_key("a")] = encoded("b")
    async with engine(bucket) as cache:
        assert (await done(cache))["warm_start_items_failed"] == 1
        assert held(cache, "a", "b") == [False, False]


async def test_it_ends_when_the_weights_are_changed() -> None:
    bucket = Bucket()
    for i in range(6):
        bucket.store("x" * (i + 1))
    bucket.gate.clear()
    async with engine(bucket) as cache:
        await until(lambda: bucket.inside == 2)
        cache.suspend()
        cache.resume(weight_version="next")
        bucket.gate.set()
        assert (await done(cache))["warm_start_items_loaded"] == 0
        assert len(bucket.read) == 2


async def test_a_bucket_that_may_not_be_listed_is_said_once_and_hurts_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bucket = Bucket()
    bucket.store("a")
    bucket.error = RemoteDeniedError("no", operation="list")
    async with engine(bucket) as cache:
        assert (await done(cache))["warm_start_items_loaded"] == 0
        assert await cache.get("a") is not None
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "the warm start cannot list what is stored: no"
    ]


async def test_an_unexpected_error_is_counted_and_ends_only_the_warm_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bucket = Bucket()
    bucket.store("a")
    bucket.error = LookupError("a bug")
    async with engine(bucket) as cache:
        assert (await done(cache))["errors_warm_start"] == 1
        assert await cache.get("a") is not None
    assert "a bug" in caplog.text


async def test_without_the_setting_nothing_is_listed() -> None:
    bucket = Bucket()
    bucket.store("a")
    async with engine(bucket, warm_start=0) as cache:
        assert await cache.get("a") is not None
        assert "list" not in bucket.calls


# -- in the host tier ------------------------------------------------------------------------------


def test_spare_entries_take_only_what_is_free_and_are_the_first_to_go() -> None:
    def put(tier: LocalTier, key: str, *, spare: bool = False) -> bool:
        reservation = tier.reserve(key, SPEC.nbytes, spare=spare)
        if reservation is not None:
            reservation.commit(SPEC, ItemMeta(), dirty=False).release()
        return reservation is not None

    with Slab.create(4 * PAGE_BYTES) as slab:
        slab.populate()
        tier = LocalTier(slab)
        assert put(tier, "asked")
        assert put(tier, "newest", spare=True)
        assert put(tier, "older", spare=True)
        assert put(tier, "oldest", spare=True)
        assert not put(tier, "more", spare=True)
        assert tier.stats().evictions == 0
        lease = tier.lookup("oldest")
        assert lease is not None
        lease.release()  # from now on it is one that somebody has asked for
        gone = []
        for i in range(4):
            assert put(tier, f"new-{i}")
            gone += [k for k in ("asked", "newest", "older", "oldest") if not tier.contains(k)]
        assert list(dict.fromkeys(gone)) == ["older", "newest", "asked", "oldest"]
