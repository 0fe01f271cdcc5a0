"""Signed objects through the engine's tiers: who is believed, and what becomes of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ec_s3.config import ECConfig
from ec_s3.engine import EncoderCache
from ec_s3.fetch import Miss
from ec_s3.keys import Namespace
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import ItemMeta
from ec_s3.wire import decode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAMESPACE = Namespace(model="org/model")
A, B, C = (f"{name}:{digit * 64}" for name, digit in zip("abc", "123", strict=True))
CAP = 1 << 30


class Store(MemoryStore):
    """Outlives its clients."""

    async def aclose(self) -> None: ...


class Fleet:
    """Engines with one bucket, one after the other."""

    def __init__(self) -> None:
        self.bucket, self.disk = Store(), Store()
        self.engines: list[EncoderCache] = []

    async def engine(self, *keys: str, disk: bool = False) -> EncoderCache:
        config = ECConfig.from_mapping(
            {"max_local_cpu_size": "8MiB", "signing_key": ",".join(keys) or None}
        )
        store = self.disk if disk else None
        engine = await EncoderCache.open(config, NAMESPACE, store=self.bucket, disk=store)
        self.engines.append(engine)
        return engine

    async def put(self, *keys: str, seed: int = 1, identifier: str = "item") -> None:
        engine = await self.engine(*keys)
        assert await engine.put(identifier, tensor(seed), meta=ItemMeta(input_digest="5a" * 32))
        await engine.close()

    def signer(self) -> str:
        body = self.bucket.objects[NAMESPACE.object_key("item")]
        return decode(body, max_tensor_bytes=CAP)[0].key_id


def tensor(seed: int) -> torch.Tensor:
    return torch.full((4, 8), float(seed), dtype=torch.bfloat16)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    yield fleet
    for engine in fleet.engines:
        await engine.close(0.0)


async def test_keys_are_rotated_without_losing_a_hit(fleet: Fleet) -> None:
    await fleet.put(A)
    for keys in ([A, B], [B, A]):
        assert await (await fleet.engine(*keys)).get("item") is not None
    assert fleet.signer() == "a"
    retired = await fleet.engine(B)
    assert await retired.get("item") is None
    assert retired.stats()["misses_unsigned"] == 1


@pytest.mark.parametrize("writer", [[], [C], ["a:" + "9" * 64]])
async def test_what_no_accepted_key_has_signed_is_a_miss_and_is_replaced(
    fleet: Fleet, writer: list[str]
) -> None:
    await fleet.put(*writer)
    engine = await fleet.engine(A, B)
    assert await engine.get("item") is None
    stats = engine.stats()
    assert (stats["misses_unsigned"], stats["corrupt_objects_remote"]) == (1, 1)
    assert await engine.put("item", tensor(2))
    await engine.flush()
    assert engine.stats()["repaired_objects"] == 1
    assert fleet.signer() == "a"
    got = await (await fleet.engine(B, A)).get("item")
    assert got is not None
    assert torch.equal(got, tensor(2))


async def test_engines_without_a_key_take_signed_objects(fleet: Fleet) -> None:
    await fleet.put(A)
    assert await (await fleet.engine()).get("item") is not None


async def test_signed_object_of_another_item_is_a_mismatch(fleet: Fleet) -> None:
    await fleet.put(A, identifier="other")
    objects = fleet.bucket.objects
    objects[NAMESPACE.object_key("item")] = objects[NAMESPACE.object_key("other")]
    await fleet.bucket.put(
        NAMESPACE.object_key("item"), [objects[NAMESPACE.object_key("other")]], if_absent=False
    )
    engine = await fleet.engine(A)
    assert await engine.get("item") is None
    assert engine.stats()["misses_mismatch"] == 1


async def test_disk_tier_is_not_believed_either(fleet: Fleet) -> None:
    await fleet.put()
    key = NAMESPACE.object_key("item")
    await fleet.disk.put(key, [fleet.bucket.objects[key]])
    await fleet.bucket.delete([key])
    engine = await fleet.engine(A, disk=True)
    assert await engine.get("item") is None
    assert key not in fleet.disk.objects
    assert engine.stats()["corrupt_objects_disk"] == 1


async def test_signature_survives_the_disk_tier(fleet: Fleet) -> None:
    engine = await fleet.engine(A, disk=True)
    await engine.put("item", tensor(1), meta=ItemMeta(input_digest="5a" * 32))
    await engine.close()
    await fleet.bucket.delete([NAMESPACE.object_key("item")])
    again = await fleet.engine(B, A, disk=True)
    item = await again.acquire("item")
    assert not isinstance(item, Miss)
    assert item.meta.input_digest == "5a" * 32
    item.release()


async def test_an_unsigned_object_is_there_until_it_has_been_read(fleet: Fleet) -> None:
    """Existence is asked for without reading: a known limit, which the documentation names."""
    await fleet.put()
    engine = await fleet.engine(A)
    assert await engine.contains("item")
    assert await engine.get("item") is None
    assert not await engine.contains("item")
