"""The pipeline that brings many items into the bucket at once, in bounded memory.

Items are taken from an iterable one at a time, looked up in parallel, encoded, and written. Runs on
an event loop; the iterable and the codec run on threads. An item is only taken when it has room, in
items (`upload_queue_items`) and in bytes (`upload_queue_size`), so that memory is bounded however
much the iterable yields and however slow the bucket is. It must never let one bad item end the
others, nor write what an operator forbids.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ec_s3.budget import ByteBudget
from ec_s3.cancellation import run_to_end
from ec_s3.control import Control, control_poll
from ec_s3.errors import ConfigError, ECS3Error, RemoteDeniedError, RemoteError
from ec_s3.guard import bounded
from ec_s3.keys import is_request_local
from ec_s3.lookup import is_stale
from ec_s3.metrics import Stats
from ec_s3.pace import spread
from ec_s3.policy import Probing, TokenBucket
from ec_s3.tensors import as_bytes, spec_of
from ec_s3.types import ItemMeta, PutOutcome
from ec_s3.uploads import HEAD_ABOVE, LATE_SECONDS, RETRY_SECONDS
from ec_s3.wire import encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    import torch

    from ec_s3.config import ECConfig
    from ec_s3.keys import Namespace
    from ec_s3.store import Store
    from ec_s3.types import ObjectInfo
    from ec_s3.wire import Frame

logger = logging.getLogger(__name__)

T = TypeVar("T")

PROBES_AT_ONCE = 32
ENCODERS = 2
COPIES = 3
"""An item's bytes count so often. While it is encoded it is in memory twice, then once, and half a
MiB of it again as it is sent; the rest is what the allocator keeps of items that are gone.
benchmarks/uploads.py watches the whole process."""


@dataclass(frozen=True, slots=True)
class Source:
    """An item that is to be uploaded.

    Attributes:
        name: its identifier (vLLM's `mm_hash`).
        nbytes: size of its tensor.
        load: gives the tensor, a dense one in CPU memory; called on a thread, and only if the
            bucket lacks the item.
        meta: what travels with it.
        held: whether the tensor is in memory before `load`.
    """

    name: str
    nbytes: int
    load: Callable[[], torch.Tensor]
    meta: ItemMeta = field(default_factory=ItemMeta)
    held: bool = False


@dataclass(frozen=True, slots=True)
class Bad:
    """What a source of items could not make an item of.

    Attributes:
        name: its identifier, or where it is.
        reason: why.
    """

    name: str
    reason: str


@dataclass(slots=True)
class UploadReport:
    """What became of the items.

    Attributes:
        written: stored now.
        present: there already.
        failed: name and reason of each item that is not in the bucket, the first `max_failures`.
        failures: how many there are.
        raw_bytes: of the tensors that were written.
        stored_bytes: of what was written of them.
        seconds: from the first item to the last.
        most_items: most items that were under way at a time.
        most_bytes: most bytes that were in use for them.
        stopped: what ended the job early, None when it went through.
    """

    written: int = 0
    present: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    failures: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0
    most_items: int = 0
    most_bytes: int = 0
    stopped: ECS3Error | None = None

    @property
    def items(self) -> int:
        """How many items were dealt with."""
        return self.written + self.present + self.failures


class _StopError(Exception):
    """The bucket can no longer be used."""

    def __init__(self, error: ECS3Error) -> None:
        super().__init__(str(error))
        self.error = error


class Intake:
    """One run: its bounds, its threads, its report."""

    def __init__(
        self,
        store: Store,
        config: ECConfig,
        namespace: Namespace,
        control: Control,
        on_item: Callable[[str, str, int], object],
        max_failures: int,
    ) -> None:
        self._store = store
        self._config = config
        self._namespace = namespace
        self._control = control
        self._on_item = on_item
        self._max_failures = max_failures
        self._keyring = config.keyring()
        self._rate = None if config.upload_rate is None else TokenBucket(config.upload_rate)
        self._budget = ByteBudget(config.upload_queue_size)
        self._room = asyncio.Semaphore(config.upload_queue_items)
        self._probes = asyncio.Semaphore(PROBES_AT_ONCE)
        self._uploads = asyncio.Semaphore(config.max_uploads)
        self._probing = Probing()
        self._described = False
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._charged: set[str] = set()
        self._stale: dict[str, str] = {}  # versions that no longer count, by key
        self._stopped = False
        self._report = UploadReport()
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="ec_s3-source")
        self._codec = ThreadPoolExecutor(ENCODERS, thread_name_prefix="ec_s3-encode")

    async def run(self, sources: Iterator[Source | Bad]) -> UploadReport:
        """Deal with all items; once only."""
        started = time.monotonic()
        poll = control_poll(
            self._store,
            key=lambda: self._namespace.control_key,
            obey=self._obey,
            stats=Stats(),
        )
        following = asyncio.create_task(poll.run())
        try:
            try:
                await self._take_all(sources)
            except Exception:  # the source's own: what it gave before is stored all the same
                await self._settle()
                raise
            await self._settle()
        finally:
            following.cancel()
            self._call_off()
            await asyncio.gather(following, *self._under_way.values(), return_exceptions=True)
            self._reading.shutdown(wait=False)
            self._codec.shutdown(wait=False)
        self._report.seconds = time.monotonic() - started
        return self._report

    async def _settle(self) -> None:
        while self._under_way:
            await asyncio.wait(self._under_way.values())

    def _call_off(self) -> None:
        for task in self._under_way.values():
            if task is not asyncio.current_task():
                task.cancel()

    async def _obey(self, control: Control) -> None:
        self._control = control
        if not control.enabled:
            self._stop(ConfigError(f"{self._namespace.id} was switched off meanwhile"))

    async def _take_all(self, sources: Iterator[Source | Bad]) -> None:
        more = True
        while more and not self._stopped:
            await self._room.acquire()
            more = await self._take(sources)

    async def _take(self, sources: Iterator[Source | Bad]) -> bool:
        """Take one item into the room that it has; False when there is none left to take."""
        source = await run_to_end(self._reading, next, sources, None)
        if isinstance(source, Source) and (reason := self._unfit(source)) is not None:
            source = Bad(source.name, reason)
        if isinstance(source, Source):
            await self._begin(source)
            return True
        self._room.release()
        if source is not None:
            self._failed(source.name, source.reason)
        return source is not None

    async def _begin(self, source: Source) -> None:
        while source.name in self._under_way:  # it comes twice
            await asyncio.wait({self._under_way[source.name]})
        if source.held:
            await self._charge(source)
        task = asyncio.create_task(self._deal_with(source))
        # Not the task itself, which may be called off before its first step.
        name, nbytes = source.name, source.nbytes
        task.add_done_callback(lambda _: self._ended(name, nbytes))
        self._under_way[source.name] = task
        self._report.most_items = max(self._report.most_items, len(self._under_way))
        if self._stopped:
            self._call_off()

    def _unfit(self, source: Source) -> str | None:
        """Why an item may not be stored, None when it may."""
        if not source.name:
            return "it has no name"
        if is_request_local(source.name):
            return "its name is one that vLLM makes up for a single request"
        if source.nbytes > self._config.max_item_size:
            return f"{source.nbytes} bytes are more than max_item_size"
        return None

    async def _charge(self, source: Source) -> None:
        await self._budget.acquire(COPIES * source.nbytes)
        self._charged.add(source.name)
        self._report.most_bytes = max(self._report.most_bytes, self._budget.used)

    def _ended(self, name: str, nbytes: int) -> None:
        if name in self._charged:
            self._charged.remove(name)
            self._budget.release(COPIES * nbytes)
        del self._under_way[name]
        self._room.release()

    async def _deal_with(self, source: Source) -> None:
        name, nbytes = source.name, source.nbytes
        try:
            key = self._namespace.object_key(name)
            if self._control.deletes(key.rpartition("/")[2], now=time.time()):
                self._failed(name, "it was deleted lately, and may not come back yet")
                return
            asked = time.monotonic()
            wanted = self._probing.wanted() or self._control.valid_after > 0.0
            if await self._is_there(key, ask=wanted or nbytes > HEAD_ABOVE):
                self._done(name, nbytes, PutOutcome.EXISTS)
                return
            if not source.held:
                await self._charge(source)
            # Ahead of its turn: the connections never wait for the codec, and a frame is smaller
            # than the tensor, which nobody else holds.
            frame = await run_to_end(self._codec, self._encode, source)
            del source
            async with self._uploads:
                # Where others write, too, somebody may have been first meanwhile.
                late = time.monotonic() - asked > LATE_SECONDS
                if await self._is_there(key, ask=late and self._probing.useful):
                    self._done(name, nbytes, PutOutcome.EXISTS)
                    return
                self._done(name, nbytes, await self._upload(key, frame))
        except _StopError as stop:
            self._stop(stop.error)
        except Exception as error:  # one bad item must not end the others
            told = not isinstance(error, RemoteError)  # else it ends in what a store has said
            logger.debug("an item could not be uploaded", exc_info=told)
            self._failed(name, _reason(error))

    async def _is_there(self, key: str, *, ask: bool) -> bool:
        """Whether the store has it; a guess where it is not to be asked."""
        if not ask:
            return False
        async with self._probes:
            info = await self._persist("head", key, lambda: self._look(key))
        self._probing.learn(present=info is not None)
        return info is not None and key not in self._stale

    async def _look(self, key: str) -> ObjectInfo | None:
        """What is there, noted if it does not count any more."""
        info = await self._store.head(key)
        self._stale.pop(key, None)
        if info is not None and await is_stale(
            self._store, info, valid_after=self._control.valid_after
        ):
            self._stale[key] = info.etag
        return info

    async def _upload(self, key: str, frame: Frame) -> PutOutcome:
        stale = self._stale.pop(key, None)
        put = partial(
            self._store.put, key, frame.parts, if_match=stale or None, if_absent=stale is None
        )
        if self._rate is not None:
            await asyncio.sleep(self._rate.take(frame.nbytes, now=time.monotonic()))
        outcome = await self._persist("put", key, put)
        self._probing.learn(present=outcome is PutOutcome.EXISTS)
        if outcome is PutOutcome.WRITTEN:
            self._report.raw_bytes += frame.header.tensor_bytes
            self._report.stored_bytes += frame.nbytes
            await self._describe()
        return outcome

    def _encode(self, source: Source) -> Frame:
        """On a codec thread: the tensor, if need be from its file, as an object."""
        tensor = source.load()
        spec = spec_of(tensor)
        if spec.dtype != self._namespace.dtype:
            raise ValueError(f"its dtype is {spec.dtype}, not {self._namespace.dtype}")
        return encode(
            spec,
            [as_bytes(tensor)],
            identifier=source.name,
            namespace=self._namespace.id,
            meta=source.meta,
            created=time.time(),
            level=self._config.compression_level,
            keyring=self._keyring,
        )

    async def _describe(self) -> None:
        """Tell the bucket's operator what the folder holds."""
        if self._described:
            return
        self._described = True
        with contextlib.suppress(ECS3Error):
            await self._store.put(self._namespace.manifest_key, [self._namespace.manifest()])

    async def _persist(self, operation: str, key: str, call: Callable[[], Awaitable[T]]) -> T:
        """A call of the store, made again while it may succeed.

        Raises:
            _StopError: the store refuses, or has not answered for too long.
            RemoteError: it will not take this item.
        """
        started, attempt = time.monotonic(), 0
        while True:
            try:
                return await bounded(operation, key, call())
            except RemoteDeniedError as error:
                raise _StopError(error) from error
            except RemoteError as error:
                if not error.retryable:
                    raise
                if time.monotonic() - started > RETRY_SECONDS:
                    raise _StopError(error) from error
            attempt += 1
            await asyncio.sleep(spread(attempt))

    def _done(self, name: str, nbytes: int, outcome: PutOutcome) -> None:
        if outcome is PutOutcome.WRITTEN:
            self._report.written += 1
        else:
            self._report.present += 1
        self._on_item(name, outcome.value, nbytes)

    def _failed(self, name: str, reason: str) -> None:
        self._report.failures += 1
        if len(self._report.failed) < self._max_failures:
            self._report.failed[name] = reason
        self._on_item(name, reason, 0)

    def _stop(self, error: ECS3Error) -> None:
        """End the job; what is under way is called off."""
        if not self._stopped:
            self._stopped = True
            self._report.stopped = error
        self._call_off()


def _reason(error: Exception) -> str:
    known = isinstance(error, ECS3Error | ValueError | OSError)
    return str(error) if known else f"{type(error).__name__}: {error}"
