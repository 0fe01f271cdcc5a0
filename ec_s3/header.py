"""The header of a stored object: its layout, its schema, and every check on what it declares.

A header is the zstd file's first frame, which zstd skips: prefix, JSON, digest. Pure functions of
buffers on any thread; no I/O. The bytes are hostile until proven otherwise: must never return a
header whose numbers disagree, or allocate more than a small multiple of the header itself.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NoReturn

from blake3 import blake3

from ec_s3.compress import Buffer, Layout, compress_bound
from ec_s3.errors import (
    FrameChecksumError,
    FrameHeaderError,
    FrameMagicError,
    FrameMismatchError,
    FrameTooLargeError,
    FrameTruncatedError,
    FrameUnsignedError,
    FrameVersionError,
)
from ec_s3.types import DTYPE_BYTES, MAX_RANK, ItemMeta, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ec_s3.signing import Keyring
    from ec_s3.types import Expectation

FORMAT_VERSION = 1
"""Version that this release writes."""

READABLE_VERSIONS = (1,)
"""Versions that this release reads."""

CHUNK_BYTES = 1 << 20
"""Tensor bytes per chunk; the last chunk may be shorter."""

MAX_HEADER_BYTES = 1 << 20
"""Largest header JSON."""

MAX_IDENTIFIER_BYTES = 64 << 10
"""Longest identifier, in UTF-8."""

DIGEST_BYTES = 16
"""Size of the BLAKE3 digests of header and chunks."""

_SKIPPABLE_MAGIC = 0x184D2A5C
_MAGIC = b"EC_S3\r\n\x1a"
_PREFIX = struct.Struct("<II8sII")
_PREFIX_BYTES = _PREFIX.size

MAX_HEAD_BYTES = _PREFIX_BYTES + MAX_HEADER_BYTES + DIGEST_BYTES
"""The first so many bytes of an object always hold its whole header."""

_LEAD = _PREFIX.pack(_SKIPPABLE_MAGIC, 0, _MAGIC, 0, 0)
_MAX_TEXT_CHARS = 1024
_MAX_SECONDS = 1e12
_FIELDS = frozenset(
    (
        *("chunk_bytes", "chunks", "created", "dtype", "encode_seconds", "identifier"),
        *("input_digest", "key_id", "layout", "mac", "namespace", "placeholder", "shape", "writer"),
    )
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk as stored.

    Attributes:
        stored: bytes of its frame.
        digest: BLAKE3 of these bytes, 128 bits.
    """

    stored: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A checked header: its numbers agree with each other and with the reader's cap.

    Attributes:
        identifier: what the item is called, verbatim.
        namespace: `Namespace.id` of the writer.
        spec: dtype and shape.
        meta: what travels with the tensor.
        layout: arrangement of a chunk's bytes.
        chunks: the chunks in order.
        created: seconds since the epoch, by the writer's clock.
        writer: name and version of the writing program.
        key_id: the key that it says it was signed with, empty for none. Proves nothing unless
            the header was read with a keyring.
        header_bytes: offset of the first chunk in the object.
        object_bytes: size of the whole object; the reader compares it with what is stored.
        offsets: where each chunk starts in the object, and where the last one ends.
    """

    identifier: str
    namespace: str
    spec: TensorSpec
    meta: ItemMeta
    layout: Layout
    chunks: tuple[Chunk, ...]
    created: float
    writer: str
    key_id: str
    header_bytes: int
    object_bytes: int
    offsets: tuple[int, ...]

    @property
    def tensor_bytes(self) -> int:
        """Size of the tensor."""
        return self.spec.nbytes

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Offset in the object and stored bytes of a chunk."""
        return self.offsets[index], self.chunks[index].stored

    def chunk_tensor_range(self, index: int) -> tuple[int, int]:
        """Offset in the tensor and tensor bytes of a chunk."""
        start = index * CHUNK_BYTES
        return start, min(CHUNK_BYTES, self.tensor_bytes - start)

    def check(self, *, identifier: str, namespace: str, expect: Expectation) -> None:
        """Compare the object with the one that was asked for.

        Raises:
            FrameMismatchError: another identifier or namespace, or a spec that `expect` refuses.
        """
        if self.identifier != identifier:
            raise FrameMismatchError("the object holds another identifier")
        if self.namespace != namespace:
            raise FrameMismatchError(f"the object is of namespace {self.namespace!r}")
        if not expect.admits(self.spec):
            raise FrameMismatchError(f"the object holds {self.spec}, wanted {expect}")


def digest(data: Buffer) -> bytes:
    """BLAKE3 of the bytes, 128 bits."""
    return blake3(data).digest(DIGEST_BYTES)


def extent(spec: TensorSpec) -> int:
    """The tensor's size with empty dimensions counted as one: bounds the shape of empty tensors."""
    return math.prod(max(size, 1) for size in spec.shape) * DTYPE_BYTES[spec.dtype]


def read_header(head: Buffer, *, max_tensor_bytes: int, keyring: Keyring | None = None) -> Header:
    """Parse and check the header at the start of an object.

    Args:
        head: the object's first bytes, header included; more of them do no harm.
        max_tensor_bytes: largest tensor that the reader takes.
        keyring: the keys that must have signed it; None takes any header, signed or not.

    Raises:
        FrameTruncatedError: `head` ends before the header does.
        FrameMagicError: not one of our objects.
        FrameVersionError: a version that this release does not read.
        FrameTooLargeError: the tensor is larger than the cap.
        FrameChecksumError: the header is damaged.
        FrameUnsignedError: no key of the keyring has signed the header as it is.
        FrameHeaderError: the header breaks its schema or contradicts itself.
    """
    view = memoryview(head)
    length = _read_prefix(view)
    end = _PREFIX_BYTES + length
    header_bytes = end + DIGEST_BYTES
    if len(view) < header_bytes:
        raise FrameTruncatedError(f"{len(view)} bytes, but the header has {header_bytes}")
    if digest(view[:end]) != bytes(view[end:header_bytes]):
        raise FrameChecksumError("the header does not match its digest")
    fields = _load_json(bytes(view[_PREFIX_BYTES:end]))
    if fields.keys() != _FIELDS:
        raise FrameHeaderError("the header does not have exactly the fields of its version")
    if keyring is not None:
        _check_signature(fields, keyring)
    return _build_header(fields, header_bytes=header_bytes, max_tensor_bytes=max_tensor_bytes)


def pack_header(fields: Mapping[str, object], *, keyring: Keyring | None = None) -> bytes:
    """Lay out a header of the current version; `fields` is its JSON, not checked here.

    With a keyring its first key signs the header.

    Raises:
        ValueError: `fields` is no JSON.
    """
    body = _canonical(fields)
    if keyring is not None:
        # What is signed is what a reader gets: JSON makes texts of numbers that are names.
        signed = {**_load_json(body), "key_id": keyring.signer, "mac": None}
        body = _canonical({**signed, "mac": keyring.sign(_canonical(signed))})
    skipped = _PREFIX_BYTES - 8 + len(body) + DIGEST_BYTES
    head = _PREFIX.pack(_SKIPPABLE_MAGIC, skipped, _MAGIC, FORMAT_VERSION, len(body)) + body
    return head + digest(head)


def _canonical(fields: Mapping[str, object]) -> bytes:
    """The one JSON of these fields."""
    try:
        # No ASCII escapes: an escaped pair of lone surrogates would read as one character.
        text = json.dumps(
            fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except (TypeError, RecursionError) as error:
        raise ValueError(f"the item's metadata is no JSON: {error}") from error
    return text.encode("utf-8", "surrogatepass")


def _check_signature(fields: Mapping[str, object], keyring: Keyring) -> None:
    mac, key_id = fields["mac"], fields["key_id"]
    if type(mac) is not str or type(key_id) is not str:
        raise FrameUnsignedError("the object is not signed")
    try:
        signed = _canonical({**fields, "mac": None})
    except ValueError as error:  # a number out of range, which JSON can hold
        raise FrameHeaderError(f"the header is no JSON: {error}") from error
    if not keyring.accepts(signed, key_id=key_id, mac=mac):
        raise FrameUnsignedError(f"the object is not signed by an accepted key: {key_id[:64]!r}")


def _read_prefix(view: memoryview) -> int:
    """Length of the header JSON."""
    lead = bytes(view[:_PREFIX_BYTES])
    if lead[:4] != _LEAD[: len(lead[:4])] or lead[8:16] != _LEAD[8 : 8 + len(lead[8:16])]:
        raise FrameMagicError("the bytes do not start like an object of ec_s3")
    if len(lead) < _PREFIX_BYTES:
        raise FrameTruncatedError(f"{len(lead)} bytes are too few for any object")
    _, skipped, _, version, length = _PREFIX.unpack(lead)
    if version not in READABLE_VERSIONS:
        what = f"format version {version}; this release reads {READABLE_VERSIONS}"
        raise FrameVersionError(what, version=version)
    if length > MAX_HEADER_BYTES or skipped != _PREFIX_BYTES - 8 + length + DIGEST_BYTES:
        raise FrameHeaderError(f"a header of {length} bytes in a frame of {skipped}")
    return int(length)


def _load_json(body: bytes) -> dict[str, object]:
    try:
        fields = json.loads(
            body.decode("utf-8", "surrogatepass"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise FrameHeaderError(f"the header is no JSON: {error}") from error
    if type(fields) is not dict:
        raise FrameHeaderError("the header is no object")
    return fields


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError("a number is out of range")
    return value


def _build_header(
    fields: Mapping[str, object], *, header_bytes: int, max_tensor_bytes: int
) -> Header:
    """Check every field and the fields against each other."""
    spec = _read_spec(fields, max_tensor_bytes)
    chunks = _read_chunks(fields, spec.nbytes)
    for name in ("mac", "key_id"):
        if fields[name] is not None:
            _text(fields, name, limit=_MAX_TEXT_CHARS)
    placeholder = fields["placeholder"]
    if type(placeholder) is not dict:
        raise FrameHeaderError("header field 'placeholder' is no object")
    seconds = fields["encode_seconds"]
    meta = ItemMeta(
        encode_seconds=None if seconds is None else _number(fields, "encode_seconds"),
        placeholder=placeholder,
        input_digest=_read_hex(fields, "input_digest", digits=64),
    )
    if not meta.is_bounded:
        raise FrameHeaderError("header field 'placeholder' is nested too deep, or holds too much")
    offsets = tuple(accumulate((chunk.stored for chunk in chunks), initial=header_bytes))
    return Header(
        identifier=_text(fields, "identifier", limit=MAX_IDENTIFIER_BYTES),
        namespace=_text(fields, "namespace", limit=_MAX_TEXT_CHARS),
        spec=spec,
        meta=meta,
        layout=_read_layout(fields, spec),
        chunks=chunks,
        created=_number(fields, "created"),
        writer=_text(fields, "writer", limit=_MAX_TEXT_CHARS),
        key_id=str(fields["key_id"] or ""),
        header_bytes=header_bytes,
        object_bytes=offsets[-1],
        offsets=offsets,
    )


def _read_spec(fields: Mapping[str, object], max_tensor_bytes: int) -> TensorSpec:
    shape = fields["shape"]
    if type(shape) is not list or len(shape) > MAX_RANK:  # before it gets into a message
        raise FrameHeaderError(f"header field 'shape' is no list of at most {MAX_RANK} integers")
    if any(type(size) is not int for size in shape):
        raise FrameHeaderError("header field 'shape' holds more than integers")
    try:
        spec = TensorSpec(_text(fields, "dtype", limit=_MAX_TEXT_CHARS), tuple(shape))
    except ValueError as error:
        raise FrameHeaderError(str(error)[:_MAX_TEXT_CHARS]) from error
    if extent(spec) > max_tensor_bytes:
        what = str(spec)[:_MAX_TEXT_CHARS]  # each of its numbers may have thousands of digits
        raise FrameTooLargeError(f"{what} exceeds the cap of {max_tensor_bytes} bytes")
    return spec


def _read_layout(fields: Mapping[str, object], spec: TensorSpec) -> Layout:
    name = fields["layout"]
    if name == Layout.PLAIN.value:
        return Layout.PLAIN
    if name != Layout.SHUFFLE.value or DTYPE_BYTES[spec.dtype] == 1:
        raise FrameHeaderError("header field 'layout' is unknown, or not one of this dtype")
    return Layout.SHUFFLE


def _read_chunks(fields: Mapping[str, object], tensor_bytes: int) -> tuple[Chunk, ...]:
    """The chunk table: as many as the tensor has, each of a size that its content can have."""
    table = fields["chunks"]
    if type(fields["chunk_bytes"]) is not int or fields["chunk_bytes"] != CHUNK_BYTES:
        raise FrameHeaderError(f"header field 'chunk_bytes' is not {CHUNK_BYTES}")
    if type(table) is not list or len(table) != -(-tensor_bytes // CHUNK_BYTES):
        raise FrameHeaderError("the chunk table does not fit the tensor's size")
    chunks = []
    limit = compress_bound(CHUNK_BYTES)
    last = len(table) - 1
    for index, row in enumerate(table):
        if type(row) is not list or len(row) != 2:
            raise FrameHeaderError(f"chunk {index} is no pair")
        stored, text = row
        if index == last:
            limit = compress_bound(tensor_bytes - last * CHUNK_BYTES)
        if type(stored) is not int or not 0 < stored <= limit:
            raise FrameHeaderError(f"chunk {index} has an impossible stored size")
        if type(text) is not str or len(text) != 2 * DIGEST_BYTES:
            raise FrameHeaderError(f"chunk {index} has no digest")
        try:
            chunks.append(Chunk(stored, bytes.fromhex(text)))
        except ValueError as error:
            raise FrameHeaderError(f"chunk {index} has no digest") from error
    return tuple(chunks)


def _text(fields: Mapping[str, object], name: str, *, limit: int) -> str:
    value = fields[name]
    if type(value) is not str or len(value) > limit:
        raise FrameHeaderError(f"header field {name!r} is no text of at most {limit} characters")
    return value


def _read_hex(fields: Mapping[str, object], name: str, *, digits: int) -> str:
    """So many lower-case hex digits; empty for null."""
    value = fields[name]
    if value is None:
        return ""
    if type(value) is not str or re.fullmatch(rf"[0-9a-f]{{{digits}}}", value) is None:
        raise FrameHeaderError(f"header field {name!r} is neither null nor {digits} hex digits")
    return value


def _number(fields: Mapping[str, object], name: str) -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FrameHeaderError(f"header field {name!r} is no number")
    if not 0 <= value <= _MAX_SECONDS:
        raise FrameHeaderError(f"header field {name!r} is no number from 0 to {_MAX_SECONDS:g}")
    return float(value)
