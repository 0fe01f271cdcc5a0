"""ec_s3: `EncoderCache` with tasks, and `ECCacheEngine` with threads, as users use them."""

from __future__ import annotations

from typing import Any

from ec_s3.blocking import ECCacheEngine
from ec_s3.config import ECConfig
from ec_s3.engine import EncoderCache
from ec_s3.keys import Namespace
from suite.systems.base import AsyncSystem, System, ThreadSystem

NAMESPACE = Namespace(model="bench/model", dtype="bfloat16")


def config(settings: dict[str, Any]) -> ECConfig:
    values: dict[str, Any] = {
        "max_local_cpu_size": settings["memory"],
        "blocking_timeout": 60,
        "metadata_timeout": 60,
        "flush_timeout": 60,
    }
    if settings.get("endpoint"):
        values["url"] = f"s3://bench?endpoint={settings['endpoint']}&region=us-east-1"
    if settings.get("folder"):
        values["local_disk"] = settings["folder"]
    return ECConfig(**values | settings.get("config", {}))


class Cached(System):
    """What both faces have in common; `cache` is the engine behind them."""

    cache: EncoderCache

    def forget(self) -> None:
        """Drop the host tier, and what is known of the bucket."""
        self.cache.tier.clear()
        self.cache.reader.tiers.presence.clear()

    def path(self, name: str) -> str:
        return f"/bench/{self.cache.key_of(name)}"


class Ours(Cached, AsyncSystem):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.cache = self.loop.run_until_complete(EncoderCache.open(config(settings), NAMESPACE))

    async def put(self, item: tuple[str, Any]) -> bool:
        return await self.cache.put(*item)

    async def get(self, name: str) -> Any:
        return await self.cache.get(name)

    async def contains(self, name: str) -> bool:
        return await self.cache.contains(name)

    def flush(self) -> None:
        report = self.loop.run_until_complete(self.cache.flush(60))
        assert not report.pending, report

    def close(self) -> None:
        self.loop.run_until_complete(self.cache.close(1))


class OursBlocking(Cached, ThreadSystem):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.engine = ECCacheEngine(config(settings), NAMESPACE)
        self.cache = self.engine._cache  # noqa: SLF001  only to make gets cold again

    def put(self, item: tuple[str, Any]) -> bool:
        return self.engine.put(*item)

    def get(self, name: str) -> Any:
        return self.engine.get(name)

    def contains(self, name: str) -> bool:
        return self.engine.contains(name)

    def lease(self, name: str) -> bool:
        """Take and give back the item in the host tier, without a copy."""
        lease = self.cache.tier.lookup(self.cache.key_of(name))
        if lease is None:
            return False
        lease.release()
        return True

    def flush(self) -> None:
        report = self.engine.flush(60)
        assert not report.pending, report

    def close(self) -> None:
        self.engine.close(1)


SYSTEMS = {"ec_s3": Ours, "ec_s3_blocking": OursBlocking}
