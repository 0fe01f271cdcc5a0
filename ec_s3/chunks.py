"""The chunks of one object: in which ranges they come, and decoding them while those arrive.

Runs on the engine's event loop; decoding runs on the codec threads. The first range is asked for
before anybody knows what the object holds, so it may end within a chunk, which is then put together
from two ranges. What is decoded is to be used only when all of it has been found good.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ec_s3.cancellation import all_or_cancel, run_to_end
from ec_s3.errors import FrameError, FrameTruncatedError, RemoteChangedError
from ec_s3.wire import decode_chunk

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator
    from concurrent.futures import Executor

    from ec_s3.arriving import Arriving
    from ec_s3.ranges import ObjectRead
    from ec_s3.wire import Header

RANGE_BYTES = 8 << 20
"""Bytes per ranged read: one is enough for a small object."""

PARALLEL_RANGES = 4
"""Ranges of one object in flight at once; a connection carries about 90 MB/s."""

_LANES = 2  # threads for an object of one range, which would otherwise be decoded by one


class Sink(Protocol):
    """Memory for a tensor."""

    def segments(self, offset: int = 0, nbytes: int | None = None) -> list[memoryview]:
        """Writable memory of the tensor's bytes from `offset` on, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """One range of an object.

    Attributes:
        start: its first byte.
        stop: the first byte behind it.
        chunks: those that lie in it.
        cut: whether the chunk before them begins in the range before, and ends in this.
    """

    start: int
    stop: int
    chunks: range
    cut: bool = False


def spans(header: Header) -> Iterator[Span]:
    """The ranges of an object: `RANGE_BYTES`, and then about as many each, up to a chunk's end."""
    offsets, count = header.offsets, len(header.chunks)
    stop = min(RANGE_BYTES, header.object_bytes)
    done = max(0, bisect_right(offsets, stop) - 1)
    yield Span(0, stop, range(done))
    while done < count:
        start, first = stop, done
        cut = offsets[first] < start
        done = max(first + 1, bisect_right(offsets, start + RANGE_BYTES) - 1)
        stop = offsets[done]
        yield Span(start, stop, range(first + cut, done), cut)


class Unpacking:
    """Decodes an object whose first range is being read, and reads the others beside that.

    Args:
        read: the object.
        header: its header.
        sink: where the tensor goes.
        executor: codec threads.
        keep: whether the stored bytes are wanted when they are decoded.
    """

    def __init__(
        self, read: ObjectRead, header: Header, sink: Sink, *, executor: Executor, keep: bool
    ) -> None:
        self._read = read
        self._header = header
        self._sink = sink
        self._executor = executor
        self._keep = keep
        self._bad: FrameError | None = None

    async def run(self, first: Arriving) -> list[memoryview]:
        """Decode everything; returns the stored bytes in order, as far as they are kept.

        Raises:
            FrameError: the object is bad; whatever was being read was read to its end.
            RemoteError: the store failed, or the object has changed.
        """
        head, *rest = spans(self._header)
        stored = [first.view] + [memoryview(b"")] * len(rest)
        coming = iter(list(enumerate(rest, 1)))

        async def others() -> None:
            for slot, span in coming:
                if self._bad is None:
                    stored[slot] = await self._other(span, first)

        async def begin() -> None:
            await self._judged(self._unpack(head, first, lanes=1 if rest else _LANES))
            await others()

        beside = min(PARALLEL_RANGES - 1, len(rest))
        if beside:
            await all_or_cancel([begin(), *(others() for _ in range(beside))])
        else:
            await begin()
        if self._bad is not None:
            raise self._bad
        return stored

    async def _other(self, span: Span, first: Arriving) -> memoryview:
        """Read and decode a later range; its stored bytes, when they are kept."""
        length = span.stop - span.start
        async with self._read.reading(span.start, length, etag=first.etag) as arriving:
            await self._judged(self._unpack(span, arriving, before=first))
        if arriving.info is None:
            what = "get failed: deleted while it was read"
            raise RemoteChangedError(what, operation="get", key=self._read.key)
        if self._keep:
            return arriving.view
        self._read.body.give_back(arriving.view)  # before the next is read, so few are held
        return memoryview(b"")

    async def _judged(self, work: Awaitable[None]) -> None:
        """Remember what is bad about the object; reads that are under way come to their end."""
        try:
            await work
        except FrameError as error:
            self._bad = self._bad or error

    async def _unpack(
        self, span: Span, arriving: Arriving, *, before: Arriving | None = None, lanes: int = 1
    ) -> None:
        """Decode what a range brings, while it comes.

        Raises:
            FrameTruncatedError: the range ends before its chunks do.
        """
        offsets, at, stop, spent = self._header.offsets, span.chunks.start, span.chunks.stop, 0.0

        async def lane() -> None:
            nonlocal at, spent
            while at < stop:
                # Half of the rest at a time: few calls, and at last little is left.
                ahead = max(1, (stop - at) // 2)
                await _reach(arriving, offsets[at + ahead] - span.start)
                whole = min(stop, bisect_right(offsets, span.start + arriving.have) - 1)
                begin, at = at, at + -(-(whole - at) // lanes)  # some are left to the other lane
                if begin < at:
                    spent += await self._decode(range(begin, at), span.start, arriving.view)

        async def join(before: Arriving, cut: int) -> None:
            nonlocal spent
            begin, end = offsets[cut], offsets[cut + 1]
            await _reach(before, span.start)
            await _reach(arriving, end - span.start)
            joined = b"".join([before.view[begin:], arriving.view[: end - span.start]])
            spent += await self._decode(range(cut, cut + 1), begin, memoryview(joined))

        works = [lane() for _ in range(min(lanes, len(span.chunks)))]
        if before is not None and span.cut:
            works.append(join(before, span.chunks.start - 1))
        if len(works) == 1:
            await works[0]
        else:
            await all_or_cancel(works)
        self._read.decoded(spent)

    async def _decode(self, chunks: range, base: int, stored: memoryview) -> float:
        """Decode chunks out of the object's bytes from `base` on; the seconds that it took."""
        started = time.monotonic()
        await run_to_end(self._executor, decode, self._header, chunks, base, stored, self._sink)
        return time.monotonic() - started


def decode(header: Header, chunks: range, base: int, stored: memoryview, sink: Sink) -> None:
    """Decode some chunks, in a codec thread.

    Raises:
        FrameError: one of them is bad.
    """
    for i in chunks:
        offset, nbytes = header.chunk_range(i)
        at, raw = header.chunk_tensor_range(i)
        decode_chunk(header, i, stored[offset - base :][:nbytes], sink.segments(at, raw))


async def _reach(arriving: Arriving, nbytes: int) -> None:
    if not await arriving.reaches(nbytes):
        raise FrameTruncatedError("the object shrank while it was read")
