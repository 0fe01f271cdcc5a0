"""ECCacheEngine: the synchronous face of the engine, for any number of threads.

The engine runs on a loop thread of its own; copies of tensors run in the calling thread, so
callers do not wait for one another. Every call returns by its deadline.

Locking: one lock per engine lets one thread close it; the others wait for that one.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Self

from ec_s3.engine import EncoderCache
from ec_s3.errors import ClosedError
from ec_s3.fetch import Miss
from ec_s3.loop import LoopThread, waitable
from ec_s3.reader import ANYTHING, release_all
from ec_s3.tensors import copy_out
from ec_s3.types import FlushReport, ItemMeta, MissReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from ec_s3.config import ECConfig
    from ec_s3.fetch import PrivateItem
    from ec_s3.keys import Namespace
    from ec_s3.local import Lease
    from ec_s3.pages import Slab
    from ec_s3.store import Store
    from ec_s3.types import DeleteReport, Expectation

START_SECONDS = 30.0
SLACK_SECONDS = 1.0
"""Added to a call's own deadline for the hop to the loop thread and back."""

CLOSE_SECONDS = 10.0
"""Most that closing takes after the flush: stores, disk writes, threads."""

_open_engines: set[ECCacheEngine] = set()
"""Kept until closed: what is still queued in a forgotten engine is uploaded at exit."""


def _close_all() -> None:
    for engine in list(_open_engines):
        engine.close()


# Not atexit, where it exists: that is too late for uploads, as all thread pools are shut down by
# then, ours and those that asyncio resolves names with. They are shut down by this same means,
# last registered first.
getattr(threading, "_register_atexit", atexit.register)(_close_all)


class ECCacheEngine:
    """Keeps encoder outputs in host memory, on disk and in a bucket.

    Args:
        config: settings; `ECConfig()` means host memory only.
        namespace: what makes two tensors interchangeable.
        store: the bucket, ready made; None opens what `config.url` names.
        disk: the disk tier, ready made; None opens what `config.local_disk` names.
        slab: host memory, ready made and owned by the caller; None makes one.
        facts: what identifiers depend on but the namespace does not; written into the bucket
            beside it, for people. JSON.

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
        facts: Mapping[str, object] | None = None,
    ) -> None:
        self._cache = EncoderCache(
            config, namespace, store=store, disk=disk, slab=slab, facts=facts
        )
        self._config = config
        self._closing = threading.Lock()
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
            False when there is no room for it now, or it may not be kept: while suspended or
            switched off, or as it was deleted lately.

        Raises:
            ValueError: the tensor's dtype is not the namespace's, or it is not dense.
            ClosedError: the engine is closed, or belongs to the process before a fork.
        """
        self._loop.check()
        upload = self._cache.stage(mm_hash, tensor, meta or ItemMeta())
        if upload is None:
            return False
        if upload.private is None:
            if self._cache.uploads:
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
        self._loop.check()
        lease = self._held(mm_hash, expect)
        if lease is None:
            return self.get_many([mm_hash], device, expect=expect, timeout=timeout)[0]
        with lease:
            return copy_out(lease.segments(), lease.spec, device)

    def get_many(
        self,
        mm_hashes: Sequence[str],
        device: str | torch.device = "cpu",
        *,
        expect: Expectation = ANYTHING,
        timeout: float | None = None,
    ) -> list[torch.Tensor | None]:
        """One result per identifier, in order; all are fetched at the same time.

        More than the host tier can hold at once come in several rounds.
        """
        limit = self._config.blocking_timeout if timeout is None else timeout
        give_up = time.monotonic() + limit
        tensors: list[torch.Tensor | None] = [None] * len(mm_hashes)
        missing: Sequence[int] = range(len(mm_hashes))
        while missing:
            names = [mm_hashes[at] for at in missing]
            items = self._acquire(names, expect, limit)
            crowded_out: list[int] = []
            try:
                for at, item in zip(missing, items, strict=True):
                    if not isinstance(item, Miss):
                        tensors[at] = copy_out(item.segments(), item.spec, device)
                    elif item.reason is MissReason.NO_ROOM:
                        crowded_out.append(at)
            finally:
                release_all(items)
            limit = give_up - time.monotonic()
            if len(crowded_out) == len(missing) or limit <= 0:
                break  # it is not these items that take the room
            missing = crowded_out
        return tensors

    def _acquire(
        self, names: Sequence[str], expect: Expectation, limit: float
    ) -> list[Lease | PrivateItem | Miss]:
        self._loop.check()
        items: dict[int, Lease | PrivateItem | Miss] = {}
        try:
            for at, name in enumerate(names):
                lease = self._held(name, expect)
                if lease is not None:
                    items[at] = lease
            others = [at for at in range(len(names)) if at not in items]
            if others:
                found = self._fetch([names[at] for at in others], expect, limit)
                items.update(zip(others, found, strict=True))
        except BaseException:
            release_all(items.values())
            raise
        return [items[at] for at in range(len(names))]

    def _held(self, name: str, expect: Expectation) -> Lease | None:
        """A plain hit in the host tier, without the hop to the loop; what else, the loop says."""
        gate = self._cache.gate
        since = gate.now
        key = since.namespace.object_key(name)
        lease = None if gate.refusal(key, since) else self._cache.tier.lookup(key)
        if lease is None:
            return None
        if gate.refusal(key, since) is not None or not expect.admits(lease.spec):
            lease.release()
            return None
        self._cache.count_local_hit(lease)
        return lease

    def _fetch(
        self, names: Sequence[str], expect: Expectation, limit: float
    ) -> list[Lease | PrivateItem | Miss]:
        try:
            return self._loop.run(
                self._cache.acquire_many(names, expect=expect, timeout=limit),
                timeout=limit + SLACK_SECONDS,
                drop=release_all,
            )
        except TimeoutError:  # the loop itself is held up
            return [Miss(MissReason.TIMEOUT)] * len(names)

    def contains(self, mm_hash: str, *, timeout: float | None = None) -> bool:
        """Whether some tier holds the item; False when that cannot be found out in time."""
        return self.contains_many([mm_hash], timeout=timeout)[mm_hash]

    def contains_many(
        self, mm_hashes: Iterable[str], *, timeout: float | None = None
    ) -> Mapping[str, bool]:
        """Existence of many items, asked for in parallel."""
        limit = self._config.blocking_timeout if timeout is None else timeout
        names = list(mm_hashes)
        try:
            return self._loop.run(
                self._cache.contains_many(names, timeout=limit), timeout=limit + SLACK_SECONDS
            )
        except TimeoutError:  # the loop itself is held up
            return dict.fromkeys(names, False)

    def prefetch(self, mm_hashes: Iterable[str]) -> None:
        """Start bringing items into the host tier; returns at once."""
        names = list(mm_hashes)

        def start() -> None:
            with contextlib.suppress(ClosedError):  # closed since the call
                self._cache.prefetch(names)

        self._loop.post(start)

    def delete(self, mm_hashes: Sequence[str], *, timeout: float = 30.0) -> DeleteReport:
        """Remove items from every tier; absent ones count as deleted.

        Raises:
            RemoteError: a store failed as a whole.
            TimeoutError: not done within `timeout` seconds.
        """
        return self._loop.run(self._cache.delete(mm_hashes), timeout=timeout)

    def suspend(self) -> None:
        """Serve and keep nothing until `resume`; returns at once. Idempotent.

        For changing a model's weights in place: suspend, change them, resume.
        """
        self._loop.check()
        self._cache.suspend()

    def resume(self, *, weight_version: str) -> None:
        """Go on with the weights of this name; returns at once. Idempotent.

        Nothing that was put or fetched before is served or written under the new name. Of items of
        other weights, those in host memory are dropped, and so are the uploads that are pending.

        Args:
            weight_version: a name of the weights, the same in every process that has the same
                ones, and never that of others; empty for those of the checkpoint.
        """
        self._loop.check()
        self._cache.resume(weight_version=weight_version)

    def flush(self, timeout: float | None = None) -> FlushReport:
        """Wait for the uploads, at most `timeout` seconds (default `flush_timeout`)."""
        limit = self._config.flush_timeout if timeout is None else timeout
        return self._loop.run(self._cache.flush(limit), timeout=limit + SLACK_SECONDS)

    def stats(self) -> dict[str, float]:
        """All counters and gauges, flat: `hits_local`, `misses_absent`, ...; also after close."""
        self._loop.check_process()
        return self._cache.stats()

    def close(self, timeout: float | None = None) -> FlushReport:
        """Flush within `timeout` seconds, then stop everything; idempotent.

        Returns:
            What was uploaded while waiting, and what was dropped.
        """
        limit = self._config.flush_timeout if timeout is None else timeout
        try:
            self._loop.check()
        except ClosedError:
            return FlushReport()
        if not self._closing.acquire(timeout=waitable(limit + CLOSE_SECONDS)):
            return FlushReport()  # another thread is closing, and late
        try:
            return self._loop.run(self._cache.close(limit), timeout=limit + CLOSE_SECONDS)
        except (ClosedError, TimeoutError):
            return FlushReport()
        finally:
            self._loop.close()
            _open_engines.discard(self)
            self._closing.release()
