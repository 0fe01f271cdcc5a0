"""One chunk of tensor bytes to one zstd frame and back, with the byte-plane layout.

Owns the zstd contexts and the scratch memory. Runs on any thread, blocking, and releases the GIL
in its long calls. Knows neither headers nor digests; must never allocate on the word of a frame:
the size of the output is always the caller's.

Locking: none. Contexts and scratch buffers are not thread-safe, so every thread has its own
(`threading.local`, two chunks of memory per thread); nothing of them is ever returned.
"""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from ec_s3.errors import FrameChecksumError, FrameHeaderError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

Buffer = bytes | bytearray | memoryview
"""Anything whose bytes can be read."""

MAX_WINDOW_BYTES = 8 << 20
"""Largest window that a frame may ask for; bounds what zstd allocates for hostile input."""

STORE = -100
"""A level at which zstd all but copies, for bytes that do not shrink."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_WORDS = {2: "<u2", 4: "<u4", 8: "<u8"}

_MERGE_BYTES = (
    256 << 10
)  # stays in a core's cache; of less, NumPy's calls cost more than that saves
_SAMPLES = 16
_SAMPLE_BYTES = 4 << 10
_WORTH_WHILE = 0.97


class Layout(StrEnum):
    """How a chunk's bytes are arranged before compression."""

    SHUFFLE = "shuffle"
    """Byte planes: the first byte of every element, then the second, and so on."""

    PLAIN = "plain"
    """As in memory."""


class _ThreadState(threading.local):
    """Contexts and scratch memory of one thread."""

    def __init__(self) -> None:
        self.compressors: dict[tuple[int, Layout], zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._scratch: dict[str, Bytes] = {}

    def scratch(self, name: str, nbytes: int) -> Bytes:
        """The named buffer's first `nbytes`, contents undefined; valid until the next call."""
        buffer = self._scratch.get(name)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._scratch[name] = np.empty(nbytes, dtype=np.uint8)
        return buffer[:nbytes]


_state = _ThreadState()


def compress_bound(nbytes: int) -> int:
    """Most bytes that a valid frame of `nbytes` of content can have."""
    margin = (((128 << 10) - nbytes) >> 11) if nbytes < 128 << 10 else 0
    return nbytes + (nbytes >> 8) + margin


def shrinks(segments: Sequence[memoryview], *, itemsize: int) -> bool:
    """Whether byte planes are worth their price, judged by samples from all over the tensor.

    Planes of bytes that are all chance cost their splitting and merging, and save nothing.

    Args:
        segments: the tensor's bytes in order, at least a few pages of them.
        itemsize: 2, 4 or 8.
    """
    step = max(_SAMPLE_BYTES, sum(map(len, segments)) // _SAMPLES // itemsize * itemsize)
    samples: list[memoryview] = []
    until = 0  # the next sample, from the start of this segment
    for segment in segments:
        while until < len(segment):
            found = segment[until : until + _SAMPLE_BYTES]
            samples.append(found[: len(found) // itemsize * itemsize])
            until += step
        until -= len(segment)
    taken = sum(map(len, samples))
    stored = compress_chunk(samples, layout=Layout.SHUFFLE, itemsize=itemsize, level=1)
    return len(stored) < _WORTH_WHILE * taken


def compress_chunk(
    segments: Sequence[memoryview], *, layout: Layout, itemsize: int, level: int
) -> bytes:
    """One zstd frame with content size and checksum; what does not shrink is stored raw in it.

    Args:
        segments: the chunk's bytes in order, in one or more runs; together whole elements.
        layout: arrangement to store.
        itemsize: bytes per element; `SHUFFLE` needs 2, 4 or 8.
        level: zstd's level.
    """
    compressor = _compressor(level, layout)
    if layout is Layout.SHUFFLE:
        planes = _state.scratch("planes", sum(map(len, segments)))
        _split(_aligned(segments, itemsize), planes, itemsize)
        return compressor.compress(planes.data)
    if len(segments) == 1:
        return compressor.compress(segments[0])
    return compressor.compress(_joined(segments).data)


def decompress_chunk(
    stored: Buffer, outs: Sequence[memoryview], *, layout: Layout, itemsize: int
) -> None:
    """Decode one frame into `outs`, whose sizes sum to the chunk's size.

    `outs` holds garbage when an error is raised.

    Raises:
        FrameHeaderError: the frame announces no size, or another one than `outs` has.
        FrameChecksumError: the frame is damaged or holds another number of bytes.
    """
    nbytes = sum(map(len, outs))
    _check_frame(stored, nbytes)
    if layout is Layout.PLAIN:
        _inflate(stored, outs)
        return
    planes = _state.scratch("planes", nbytes)
    _inflate(stored, (planes.data,))
    if all(len(out) % itemsize == 0 for out in outs):
        _merge(planes, outs, itemsize)
        return
    joined = _state.scratch("joined", nbytes)
    _merge(planes, (joined.data,), itemsize)
    start = 0
    for out in outs:
        out[:] = joined[start : start + len(out)].data
        start += len(out)


def _compressor(level: int, layout: Layout) -> zstandard.ZstdCompressor:
    compressor = _state.compressors.get((level, layout))
    if compressor is None:
        # On byte planes almost every match is chance and costs more than it saves. The smallest
        # hash table and long matches leave as little, at twice the speed in and 1.5 times out.
        tuning: dict[str, int] = {}
        if layout is Layout.SHUFFLE and level == 1:
            tuning = {"window_log": 20, "hash_log": 6, "min_match": 7}
        elif level == STORE:
            tuning = {"window_log": 20, "hash_log": 6}
        parameters = zstandard.ZstdCompressionParameters.from_level(
            level, write_checksum=1, write_content_size=1, **tuning
        )
        compressor = zstandard.ZstdCompressor(compression_params=parameters)
        _state.compressors[level, layout] = compressor
    return compressor


def _check_frame(stored: Buffer, nbytes: int) -> None:
    """Refuse a frame by its first bytes, before anything is decompressed or allocated."""
    try:
        parameters = zstandard.get_frame_parameters(stored)
    except zstandard.ZstdError as error:
        raise FrameHeaderError("a chunk is no zstd frame") from error
    # A skippable frame has parameters too, hence the magic.
    if bytes(stored[:4]) != _ZSTD_MAGIC or parameters.content_size != nbytes:
        raise FrameHeaderError(f"a chunk's frame does not announce its {nbytes} bytes")
    if not parameters.has_checksum or parameters.dict_id:
        raise FrameHeaderError("a chunk's frame lacks its checksum or needs a dictionary")


def _inflate(stored: Buffer, outs: Sequence[memoryview]) -> None:
    # Reading into recycled memory is twice as fast as decompress(), which returns fresh pages.
    # Across frames: bytes after the frame's end are then an error instead of being ignored.
    try:
        reader = _state.decompressor.stream_reader(stored, read_across_frames=True)
        for out in outs:
            done = 0
            while done < len(out):
                count = reader.readinto(out[done:])
                if not count:
                    raise FrameChecksumError("a chunk's frame ends early")
                done += count
        if reader.read(1):  # also makes zstd compare its checksum
            raise FrameChecksumError("a chunk's frame holds too many bytes")
    except zstandard.ZstdError as error:
        raise FrameChecksumError(f"a chunk's frame is damaged: {error}") from error


def _split(segments: Sequence[memoryview], planes: Bytes, itemsize: int) -> None:
    count = len(planes) // itemsize
    start = 0
    for segment in segments:
        words = _words(segment, itemsize)
        stop = start + len(words)
        for index in range(itemsize):
            plane = planes[index * count + start : index * count + stop]
            # Shift and truncate in one pass: four times as fast as a strided copy.
            np.right_shift(words, 8 * index, out=plane, casting="unsafe")
        start = stop


def _merge(planes: Bytes, outs: Sequence[memoryview], itemsize: int) -> None:
    count = len(planes) // itemsize
    block = _MERGE_BYTES // itemsize
    start = 0
    for out in outs:
        words = _words(out, itemsize)
        for at in range(0, len(words), block):
            piece = words[at : at + block]
            for index in reversed(range(itemsize)):
                first = index * count + start + at
                plane = planes[first : first + len(piece)]
                if index == itemsize - 1:
                    np.left_shift(plane, 8, out=piece, dtype=piece.dtype)
                    continue
                np.bitwise_or(piece, plane, out=piece)
                if index:
                    np.left_shift(piece, 8, out=piece)
        start += len(words)


def _words(segment: memoryview, itemsize: int) -> npt.NDArray[Any]:
    return np.frombuffer(segment, dtype=_WORDS[itemsize])


def _aligned(segments: Sequence[memoryview], itemsize: int) -> Sequence[memoryview]:
    """The same bytes in runs of whole elements: copied only where an element is cut in two."""
    if all(len(segment) % itemsize == 0 for segment in segments):
        return segments
    return (_joined(segments).data,)


def _joined(segments: Sequence[memoryview]) -> Bytes:
    joined = _state.scratch("joined", sum(map(len, segments)))
    start = 0
    for segment in segments:
        joined[start : start + len(segment)] = np.frombuffer(segment, dtype=np.uint8)
        start += len(segment)
    return joined
