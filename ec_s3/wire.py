"""The stored object: a tensor to the bytes of one object and back, format v1.

An object is a zstd file: a skippable frame with the header, then one frame per chunk of tensor
bytes. docs/reference/wire-format.md is the specification. Pure functions of buffers on any thread;
no I/O, no torch. What is read is hostile until proven otherwise: must never allocate, or
decompress, on the word of bytes that have not been checked against the header and the caller's cap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ec_s3 import __version__
from ec_s3.compress import STORE, Buffer, Layout, compress_chunk, decompress_chunk, shrinks
from ec_s3.errors import FrameChecksumError, FrameTruncatedError
from ec_s3.header import (
    CHUNK_BYTES,
    FORMAT_VERSION,
    MAX_HEAD_BYTES,
    MAX_IDENTIFIER_BYTES,
    READABLE_VERSIONS,
    Chunk,
    Header,
    digest,
    extent,
    pack_header,
    read_header,
)
from ec_s3.types import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ec_s3.signing import Keyring
    from ec_s3.types import ItemMeta, TensorSpec

__all__ = [
    "CHUNK_BYTES",
    "FORMAT_VERSION",
    "MAX_HEAD_BYTES",
    "MAX_IDENTIFIER_BYTES",
    "READABLE_VERSIONS",
    "Buffer",
    "Chunk",
    "Frame",
    "Header",
    "decode",
    "decode_chunk",
    "encode",
    "read_header",
]

_SHUFFLED = frozenset({"bfloat16", "float16", "float32", "float64"})


@dataclass(frozen=True, slots=True)
class Frame:
    """An encoded object, ready to be stored.

    Attributes:
        parts: the body, in order; owned by the frame, never scratch memory.
        nbytes: size of the body.
        header: what a reader will see.
    """

    parts: tuple[Buffer, ...]
    nbytes: int
    header: Header


def encode(
    spec: TensorSpec,
    segments: Sequence[memoryview],
    *,
    identifier: str,
    namespace: str,
    meta: ItemMeta,
    created: float,
    level: int = 1,
    keyring: Keyring | None = None,
) -> Frame:
    """Encode a tensor.

    Args:
        spec: dtype and shape.
        segments: the tensor's bytes in order, in any number of contiguous runs of any size.
        identifier: what the item is called; at most `MAX_IDENTIFIER_BYTES` of UTF-8.
        namespace: `Namespace.id`.
        meta: what travels with the tensor.
        created: seconds since the epoch.
        level: zstd's level; higher ones are slower and leave more of byte planes.
        keyring: its first key signs the object; None leaves it unsigned.

    Raises:
        ValueError: the segments have not the tensor's size, or a field cannot be stored.
    """
    if sum(segment.nbytes for segment in segments) != spec.nbytes:
        raise ValueError(f"segments do not have the {spec.nbytes} bytes of {spec}")
    if len(identifier.encode("utf-8", "surrogatepass")) > MAX_IDENTIFIER_BYTES:
        raise ValueError(f"identifier is longer than {MAX_IDENTIFIER_BYTES} bytes")
    segments = [segment.cast("B") for segment in segments if segment.nbytes]
    layout = Layout.SHUFFLE if spec.dtype in _SHUFFLED else Layout.PLAIN
    itemsize = DTYPE_BYTES[spec.dtype]
    if (
        layout is Layout.SHUFFLE
        and spec.nbytes >= CHUNK_BYTES  # the price of less is not worth a look
        and not shrinks(segments, itemsize=itemsize)
    ):
        layout, level = Layout.PLAIN, STORE
    bodies, chunks = [], []
    for runs in _chunk_runs(segments):
        body = compress_chunk(runs, layout=layout, itemsize=itemsize, level=level)
        bodies.append(body)
        chunks.append([len(body), digest(body).hex()])  # now, while it is in the cache
    fields: dict[str, object] = {
        **_describe(spec, layout, chunks),
        "created": float(created),
        "encode_seconds": meta.encode_seconds,
        "input_digest": meta.input_digest or None,
        "identifier": identifier,
        **dict.fromkeys(("key_id", "mac")),
        "namespace": namespace,
        "placeholder": dict(meta.placeholder),
    }
    head = pack_header(fields, keyring=keyring)
    # Reading it back makes it impossible to store what no reader would accept.
    header = read_header(head, max_tensor_bytes=extent(spec), keyring=keyring)
    return Frame(parts=(head, *bodies), nbytes=header.object_bytes, header=header)


def decode_chunk(header: Header, index: int, stored: Buffer, outs: Sequence[memoryview]) -> None:
    """Check one chunk and decode it; thread-safe, chunks may come in any order.

    Args:
        header: the object's header.
        index: which chunk.
        stored: exactly the bytes of `header.chunk_range(index)`.
        outs: writable memory whose sizes sum to the chunk's size in the tensor. Untouched when
            the digest does not match; garbage after any other error.

    Raises:
        FrameError: the bytes are not the chunk that the header declares.
        ValueError: `outs` has another size.
    """
    chunk = header.chunks[index]
    raw = header.chunk_tensor_range(index)[1]
    if sum(len(out) for out in outs) != raw:
        raise ValueError(f"chunk {index} needs {raw} bytes of memory")
    if len(stored) != chunk.stored:
        raise FrameTruncatedError(f"chunk {index}: {len(stored)} bytes, declared {chunk.stored}")
    if digest(stored) != chunk.digest:
        raise FrameChecksumError(f"chunk {index} does not match its digest")
    itemsize = DTYPE_BYTES[header.spec.dtype]
    decompress_chunk(stored, outs, layout=header.layout, itemsize=itemsize)


def decode(
    obj: Buffer, *, max_tensor_bytes: int, keyring: Keyring | None = None
) -> tuple[Header, bytearray]:
    """Check and decode a whole object; the arguments are those of `read_header`.

    Raises:
        FrameError: anything about the object is not as it should be.
    """
    view = memoryview(obj)
    header = read_header(view, max_tensor_bytes=max_tensor_bytes, keyring=keyring)
    if len(view) != header.object_bytes:
        raise FrameTruncatedError(f"{len(view)} bytes, but the object has {header.object_bytes}")
    tensor = bytearray(header.tensor_bytes)
    out = memoryview(tensor)
    for index in range(len(header.chunks)):
        offset, stored = header.chunk_range(index)
        start, raw = header.chunk_tensor_range(index)
        decode_chunk(header, index, view[offset : offset + stored], (out[start : start + raw],))
    return header, tensor


def _describe(spec: TensorSpec, layout: Layout, chunks: Sequence[object]) -> dict[str, object]:
    """The header fields that follow from the tensor and its chunks."""
    return {
        "chunk_bytes": CHUNK_BYTES,
        "chunks": chunks,
        "dtype": spec.dtype,
        "layout": layout.value,
        "shape": list(spec.shape),
        "writer": f"ec_s3/{__version__}",
    }


def _chunk_runs(segments: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The segments, which are of bytes, cut into chunks; each chunk as its runs."""
    runs: list[memoryview] = []
    room = CHUNK_BYTES
    for segment in segments:
        rest = segment
        while rest.nbytes:
            runs.append(rest[:room])
            rest = rest[room:]
            room -= len(runs[-1])
            if not room:
                yield runs
                runs, room = [], CHUNK_BYTES
    if runs:
        yield runs
