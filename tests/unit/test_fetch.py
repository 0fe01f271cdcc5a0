"""Fetcher: number and kind of requests, refusals, cancellation, and buffers given back."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ec_s3 import chunks
from ec_s3.buffers import Body, BufferPool
from ec_s3.chunks import PARALLEL_RANGES, RANGE_BYTES, spans
from ec_s3.errors import RemoteChangedError, RemoteTimeoutError
from ec_s3.fetch import Fetcher, Miss, PrivateItem
from ec_s3.keys import Namespace
from ec_s3.local import Lease, LocalTier
from ec_s3.pages import PAGE_BYTES, Slab
from ec_s3.store import GetResult, Progress
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import ItemMeta, MissReason, TensorSpec
from ec_s3.wire import encode, read_header

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ec_s3.types import ObjectInfo
    from ec_s3.wire import Header

NAMESPACE = Namespace(model="org/model", dtype="uint8")
CAPACITY = 40 << 20
START_BYTES = (5 << 20) + 5000
"""Of a body that arrives slowly: the header, and five chunks of noise."""


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def stored(identifier: str, data: bytes, *, namespace: Namespace = NAMESPACE) -> bytes:
    frame = encode(
        TensorSpec("uint8", (len(data),)),
        [memoryview(data)],
        identifier=identifier,
        namespace=namespace.id,
        meta=ItemMeta(encode_seconds=0.25, placeholder={"grid": [1, 2]}),
        created=1.0,
    )
    return b"".join(frame.parts)


@dataclass(frozen=True, slots=True)
class Get:
    start: int
    length: int | None
    if_match: str | None


class Recorder(MemoryStore):
    """Remembers every GET and lets a test step in before each."""

    def __init__(self) -> None:
        super().__init__()
        self.gets: list[Get] = []
        self.before: Callable[[int], object] = lambda _: None
        self.inside = 0
        self.most_inside = 0
        self.hold: asyncio.Event | None = None

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
        self.before(len(self.gets))
        self.gets.append(Get(start, length, if_match))
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            if self.hold is not None and start:
                await self.hold.wait()
            return await super().get(
                key,
                into=into,
                start=start,
                length=length,
                if_match=if_match,
                if_none_match=if_none_match,
            )
        finally:
            self.inside -= 1


class Shelf:
    """A keeper that keeps whole objects."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.admitted = 0

    def admit(self, nbytes: int) -> bool:
        self.admitted += nbytes
        return True

    def withdraw(self, nbytes: int) -> None:
        self.admitted -= nbytes

    def take(self, key: str, parts: list[memoryview], body: Body, *, nbytes: int) -> None:
        self.objects[key] = b"".join(parts)
        self.admitted -= nbytes
        body.close()


@dataclass(slots=True)
class Rig:
    slab: Slab
    executor: ThreadPoolExecutor
    store: Recorder = field(default_factory=Recorder)
    shelf: Shelf = field(default_factory=Shelf)
    pool: BufferPool = field(default_factory=lambda: BufferPool(1 << 30))
    tier: LocalTier = field(init=False)
    fetcher: Fetcher = field(init=False)

    def __post_init__(self) -> None:
        self.tier = LocalTier(self.slab)
        self.fetcher = Fetcher(
            tier=self.tier,
            pool=self.pool,
            executor=self.executor,
            max_tensor_bytes=100 << 20,
        )

    async def put(self, identifier: str, obj: bytes) -> str:
        key = NAMESPACE.object_key(identifier)
        await self.store.put(key, [obj], if_absent=False)
        return key

    async def fetch(self, identifier: str, *, keep: bool = False) -> Lease | PrivateItem | Miss:
        return await self.fetcher.fetch(
            self.store,
            NAMESPACE.object_key(identifier),
            identifier,
            keep=self.shelf if keep else None,
        )

    async def bytes_of(self, identifier: str, *, keep: bool = False) -> bytes:
        item = await self.fetch(identifier, keep=keep)
        assert not isinstance(item, Miss), item
        data = b"".join(item.segments())
        item.release()
        return data

    def assert_nothing_held(self) -> None:
        stats = self.tier.stats()
        assert (stats.reserved_bytes, stats.leased_bytes) == (0, 0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with Slab.create(CAPACITY) as slab, ThreadPoolExecutor(4) as executor:
        slab.populate()
        yield Rig(slab, executor)


@pytest.mark.parametrize("nbytes", [0, 1, 300_000, (1 << 20) + 1, 5 << 20])
async def test_a_small_object_is_one_get(rig: Rig, nbytes: int) -> None:
    data = noise(nbytes)
    await rig.put("x", stored("x", data))
    item = await rig.fetch("x")
    assert isinstance(item, Lease)
    assert b"".join(item.segments()) == data
    assert item.meta == ItemMeta(0.25, {"grid": [1, 2]})
    assert item.indexed
    item.release()
    assert rig.store.gets == [Get(0, RANGE_BYTES, None)]
    assert rig.store.calls == {"put": 1, "get": 1}
    assert rig.tier.stats().dirty_bytes == 0
    assert rig.pool.idle_bytes > 0  # its buffer is ready for the next one


async def test_a_large_object_is_read_in_parallel_ranges_of_one_version(rig: Rig) -> None:
    data = noise((35 << 20) + 77)
    await rig.put("x", stored("x", data))
    assert await rig.bytes_of("x") == data
    first, *rest = rig.store.gets
    assert first == Get(0, RANGE_BYTES, None)
    assert len(rest) == 4
    assert {get.if_match for get in rest} == {'"1"'}
    assert 1 < rig.store.most_inside <= PARALLEL_RANGES
    size, at = len(rig.store.objects[NAMESPACE.object_key("x")]), RANGE_BYTES
    for get in rest:  # no byte is read twice
        assert get.start == at
        assert get.length is not None
        assert get.length <= RANGE_BYTES
        at += get.length
    assert at == size


def test_ranges_follow_one_another_and_every_chunk_ends_in_one() -> None:
    for nbytes in (0, 1, RANGE_BYTES - 300, RANGE_BYTES, RANGE_BYTES + 1, (30 << 20) + 5):
        obj = stored("x", noise(nbytes))
        header = read_header(obj, max_tensor_bytes=100 << 20)
        found, at = [], 0
        for span in spans(header):
            assert (span.start, span.stop <= len(obj)) == (at, True)
            at = span.stop
            found += [*([span.chunks.start - 1] if span.cut else []), *span.chunks]
            for i in span.chunks:
                begin, size = header.chunk_range(i)
                assert span.start <= begin
                assert begin + size <= span.stop
        assert at == len(obj)
        assert found == list(range(len(header.chunks)))


async def test_ranges_give_their_buffers_back_as_they_are_decoded(rig: Rig) -> None:
    data = noise((39 << 20) + 1)
    await rig.put("x", stored("x", data))
    lent: list[int] = []
    take = rig.pool.take

    def counted(nbytes: int) -> memoryview:
        lent.append(nbytes)
        return take(nbytes)

    rig.pool.take = counted  # type: ignore[method-assign]  # counts what is asked for
    assert await rig.bytes_of("x") == data
    assert sum(lent) >= len(data)
    assert rig.pool.idle_bytes > 0
    again = rig.pool.idle_bytes
    rig.tier.clear()
    assert await rig.bytes_of("x") == data
    assert rig.pool.idle_bytes <= again + 2 * RANGE_BYTES  # the second fetch used them again


class Slow(Recorder):
    """Tells how far a body is, and lets an object's beginning end when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.lengths: list[int] = []
        self.beside = 0

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
        assert isinstance(into, Progress)
        info = await self.head(key)
        assert info is not None
        if if_match is not None and if_match != info.etag:
            raise RemoteChangedError("replaced", operation="get", key=key)
        body = self.objects[key][start : start + (length or 0)]
        into.answered(info)
        view = into(len(body))
        stop = min(START_BYTES, len(body))
        view[:stop] = body[:stop]
        into.arrived(stop)
        if start:
            self.beside += 1
        else:
            await self.go_on.wait()
        view[stop:] = body[stop:]
        self.lengths.append(len(body))
        return GetResult(view, start, info)


async def until(condition: Callable[[], bool]) -> None:
    """Let everything go on until something has come about."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.001)


async def test_chunks_are_decoded_while_the_rest_of_a_range_is_on_its_way(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[range] = []
    begun = threading.Event()

    def watched(header: Header, chosen: range, *rest: object) -> None:
        real(header, chosen, *rest)
        decoded.append(chosen)
        begun.set()

    real: Callable[..., None] = chunks.decode
    monkeypatch.setattr("ec_s3.chunks.decode", watched)
    store, data = Slow(), noise(7 << 20)
    rig.store = store
    key = await rig.put("x", stored("x", data))
    fetching = asyncio.create_task(rig.fetch("x"))
    assert await asyncio.to_thread(begun.wait, 20)
    assert {i for chosen in decoded for i in chosen} <= set(range(5))
    assert not rig.tier.contains(key), "not before all of it has come"
    store.go_on.set()
    lease = await fetching
    assert isinstance(lease, Lease)
    with lease:
        assert b"".join(lease.segments()) == data


async def test_a_bad_object_is_read_to_its_end_before_it_is_refused(rig: Rig) -> None:
    store = Slow()
    rig.store = store
    body = bytearray(stored("x", noise(7 << 20)))
    body[100_000] ^= 1
    await rig.put("x", bytes(body))
    fetching = asyncio.create_task(rig.fetch("x"))
    await asyncio.sleep(0.05)
    assert not fetching.done()
    store.go_on.set()
    assert await fetching == Miss(MissReason.CORRUPT, '"1"')
    assert store.lengths == [len(body)]
    rig.assert_nothing_held()


async def test_a_store_that_tells_nothing_meanwhile_is_read_all_the_same(rig: Rig) -> None:
    class Silent(Recorder):
        async def get(
            self, key: str, *, into: Callable[[int], memoryview], **more: Any
        ) -> GetResult | None:
            return await super().get(key, into=lambda nbytes: into(nbytes), **more)

    rig.store, data = Silent(), noise((20 << 20) + 3)
    await rig.put("x", stored("x", data))
    assert await rig.bytes_of("x") == data
    assert {get.if_match for get in rig.store.gets[1:]} == {'"1"'}


async def test_later_ranges_are_read_beside_the_first(rig: Rig) -> None:
    store, data = Slow(), noise((30 << 20) + 77)
    rig.store = store
    key = await rig.put("x", stored("x", data))
    fetching = asyncio.create_task(rig.fetch("x"))
    await until(lambda: store.beside == 3)  # all there are
    assert not rig.tier.contains(key), "not before all of it has come"
    store.go_on.set()
    lease = await fetching
    assert isinstance(lease, Lease)
    with lease:
        assert b"".join(lease.segments()) == data


@pytest.mark.parametrize("at", [100_000, RANGE_BYTES + (2 << 20)])
async def test_what_is_read_beside_a_bad_range_is_read_to_its_end_and_no_more_is_begun(
    rig: Rig, at: int
) -> None:
    store = Slow()
    rig.store = store
    body = bytearray(stored("x", noise(60 << 20)))
    body[at] ^= 1
    await rig.put("x", bytes(body))
    fetching = asyncio.create_task(rig.fetch("x", keep=True))
    await until(lambda: len(store.lengths) >= PARALLEL_RANGES - 1)
    store.go_on.set()
    assert await fetching == Miss(MissReason.CORRUPT, '"1"')
    assert sum(store.lengths) < len(body)
    assert rig.shelf.admitted == 0
    rig.assert_nothing_held()


async def test_an_object_that_is_replaced_beside_its_first_range_is_not_mixed(rig: Rig) -> None:
    store = Slow()
    rig.store = store
    key = await rig.put("x", stored("x", noise(20 << 20, 1)))
    real = store.head

    async def replacing(key: str) -> ObjectInfo | None:
        info = await real(key)
        store.objects[key] = stored("x", noise(20 << 20, 2))
        store._versions[key] = ('"2"', 0.0)
        return info

    store.head = replacing  # type: ignore[method-assign]  # steps in between two ranges
    with pytest.raises(RemoteChangedError):
        await rig.fetch("x")
    assert not rig.tier.contains(key)
    rig.assert_nothing_held()


async def test_a_first_range_that_fails_ends_the_others(rig: Rig) -> None:
    class Failing(Slow):
        async def get(self, key: str, **more: Any) -> GetResult | None:
            self.inside += 1
            try:
                if not more["start"]:
                    await super().get(key, **more)
                    raise RemoteTimeoutError("silence", operation="get", key=key)
                await asyncio.Event().wait()
                return None
            finally:
                self.inside -= 1

    store = Failing()
    rig.store = store
    await rig.put("x", stored("x", noise(40 << 20)))
    fetching = asyncio.create_task(rig.fetch("x"))
    await until(lambda: store.inside == PARALLEL_RANGES)
    store.go_on.set()
    with pytest.raises(RemoteTimeoutError):
        await fetching
    assert store.inside == 0
    rig.assert_nothing_held()


async def test_an_object_too_large_for_the_tier_comes_in_private_memory(rig: Rig) -> None:
    data = noise(CAPACITY + 1)
    await rig.put("x", stored("x", data))
    item = await rig.fetch("x")
    assert isinstance(item, PrivateItem)
    assert b"".join(item.segments()) == data
    assert b"".join(item.segments(10, 20)) == data[10:30]
    assert item.share() is item
    item.mark_clean()
    item.release()
    assert rig.tier.stats().entries == 0


@pytest.mark.parametrize("nbytes", [1000, 20 << 20])
async def test_the_keeper_gets_the_object_as_it_is_stored(rig: Rig, nbytes: int) -> None:
    obj = stored("x", noise(nbytes))
    key = await rig.put("x", obj)
    await rig.bytes_of("x", keep=True)
    assert rig.shelf.objects == {key: obj}
    assert rig.shelf.admitted == 0
    assert rig.pool.idle_bytes > nbytes // 2


async def test_absence_is_a_miss(rig: Rig) -> None:
    assert await rig.fetch("nothing") == Miss(MissReason.ABSENT)


def _flip(obj: bytes, at: int) -> bytes:
    changed = bytearray(obj)
    changed[at] ^= 0x40
    return bytes(changed)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(lambda obj: b"", MissReason.CORRUPT, id="Mooncake#3465: zero bytes"),
        pytest.param(lambda obj: noise(len(obj), 9), MissReason.CORRUPT, id="random bytes"),
        pytest.param(lambda obj: _flip(obj, len(obj) - 100), MissReason.CORRUPT, id="flipped end"),
        pytest.param(lambda obj: _flip(obj, 60), MissReason.CORRUPT, id="flipped header"),
        pytest.param(lambda obj: obj[:-1], MissReason.CORRUPT, id="truncated"),
        pytest.param(lambda obj: obj[:30], MissReason.CORRUPT, id="cut in the header"),
        pytest.param(lambda obj: obj + bytes(65536), MissReason.CORRUPT, id="LMCache#3831: grown"),
        pytest.param(
            lambda obj: stored("other", noise(500_000)), MissReason.MISMATCH, id="another's object"
        ),
        pytest.param(
            lambda obj: stored(
                "x", noise(500_000), namespace=Namespace(model="org/other", dtype="uint8")
            ),
            MissReason.MISMATCH,
            id="another namespace's object",
        ),
    ],
)
async def test_a_bad_object_is_refused_and_nothing_stays_behind(
    rig: Rig, damage: Callable[[bytes], bytes], reason: MissReason
) -> None:
    await rig.put("x", damage(stored("x", noise(500_000))))
    miss = await rig.fetch("x", keep=True)
    assert miss == Miss(reason, '"1"')
    assert rig.tier.stats().entries == 0
    assert rig.shelf.objects == {}
    assert rig.shelf.admitted == 0
    rig.assert_nothing_held()


async def test_a_flipped_byte_in_a_late_range_is_found(rig: Rig) -> None:
    obj = stored("x", noise(20 << 20))
    await rig.put("x", _flip(obj, len(obj) - 5))
    assert await rig.fetch("x", keep=True) == Miss(MissReason.CORRUPT, '"1"')
    assert rig.shelf.admitted == 0
    rig.assert_nothing_held()


async def test_an_item_above_the_readers_cap_is_not_read(rig: Rig) -> None:
    small = Fetcher(
        tier=rig.tier,
        pool=rig.pool,
        executor=rig.executor,
        max_tensor_bytes=1000,
    )
    key = await rig.put("x", stored("x", noise(1001)))
    assert await small.fetch(rig.store, key, "x") == Miss(MissReason.TOO_LARGE, '"1"')


async def test_without_room_nothing_is_evicted_or_kept(rig: Rig) -> None:
    held = rig.tier.reserve("other", CAPACITY - PAGE_BYTES)
    assert held is not None
    await rig.put("x", stored("x", noise(2 * PAGE_BYTES)))
    assert await rig.fetch("x") == Miss(MissReason.NO_ROOM)
    held.abort()


async def test_an_object_replaced_between_two_ranges_is_not_mixed(rig: Rig) -> None:
    key = await rig.put("x", stored("x", noise(20 << 20, 1)))
    other = stored("x", noise(20 << 20, 2))

    def replace(number: int) -> None:
        if number == 1:
            rig.store.objects[key] = other
            rig.store._versions[key] = ('"2"', 0.0)

    rig.store.before = replace
    with pytest.raises(RemoteChangedError):
        await rig.fetch("x")
    rig.assert_nothing_held()


async def test_an_object_deleted_between_two_ranges_is_no_corruption(rig: Rig) -> None:
    key = await rig.put("x", stored("x", noise(20 << 20)))

    def remove(number: int) -> None:
        if number == 1:
            del rig.store.objects[key]

    rig.store.before = remove
    with pytest.raises(RemoteChangedError):
        await rig.fetch("x")
    rig.assert_nothing_held()


async def test_a_failing_range_ends_the_others(rig: Rig) -> None:
    await rig.put("x", stored("x", noise(39 << 20)))

    def fail(number: int) -> None:
        if number == 2:
            raise RemoteTimeoutError("silence", operation="get", key="x")

    rig.store.before = fail
    with pytest.raises(RemoteTimeoutError):
        await rig.fetch("x")
    assert rig.store.inside == 0
    rig.assert_nothing_held()


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
async def test_a_cancelled_fetch_leaves_nothing_behind(rig: Rig, steps: int) -> None:
    await rig.put("x", stored("x", noise(20 << 20)))
    rig.store.hold = asyncio.Event()
    task = asyncio.create_task(rig.fetch("x", keep=True))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.store.inside == 0
    assert rig.shelf.admitted == 0
    rig.assert_nothing_held()


async def test_pages_are_kept_while_a_thread_writes_however_often_it_is_cancelled(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.put("x", stored("x", noise(300_000)))
    entered, leave = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        entered.set()
        assert leave.wait(10)

    monkeypatch.setattr("ec_s3.chunks.decode", slow)
    task = asyncio.create_task(rig.fetch("x"))
    await asyncio.get_running_loop().run_in_executor(None, entered.wait, 10)
    for _ in range(4):
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not task.done()
        assert rig.tier.stats().reserved_bytes > 0
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    rig.assert_nothing_held()


def test_a_body_gives_back_every_buffer_once() -> None:
    pool = BufferPool(1 << 20)
    with Body(pool) as body:
        first, second = body.take(1000), body.take(70_000)
        body.part(first[:10])
        body.give_back(first)
        body.give_back(second)
        assert pool.idle_bytes > 130_000
        third = body.take(70_000)
        heir = body.hand_over()
    third[:3] = b"abc"  # the heir still owns it
    heir.close()
    heir.close()
    with pytest.raises(ValueError, match="released"):
        third[:3] = b"abc"
