"""The index of a namespace: which items its folder held at some time, in a few bytes an item.

An item is known here by its *tag*, the first 32 bits of its identifier's digest. The tags lie
sorted, as differences in byte planes under zstd: about 14 bits an item stored, and 32 in memory.
Pure functions and one immutable value, for any thread; no I/O. What is read is untrusted, and
refused unless it is an index of this namespace to the last byte, signed where signatures are asked
for.
"""

from __future__ import annotations

import json
import math
import struct
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from ec_s3.errors import IndexObjectError
from ec_s3.header import digest

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping

    from ec_s3.signing import Keyring

MAX_INDEX_BYTES = 32 << 20
"""Largest index object that is read."""

MAX_ITEMS = 1 << 24
"""Most items of an index: 64 MiB of tags, of which an absent item has one by chance in 1 of 256."""

AHEAD_SECONDS = 300.0
"""How far the clock of whoever made an index may be ahead of the reader's."""

_MAGIC = b"EC_S3IDX"
_PREFIX = struct.Struct("<8sI")
_MAX_HEADER_BYTES = 4096
_VERSION = 1
_LEVEL = 3
_CONTEXT = b"ec_s3 index, format 1\n"
_FIELDS = {"version", "namespace", "made", "items", "digest", "key_id", "mac"}


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """What a namespace's folder held.

    Attributes:
        namespace: last part of `Namespace.prefix`.
        made: when its making began, in seconds since the epoch; later items may be missing.
    """

    namespace: str
    made: float
    _tags: memoryview = field(repr=False)

    def __len__(self) -> int:
        return len(self._tags)

    def __contains__(self, tag: int) -> bool:
        """Whether an item of this tag was there; by chance also where it was another item's."""
        at = bisect_left(self._tags, tag)
        return at < len(self._tags) and self._tags[at] == tag


def tag_of(name: str) -> int:
    """The tag of an item: of its digest, in hex."""
    return int(name[:8], 16)


def pack_index(
    tags: array[int], *, namespace: str, made: float, keyring: Keyring | None = None
) -> list[bytes]:
    """The index object of these items, in parts.

    Args:
        tags: of type `I`, in any order, repeated or not.
        namespace: last part of `Namespace.prefix`.
        made: when the listing began, in seconds since the epoch.
        keyring: its first key signs, None for no signature.

    Raises:
        IndexObjectError: more items than an index can hold.
    """
    values = np.unique(np.frombuffer(tags, dtype=np.uint32))
    if len(values) > MAX_ITEMS:
        raise IndexObjectError(f"{len(values)} items, an index holds {MAX_ITEMS}")
    steps = np.diff(values, prepend=np.uint32(0)).astype("<u4")
    planes = steps.view(np.uint8).reshape(-1, 4).T.tobytes()
    body = zstandard.ZstdCompressor(level=_LEVEL).compress(planes)
    fields: dict[str, object] = {
        "version": _VERSION,
        "namespace": namespace,
        "made": made,
        "items": len(values),
        "digest": digest(body).hex(),
        "key_id": "" if keyring is None else keyring.signer,
        "mac": "",
    }
    if keyring is not None:
        fields["mac"] = keyring.sign(_signed(fields))
    header = json.dumps(fields, allow_nan=False).encode()
    return [_PREFIX.pack(_MAGIC, len(header)), header, body]


def read_index(
    body: bytes | bytearray | memoryview, *, namespace: str, now: float, keyring: Keyring | None
) -> Index:
    """Read and check an index object; takes milliseconds a million items.

    Args:
        body: the whole object.
        namespace: whose index it must be.
        now: seconds since the epoch.
        keyring: the keys that must have signed it; None takes any.

    Raises:
        IndexObjectError: anything else.
    """
    view = memoryview(body)
    if len(view) < _PREFIX.size:
        raise IndexObjectError("too short for an index")
    magic, length = _PREFIX.unpack(view[: _PREFIX.size])
    if magic != _MAGIC or length > _MAX_HEADER_BYTES:
        raise IndexObjectError("the bytes do not start like an index of this version")
    fields = _load(bytes(view[_PREFIX.size : _PREFIX.size + length]))
    stored = view[_PREFIX.size + length :]
    if keyring is not None and not keyring.accepts(
        _signed(fields), key_id=str(fields["key_id"]), mac=str(fields["mac"])
    ):
        raise IndexObjectError("not signed by an accepted key")
    made, items = fields["made"], fields["items"]
    if fields["version"] != _VERSION or fields["namespace"] != namespace:
        raise IndexObjectError("of another version or namespace")
    if not isinstance(made, int | float) or not 0 <= made <= now + AHEAD_SECONDS:
        raise IndexObjectError("made in the future, or at no time")
    if type(items) is not int or not 0 <= items <= MAX_ITEMS:
        raise IndexObjectError("no number of items that an index can hold")
    if fields["digest"] != digest(stored).hex():
        raise IndexObjectError("the tags do not match their digest")
    return Index(namespace, float(made), _unpack(stored, items))


def _load(text: bytes) -> dict[str, object]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise IndexObjectError("the header is no JSON") from None
    if type(fields) is not dict or fields.keys() != _FIELDS:
        raise IndexObjectError("the header does not have exactly the fields of its version")
    made = fields["made"]
    if isinstance(made, bool) or (isinstance(made, float) and not math.isfinite(made)):
        raise IndexObjectError("made at no time")
    return fields


def _signed(fields: Mapping[str, object]) -> bytes:
    """What a signature covers; never begins as an object's header does."""
    return _CONTEXT + json.dumps({**fields, "mac": ""}, sort_keys=True).encode()


def _unpack(stored: memoryview, items: int) -> memoryview:
    """The tags, ascending."""
    try:
        size = zstandard.get_frame_parameters(stored).content_size
        if size != 4 * items:  # before anything of that size is allocated
            raise IndexObjectError(f"{size} bytes of tags for {items} items")
        planes = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size or 1)
    except zstandard.ZstdError as error:
        raise IndexObjectError(f"the tags cannot be decompressed: {error}") from None
    rows = np.frombuffer(planes, dtype=np.uint8).reshape(4, items)
    steps = np.ascontiguousarray(rows.T).view("<u4").reshape(-1)
    tags = np.cumsum(steps, dtype=np.uint32)
    if items > 1 and not bool((tags[1:] > tags[:-1]).all()):
        raise IndexObjectError("the tags are not in order")
    return memoryview(tags.data)
