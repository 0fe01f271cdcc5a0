"""LMCache's parts; runs in LMCache's own virtual environment.

`lmcache`: its storage manager with its S3 connector. Its `ECCacheEngine.get` never reaches the
remote tier, and the connector refuses objects that are not one KV chunk, so the storage manager is
called directly, with metadata whose one chunk has the tensor's shape. A get then copies the result
out of LMCache's memory, as `ECCacheEngine.get` does. The connector sends its URL's host verbatim
as `Host` and the key as the path, so `s3://127.0.0.1:PORT` reaches a server that takes any path.

`lmcache_ec`: its `ECCacheEngine` itself, for the host and disk tiers.
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.ec_engine import ECCacheEngine
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

from suite.systems.base import ThreadSystem

MODEL = "bench-model"


def metadata(shape: tuple[int, int]) -> LMCacheMetadata:
    """That of a model with one layer whose KV chunk has this shape."""
    return LMCacheMetadata(
        model_name=MODEL,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(1, 1, shape[0], 1, shape[1]),
        use_mla=True,
        role="worker",
        chunk_size=shape[0],
    )


def config(settings: dict[str, Any], **values: Any) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.from_defaults(
        chunk_size=settings["shape"][0],
        max_local_cpu_size=settings["memory"] / 2**30,
        blocking_timeout_secs=60,
        **values,
    )


class Bucket(ThreadSystem):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        logging.disable(logging.INFO)
        made = config(
            settings,
            local_cpu=True,
            remote_url=f"s3://127.0.0.1:{settings['port']}",
            remote_serde="naive",
            extra_config={
                "save_chunk_meta": False,
                "s3_region": "us-east-1",
                "s3_prefer_http2": False,
                "disable_tls": True,
                "aws_access_key_id": "testaccess",
                "aws_secret_access_key": "testsecret",
            },
        )
        self.manager = StorageManager(made, metadata(self.shape), EventManager())
        self.remote = self.manager.storage_backends["RemoteBackend"]
        self.s3 = self.remote.connection._connector  # noqa: SLF001  only to make gets cold again

    def key(self, name: str) -> CacheEngineKey:
        digest = hashlib.sha256(name.encode()).digest()
        return CacheEngineKey(
            model_name=MODEL,
            world_size=1,
            worker_id=0,
            chunk_hash=int.from_bytes(digest[:8], "big"),
            dtype=torch.bfloat16,
            request_configs={},
        )

    def put(self, item: tuple[str, torch.Tensor]) -> bool:
        name, tensor = item
        shape = torch.Size((1, 1, *self.shape))
        room = self.manager.allocate(
            shape, torch.bfloat16, MemoryFormat.KV_MLA_FMT, eviction=True, busy_loop=False
        )
        if room is None or room.tensor is None:
            return False
        room.tensor.copy_(tensor.view(shape))
        self.manager.batched_put([self.key(name)], [room])
        return True

    def get(self, name: str) -> torch.Tensor | None:
        found = self.manager.get(self.key(name))  # batched_get stops at the host tier's "no"
        if found is None:
            return None
        try:
            copy: torch.Tensor = found.tensor.clone()
            return copy.view(self.shape)
        finally:
            found.ref_count_down()

    def get_batch(self, names: list[str]) -> list[torch.Tensor | None]:
        """All at once, by one call."""
        keys = [self.key(name) for name in names]
        copies: list[torch.Tensor | None] = []
        for found in self.manager.batched_get(keys, location="RemoteBackend"):
            copies.append(None if found is None else found.tensor.clone().view(self.shape))
            if found is not None:
                found.ref_count_down()
        return copies

    def contains(self, name: str) -> bool:
        return self.manager.contains(self.key(name)) is not None

    def flush(self) -> None:
        give_up = time.monotonic() + 60
        while self.remote.put_tasks and time.monotonic() < give_up:
            time.sleep(0.0005)
        assert not self.remote.put_tasks

    def forget(self) -> None:
        self.manager.clear(["LocalCPUBackend"])
        self.s3.object_size_cache.clear()

    def path(self, name: str) -> str:
        return f"/{self.key(name).to_string()}"


class Engine(ThreadSystem):
    """With a folder, gets go to its storage manager: its own never reach the disk either."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        logging.disable(logging.INFO)
        values: dict[str, Any] = {}
        self.disk = bool(settings.get("folder"))
        if self.disk:
            values = {"local_disk": f"file://{settings['folder']}/", "max_local_disk_size": 8.0}
        made = config(settings, local_cpu=True, **values)
        self.engine = ECCacheEngine(made, metadata(self.shape), torch.bfloat16)
        self.manager = self.engine._storage_manager  # noqa: SLF001  see above

    def put(self, item: tuple[str, torch.Tensor]) -> bool:
        return bool(self.engine.put(*item))

    def get(self, name: str) -> torch.Tensor | None:
        if not self.disk:
            result: torch.Tensor | None = self.engine.get(name, "cpu")
            return result
        found = self.manager.get(self.engine._make_cache_key(name))  # noqa: SLF001  see above
        if found is None:
            return None
        try:
            copy: torch.Tensor = found.tensor.clone()
            return copy
        finally:
            found.ref_count_down()

    def contains(self, name: str) -> bool:
        return bool(self.engine.contains(name))

    def flush(self) -> None:
        disk = self.manager.storage_backends.get("LocalDiskBackend")
        give_up = time.monotonic() + 60
        while disk is not None and disk.disk_worker.put_tasks and time.monotonic() < give_up:
            time.sleep(0.0005)

    def forget(self) -> None:
        self.manager.clear(["LocalCPUBackend"])


SYSTEMS = {"lmcache": Bucket, "lmcache_ec": Engine}
