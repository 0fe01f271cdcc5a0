"""EncoderCache: the asynchronous core. Host tier, disk tier and bucket behind put and get.

Runs on one event loop, which it never blocks: copies and (de)compression run on a few codec
threads. It speaks tensors and identifiers only and knows nothing of vLLM. A tensor that it returns
never aliases the host tier. Whatever a store does, `get` returns a valid tensor or None, and the
reason is counted.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from ec_s3 import __version__, deletion
from ec_s3.audit import Auditor
from ec_s3.cancellation import run_to_end
from ec_s3.errors import ClosedError
from ec_s3.fetch import Miss, PrivateItem
from ec_s3.gauges import TierGauges
from ec_s3.governor import Governor
from ec_s3.guard import connect_all
from ec_s3.local import LocalTier
from ec_s3.metrics import Stats
from ec_s3.pages import Slab
from ec_s3.reader import ANYTHING, Reader
from ec_s3.staging import Stager, copied_out
from ec_s3.types import DeleteReport, FlushReport, ItemMeta, Tier
from ec_s3.wire import FORMAT_VERSION
from ec_s3.wiring import first_pages, make_fetcher, make_queue, open_tiers, upload_rate, warm_start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from ec_s3.config import ECConfig
    from ec_s3.keys import Namespace
    from ec_s3.local import Lease
    from ec_s3.store import Store
    from ec_s3.tiers import Tiers
    from ec_s3.types import Expectation
    from ec_s3.uploads import Upload, UploadQueue

ENCODERS = 2  # threads; of their own, so that a fetch never waits behind an upload's compression


class EncoderCache:
    """The engine. Open it with `await EncoderCache.open(...)` or `async with`.

    Args:
        config: settings.
        namespace: what makes two tensors interchangeable.
        store: the bucket, ready made; None opens what `config.url` names.
        disk: the disk tier, ready made; None opens what `config.local_disk` names.
        slab: host memory, ready made and owned by the caller; None makes one.
        facts: what identifiers depend on but the namespace does not; written into the bucket
            beside it, for people. JSON.
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
        self.config = config
        self.statistics = Stats()
        self._keyring = config.keyring()
        self._given = (store, disk)
        self._facts = dict(facts or {})
        self._owns_slab = slab is None
        self._slab = slab if slab is not None else Slab.create(config.max_local_cpu_size)
        self.tier = LocalTier(self._slab)
        self.governor = Governor(namespace, tier=self.tier, stats=self.statistics)
        self.gate = self.governor.gate
        self._clock = time.monotonic
        self.gauges = TierGauges(self.tier, self._slab, self.statistics)
        self._closed = False
        self._closing: asyncio.Task[FlushReport] | None = None
        self._tiers: Tiers | None = None
        self._queue: UploadQueue | None = None
        self._reader: Reader | None = None
        self._stager = Stager(config, self.gate, tier=self.tier, stats=self.statistics)
        decoders = max(2, min(4, os.cpu_count() or 1))
        self._executor = ThreadPoolExecutor(decoders, thread_name_prefix="ec_s3-codec")
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="ec_s3-encode")
        self.auditor = Auditor(self.tier, self._encoders, self.statistics)
        self._fetcher = make_fetcher(
            config, tier=self.tier, executor=self._executor, keyring=self._keyring
        )

    @classmethod
    async def open(
        cls,
        config: ECConfig,
        namespace: Namespace,
        *,
        store: Store | None = None,
        disk: Store | None = None,
        slab: Slab | None = None,
        facts: Mapping[str, object] | None = None,
    ) -> Self:
        """Make an engine and start it on the running loop."""
        cache = cls(config, namespace, store=store, disk=disk, slab=slab, facts=facts)
        await cache.start()
        return cache

    async def start(self) -> None:
        """Open the stores and start the background work; no request is sent yet.

        Raises:
            ConfigError: the settings cannot be used; the engine is closed then.
        """
        try:
            await self._start(upload_rate(self.config, self._clock))
        except BaseException:
            await self.close(0.0)
            raise

    async def _start(self, rate: Callable[[int], float]) -> None:
        self._tiers = tiers = self._open_tiers(rate)
        await connect_all(tiers.stores)
        self.statistics.set("info", 1, version=__version__, wire=str(FORMAT_VERSION))
        self._reader = Reader(
            self.config,
            self.gate,
            tiers=tiers,
            fetcher=self._fetcher,
            stats=self.statistics,
            clock=self._clock,
        )
        if tiers.stores:
            self._queue = make_queue(
                self.config,
                self.gate,
                tiers=tiers,
                facts=self._facts,
                admit_bytes=rate,
                executor=self._encoders,
                stats=self.statistics,
                clock=self._clock,
                keyring=self._keyring,
            )
            self._stager.uploads = True
        self.governor.start(self._reader, self._queue)
        if self.config.warm_start:
            warm = warm_start(
                self.config,
                self.gate,
                reader=self._reader,
                slab=self._slab,
                control=self.governor.poll,
                stats=self.statistics,
            )
            self.governor.attend(warm.run())
        if self._owns_slab:
            threading.Thread(target=self._slab.populate, name="ec_s3-populate", daemon=True).start()
            await first_pages(self._slab)

    def _open_tiers(self, rate: Callable[[int], float]) -> Tiers:
        store, disk = self._given
        return open_tiers(
            self.config,
            self.gate,
            local=self.tier,
            store=store,
            disk=disk,
            admit_bytes=rate,
            executor=self._encoders,
            stats=self.statistics,
            clock=self._clock,
            keyring=self._keyring,
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def namespace(self) -> Namespace:
        """That of the weights in use."""
        return self.gate.now.namespace

    def key_of(self, identifier: str) -> str:
        """The object key of an identifier."""
        return self.namespace.object_key(identifier)

    @property
    def uploads(self) -> bool:
        """Whether items go anywhere beyond the host tier."""
        return self._queue is not None

    def count_local_hit(self, item: Lease) -> None:
        """Count a hit that a caller found in the host tier by himself; any thread."""
        self.statistics.add("queries")
        if self._reader is not None:
            self._reader.count_hit(item, Tier.LOCAL)

    def is_known_shared(self, key: str) -> bool:
        """Whether the bucket holds an object as far as is known; sends nothing. Any thread."""
        tiers = self._tiers
        return tiers is not None and tiers.presence.holds(key, now=self._clock())

    async def is_shared(self, identifier: str) -> bool:
        """Whether the bucket holds the item, or will: its upload is under way.

        Raises:
            RemoteError: the bucket cannot say, or not within `metadata_timeout`.
        """
        key = self.key_of(identifier)
        if self._queue is not None and key in self._queue:
            return True
        return await self.reader.existence.in_bucket(key)

    @property
    def reader(self) -> Reader:
        """The reading half, once started and until closed."""
        if self._closed or self._reader is None:
            raise ClosedError("the cache is closed" if self._closed else "the cache is not started")
        return self._reader

    # -- reading ---------------------------------------------------------------------------

    async def acquire(
        self,
        identifier: str,
        *,
        expect: Expectation = ANYTHING,
        timeout: float | None = None,
    ) -> Lease | PrivateItem | Miss:
        """The item itself, leased; see `Reader.acquire`."""
        return await self.reader.acquire(identifier, expect=expect, timeout=timeout)

    async def get(
        self,
        identifier: str,
        device: str | torch.device = "cpu",
        *,
        expect: Expectation = ANYTHING,
        timeout: float | None = None,
    ) -> torch.Tensor | None:
        """A copy of the tensor on `device`, None when no valid one can be had in time."""
        item = await self.acquire(identifier, expect=expect, timeout=timeout)
        if isinstance(item, Miss):
            return None
        started = self._clock()
        try:
            return await copied_out(self._executor, item, device)
        finally:
            self.statistics.observe("fetch_seconds", self._clock() - started, phase="copy")
            item.release()

    async def acquire_many(
        self, identifiers: Sequence[str], *, expect: Expectation, timeout: float | None
    ) -> list[Lease | PrivateItem | Miss]:
        """Several at the same time, in order; the caller must release every item."""
        return await self.reader.acquire_many(identifiers, expect=expect, timeout=timeout)

    async def get_many(
        self,
        identifiers: Sequence[str],
        device: str | torch.device = "cpu",
        *,
        timeout: float | None = None,
    ) -> list[torch.Tensor | None]:
        """One result per identifier, in order; all are fetched at the same time."""
        return await asyncio.gather(*(self.get(i, device, timeout=timeout) for i in identifiers))

    async def contains(self, identifier: str, *, timeout: float | None = None) -> bool:
        """Whether some tier holds the item; False when that cannot be found out in time."""
        return await self.reader.existence.contains(identifier, timeout=timeout)

    async def contains_many(
        self, identifiers: Iterable[str], *, timeout: float | None = None
    ) -> Mapping[str, bool]:
        """Existence of many items at once, asked for in parallel."""
        return await self.reader.existence.contains_many(identifiers, timeout=timeout)

    def prefetch(self, identifiers: Iterable[str]) -> None:
        """Start bringing items into the host tier; returns at once. Call on the loop."""
        self.reader.prefetch(identifiers)

    # -- writing ---------------------------------------------------------------------------

    def stage(self, identifier: str, tensor: torch.Tensor, meta: ItemMeta) -> Upload | None:
        """Copy a tensor into the host tier; see `staging.Stager.stage`. Any thread."""
        if self._closed:
            raise ClosedError("the cache is closed")
        return self._stager.stage(identifier, tensor, meta)

    def enqueue(self, upload: Upload) -> bool:
        """Queue the upload of a staged item; call on the loop. False only when nothing holds it."""
        if self._tiers is not None:
            self._tiers.presence.forget_absence(upload.key)
        if self._queue is None:
            return True
        queued = self._stager.admit(upload) and self._queue.offer(upload)
        return queued or upload.private is None

    async def put(
        self, identifier: str, tensor: torch.Tensor, *, meta: ItemMeta | None = None
    ) -> bool:
        """Take a tensor: copied before the call returns, uploaded in the background.

        Returns:
            False when there is no room for it now, or it may not be kept: while suspended or
            switched off, or as it was deleted lately.
        """
        upload = await run_to_end(
            self._executor, self.stage, identifier, tensor, meta or ItemMeta()
        )
        return upload is not None and self.enqueue(upload)

    async def put_many(self, items: Mapping[str, torch.Tensor]) -> dict[str, bool]:
        """Put several; one result per identifier."""
        return {name: await self.put(name, tensor) for name, tensor in items.items()}

    async def delete(self, identifiers: Sequence[str]) -> DeleteReport:
        """Remove items from every tier, and call off what is under way; see `deletion.delete`."""
        reader = self.reader
        keys = [self.key_of(identifier) for identifier in identifiers]
        return await deletion.delete(keys, tiers=reader.tiers, reader=reader, queue=self._queue)

    # -- changing the weights --------------------------------------------------------------

    def suspend(self) -> None:
        """Serve and keep nothing until `resume`; returns at once. Any thread, idempotent."""
        _ = self.reader  # ClosedError, if so
        self.governor.suspend()

    def resume(self, *, weight_version: str) -> None:
        """Go on with the weights of this name; returns at once. Any thread, idempotent.

        Nothing that was made before is served or written under the new name; of items of other
        weights, those in host memory are dropped, and so are the uploads that are pending.

        Args:
            weight_version: a name of the weights, the same in every process that has the same
                ones, and never that of others; empty for those of the checkpoint.
        """
        _ = self.reader
        self.governor.resume(weight_version)

    # -- the end ---------------------------------------------------------------------------

    async def flush(self, timeout: float | None = None) -> FlushReport:
        """Wait for the uploads, at most `timeout` seconds (default `flush_timeout`)."""
        limit = self.config.flush_timeout if timeout is None else timeout
        return await self._queue.drain(limit) if self._queue is not None else FlushReport()

    def stats(self) -> dict[str, float]:
        """All counters and gauges, flat: `hits_local`, `misses_absent`, ... Any thread."""
        self.gauges.update()
        return self.statistics.snapshot()

    async def close(self, timeout: float | None = None) -> FlushReport:
        """Flush within `timeout` seconds, then stop everything; idempotent.

        What does not stop by itself is left behind a few seconds after that. A caller who does not
        wait for the end changes nothing: the next one can.
        """
        if self._closing is None:
            self._closed = True
            limit = self.config.flush_timeout if timeout is None else timeout
            self._closing = asyncio.ensure_future(self._close(limit))
            return await asyncio.shield(self._closing)
        if not self._closing.done():
            await asyncio.wait({self._closing})
        return FlushReport()

    async def _close(self, limit: float) -> FlushReport:
        report = FlushReport()
        try:
            await self.governor.close()
            await self.auditor.close()
            if self._tiers is not None and self._tiers.refresher is not None:
                await self._tiers.refresher.close()
            if self._queue is not None:
                report = await self._queue.close(limit)
            if self._reader is not None:
                await self._reader.close()
            if self._tiers is not None:
                await self._tiers.close()
        finally:
            for executor in (self._executor, self._encoders):
                executor.shutdown(wait=False, cancel_futures=True)
            if self._owns_slab:
                self._slab.close()
        return report
