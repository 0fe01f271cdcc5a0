"""The background upload queue: encodes items of the host tier and writes them to the stores.

Runs on the engine's event loop; encoding runs on the codec threads. It holds keys, not leases: a
lease lasts only while an item is encoded, and the encoded bytes live in the queue's own byte
budget. Bounded in items and in bytes; what does not fit, or cannot be written, is dropped and
counted. It must never raise into the caller of a put.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ec_s3.budget import ByteBudget
from ec_s3.cancellation import run_to_end
from ec_s3.errors import ECS3Error, RemoteDeniedError, RemoteError
from ec_s3.guard import bounded
from ec_s3.keys import parse_key
from ec_s3.pace import spread
from ec_s3.quiet import Quiet
from ec_s3.types import FlushReport, PutOutcome
from ec_s3.wire import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Executor

    from ec_s3.fetch import PrivateItem
    from ec_s3.local import Lease, LocalTier
    from ec_s3.manifest import Manifest
    from ec_s3.metrics import Stats
    from ec_s3.presence import Presence, Refused
    from ec_s3.signing import Keyring
    from ec_s3.store import Store
    from ec_s3.wire import Frame

logger = logging.getLogger(__name__)

HEAD_ABOVE = 1 << 20
"""Tensors above this follow a HEAD: a fleet that encodes the same item sends its body once."""

LATE_SECONDS = 0.05
"""Smaller ones do when they come later than this: then somebody else may well have been first."""

RETRY_SECONDS = 120.0
"""How long an encoded item is kept for a store that does not answer."""

STOP_SECONDS = 2.0
"""How long given-up uploads may take to let go when the queue is closed."""


@dataclass(frozen=True, slots=True)
class Upload:
    """One item to be written.

    Attributes:
        key: object key.
        identifier: the item's identifier, for the header.
        private: the bytes, when the item is too large for the host tier.
        since: when it was taken; monotonic seconds.
    """

    key: str
    identifier: str
    private: PrivateItem | None = None
    since: float = field(default_factory=time.monotonic, compare=False)


@dataclass(frozen=True, slots=True)
class UploadTargets:
    """Where uploads go and what is known of it: the bucket, the disk tier, or both."""

    remote: Store | None
    disk: Store | None
    presence: Presence
    refused: Refused
    admit_bytes: Callable[[int], float]
    """Seconds to wait before sending that many bytes (the rate limit)."""
    manifest: Manifest
    refusal: Callable[[str], str | None]
    """Why an item of this key may not be written (an outcome of `uploads`), None when it may."""


class UploadQueue:
    """Writes items in the background, a few at a time, in the order they were offered."""

    def __init__(
        self,
        *,
        tier: LocalTier,
        targets: UploadTargets,
        executor: Executor,
        stats: Stats,
        max_items: int,
        max_bytes: int,
        workers: int,
        level: int,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        keyring: Keyring | None = None,
    ) -> None:
        self._tier = tier
        self._targets = targets
        self._executor = executor
        self._stats = stats
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._level = level
        self._clock = clock
        self._wall_clock = wall_clock
        self._keyring = keyring
        self._waiting: dict[str, Upload] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._withdrawn: dict[str, str] = {}  # running ones: as what they end
        self._asked: dict[str, asyncio.Task[bool | RemoteError]] = {}
        self._closed = False
        self._private_bytes = 0
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._budget = ByteBudget(max_bytes)
        self._uploaded = 0
        self._dropped = 0
        self._quiet = Quiet(clock, once=True)
        self._workers = [asyncio.create_task(self._work()) for _ in range(workers)]

    def __contains__(self, key: object) -> bool:
        return key in self._waiting or key in self._running

    @property
    def pending(self) -> int:
        """Uploads waiting or running."""
        return len(self._waiting) + len(self._running)

    def offer(self, upload: Upload) -> bool:
        """Queue an upload; False when there is no room (counted). Never waits."""
        refusal = "closed" if self._closed else self._targets.refusal(upload.key)
        if refusal is not None:
            self._count(refusal)
            return False
        if upload.key in self:
            return True
        private = upload.private.spec.nbytes if upload.private is not None else 0
        full = len(self._waiting) >= self._max_items
        if full or (private and self._private_bytes + private > self._max_bytes):
            self._count("queue_full")
            self._warn("queue_full", "items are not uploaded: %s wait already", self.pending)
            return False
        self._private_bytes += private
        self._waiting[upload.key] = upload
        self._idle.clear()
        self._arrived.set()
        self._gauge()
        return True

    async def drain(self, timeout: float) -> FlushReport:
        """Wait until nothing is pending, at most `timeout` seconds."""
        before = self._uploaded
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        return FlushReport(self._uploaded - before, self.pending, self._dropped)

    def keys(self) -> set[str]:
        """Keys whose uploads are waiting or running."""
        return {*self._waiting, *self._running}

    async def withdraw(self, keys: Iterable[str], *, outcome: str) -> None:
        """Forget the uploads of these keys; returns when none of them can write any more.

        Args:
            keys: those that are not pending are passed over.
            outcome: as what they are counted.
        """
        ending = []
        for key in keys:
            if upload := self._waiting.pop(key, None):
                self._ended(upload)
                self._count(outcome)
            elif key in self._running:
                self._withdrawn[key] = outcome
                self._running[key].cancel()
                ending.append(self._running[key])
        if ending:
            await asyncio.wait(ending)

    async def close(self, timeout: float) -> FlushReport:
        """Drain, then give up what is left (counted); idempotent.

        Takes at most `timeout` seconds and `STOP_SECONDS`.
        """
        report = await self.drain(timeout)
        self._closed = True
        for worker in self._workers:
            worker.cancel()
        for upload in list(self._waiting.values()):
            del self._waiting[upload.key]
            self._count("closed")
            self._ended(upload)
        await asyncio.wait(self._workers, timeout=STOP_SECONDS)
        return FlushReport(report.uploaded, report.pending, self._dropped)

    async def _work(self) -> None:
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            upload = self._waiting.pop(next(iter(self._waiting)))
            task = asyncio.create_task(self._try(upload))
            self._running[upload.key] = task
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.wait({task})
                raise
            finally:
                outcome = self._withdrawn.pop(upload.key, "closed")
                if task.cancelled():
                    self._count(outcome)
                self._running.pop(upload.key)
                self._ended(upload)

    async def _try(self, upload: Upload) -> None:
        try:
            await self._upload(upload)
        except Exception:  # the worker's outermost border: one bad item must not end it
            self._count("error")
            self._stats.add("errors", where="upload")
            logger.exception("upload failed unexpectedly")

    def _ended(self, upload: Upload) -> None:
        if upload.private is not None:
            self._private_bytes -= upload.private.spec.nbytes
        self._gauge()
        if not self.pending:
            self._idle.set()

    async def _upload(self, upload: Upload) -> None:
        key = upload.key
        known = self._targets.presence.get(key, now=self._clock())
        item = self._item(upload)
        if known and not self._targets.refused.knows(key):
            if item is not None:
                item.mark_clean()
                item.release()
            self._count("exists", dropped=False)
            return
        if item is None:
            self._count("evicted")
            return
        nbytes = item.spec.nbytes
        item.release()  # its pages must not wait for the budget
        await self._budget.acquire(nbytes)
        try:
            if (item := self._item(upload)) is None:
                self._count("evicted")
                return
            self._ask(key, wanted=nbytes > HEAD_ABOVE)
            frame = await self._encode(upload, item)
            self._ask(key, wanted=self._clock() - upload.since > LATE_SECONDS)
            await self._write(key, frame)
        finally:
            self._budget.release(nbytes)
            if asked := self._asked.pop(key, None):
                asked.cancel()

    def _ask(self, key: str, *, wanted: bool) -> None:
        """Ask whether an object is there, large ones while their body is made: that hides it."""
        remote = self._targets.remote
        if remote is None or key in self._asked or self._targets.refused.knows(key):
            return
        if wanted:
            self._asked[key] = asyncio.create_task(self._look(remote, key))

    def _item(self, upload: Upload) -> Lease | PrivateItem | None:
        return upload.private or self._tier.lookup(upload.key, touch=False)

    async def _encode(self, upload: Upload, item: Lease | PrivateItem) -> Frame:
        started = self._clock()
        try:
            frame = await run_to_end(
                self._executor,
                lambda: encode(
                    item.spec,
                    item.segments(),
                    identifier=upload.identifier,
                    namespace=parse_key(upload.key).namespace,
                    meta=item.meta,
                    created=self._wall_clock(),
                    level=self._level,
                    keyring=self._keyring,
                ),
            )
            item.mark_clean()
        finally:
            item.release()
        self._stats.observe("save_seconds", self._clock() - started, stage="encode")
        self._stats.add("upload_bytes", item.spec.nbytes, kind="raw")
        self._stats.add("upload_bytes", frame.nbytes, kind="stored")
        return frame

    async def _write(self, key: str, frame: Frame) -> None:
        if self._targets.disk is not None:
            await self._write_disk(self._targets.disk, key, frame)
        if self._targets.remote is None:
            self._uploaded += 1
            self._count("written", dropped=False)
            return
        started = self._clock()
        replace = self._targets.refused.take(key, now=started)
        attempt, sent = 0, False
        while True:
            try:
                outcome = await self._put(self._targets.remote, key, frame, replace, sent=sent)
            except RemoteError as error:
                if not self._try_again(error, started):
                    return
                attempt += 1
                sent = sent or error.operation == "put"
                await asyncio.sleep(spread(attempt))
                continue
            self._written(key, outcome)
            self._stats.observe("save_seconds", self._clock() - started, stage="store")
            await self._targets.manifest.describe(self._targets.remote, key)
            return

    async def _write_disk(self, disk: Store, key: str, frame: Frame) -> None:
        try:
            await bounded("put", key, disk.put(key, frame.parts))
            self._stats.add("disk_writes", outcome="written")
        except ECS3Error as error:
            self._stats.add("disk_writes", outcome="failed")
            self._warn(f"disk:{type(error).__name__}", "the disk tier refuses a write: %s", error)

    async def _put(
        self, remote: Store, key: str, frame: Frame, replace: str | None, *, sent: bool
    ) -> PutOutcome:
        if replace is not None:
            # A store that names no versions can only be overwritten.
            put = remote.put(key, frame.parts, if_match=replace or None, if_absent=False)
            outcome = await bounded("put", key, put)
            self._stats.add("repaired_objects", int(outcome is PutOutcome.WRITTEN))
            if outcome is not PutOutcome.CHANGED:
                return outcome
        elif key in self._asked or frame.header.tensor_bytes > HEAD_ABOVE:
            there = await (self._asked.pop(key, None) or self._look(remote, key))
            if isinstance(there, RemoteError):
                raise there
            if there and not sent:  # else it may be our own: the store finds out
                return PutOutcome.EXISTS
        await asyncio.sleep(self._targets.admit_bytes(frame.nbytes))
        return await bounded("put", key, remote.put(key, frame.parts))

    async def _look(self, remote: Store, key: str) -> bool | RemoteError:
        """Whether an object is there, or why that is unknown: nobody may be left to raise to."""
        try:
            return await bounded("head", key, remote.head(key)) is not None
        except RemoteError as error:
            return error

    def _try_again(self, error: RemoteError, started: float) -> bool:
        if error.retryable and self._clock() - started <= RETRY_SECONDS:
            return True
        self._count("denied" if isinstance(error, RemoteDeniedError) else "failed")
        self._warn(error.reason, "an upload is given up: %s", error)
        return False

    def _written(self, key: str, outcome: PutOutcome) -> None:
        if outcome is PutOutcome.WRITTEN:
            self._targets.refused.forget(key)
        if not self._targets.refused.knows(key):
            self._targets.presence.set(key, present=True, now=self._clock())
        if self._targets.presence.listing.learn(key, existed=outcome is PutOutcome.EXISTS):
            self._stats.add("index_answers", outcome="wrong")
        self._quiet.over()
        self._uploaded += 1
        self._count(outcome.value, dropped=False)

    def _count(self, outcome: str, *, dropped: bool = True) -> None:
        self._dropped += dropped
        self._stats.add("uploads", outcome=outcome)

    def _gauge(self) -> None:
        self._stats.set("upload_queue_items", self.pending)
        self._stats.set("upload_queue_bytes", self._budget.used + self._private_bytes)

    def _warn(self, cause: str, message: str, detail: object) -> None:
        """Log a cause once until an upload succeeds again; errors carry no secret."""
        if self._quiet.due(cause) is not None:
            logger.warning(message, detail)
