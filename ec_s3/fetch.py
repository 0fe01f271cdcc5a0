"""Brings one stored object into host memory: ranged reads, checks, decoding.

Runs on the engine's event loop; decoding runs on the codec threads. Nothing enters the host tier
before every byte of it is checked. Buffers and pages are given back only when no thread writes to
them any more, also after a cancellation.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from ec_s3.errors import CapacityError, FrameError, FrameTruncatedError
from ec_s3.types import Expectation, ItemMeta, MissReason, TensorSpec
from ec_s3.wire import decode_chunk, read_header

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from concurrent.futures import Executor

    from ec_s3.buffers import BufferPool
    from ec_s3.keys import Namespace
    from ec_s3.local import Lease, LocalTier, Reservation
    from ec_s3.store import GetResult, Store
    from ec_s3.types import Extent
    from ec_s3.wire import Header

T = TypeVar("T")

RANGE_BYTES = 8 << 20
"""Bytes per ranged read: one is enough for a small object, and large ones stream at line rate
over several connections of about 90 MB/s each."""

PARALLEL_RANGES = 4
"""Ranges of one object in flight at once."""


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


async def run_to_end(executor: Executor, call: Callable[..., T], *args: object) -> T:
    """Run a call on an executor; a cancellation is raised only after the call has ended.

    Whoever cancels may then reuse the memory that the call was working on.
    """
    future = asyncio.get_running_loop().run_in_executor(executor, call, *args)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:  # cancelled again: still not safe to leave
                continue
        raise


async def all_or_cancel(works: Iterable[Awaitable[None]]) -> None:
    """Await all; on the first failure cancel the others, wait for them, and raise it."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Keeper(Protocol):
    """Takes over the stored bytes of an object that was fetched."""

    def admits(self, nbytes: int) -> bool:
        """Whether an object of this size is wanted."""
        ...

    def take(self, key: str, parts: list[memoryview], body: Body) -> None:
        """Own the parts; `body.close()` when done with them."""
        ...


@dataclass(slots=True)
class Body:
    """The stored bytes of one object, in pooled buffers, while they are needed."""

    pool: BufferPool
    lent: list[memoryview] = field(default_factory=list)

    def take(self, nbytes: int) -> memoryview:
        """A buffer of that size, owned until given back."""
        view = self.pool.take(nbytes)
        self.lent.append(view)
        return view

    def give_back(self, view: memoryview) -> None:
        """Return one buffer early."""
        for i, mine in enumerate(self.lent):
            if mine.obj is view.obj:
                del self.lent[i]
                self.pool.give(view)
                return

    def hand_over(self) -> Body:
        """A new owner of all buffers; this one owns none any more."""
        heir = Body(self.pool, self.lent)
        self.lent = []
        return heir

    def close(self) -> None:
        """Give every buffer back; idempotent."""
        while self.lent:
            self.pool.give(self.lent.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
            try:
                first = await self._read(store, key, body, 0, RANGE_BYTES, None)
                if first is None:
                    return Miss(MissReason.ABSENT)
                etag = first.info.etag
                header = self._accept(first, identifier)
                sink = self._reserve(key, header)
                if sink is None:
                    return Miss(MissReason.NO_ROOM)
                kept = keep if keep is not None and keep.admits(header.object_bytes) else None
                with sink:
                    stored = await self._fill(
                        store, key, body, first, header, sink, keep=kept is not None
                    )
                    item = sink.commit(header.spec, header.meta, dirty=False)
                if kept is not None:
                    kept.take(key, stored, body.hand_over())
                return item
            except FrameError as error:
                return Miss(MissReason(error.reason), etag)

    async def _read(
        self, store: Store, key: str, body: Body, start: int, length: int, etag: str | None
    ) -> GetResult | None:
        return await store.get(key, into=body.take, start=start, length=length, if_match=etag)

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
        store: Store,
        key: str,
        body: Body,
        first: GetResult,
        header: Header,
        sink: Reservation | _PrivateSink,
        *,
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
            stored[0] = first.body[: header.chunk_range(whole)[0]]

        async def rest(slot: int, group: range) -> None:
            start = header.chunk_range(group[0])[0]
            length = sum(header.chunk_range(group[-1])) - start
            async with gate:
                part = await self._read(store, key, body, start, length, first.info.etag or None)
                if part is None or len(part.body) != length:
                    raise FrameTruncatedError("the object shrank while it was read")
                await run_to_end(self._executor, _decode, header, group, start, part.body, sink)
            stored[slot] = part.body
            if not keep:
                body.give_back(part.body)

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
        self._buffer = memoryview(bytearray(nbytes))

    def segments(self, offset: int = 0, nbytes: int | None = None) -> list[memoryview]:
        end = len(self._buffer) if nbytes is None else offset + nbytes
        return [self._buffer[offset:end]]

    def commit(self, spec: TensorSpec, meta: ItemMeta, *, dirty: bool) -> PrivateItem:
        del dirty  # a private item has no place in the tier to be dirty in
        return PrivateItem(self.key, spec, meta, self._buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None
