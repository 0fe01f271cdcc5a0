"""`StoreTests`: every promise of the store protocol as a test.

Runs under pytest with pytest-asyncio. A store passes when a subclass with a `store` fixture does:

    class TestMyStore(StoreTests):
        @pytest.fixture
        async def store(self):
            store = MyStore(...)          # empty
            yield store
            await store.aclose()

Call `pytest.register_assert_rewrite("ec_s3.testing.conformance")` in `conftest.py` for readable
failures.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ec_s3.errors import CapacityError, ClosedError, InvalidKeyError, RemoteChangedError
from ec_s3.types import PutOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from ec_s3.store import Buffer, GetResult, Store
    from ec_s3.types import ObjectInfo

_BODY = bytes(range(256)) * 4


def buffer(nbytes: int) -> memoryview:
    """An `into` that gives every read a buffer of its own."""
    return memoryview(bytearray(nbytes))


class Heard:
    """An `into` that notes in order what it is told."""

    def __init__(self) -> None:
        self.info: ObjectInfo | None = None
        self.asked: int | None = None
        self.told: list[int] = []

    def answered(self, info: ObjectInfo) -> None:
        assert self.info is None, "told twice"
        assert self.asked is None, "told too late"
        self.info = info

    def __call__(self, nbytes: int) -> memoryview:
        self.asked = nbytes
        return buffer(nbytes)

    def arrived(self, nbytes: int) -> None:
        assert self.asked is not None
        assert nbytes <= self.asked
        self.told.append(nbytes)


async def read(store: Store, key: str) -> bytes | None:
    """A whole object, None when there is none."""
    result = await store.get(key, into=buffer)
    return None if result is None else bytes(result.body)


async def keys(store: Store, prefix: str = "") -> list[str]:
    """The keys of a listing, in its order, of which the protocol promises nothing."""
    return [info.key async for info in store.list(prefix)]


async def stored(store: Store, key: str = "a/k", body: bytes = _BODY) -> str:
    """Put an object and return its ETag."""
    assert await store.put(key, [body], if_absent=False) is PutOutcome.WRITTEN
    info = await store.head(key)
    assert info is not None
    return info.etag


@pytest.mark.asyncio
class StoreTests:
    """The promises; the subclass supplies the `store` fixture, an empty store for each test."""

    @pytest.fixture
    async def store(self) -> Store:
        raise NotImplementedError("a subclass supplies the store")

    async def test_what_was_put_comes_back(self, store: Store) -> None:
        assert await store.put("a/b/k", [_BODY]) is PutOutcome.WRITTEN
        result = await store.get("a/b/k", into=buffer)
        assert result is not None
        assert bytes(result.body) == _BODY
        assert (result.start, result.info.key, result.info.size) == (0, "a/b/k", len(_BODY))
        assert result.info.etag

    async def test_absence_is_none(self, store: Store) -> None:
        assert await store.get("a/none", into=buffer) is None
        assert await store.get("a/none", into=buffer, start=1, length=0) is None
        assert await store.head("a/none") is None
        await stored(store, "a/k")
        assert await store.head("a/k/below") is None
        assert await store.get("a/k/below", into=buffer) is None
        assert await store.get("a", into=buffer) is None
        assert await store.head("a") is None

    async def test_parts_are_joined_in_order(self, store: Store) -> None:
        parts: list[Buffer] = [
            b"one",
            bytearray(b""),
            memoryview(b"-two-"),
            b"",
            bytearray(b"three"),
        ]
        await store.put("k", parts)
        assert await read(store, "k") == b"one-two-three"

    async def test_empty_objects_exist(self, store: Store) -> None:
        assert await store.put("k", []) is PutOutcome.WRITTEN
        assert await store.put("k2", [b""]) is PutOutcome.WRITTEN
        assert await read(store, "k") == b""
        result = await store.get("k", into=buffer, start=0, length=10)
        assert result is not None
        assert (result.body.nbytes, result.info.size) == (0, 0)
        info = await store.head("k")
        assert info is not None
        assert info.size == 0

    async def test_large_objects_come_back(self, store: Store) -> None:
        body = os.urandom(5_000_000)
        await store.put("k", [memoryview(body)[:3], memoryview(body)[3:]])
        assert await read(store, "k") == body

    @pytest.mark.parametrize(
        ("start", "length", "expected"),
        [
            (0, 10, _BODY[:10]),
            (7, 300, _BODY[7:307]),
            (1000, None, _BODY[1000:]),
            (1000, 500, _BODY[1000:]),
            (len(_BODY) - 1, 1, _BODY[-1:]),
            (5, 0, b""),
            (0, 0, b""),
            (len(_BODY), None, b""),
            (len(_BODY), 3, b""),
            (len(_BODY) + 50, 3, b""),
        ],
    )
    async def test_ranges_are_cut_at_the_end(
        self, store: Store, start: int, length: int | None, expected: bytes
    ) -> None:
        await stored(store)
        asked: list[int] = []

        def into(nbytes: int) -> memoryview:
            asked.append(nbytes)
            return buffer(nbytes)

        result = await store.get("a/k", into=into, start=start, length=length)
        assert result is not None
        assert bytes(result.body) == expected
        assert (result.start, result.info.size) == (start, len(_BODY))
        assert asked == [len(expected)]

    async def test_larger_buffers_are_not_overrun(self, store: Store) -> None:
        await stored(store)
        space = bytearray(b"x" * 2000)
        result = await store.get("a/k", into=lambda _: memoryview(space))
        assert result is not None
        assert bytes(result.body) == _BODY
        assert space[len(_BODY) :] == b"x" * (2000 - len(_BODY))

    async def test_if_match_reads_only_that_version(self, store: Store) -> None:
        etag = await stored(store)
        result = await store.get("a/k", into=buffer, start=3, length=4, if_match=etag)
        assert result is not None
        assert bytes(result.body) == _BODY[3:7]
        assert result.info.etag == etag
        await stored(store, body=b"other")
        for length in (1, 0, None):
            with pytest.raises(RemoteChangedError):
                await store.get("a/k", into=buffer, start=0, length=length, if_match=etag)

    @pytest.mark.parametrize(("start", "length"), [(0, None), (3, 500_000), (5, 0), (900_000, 9)])
    async def test_a_progress_hears_of_which_object_a_body_is(
        self, store: Store, start: int, length: int | None
    ) -> None:
        etag = await stored(store, body=os.urandom(800_000))
        heard = Heard()
        result = await store.get("a/k", into=heard, start=start, length=length)
        assert result is not None
        assert heard.info == result.info
        assert (result.info.etag, result.info.size) == (etag, 800_000)
        assert heard.asked == result.body.nbytes
        assert heard.told == sorted(heard.told)

    async def test_a_progress_hears_nothing_where_there_is_no_body(self, store: Store) -> None:
        etag = await stored(store)
        heard = Heard()
        assert await store.get("a/none", into=heard) is None
        assert await store.get("a/k", into=heard, if_none_match=etag) is not None
        with pytest.raises(RemoteChangedError):
            await store.get("a/k", into=heard, if_match='"other"')
        assert (heard.info, heard.asked, heard.told) == (None, None, [])

    async def test_if_none_match_reads_only_what_is_new(self, store: Store) -> None:
        asked: list[int] = []

        def into(nbytes: int) -> memoryview:
            asked.append(nbytes)
            return buffer(nbytes)

        etag = await stored(store)
        result = await store.get("a/k", into=into, if_none_match=etag)
        assert result is not None
        assert (result.body.nbytes, result.info.etag, asked) == (0, etag, [])
        new = await stored(store, body=b"other")
        result = await store.get("a/k", into=into, if_none_match=etag)
        assert result is not None
        assert (bytes(result.body), result.info.etag, asked) == (b"other", new, [5])
        assert await store.get("a/none", into=into, if_none_match=etag) is None

    async def test_put_if_absent_leaves_the_first_writer(self, store: Store) -> None:
        assert await store.put("k", [b"first"]) is PutOutcome.WRITTEN
        assert await store.put("k", [b"second"]) is PutOutcome.EXISTS
        assert await read(store, "k") == b"first"
        assert await store.put("k", [b"third"], if_absent=False) is PutOutcome.WRITTEN
        assert await read(store, "k") == b"third"

    async def test_of_sixteen_writers_one_wins_whole(self, store: Store) -> None:
        bodies = [bytes([n]) * 100_000 for n in range(16)]
        outcomes = await asyncio.gather(*(store.put("k", [body]) for body in bodies))
        assert outcomes.count(PutOutcome.WRITTEN) == 1
        assert outcomes.count(PutOutcome.EXISTS) == 15
        assert await read(store, "k") == bodies[outcomes.index(PutOutcome.WRITTEN)]

    async def test_put_if_match_replaces_only_that_version(self, store: Store) -> None:
        etag = await stored(store, body=b"bad")
        assert await store.put("a/k", [b"good"], if_match=etag) is PutOutcome.WRITTEN
        assert await store.put("a/k", [b"late"], if_match=etag) is PutOutcome.CHANGED
        assert await read(store, "a/k") == b"good"
        assert await store.put("a/gone", [b"x"], if_match=etag) is PutOutcome.CHANGED
        assert await store.head("a/gone") is None

    async def test_lists_every_key_below_a_prefix_once(self, store: Store) -> None:
        names = ["a-b/1", "a/2", "a/1", "b", "a.c/1", "ab/1", "a/11", "A/1"]
        for name in names:
            await stored(store, name, name.encode())
        assert sorted(await keys(store)) == sorted(names)
        assert sorted(await keys(store, "a/")) == ["a/1", "a/11", "a/2"]
        assert sorted(await keys(store, "a/1")) == ["a/1", "a/11"]
        below = await keys(store, "a")
        assert sorted(below) == sorted(n for n in names if n.startswith("a"))
        assert await keys(store, "none/") == []
        listed = [info async for info in store.list("a/2")]
        assert [info.size for info in listed] == [3]
        info = await store.head("a/2")
        assert info is not None
        assert abs(listed[0].modified - info.modified) < 1, "an answer's header has whole seconds"
        assert replace(listed[0], modified=info.modified) == info

    async def test_deleting_twice_is_no_failure(self, store: Store) -> None:
        await stored(store)
        report = await store.delete(["a/k", "a/never"])
        assert set(report.deleted) == {"a/k", "a/never"}
        assert not report.failed
        assert await store.head("a/k") is None
        assert (await store.delete(["a/k"])).deleted == ("a/k",)
        assert (await store.delete([])).deleted == ()
        assert await store.put("a/k", [b"again"]) is PutOutcome.WRITTEN

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".a", "é", "a b"])
    async def test_strange_keys_are_refused(self, store: Store, key: str) -> None:
        with pytest.raises(InvalidKeyError):
            await store.get(key, into=buffer)
        with pytest.raises(InvalidKeyError):
            await store.put(key, [b"x"])

    async def test_refusing_the_size_leaves_the_store_usable(self, store: Store) -> None:
        await stored(store, body=b"x" * 200_000)

        def refuse(nbytes: int) -> memoryview:
            raise CapacityError(f"{nbytes} are too many")

        for _ in range(5):
            with pytest.raises(CapacityError, match="200000 are too many"):
                await store.get("a/k", into=refuse)
        assert await read(store, "a/k") == b"x" * 200_000

    async def test_cancelled_calls_leave_the_store_usable(self, store: Store) -> None:
        body = os.urandom(3_000_000)
        await stored(store, body=body)

        def verbs(n: int) -> list[Callable[[], Coroutine[Any, Any, object]]]:
            return [
                lambda: store.get("a/k", into=buffer),
                lambda: store.put(f"b/{n}", [body]),
                lambda: store.head("a/k"),
            ]

        for n in range(6):
            for verb in verbs(n):
                task = asyncio.create_task(verb())
                await asyncio.sleep(0.002 * n)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        assert await read(store, "a/k") == body
        for key in await keys(store, "b/"):
            assert await read(store, key) == body

    async def test_many_calls_at_once(self, store: Store) -> None:
        async def round_trip(n: int) -> GetResult | None:
            await store.put(f"k/{n}", [str(n).encode() * 1000])
            return await store.get(f"k/{n}", into=buffer)

        for n, result in enumerate(await asyncio.gather(*map(round_trip, range(24)))):
            assert result is not None
            assert bytes(result.body) == str(n).encode() * 1000

    async def test_connecting_ahead_changes_nothing(self, store: Store) -> None:
        await store.connect()
        await store.connect()
        assert await store.head("a/k") is None
        await stored(store)
        assert await store.head("a/k") is not None

    async def test_a_closed_store_says_so(self, store: Store) -> None:
        await stored(store)
        await store.aclose()
        await store.aclose()
        with pytest.raises(ClosedError):
            await store.get("a/k", into=buffer)
        with pytest.raises(ClosedError):
            await store.put("a/k", [b"x"])
        with pytest.raises(ClosedError):
            await store.head("a/k")
        with pytest.raises(ClosedError):
            await keys(store)
        with pytest.raises(ClosedError):
            await store.delete(["a/k"])
