"""ECCacheEngine: the synchronous face of the engine, for any number of threads.

The engine runs on a loop thread of its own; copies of tensors run in the calling thread, so
callers do not wait for one another. Every call returns by its deadline.
"""

from __future__ import annotations

import atexit
import weakref
from typing import TYPE_CHECKING, Self

from ec_s3.engine import EncoderCache
from ec_s3.errors import ClosedError
from ec_s3.fetch import Miss
from ec_s3.loop import LoopThread
from ec_s3.reader import ANYTHING
from ec_s3.tensors import copy_out
from ec_s3.types import FlushReport, ItemMeta

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from ec_s3.config import ECConfig
    from ec_s3.keys import Namespace
    from ec_s3.pages import Slab
    from ec_s3.store import Store
    from ec_s3.types import DeleteReport, Expectation

START_SECONDS = 30.0
SLACK_SECONDS = 1.0
"""Added to a call's own deadline for the hop to the loop thread and back."""

CLOSE_SECONDS = 10.0
"""Most that closing takes after the flush: stores, disk writes, threads."""

_open_engines: weakref.WeakSet[ECCacheEngine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for engine in list(_open_engines):
        engine.close()


class ECCacheEngine:
    """Keeps encoder outputs in host memory, on disk and in a bucket.

    Args:
        config: settings; `ECConfig()` means host memory only.
        namespace: what makes two tensors interchangeable.
        store: the bucket, ready made; None opens what `config.url` names.
        disk: the disk tier, ready made; None opens what `config.local_disk` names.
        slab: host memory, ready made and owned by the caller; None makes one.

    Raises:
        ConfigError: the settings cannot be used on this machine.
    """

    def __init__(
        self,
        config: ECConfig,
        namespace: Namespace,
        *,
        store: Store | None = None,
        disk: Store | None = None,
        slab: Slab | None = None,
    ) -> None:
        self._cache = EncoderCache(config, namespace, store=store, disk=disk, slab=slab)
        self._config = config
        self._loop = LoopThread()
        try:
            self._loop.run(self._cache.start(), timeout=START_SECONDS)
        except BaseException:
            self._loop.close()
            raise
        _open_engines.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, mm_hash: str, tensor: torch.Tensor, *, meta: ItemMeta | None = None) -> bool:
        """Take a tensor; it is copied before the call returns and uploaded in the background.

        Args:
            mm_hash: identifier of the media item; any string.
            tensor: encoder output `[num_embeds, width]` of the namespace's dtype, on any device.
            meta: what travels with it.

        Returns:
            False only when there is no room for it now.

        Raises:
            ValueError: the tensor's dtype is not the namespace's.
            ClosedError: the engine is closed.
        """
        upload = self._cache.stage(mm_hash, tensor, meta or ItemMeta())
        if upload is None:
            return False
        if upload.private is None:
            self._loop.post(self._cache.enqueue, upload)
            return True

        async def enqueue() -> bool:
            return self._cache.enqueue(upload)

        return self._loop.run(enqueue(), timeout=self._config.blocking_timeout)

    def put_many(self, items: Mapping[str, torch.Tensor]) -> dict[str, bool]:
        """Put several; one result per identifier."""
        return {mm_hash: self.put(mm_hash, tensor) for mm_hash, tensor in items.items()}

    def get(
        self,
        mm_hash: str,
        device: str | torch.device = "cpu",
        *,
        expect: Expectation = ANYTHING,
        timeout: float | None = None,
    ) -> torch.Tensor | None:
        """A copy of the tensor on `device`.

        Args:
            mm_hash: identifier of the media item.
            device: where the tensor is wanted.
            expect: dtype and rows that it must have; another tensor counts as a miss.
            timeout: seconds, default `blocking_timeout`.

        Returns:
            None when no valid tensor can be had in time; the reason is in `stats()`.
        """
        return self.get_many([mm_hash], device, expect=expect, timeout=timeout)[0]

    def get_many(
        self,
        mm_hashes: Sequence[str],
        device: str | torch.device = "cpu",
        *,
        expect: Expectation = ANYTHING,
        timeout: float | None = None,
    ) -> list[torch.Tensor | None]:
        """One result per identifier, in order; all are fetched at the same time."""
        limit = self._config.blocking_timeout if timeout is None else timeout
        items = self._loop.run(
            self._cache.acquire_many(mm_hashes, expect=expect, timeout=limit),
            timeout=limit + SLACK_SECONDS,
        )
        tensors: list[torch.Tensor | None] = []
        try:
            for item in items:
                if isinstance(item, Miss):
                    tensors.append(None)
                else:
                    tensors.append(copy_out(item.segments(), item.spec, device))
        finally:
            for item in items:
                if not isinstance(item, Miss):
                    item.release()
        return tensors

    def contains(self, mm_hash: str, *, timeout: float | None = None) -> bool:
        """Whether some tier holds the item; False when that cannot be found out in time."""
        return self.contains_many([mm_hash], timeout=timeout)[mm_hash]

    def contains_many(
        self, mm_hashes: Iterable[str], *, timeout: float | None = None
    ) -> Mapping[str, bool]:
        """Existence of many items, asked for in parallel."""
        limit = self._config.blocking_timeout if timeout is None else timeout
        return self._loop.run(
            self._cache.contains_many(mm_hashes, timeout=limit), timeout=limit + SLACK_SECONDS
        )

    def prefetch(self, mm_hashes: Iterable[str]) -> None:
        """Start bringing items into the host tier; returns at once."""
        self._loop.post(self._cache.prefetch, list(mm_hashes))

    def delete(self, mm_hashes: Sequence[str], *, timeout: float = 30.0) -> DeleteReport:
        """Remove items from every tier; absent ones count as deleted.

        Raises:
            RemoteError: a store failed as a whole.
            TimeoutError: not done within `timeout` seconds.
        """
        return self._loop.run(self._cache.delete(mm_hashes), timeout=timeout)

    def flush(self, timeout: float | None = None) -> FlushReport:
        """Wait for the uploads, at most `timeout` seconds (default `flush_timeout`)."""
        limit = self._config.flush_timeout if timeout is None else timeout
        return self._loop.run(self._cache.flush(limit), timeout=limit + SLACK_SECONDS)

    def stats(self) -> dict[str, float]:
        """All counters and gauges, flat: `hits_local`, `misses_absent`, ..."""
        return self._cache.stats()

    def close(self, timeout: float | None = None) -> FlushReport:
        """Flush within `timeout` seconds, then stop everything; idempotent.

        Returns:
            What was uploaded while waiting, and what was dropped.
        """
        _open_engines.discard(self)
        limit = self._config.flush_timeout if timeout is None else timeout
        try:
            return self._loop.run(self._cache.close(limit), timeout=limit + CLOSE_SECONDS)
        except (ClosedError, TimeoutError):
            return FlushReport()
        finally:
            self._loop.close()
