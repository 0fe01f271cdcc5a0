"""Right in spite of the server.

Whatever a server makes of conditions, and whatever happens to bodies on their way: an object is
whole, an own write counts as one, and no item comes out that is not the one that went in.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fronted_server import ITEMS, PATIENT, Fronted, fronted, no_waiting, open_engine

from ec_s3.keys import Namespace
from ec_s3.testing.conformance import keys, read
from ec_s3.testing.faults import Fault
from ec_s3.transport import ATTEMPTS
from ec_s3.types import PutOutcome
from ec_s3.url import S3Location

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.blocking import ECCacheEngine
    from ec_s3.s3 import S3Store
    from ec_s3.testing.servers import RealServer

__all__ = ["fronted", "no_waiting", "open_engine"]

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("no_waiting")]

WRITERS = 8
CONDITIONAL = ("ceph", "ceph-https", "seaweedfs", "moto")
"""Kinds that let one of several conditional writers through."""


# Writers of one key at the same moment


async def race(
    open_store: Callable[..., S3Store], server: RealServer, bucket: str, bodies: list[bytes]
) -> list[PutOutcome]:
    """Write all bodies to one key, each by a store of its own, while another one reads it."""
    location = S3Location(bucket, "p", server.endpoint, server.region)
    stores = [open_store(location, PATIENT) for _ in range(len(bodies) + 1)]
    for store in stores:
        await store.connect()
    *writers, reader = stores
    start = asyncio.Event()

    async def write(store: S3Store, body: bytes) -> PutOutcome:
        await start.wait()
        half = len(body) // 2
        return await store.put("k", [body[:half], body[half:]])

    writing = [asyncio.ensure_future(write(*pair)) for pair in zip(writers, bodies, strict=True)]
    await asyncio.sleep(0)
    start.set()
    seen = set()
    while not all(task.done() for task in writing):
        seen.add(await read(reader, "k"))
    outcomes = [task.result() for task in writing]
    seen.add(await read(reader, "k"))
    for store in stores:
        await store.aclose()
    assert seen <= {None, *bodies}, "a mix of two"
    return outcomes


@pytest.mark.smoke
async def test_writers_of_one_key_leave_one_whole_object(
    open_store: Callable[..., S3Store], real_server: RealServer, real_bucket: str
) -> None:
    bodies = [os.urandom(400_000) for _ in range(WRITERS)]
    outcomes = await race(open_store, real_server, real_bucket, bodies)
    assert set(outcomes) <= {PutOutcome.WRITTEN, PutOutcome.EXISTS}
    assert outcomes.count(PutOutcome.WRITTEN) >= 1
    if real_server.kind in CONDITIONAL:
        assert outcomes.count(PutOutcome.WRITTEN) == 1


async def test_writers_of_one_large_key_leave_one_whole_object(
    open_store: Callable[..., S3Store],
    real_server: RealServer,
    real_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ec_s3.s3._MULTIPART_BYTES", 6 << 20)
    monkeypatch.setattr("ec_s3.transfer.PART_BYTES", 5 << 20)
    bodies = [os.urandom(11 << 20) for _ in range(3)]
    outcomes = await race(open_store, real_server, real_bucket, bodies)
    assert outcomes.count(PutOutcome.WRITTEN) >= 1


# Items of an engine


def tensor(rows: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 256, generator=generator).to(torch.bfloat16)


def same(got: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return got is not None and torch.equal(got, expected)


def save(engine: ECCacheEngine, name: str, item: torch.Tensor) -> None:
    assert engine.put(name, item)
    assert engine.flush(60).complete


def introduced(engine: ECCacheEngine, fronted: Fronted) -> ECCacheEngine:
    """An engine that has learnt with an item of its own what the server makes of conditions."""
    save(engine, "introduction", tensor(16))
    fronted.proxy.clear()
    return engine


@pytest.mark.parametrize(
    "rows", [pytest.param(256, marks=pytest.mark.smoke, id="small"), pytest.param(4096, id="large")]
)
def test_an_upload_whose_answers_are_all_lost_is_not_sent_again_and_counts_as_written(
    open_engine: Callable[..., ECCacheEngine], fronted: Fronted, rows: int
) -> None:
    item = tensor(rows)
    engine = introduced(open_engine(), fronted)
    fronted.proxy.add(Fault(method="PUT", path=ITEMS, drop_response=True, times=ATTEMPTS))
    save(engine, "a", item)
    flat = engine.stats()
    assert (flat["uploads_written"], flat["uploads_exists"]) == (2, 0)
    assert fronted.proxy.count("PUT", ITEMS) == ATTEMPTS
    assert same(open_engine().get("a"), item)


@pytest.mark.parametrize("rows", [256, 4096], ids=["small", "large"])
def test_an_upload_whose_answer_is_lost_counts_as_written(
    open_engine: Callable[..., ECCacheEngine], fronted: Fronted, rows: int
) -> None:
    engine = introduced(open_engine(), fronted)
    fronted.proxy.add(Fault(method="PUT", path=ITEMS, drop_response=True, times=1))
    save(engine, "a", tensor(rows))
    flat = engine.stats()
    assert (flat["uploads_written"], flat["uploads_exists"]) == (2, 0)
    assert fronted.proxy.count("PUT", ITEMS) == 2


@pytest.mark.parametrize("rows", [256, 4096], ids=["small", "large"])
def test_an_upload_that_another_was_quicker_with_counts_as_there(
    open_engine: Callable[..., ECCacheEngine], fronted: Fronted, rows: int
) -> None:
    save(open_engine(), "a", tensor(rows))
    engine = introduced(open_engine(), fronted)
    fronted.proxy.add(Fault(method="PUT", path=ITEMS, refuse=True, times=ATTEMPTS))
    save(engine, "a", tensor(rows))
    flat = engine.stats()
    assert (flat["uploads_written"], flat["uploads_exists"]) == (1, 1)
    assert fronted.proxy.count("PUT", ITEMS) <= (ATTEMPTS if rows == 256 else 0)


DAMAGES: dict[str, dict[str, Any]] = {
    "cut at once": {"cut_at": 0},
    "reset on the way": {"cut_at": 60_000, "reset": True},
    "closed on the way": {"cut_at": 60_000},
    "flipped in its header": {"flip_at": 3},
    "flipped in its body": {"flip_at": 60_000},
    "padded": {"extra": b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nmore"},
}


@pytest.mark.smoke
def test_a_body_that_is_damaged_once_still_comes_out_right(
    open_engine: Callable[..., ECCacheEngine], fronted: Fronted
) -> None:
    writer, reader = open_engine(), open_engine()
    writer.put_many(dict.fromkeys(DAMAGES, tensor()))
    assert writer.flush(60).complete
    for name, damage in DAMAGES.items():
        fronted.proxy.clear()
        fronted.proxy.add(Fault(method="GET", path=ITEMS, times=1, **damage))
        assert same(reader.get(name), tensor()), name


def test_a_body_that_is_damaged_each_time_is_a_miss_or_right_and_never_wrong(
    open_engine: Callable[..., ECCacheEngine], fronted: Fronted
) -> None:
    writer, reader = open_engine(), open_engine()
    writer.put_many(dict.fromkeys(DAMAGES, tensor()))
    assert writer.flush(60).complete
    for name, damage in DAMAGES.items():
        fronted.proxy.clear()
        fronted.proxy.add(Fault(method="GET", path=ITEMS, **damage))
        got = reader.get(name)
        assert got is None or torch.equal(got, tensor()), name
        if "flip_at" in damage or damage.get("cut_at") == 0:
            assert got is None, name


def test_a_body_that_falls_silent_is_continued_within_the_deadline(
    open_engine: Callable[..., ECCacheEngine], fronted: Fronted
) -> None:
    save(open_engine(), "a", tensor())
    fronted.proxy.add(Fault(method="GET", path=ITEMS, stall_at=60_000, times=1))
    assert same(open_engine(read_timeout=1.5).get("a"), tensor())


# Keys


async def test_every_kind_of_key_of_several_models_is_there_beside_the_others(
    open_store: Callable[..., S3Store], real_server: RealServer, real_bucket: str
) -> None:
    spaces = [
        Namespace(model=model, dtype=dtype)
        for model in ("org/model", "org/model/bfloat16", "m" * 900, "../a//b", "模型")
        for dtype in ("bfloat16", "float16")
    ]
    names = {
        key
        for space in spaces
        for key in (
            *(space.object_key("x"), space.object_key("x/y"), space.object_key("../" * 400)),
            *(space.manifest_key, space.control_key, space.index_key),
        )
    }
    location = S3Location(real_bucket, "team=a/cache", real_server.endpoint, real_server.region)
    store = open_store(location, PATIENT)
    outcomes = await asyncio.gather(*(store.put(name, [name.encode()]) for name in names))
    assert set(outcomes) == {PutOutcome.WRITTEN}
    assert sorted(await keys(store)) == sorted(names)
    assert [await read(store, name) for name in names] == [name.encode() for name in names]
    assert (await store.delete(list(names))).failed == {}
    assert await keys(store) == []
    await store.aclose()
