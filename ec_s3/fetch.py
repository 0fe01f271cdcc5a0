"""Brings one stored object into host memory: ranged reads, checks, decoding.

Runs on the engine's event loop; decoding runs on the codec threads. Nothing enters the host tier
before every byte of it is checked. Buffers and pages are given back only when no thread writes to
them any more, also after a cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import numpy as np

from ec_s3.buffers import Body
from ec_s3.cancellation import all_or_cancel
from ec_s3.errors import (
    CapacityError,
    FrameError,
    FrameStaleError,
    FrameTruncatedError,
    RemoteChangedError,
)
from ec_s3.keys import parse_key
from ec_s3.ranges import ObjectRead
from ec_s3.types import Expectation, ItemMeta, MissReason, TensorSpec
from ec_s3.wire import decode_chunk, read_header

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ec_s3.arriving import Arriving
    from ec_s3.buffers import BufferPool
    from ec_s3.local import Lease, LocalTier, Reservation
    from ec_s3.metrics import Stats
    from ec_s3.signing import Keyring
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


OVERSIZED = Miss(MissReason.TOO_LARGE)
"""A good object whose item the host tier can never hold; told apart by identity."""


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


class Fetcher:
    """Reads objects into a host tier.

    Args:
        tier: where decoded items go.
        pool: recycled buffers for stored bytes.
        executor: codec threads.
        max_tensor_bytes: largest item that is accepted.
        keyring: the keys that must have signed an object; None accepts any.
    """

    def __init__(
        self,
        *,
        tier: LocalTier,
        pool: BufferPool,
        executor: Executor,
        max_tensor_bytes: int,
        keyring: Keyring | None = None,
    ) -> None:
        self._tier = tier
        self._pool = pool
        self._executor = executor
        self._max_tensor_bytes = max_tensor_bytes
        self._keyring = keyring

    async def fetch(
        self,
        store: Store,
        key: str,
        identifier: str,
        *,
        keep: Keeper | None = None,
        stats: Stats | None = None,
        valid_after: float = 0.0,
        resident: bool = False,
    ) -> Lease | PrivateItem | Miss:
        """Read, check and decode one object.

        Args:
            store: the tier to read from.
            key: object key; names the namespace that the object must belong to.
            identifier: whose tensor it must be.
            keep: gets the whole stored object once it has been accepted.
            stats: where the phases and the bytes are counted; None counts nothing.
            valid_after: objects made before this time are refused; seconds since the epoch.
            resident: refuse an item that the host tier can never hold, before the rest of it is
                read; without it, it is read into private memory.

        Returns:
            The leased item, or why there is none.

        Raises:
            RemoteError: the store failed.
        """
        with Body(self._pool) as body, contextlib.ExitStack() as stack:
            job = ObjectRead(store=store, key=key, body=body, stats=stats)
            begun: list[tuple[Header, Reservation | _PrivateSink] | Miss] = []

            async def begin(arriving: Arriving) -> None:
                header = await self._header(arriving)
                if header is None:
                    return
                self._accept(key, header, identifier, valid_after)
                sink = self._reserve(key, header, resident=resident)
                if isinstance(sink, Miss):
                    begun.append(sink)
                    return
                stack.enter_context(sink)
                begun.append((header, sink))
                whole = _whole(header, RANGE_BYTES)
                await self._decode_arriving(job, arriving, header, range(whole), sink)

            try:
                first = await job.take_in(0, RANGE_BYTES, begin)
                if first is None:
                    return Miss(MissReason.ABSENT)
                if not begun:
                    raise FrameTruncatedError("the object is empty")
                (outcome,) = begun
                if isinstance(outcome, Miss):
                    return outcome
                header, sink = outcome
                if header.object_bytes != first.info.size:
                    raise FrameTruncatedError(
                        f"the object has {first.info.size} bytes, declared {header.object_bytes}"
                    )
                await self._fill_and_keep(job, keep, first, header=header, sink=sink)
                return sink.commit(header.spec, header.meta, dirty=False)
            except FrameError as error:
                return Miss(MissReason(error.reason), job.etag)

    async def _header(self, arriving: Arriving) -> Header | None:
        """The object's header, as soon as it is there; None when nothing comes."""
        wanted = 1
        while await arriving.reaches(wanted):
            try:
                return read_header(
                    arriving.view[: arriving.have],
                    max_tensor_bytes=self._max_tensor_bytes,
                    keyring=self._keyring,
                )
            except FrameTruncatedError:
                if arriving.ended:
                    raise
                wanted = arriving.have + 1
        return None

    async def _decode_arriving(
        self,
        job: ObjectRead,
        arriving: Arriving,
        header: Header,
        chunks: range,
        sink: Reservation | _PrivateSink,
    ) -> None:
        """Decode a range of chunks that is read from its first byte on, whatever is there by now.

        Raises:
            FrameTruncatedError: the body ends before they do.
        """
        base = 0 if not chunks.start else header.chunk_range(chunks.start)[0]
        at, spent = chunks.start, 0.0
        while at < chunks.stop:
            if not await arriving.reaches(sum(header.chunk_range(at)) - base):
                raise FrameTruncatedError("the object shrank while it was read")
            stop = at + 1
            while stop < chunks.stop and sum(header.chunk_range(stop)) - base <= arriving.have:
                stop += 1
            spent += await job.decode(
                self._executor, _decode, header, range(at, stop), base, arriving.view, sink
            )
            at = stop
        job.decoded(spent)

    async def _fill_and_keep(
        self,
        job: ObjectRead,
        keep: Keeper | None,
        first: GetResult,
        *,
        header: Header,
        sink: Reservation | _PrivateSink,
    ) -> None:
        nbytes = header.object_bytes
        kept = keep if keep is not None and keep.admit(nbytes) else None
        try:
            stored = await self._fill(job, first, header=header, sink=sink, keep=kept is not None)
        except BaseException:
            if kept is not None:
                kept.withdraw(nbytes)
            raise
        if kept is not None:
            kept.take(job.key, stored, job.body.hand_over(), nbytes=nbytes)

    def _accept(self, key: str, header: Header, identifier: str, valid_after: float) -> None:
        expected = parse_key(key)
        header.check(
            identifier=identifier,
            namespace=expected.namespace,
            expect=Expectation(dtype=expected.dtype),
        )
        if header.created < valid_after:
            raise FrameStaleError("the object was made before the time that counts")

    def _reserve(
        self, key: str, header: Header, *, resident: bool
    ) -> Reservation | _PrivateSink | Miss:
        try:
            return self._tier.reserve(key, header.tensor_bytes) or Miss(MissReason.NO_ROOM)
        except CapacityError:
            if resident:
                return OVERSIZED
            return _PrivateSink(key, header.tensor_bytes)

    async def _fill(
        self,
        job: ObjectRead,
        first: GetResult,
        *,
        header: Header,
        sink: Reservation | _PrivateSink,
        keep: bool,
    ) -> list[memoryview]:
        """Read and decode the rest; returns the stored bytes when kept."""
        whole = _whole(header, len(first.body))
        groups = _groups(header, whole)
        stored = [first.body] + [memoryview(b"")] * len(groups)
        gate = asyncio.Semaphore(PARALLEL_RANGES)
        if groups:
            # The cut-off tail of the first range is read again with its chunk.
            stored[0] = job.body.part(first.body[: header.chunk_range(whole)[0]])

        async def rest(slot: int, group: range) -> None:
            start = header.chunk_range(group[0])[0]
            length = sum(header.chunk_range(group[-1])) - start

            async def use(arriving: Arriving) -> None:
                await self._decode_arriving(job, arriving, header, group, sink)

            async with gate:
                part = await job.take_in(start, length, use)
                if part is None:
                    raise RemoteChangedError(
                        "deleted while it was read", operation="get", key=job.key
                    )
                if keep:
                    stored[slot] = part.body
                else:
                    job.body.give_back(part.body)  # inside the gate, which bounds what is held

        await all_or_cancel([rest(i + 1, g) for i, g in enumerate(groups)])
        return stored


def _whole(header: Header, nbytes: int) -> int:
    """How many chunks lie in an object's first bytes."""
    whole = 0
    while whole < len(header.chunks) and sum(header.chunk_range(whole)) <= nbytes:
        whole += 1
    return whole


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
