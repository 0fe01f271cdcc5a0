"""Reader: tiers in order, what is remembered, deadlines, accounting."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ec_s3.buffers import BufferPool
from ec_s3.config import ECConfig
from ec_s3.errors import (
    ClosedError,
    ECS3Error,
    RemoteChangedError,
    RemoteDeniedError,
    RemoteTimeoutError,
)
from ec_s3.fetch import Fetcher, Miss
from ec_s3.gate import Gate
from ec_s3.keys import Namespace
from ec_s3.local import LocalTier
from ec_s3.metrics import Stats
from ec_s3.pages import PAGE_BYTES, Slab
from ec_s3.presence import Presence, Refused
from ec_s3.reader import ANYTHING, Reader, release_all
from ec_s3.testing.memory import MemoryStore
from ec_s3.tiers import Tiers
from ec_s3.types import Expectation, ItemMeta, MissReason, TensorSpec
from ec_s3.wire import encode
from ec_s3.writeback import DiskWriteback

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ec_s3.store import GetResult
    from ec_s3.types import ObjectInfo

NAMESPACE = Namespace(model="org/model", dtype="uint8")
PAGES = 32


class Bucket(MemoryStore):
    """Raises `errors` in order, and can be held up."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.inside = 0
        self.most_inside = 0

    async def _mood(self) -> None:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            await self.gate.wait()
        finally:
            self.inside -= 1
        if self.errors:
            raise self.errors.pop(0)

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
        await self._mood()
        return await super().get(
            key,
            into=into,
            start=start,
            length=length,
            if_match=if_match,
            if_none_match=if_none_match,
        )

    async def head(self, key: str) -> ObjectInfo | None:
        await self._mood()
        return await super().head(key)


def content(name: str) -> bytes:
    return np.random.default_rng(len(name)).bytes(1000)


def encoded(name: str) -> bytes:
    frame = encode(
        TensorSpec("uint8", (10, 100)),
        [memoryview(content(name))],
        identifier=name,
        namespace=NAMESPACE.id,
        meta=ItemMeta(encode_seconds=0.5),
        created=1.0,
    )
    return b"".join(frame.parts)


class Rig:
    def __init__(self, slab: Slab, executor: ThreadPoolExecutor) -> None:
        self.slab, self.executor = slab, executor
        self.bucket, self.disk = Bucket(), Bucket()
        self.tier = LocalTier(slab)
        self.stats = Stats()
        self.now = 0.0
        self.presence = Presence(positive_ttl=60, negative_ttl=5)
        self.refused = Refused()
        self.gate = Gate(NAMESPACE)
        self.writeback = DiskWriteback(self.disk, self.stats)
        self.reader = self.make()

    def make(self, *, disk: bool = False, remote: bool = True, **settings: object) -> Reader:
        config = ECConfig().model_copy(update={"blocking_timeout": 10.0, **settings})
        self.reader = Reader(
            config,
            self.gate,
            tiers=Tiers(
                local=self.tier,
                disk=self.disk if disk else None,
                remote=self.bucket if remote else None,
                writeback=self.writeback if disk else None,
                presence=self.presence,
                refused=self.refused,
            ),
            fetcher=Fetcher(
                tier=self.tier,
                pool=BufferPool(1 << 24),
                executor=self.executor,
                max_tensor_bytes=1 << 20,
            ),
            stats=self.stats,
            clock=lambda: self.now,
        )
        return self.reader

    async def store(self, name: str, body: bytes | None = None) -> str:
        key = NAMESPACE.object_key(name)
        await self.bucket.put(key, [encoded(name) if body is None else body], if_absent=False)
        return key

    async def read(self, name: str, **arguments: float) -> bytes | MissReason:
        item = await self.reader.acquire(name, **arguments)  # type: ignore[arg-type]  # few fit
        if isinstance(item, Miss):
            return item.reason
        data = b"".join(item.segments())
        item.release()
        return data

    def counts(self) -> dict[str, float]:
        names = ("queries", "hits", "misses", "corrupt_objects")
        return {k: v for k, v in self.stats.snapshot().items() if v and k.startswith(names)}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # other threads make it true
            await asyncio.sleep(0.001)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with Slab.create(PAGES * PAGE_BYTES) as slab, ThreadPoolExecutor(2) as executor:
        slab.populate()
        made = Rig(slab, executor)
        yield made
        for store in (made.bucket, made.disk):
            store.gate.set()
        await made.reader.close()
        await made.writeback.close(5)
        stats = made.tier.stats()
        assert (stats.leased_bytes, stats.reserved_bytes) == (0, 0)


async def test_a_cold_item_is_one_request_and_then_local(rig: Rig) -> None:
    await rig.store("a")
    assert await rig.read("a") == content("a")
    assert await rig.read("a") == content("a")
    assert rig.bucket.calls == {"put": 1, "get": 1}
    assert rig.counts() == {"queries": 2, "hits_local": 1, "hits_remote": 1}
    flat = rig.stats.snapshot()
    assert flat["load_bytes_remote"] == 1000
    assert flat["load_seconds_remote_count"] == 1
    assert flat["saved_encoder_seconds"] == 1.0


async def test_many_callers_share_one_fetch_and_each_counts(rig: Rig) -> None:
    await rig.store("a")
    results = await asyncio.gather(*(rig.read("a") for _ in range(10)))
    assert results == [content("a")] * 10
    assert rig.bucket.calls["get"] == 1
    assert rig.counts() == {"queries": 10, "hits_remote": 10}


async def test_absence_is_remembered_for_its_time(rig: Rig) -> None:
    assert await rig.read("a") is MissReason.ABSENT
    assert await rig.read("a") is MissReason.ABSENT
    assert rig.bucket.calls["get"] == 1
    await rig.store("a")
    assert await rig.read("a") is MissReason.ABSENT
    rig.now = 5.0
    assert await rig.read("a") == content("a")
    assert rig.counts()["misses_absent"] == 3


async def test_who_must_know_does_not_believe_a_remembered_no(rig: Rig) -> None:
    assert await rig.read("a") is MissReason.ABSENT
    await rig.store("a")
    item = await rig.reader.acquire("a", fresh=True)
    assert not isinstance(item, Miss)
    item.release()


async def test_an_out_of_band_deletion_is_noticed(rig: Rig) -> None:
    """LMCache#4745: there existence stayed "yes" for ever and each load ended in a 404."""
    key = await rig.store("a")
    assert await rig.reader.existence.contains("a")
    del rig.bucket.objects[key]
    assert await rig.reader.existence.contains("a")  # believed for a while
    assert await rig.read("a") is MissReason.ABSENT
    assert not await rig.reader.existence.contains("a")  # the 404 has corrected it
    await rig.store("a")
    rig.now = 5.0
    assert await rig.reader.existence.contains("a")
    del rig.bucket.objects[key]
    rig.now = 65.0
    assert not await rig.reader.existence.contains("a")  # and without a get, time has


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", MissReason.CORRUPT),
        (encoded("a")[:-7], MissReason.CORRUPT),
        (encoded("other"), MissReason.MISMATCH),
    ],
    ids=["Mooncake#3465: zero bytes", "truncated", "another's"],
)
async def test_a_bad_object_is_a_counted_miss_and_marked_for_repair(
    rig: Rig, body: bytes, reason: MissReason
) -> None:
    key = await rig.store("a", body)
    assert await rig.reader.existence.contains("a")
    assert await rig.read("a") is reason
    assert rig.counts() == {
        "queries": 1,
        f"misses_{reason}": 1,
        "corrupt_objects_remote": 1,
    }
    assert not await rig.reader.existence.contains("a")
    rig.now = 100.0
    assert not await rig.reader.existence.contains("a")  # still that version
    assert rig.refused.knows(key, '"1"')
    await rig.store("a")
    rig.now = 105.0
    assert await rig.read("a") == content("a")
    assert not rig.refused.knows(key)


async def test_a_bad_object_that_is_gone_needs_no_repair(rig: Rig) -> None:
    key = await rig.store("a", b"bad")
    await rig.read("a")
    del rig.bucket.objects[key]
    rig.now = 10.0
    assert await rig.read("a") is MissReason.ABSENT
    assert not rig.refused.knows(key)


async def test_other_items_are_untouched_by_a_bad_one(rig: Rig) -> None:
    names = ["a", "bb", "ccc"]
    for name in names:
        await rig.store(name)
        await rig.read(name)
    key = await rig.store("dddd", encoded("dddd") + bytes(65536))
    assert await rig.read("dddd") is MissReason.CORRUPT
    assert [await rig.read(name) for name in names] == [content(name) for name in names]
    assert rig.refused.knows(key)


async def test_a_tensor_of_another_shape_is_a_mismatch_and_stays(rig: Rig) -> None:
    """vllm#55547: there a client's id for two media killed the engine."""
    await rig.store("a")
    miss = await rig.reader.acquire("a", expect=Expectation(rows=11))
    assert miss == Miss(MissReason.MISMATCH)
    item = await rig.reader.acquire("a", expect=Expectation(dtype="uint8", rows=10))
    assert not isinstance(item, Miss)
    item.release()
    assert rig.counts() == {"queries": 2, "misses_mismatch": 1, "hits_local": 1}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RemoteDeniedError("no", operation="get"), MissReason.DENIED),
        (RemoteTimeoutError("slow", operation="get"), MissReason.TIMEOUT),
        (ClosedError("closed"), MissReason.CLOSED),
    ],
)
async def test_a_failing_store_is_a_miss_that_is_not_remembered(
    rig: Rig, error: ECS3Error, reason: MissReason
) -> None:
    await rig.store("a")
    rig.bucket.errors = [error]
    assert await rig.read("a") is reason
    assert await rig.read("a") == content("a")


async def test_an_unexpected_exception_is_a_counted_miss(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.bucket.errors = [KeyError("bug")]
    assert await rig.read("a") is MissReason.FAILED
    assert rig.stats.snapshot()["errors_fetch"] == 1
    assert "a fetch failed unexpectedly" in caplog.text


async def test_an_object_that_changes_while_it_is_read_is_read_once_more(rig: Rig) -> None:
    await rig.store("a")
    rig.bucket.errors = [RemoteChangedError("replaced", operation="get")]
    assert await rig.read("a") == content("a")
    rig.tier.clear()
    rig.bucket.errors = [RemoteChangedError("replaced", operation="get")] * 2
    assert await rig.read("a") is MissReason.CHANGED


async def test_a_reader_leaves_at_its_deadline_and_the_fetch_goes_on(rig: Rig) -> None:
    await rig.store("a")
    rig.bucket.gate.clear()
    assert await rig.read("a", timeout=0.01) is MissReason.TIMEOUT
    rig.bucket.gate.set()
    assert await rig.read("a") == content("a")
    assert rig.bucket.calls["get"] == 1


async def test_without_lingering_the_fetch_ends_with_its_last_caller(rig: Rig) -> None:
    rig.bucket.gate.clear()
    assert await rig.read("a", timeout=0.01, linger=False) is MissReason.TIMEOUT
    await until(lambda: rig.bucket.inside == 0)


async def test_a_fetch_that_nobody_waits_for_ends_too(rig: Rig) -> None:
    rig.make(metadata_timeout=0.05, max_fetches=1)
    await rig.store("b")
    rig.bucket.gate.clear()
    assert await rig.read("a", timeout=0.01) is MissReason.TIMEOUT
    await until(lambda: rig.bucket.inside == 0)
    rig.bucket.gate.set()
    assert await rig.read("b") == content("b")  # its place is free again


async def test_fetches_under_way_are_bounded(rig: Rig) -> None:
    rig.make(max_fetches=3)
    names = ["n" * i for i in range(1, 11)]
    for name in names:
        await rig.store(name)
    rig.bucket.gate.clear()
    work = asyncio.gather(*(rig.read(name) for name in names))
    await until(lambda: rig.bucket.inside == 3)
    rig.bucket.gate.set()
    assert await work == [content(name) for name in names]
    assert rig.bucket.most_inside == 3


async def test_local_hits_pass_while_the_bucket_hangs(rig: Rig) -> None:
    await rig.store("a")
    await rig.read("a")
    rig.bucket.gate.clear()
    waiting = [asyncio.create_task(rig.read(f"x{i}", timeout=30)) for i in range(40)]
    await until(lambda: rig.bucket.inside > 0)
    assert await rig.read("a", timeout=0) == content("a")
    rig.bucket.gate.set()
    assert set(await asyncio.gather(*waiting)) == {MissReason.ABSENT}


async def test_the_disk_is_asked_first_and_filled_behind_the_bucket(rig: Rig) -> None:
    rig.make(disk=True)
    key = await rig.store("a")
    assert await rig.read("a") == content("a")
    await rig.writeback.close(10)
    assert rig.disk.objects[key] == rig.bucket.objects[key]
    rig.tier.clear()
    assert await rig.read("a") == content("a")
    assert rig.bucket.calls["get"] == 1
    assert rig.counts() == {"queries": 2, "hits_remote": 1, "hits_disk": 1}


async def test_a_bad_object_on_disk_is_removed_and_the_bucket_asked(rig: Rig) -> None:
    rig.make(disk=True)
    key = await rig.store("a")
    await rig.disk.put(key, [b"bad"])
    assert await rig.read("a") == content("a")
    await rig.writeback.close(10)
    assert rig.disk.objects[key] == rig.bucket.objects[key]
    assert rig.counts()["corrupt_objects_disk"] == 1
    assert not rig.refused.knows(key)


async def test_a_failing_disk_is_passed_over(rig: Rig) -> None:
    rig.make(disk=True)
    await rig.store("a")
    rig.disk.errors = [RemoteDeniedError("mode 000", operation="get")]
    assert await rig.read("a") == content("a")


async def test_without_a_bucket_everything_else_is_absent(rig: Rig) -> None:
    rig.make(remote=False)
    assert await rig.read("a") is MissReason.ABSENT
    assert not await rig.reader.existence.contains("a")


async def test_many_keys_are_asked_for_in_parallel_and_once(rig: Rig) -> None:
    for name in ("a", "bb"):
        await rig.store(name)
    rig.bucket.gate.clear()
    names = ["a", "bb", "ccc", "a"]
    asking = asyncio.create_task(rig.reader.existence.contains_many(names))
    await until(lambda: rig.bucket.inside == 3)
    rig.bucket.gate.set()
    assert await asking == {"a": True, "bb": True, "ccc": False}
    assert await rig.reader.existence.contains_many(names) == {"a": True, "bb": True, "ccc": False}
    assert rig.bucket.calls["head"] == 3  # remembered


async def test_existence_is_no_when_nobody_can_say(rig: Rig) -> None:
    rig.bucket.errors = [RemoteDeniedError("no", operation="head")]
    assert not await rig.reader.existence.contains("a")
    rig.bucket.gate.clear()
    assert not await rig.reader.existence.contains("a", timeout=0.01)
    rig.bucket.gate.set()
    await rig.store("a")
    assert await rig.reader.existence.contains("a")  # neither was remembered as a no


async def test_existence_on_disk_needs_no_bucket(rig: Rig) -> None:
    rig.make(disk=True)
    await rig.disk.put(NAMESPACE.object_key("a"), [encoded("a")])
    assert await rig.reader.existence.contains("a")
    assert "head" not in rig.bucket.calls
    rig.disk.errors = [RemoteDeniedError("no", operation="head")]
    assert not await rig.reader.existence.contains("bb")


async def test_prefetched_items_are_local_hits(rig: Rig) -> None:
    names = ["a", "bb", "ccc"]
    for name in names:
        await rig.store(name)
    rig.reader.prefetch([*names, "absent"])
    rig.reader.prefetch(names)
    await until(lambda: not rig.reader._background)
    assert rig.bucket.calls["get"] == 4
    assert rig.counts() == {}
    assert [await rig.read(name) for name in names] == [content(name) for name in names]
    assert rig.counts() == {"queries": 3, "hits_local": 3}


async def test_prefetches_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ec_s3.reader.MAX_PREFETCHES", 5)
    rig.bucket.gate.clear()
    rig.reader.prefetch(f"x{i}" for i in range(100))
    assert len(rig.reader._background) == 5


async def test_who_is_cancelled_keeps_none_of_several_items(rig: Rig) -> None:
    await rig.store("a")
    await rig.read("a")
    rig.bucket.gate.clear()
    works = asyncio.create_task(
        rig.reader.acquire_many(["a", "absent"], expect=ANYTHING, timeout=30)
    )
    await until(lambda: rig.bucket.inside == 1)
    assert rig.tier.stats().leased_bytes > 0
    works.cancel()
    with pytest.raises(asyncio.CancelledError):
        await works
    assert rig.tier.stats().leased_bytes == 0


async def test_several_items_come_in_order(rig: Rig) -> None:
    await rig.store("a")
    items = await rig.reader.acquire_many(["x", "a", "y"], expect=ANYTHING, timeout=10)
    assert [isinstance(item, Miss) for item in items] == [True, False, True]
    release_all(items)


async def test_what_is_barred_is_not_fetched_and_what_was_under_way_ends(rig: Rig) -> None:
    await rig.store("a")
    await rig.store("bb")
    rig.bucket.gate.clear()
    waiting = asyncio.create_task(rig.read("a"))
    other = asyncio.create_task(rig.read("bb"))
    await until(lambda: rig.bucket.inside == 2)
    async with rig.reader.barred([NAMESPACE.object_key("a")]):
        assert await waiting is MissReason.ABSENT
        rig.bucket.gate.set()
        assert await rig.read("a") is MissReason.ABSENT
        assert await other == content("bb")
    assert await rig.read("a") == content("a")


async def test_closing_answers_everybody(rig: Rig) -> None:
    rig.bucket.gate.clear()
    waiting = asyncio.create_task(rig.read("a"))
    rig.reader.prefetch(["b"])
    await until(lambda: rig.bucket.inside == 2)
    await rig.reader.close()
    with pytest.raises(ClosedError):
        await waiting
    assert rig.bucket.inside == 0
