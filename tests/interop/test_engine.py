"""Engine."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import torch
from interop_engines import SECONDS, open_engine

from ec_s3 import Namespace
from ec_s3.keys import parse_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3 import ECCacheEngine
    from ec_s3.testing.servers import RealServer

pytestmark = [pytest.mark.interop, pytest.mark.smoke]

NAMESPACE = Namespace(model="org/model")
WIDTH = 256
WRITERS = 8


@pytest.fixture
def prefix() -> str:
    return f"engine/{uuid4().hex}"


@pytest.fixture(params=["sdk", "direct"])
def opened(
    request: pytest.FixtureRequest, real_server: RealServer, shared_bucket: str, prefix: str
) -> Callable[..., ECCacheEngine]:
    """Opens engines on one prefix of the server, each with a memory of its own."""

    def opened(**more: Any) -> ECCacheEngine:
        url = real_server.url(shared_bucket, prefix)
        return open_engine(real_server, url, NAMESPACE, transport=request.param, **more)

    return opened


def tensor(rows: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return made.to(torch.bfloat16)


def stored_keys(server: RealServer, bucket: str, prefix: str) -> dict[str, str]:
    """Key below the prefix -> ETag, of encoder outputs."""
    client = server.client()
    try:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        rows = [row for page in pages for row in page.get("Contents", ())]
    finally:
        client.close()
    found = {row["Key"].removeprefix(f"{prefix}/"): row["ETag"] for row in rows}
    return {key: etag for key, etag in found.items() if not key.endswith(".json")}


def test_a_fresh_engine_gets_what_another_put(opened: Callable[..., ECCacheEngine]) -> None:
    items = {f"image-{rows}": tensor(rows, seed=rows) for rows in (1, 7, 300, 2500)}
    with opened() as writer:
        for name, item in items.items():
            assert writer.put(name, item)
        assert writer.flush(timeout=SECONDS).complete
    with opened() as reader:
        for name, item in items.items():
            found = reader.get(name, timeout=SECONDS)
            assert found is not None, reader.stats()
            assert torch.equal(found.view(torch.int16), item.view(torch.int16))
        assert reader.get("another", timeout=SECONDS) is None


def test_of_eight_writers_of_one_key_one_whole_object_stays(
    opened: Callable[..., ECCacheEngine], real_server: RealServer, shared_bucket: str, prefix: str
) -> None:
    items = [tensor(1500, seed=n) for n in range(WRITERS)]
    gate = threading.Barrier(WRITERS)
    complete: list[bool] = []

    def write(item: torch.Tensor) -> None:
        with opened() as engine:
            gate.wait(SECONDS)
            engine.put("image", item)
            complete.append(engine.flush(timeout=SECONDS).complete)

    threads = [threading.Thread(target=write, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert complete == [True] * WRITERS
    with opened() as reader:
        found = reader.get("image", timeout=SECONDS)
    assert found is not None
    assert any(torch.equal(found, item) for item in items)
    assert len(stored_keys(real_server, shared_bucket, prefix)) == 1


def test_a_large_object_goes_in_parts_and_comes_back(
    opened: Callable[..., ECCacheEngine], real_server: RealServer, shared_bucket: str, prefix: str
) -> None:
    noise = torch.randint(-(2**15), 2**15, (70 << 12, 128), dtype=torch.int16)  # 70 MiB as stored
    item = noise.view(torch.bfloat16)
    with opened(memory="128MiB") as writer:
        assert writer.put("video", item)
        assert writer.flush(timeout=SECONDS).complete
    (etag,) = stored_keys(real_server, shared_bucket, prefix).values()
    assert "-" in etag, "the mark of a multipart upload"
    with opened(memory="128MiB") as reader:
        found = reader.get("video", timeout=SECONDS)
        assert found is not None, reader.stats()
        assert torch.equal(found.view(torch.int16), noise)


def test_what_was_deleted_is_gone_for_everybody(opened: Callable[..., ECCacheEngine]) -> None:
    with opened() as engine:
        for name in ("kept", "gone"):
            assert engine.put(name, tensor(20))
        assert engine.flush(timeout=SECONDS).complete
        assert not engine.delete(["gone", "never there"]).failed
    with opened() as reader:
        assert reader.contains_many(["kept", "gone"], timeout=SECONDS) == {
            "kept": True,
            "gone": False,
        }
        assert reader.get("gone", timeout=SECONDS) is None
        assert reader.get("kept", timeout=SECONDS) is not None


def test_a_listing_shows_every_item_once_in_its_namespace(
    opened: Callable[..., ECCacheEngine], real_server: RealServer, shared_bucket: str, prefix: str
) -> None:
    names = [f"image-{n}" for n in range(30)]
    with opened() as engine:
        for name in names:
            assert engine.put(name, tensor(3))
        assert engine.flush(timeout=SECONDS).complete
    listed = stored_keys(real_server, shared_bucket, prefix)
    assert set(listed) == {NAMESPACE.object_key(name) for name in names}
    assert {parse_key(key).namespace for key in listed} == {NAMESPACE.id}
