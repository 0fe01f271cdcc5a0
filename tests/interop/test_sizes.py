"""Boundary sizes."""

from __future__ import annotations

import asyncio
import os
from functools import cache
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
import torch
from interop_engines import SECONDS, open_engine

from ec_s3 import Namespace
from ec_s3.chunks import RANGE_BYTES
from ec_s3.header import CHUNK_BYTES
from ec_s3.transfer import PART_BYTES
from ec_s3.types import PutOutcome
from ec_s3.url import S3Location, S3Options, parse_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ec_s3.s3 import S3Store
    from ec_s3.testing.servers import RealServer

pytestmark = pytest.mark.interop

MULTIPART_BYTES = 64 << 20
_LARGEST = 200_000_000
_BOUNDARIES = (CHUNK_BYTES, RANGE_BYTES, PART_BYTES, MULTIPART_BYTES)
_STORED = (0, 1, *(size + step for size in _BOUNDARIES for step in (-1, 0, 1)))
_TENSORS = (0, 1, *(size + step for size in (CHUNK_BYTES, RANGE_BYTES) for step in (-1, 0, 1)))


def sizes(*values: int) -> list[object]:
    """Parameters; those in the smoke run are enough to show a kind of server's own boundaries."""
    return [
        pytest.param(size, marks=pytest.mark.smoke if _in_smoke(size) else (), id=f"{size}")
        for size in values
    ]


def _in_smoke(size: int) -> bool:
    return size <= RANGE_BYTES + 1 or size in (MULTIPART_BYTES, MULTIPART_BYTES + 1)


@cache
def noise() -> memoryview:
    """Bytes that do not compress, as many as the largest body."""
    return memoryview(os.urandom(_LARGEST))


@pytest.fixture
async def store(
    open_store: Callable[..., S3Store], real_server: RealServer, shared_bucket: str
) -> AsyncIterator[S3Store]:
    location = parse_url(real_server.url(shared_bucket, f"sizes/{uuid4().hex}"))
    assert isinstance(location, S3Location)
    ca = str(real_server.ca_bundle) if real_server.ca_bundle else None
    store = open_store(location, S3Options(ca_bundle=ca, total_timeout=SECONDS))
    yield store
    await store.aclose()


@pytest.mark.parametrize("size", sizes(*_STORED, _LARGEST))
async def test_an_object_of_this_size_comes_back_whole_and_in_ranges(
    store: S3Store, size: int
) -> None:
    body = noise()[:size]
    assert await store.put("k", [body[: size // 3], body[size // 3 :]]) is PutOutcome.WRITTEN
    info = await store.head("k")
    assert info is not None
    assert info.size == size
    whole = await store.get("k", into=lambda nbytes: memoryview(bytearray(nbytes)))
    assert whole is not None
    assert whole.body == body
    ranges = [(start, min(RANGE_BYTES, size - start)) for start in range(0, size, RANGE_BYTES)]

    async def read(start: int, length: int) -> bool:
        part = await store.get(
            "k",
            into=lambda nbytes: memoryview(bytearray(nbytes)),
            start=start,
            length=length,
            if_match=info.etag,
        )
        return part is not None and part.body == body[start : start + length]

    assert all(await asyncio.gather(*(read(*part) for part in ranges)))
    assert not (await store.delete(["k"])).failed


@pytest.mark.parametrize("size", sizes(*_TENSORS, MULTIPART_BYTES + 1, _LARGEST))
def test_a_tensor_of_this_size_comes_back(
    real_server: RealServer, shared_bucket: str, size: int
) -> None:
    url = real_server.url(shared_bucket, f"tensors/{uuid4().hex}")
    namespace = Namespace(model="org/model", dtype="uint8")
    memory = f"{(size >> 20) + 16}MiB"
    item = (
        torch.frombuffer(bytearray(noise()[:size]), dtype=torch.uint8) if size else torch.empty(0)
    )
    item = item.to(torch.uint8).reshape(size, 1)
    with open_engine(real_server, url, namespace, memory=memory) as writer:
        assert writer.put("item", item)
        assert writer.flush(timeout=SECONDS).complete
    with open_engine(real_server, url, namespace, memory=memory) as reader:
        found = reader.get("item", timeout=SECONDS)
        assert found is not None, reader.stats()
        assert (found.dtype, found.shape) == (item.dtype, item.shape)
        assert torch.equal(found, item)
        reader.delete(["item"])
