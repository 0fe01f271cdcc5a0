"""Brings one stored object into host memory: ranged reads, checks, decoding.

Runs on the engine's event loop; decoding runs on the codec threads. Nothing enters the host tier
before every byte of it is checked. Buffers and pages are given back only when no thread writes to
them any more, also after a cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import numpy as np

from ec_s3.cancellation import all_or_cancel, run_to_end
from ec_s3.errors import CapacityError, FrameError, FrameTruncatedError, RemoteChangedError
from ec_s3.types import Expectation, ItemMeta, MissReason, TensorSpec
from ec_s3.wire import decode_chunk, read_header

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Executor

    from ec_s3.buffers import BufferPool
    from ec_s3.keys import Namespace
    from ec_s3.local import Lease, LocalTier, Reservation
    from ec_s3.store import GetResult, Store
    from ec_s3.types import Extent
    from ec_s3.wire import Header

T = TypeVar("T")

RANGE_BYTES = 8 << 20
"""Bytes per ranged read: one is enough for a small object."""

PARALLEL_RANGES = 4
"""Ranges of one object in flight at once; a connection carries about 90 MB/s."""


@dataclass(frozen=True, slots=True)
class Miss:
    """No item, and why.

    Attributes:
        reason: a label value of the metrics.
        etag: version of the object that was refused, empty when none was.
    """

    reason: MissReason
    etag: str = ""


@dataclass(slots=True)
class PrivateItem:
    """A decoded item too large for the host tier; the same face as `local.Lease`."""

    key: str
    spec: TensorSpec
    meta: ItemMeta
    buffer: memoryview
    extents: tuple[Extent, ...] = ()
    indexed: bool = False

    def segments(self, offset: int = 0, nbytes: int | None = None) -> list[memoryview]:
        """The item's bytes."""
        end = len(self.buffer) if nbytes is None else offset + nbytes
        return [self.buffer[offset:end]]

    def share(self) -> PrivateItem:
        """Another holder of the same bytes."""
        return self

    def release(self) -> None:
        """Nothing to give back: the bytes live as long as they are referenced."""

    def mark_clean(self) -> None:
        """Private items are never dirty."""


class Keeper(Protocol):
    """Takes over the stored bytes of an object that was fetched."""

    def admit(self, nbytes: int) -> bool:
        """Whether an object of this size is wanted; a yes is followed by `take` or `withdraw`."""
        ...

    def withdraw(self, nbytes: int) -> None:
        """The object does not come after all."""
        ...

    def take(self, key: str, parts: list[memoryview], body: Body, *, nbytes: int) -> None:
        """Own the parts; `body.close()` when done with them."""
        ...


@dataclass(slots=True)
class Body:
    """The stored bytes of one object, in pooled buffers, while they are needed."""

    pool: BufferPool
    lent: list[memoryview] = field(default_factory=list)
    parts: list[memoryview] = field(default_factory=list)

    def take(self, nbytes: int) -> memoryview:
        """A buffer of that size, owned until given back."""
        view = self.pool.take(nbytes)
        self.lent.append(view)
        return self.part(view[:])

    def part(self, view: memoryview) -> memoryview:
        """Remember a view of a buffer of this body: released before its buffer is given back.

        The pool cannot use a buffer again that anybody still has a view of.
        """
        self.parts.append(view)
        return view

    def give_back(self, view: memoryview) -> None:
        """Return the buffer behind a view early, and release what was made a part of it."""
        owner = view.obj
        ended = [part for part in self.parts if part.obj is owner]
        self.parts = [part for part in self.parts if part.obj is not owner]
        _release(ended)
        for lent in [lent for lent in self.lent if lent.obj is owner]:
            self.lent.remove(lent)
            self.pool.give(lent)

    def hand_over(self) -> Body:
        """A new owner of all buffers; this one owns none any more."""
        heir = Body(self.pool, self.lent, self.parts)
        self.lent, self.parts = [], []
        return heir

    def close(self) -> None:
        """Give every buffer back; idempotent."""
        _release(self.parts)
        self.parts = []
        while self.lent:
            self.pool.give(self.lent.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _release(views: Iterable[memoryview]) -> None:
    for view in views:
        with contextlib.suppress(BufferError):  # the traceback of a failure may hold on to it
            view.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One object being read: from where, into what."""

    store: Store
    key: str
    body: Body
    keep: Keeper | None

    async def read(self, start: int, length: int, etag: str | None) -> GetResult | None:
        result = await self.store.get(
            self.key, into=self.body.take, start=start, length=length, if_match=etag
        )
        if result is not None:
            self.body.part(result.body)
        return result


class Fetcher:
    """Reads objects of one namespace into a host tier.

    Args:
        tier: where decoded items go.
        namespace: what objects must belong to.
        pool: recycled buffers for stored bytes.
        executor: codec threads.
        max_tensor_bytes: largest item that is accepted.
    """

    def __init__(
        self,
        *,
        tier: LocalTier,
        namespace: Namespace,
        pool: BufferPool,
        executor: Executor,
        max_tensor_bytes: int,
    ) -> None:
        self._tier = tier
        self._namespace = namespace
        self._pool = pool
        self._executor = executor
        self._max_tensor_bytes = max_tensor_bytes

    async def fetch(
        self,
        store: Store,
        key: str,
        identifier: str,
        *,
        keep: Keeper | None = None,
    ) -> Lease | PrivateItem | Miss:
        """Read, check and decode one object.

        Args:
            store: the tier to read from.
            key: object key.
            identifier: whose tensor it must be.
            keep: gets the whole stored object once it has been accepted.

        Returns:
            The leased item, or why there is none.

        Raises:
            RemoteError: the store failed.
        """
        etag = ""
        with Body(self._pool) as body:
            job = _Job(store=store, key=key, body=body, keep=keep)
            try:
                first = await job.read(0, RANGE_BYTES, None)
                if first is None:
                    return Miss(MissReason.ABSENT)
                etag = first.info.etag
                header = self._accept(first, identifier)
                sink = self._reserve(key, header)
                if sink is None:
                    return Miss(MissReason.NO_ROOM)
                with sink:
                    await self._fill_and_keep(job, first, header=header, sink=sink)
                    return sink.commit(header.spec, header.meta, dirty=False)
            except FrameError as error:
                return Miss(MissReason(error.reason), etag)

    async def _fill_and_keep(
        self, job: _Job, first: GetResult, *, header: Header, sink: Reservation | _PrivateSink
    ) -> None:
        nbytes = header.object_bytes
        kept = job.keep if job.keep is not None and job.keep.admit(nbytes) else None
        try:
            stored = await self._fill(job, first, header=header, sink=sink, keep=kept is not None)
        except BaseException:
            if kept is not None:
                kept.withdraw(nbytes)
            raise
        if kept is not None:
            kept.take(job.key, stored, job.body.hand_over(), nbytes=nbytes)

    def _accept(self, first: GetResult, identifier: str) -> Header:
        header = read_header(first.body, max_tensor_bytes=self._max_tensor_bytes)
        header.check(
            identifier=identifier,
            namespace=self._namespace.id,
            expect=Expectation(dtype=self._namespace.dtype),
        )
        if header.object_bytes != first.info.size:
            raise FrameTruncatedError(
                f"the object has {first.info.size} bytes and declares {header.object_bytes}"
            )
        return header

    def _reserve(self, key: str, header: Header) -> Reservation | _PrivateSink | None:
        try:
            return self._tier.reserve(key, header.tensor_bytes)
        except CapacityError:
            return _PrivateSink(key, header.tensor_bytes)

    async def _fill(
        self,
        job: _Job,
        first: GetResult,
        *,
        header: Header,
        sink: Reservation | _PrivateSink,
        keep: bool,
    ) -> list[memoryview]:
        """Decode what has come and read the rest; returns the stored bytes when kept."""
        have = len(first.body)
        whole = 0
        while whole < len(header.chunks) and sum(header.chunk_range(whole)) <= have:
            whole += 1
        groups = _groups(header, whole)
        stored = [first.body] + [memoryview(b"")] * len(groups)
        gate = asyncio.Semaphore(PARALLEL_RANGES)
        if groups:
            # The cut-off tail of the first range is read again with its chunk.
            stored[0] = job.body.part(first.body[: header.chunk_range(whole)[0]])

        async def rest(slot: int, group: range) -> None:
            start = header.chunk_range(group[0])[0]
            length = sum(header.chunk_range(group[-1])) - start
            async with gate:
                part = await job.read(start, length, first.info.etag or None)
                if part is None:
                    raise RemoteChangedError(
                        "deleted while it was read", operation="get", key=job.key
                    )
                if len(part.body) != length:
                    raise FrameTruncatedError("the object shrank while it was read")
                await run_to_end(self._executor, _decode, header, group, start, part.body, sink)
                if keep:
                    stored[slot] = part.body
                else:
                    job.body.give_back(part.body)  # inside the gate, which bounds what is held

        decode_first = run_to_end(
            self._executor, _decode, header, range(whole), 0, first.body, sink
        )
        await all_or_cancel([decode_first, *(rest(i + 1, g) for i, g in enumerate(groups))])
        return stored


def _groups(header: Header, start: int) -> list[range]:
    """Chunks from `start` on, in runs of about `RANGE_BYTES` stored bytes."""
    groups: list[range] = []
    begin, size = start, 0
    for i in range(start, len(header.chunks)):
        nbytes = header.chunk_range(i)[1]
        if i > begin and size + nbytes > RANGE_BYTES:
            groups.append(range(begin, i))
            begin, size = i, 0
        size += nbytes
    if begin < len(header.chunks):
        groups.append(range(begin, len(header.chunks)))
    return groups


def _decode(
    header: Header, chunks: range, base: int, body: memoryview, sink: Reservation | _PrivateSink
) -> None:
    for i in chunks:
        offset, nbytes = header.chunk_range(i)
        at, raw = header.chunk_tensor_range(i)
        stored = body[offset - base : offset - base + nbytes]
        decode_chunk(header, i, stored, sink.segments(at, raw))


class _PrivateSink:
    """Stands in for a reservation where the item is too large for the tier."""

    def __init__(self, key: str, nbytes: int) -> None:
        self.key = key
        # Not a bytearray: zeroing a gigabyte would stop the event loop.
        self._buffer = np.empty(nbytes, dtype=np.uint8).data

    def segments(self, offset: int = 0, nbytes: int | None = None) -> list[memoryview]:
        end = len(self._buffer) if nbytes is None else offset + nbytes
        return [self._buffer[offset:end]]

    def commit(self, spec: TensorSpec, meta: ItemMeta, *, dirty: bool) -> PrivateItem:
        del dirty  # a private item has no place in the tier to be dirty in
        return PrivateItem(self.key, spec, meta, self._buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
