"""Frozen value objects shared by every layer; pure, torch-free."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "bfloat16": 2,
        "float16": 2,
        "float32": 4,
        "float64": 8,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "uint8": 1,
        "bool": 1,
    }
)
"""The closed table of element types, by torch's names, with their size in bytes."""

MAX_RANK = 8
"""Most dimensions that a tensor may have."""

MAX_PLACEHOLDER_DEPTH = 32
"""How deep the metadata of an item may be nested."""

MAX_PLACEHOLDER_VALUES = 1 << 15
"""Most values, lists and maps that it may hold: engines hand it on to schedulers, as JSON."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Element type and shape of a tensor, for encoder outputs `[num_embeds, width]`.

    Raises:
        ValueError: unknown dtype, more than `MAX_RANK` dimensions, or a negative size.
    """

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        if len(self.shape) > MAX_RANK or min(self.shape, default=0) < 0:
            raise ValueError(
                f"shape {self.shape} has more than {MAX_RANK} dimensions or a negative one"
            )

    @property
    def nbytes(self) -> int:
        """Size of the tensor's elements in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a reader demands of an item; None means anything.

    Attributes:
        dtype: required element type.
        rows: required size of the first dimension (`num_embeds`).
    """

    dtype: str | None = None
    rows: int | None = None

    def admits(self, spec: TensorSpec) -> bool:
        """Whether a tensor of this spec is what the reader asked for."""
        if self.dtype is not None and spec.dtype != self.dtype:
            return False
        return self.rows is None or (len(spec.shape) > 0 and spec.shape[0] == self.rows)


@dataclass(frozen=True, slots=True)
class ItemMeta:
    """What travels with a tensor beside its bytes.

    Attributes:
        encode_seconds: what the encoder needed for it, None when unknown.
        placeholder: JSON-able metadata that a consumer needs to lay out the item (grid, counts).
        input_digest: what the encoder was given for it, as 64 hex digits; empty when the tensor
            is bound to no input.

    Raises:
        ValueError: `input_digest` is neither empty nor 64 lower-case hex digits.
    """

    encode_seconds: float | None = None
    placeholder: Mapping[str, object] = field(default_factory=dict)
    input_digest: str = ""

    def __post_init__(self) -> None:
        if self.input_digest and _DIGEST.fullmatch(self.input_digest) is None:
            raise ValueError("an input digest is empty or 64 lower-case hex digits")

    @property
    def is_bounded(self) -> bool:
        """Whether the placeholder is shallow and small enough to be stored."""
        level: list[object] = list(self.placeholder.values())
        held = len(level)
        for _ in range(MAX_PLACEHOLDER_DEPTH):
            maps = [inner for value in level if type(value) is dict for inner in value.values()]
            level = maps + [inner for value in level if type(value) is list for inner in value]
            held += len(level)
            if not level or held > MAX_PLACEHOLDER_VALUES:
                break
        return not level and held <= MAX_PLACEHOLDER_VALUES


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored object as the store describes it.

    Attributes:
        key: object key below the store's own prefix.
        size: stored bytes of the whole object.
        etag: opaque version of the object, compared for equality only; empty when unknown.
        modified: seconds since the epoch, 0.0 when unknown.
    """

    key: str
    size: int
    etag: str = ""
    modified: float = 0.0


class PutOutcome(StrEnum):
    """What became of a put to a store."""

    WRITTEN = "written"
    EXISTS = "exists"
    CHANGED = "changed"
    """An If-Match put found another object."""


class Tier(StrEnum):
    """Where an item was found."""

    LOCAL = "local"
    DISK = "disk"
    REMOTE = "remote"


class MissReason(StrEnum):
    """Why no tensor came back. The names are label values of the metrics."""

    ABSENT = "absent"
    CORRUPT = "corrupt"
    MISMATCH = "mismatch"
    UNSIGNED = "unsigned"
    VERSION = "version"
    TOO_LARGE = "too_large"
    TIMEOUT = "timeout"
    THROTTLED = "throttled"
    DENIED = "denied"
    UNREACHABLE = "unreachable"
    CHANGED = "changed"
    FAILED = "failed"
    STALE = "stale"
    """Made before the time from which objects count, see `control`."""
    DELETED = "deleted"
    """An operator has deleted it, and it may not come back yet."""
    NO_ROOM = "no_room"
    SUSPENDED = "suspended"
    """The weights are being changed, or were while the item was on its way."""
    DISABLED = "disabled"
    """An operator has switched the cache off."""
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of consecutive bytes in the host slab."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What a flush or close left behind.

    Attributes:
        uploaded: uploads that ended well while waiting.
        pending: uploads still waiting or running at the deadline.
        dropped: uploads given up since the start (queue full, failed, evicted, closed).
    """

    uploaded: int = 0
    pending: int = 0
    dropped: int = 0

    @property
    def complete(self) -> bool:
        """Whether nothing was left behind."""
        return self.pending == 0


@dataclass(frozen=True, slots=True)
class DeleteReport:
    """Result of deleting several keys: absent keys count as deleted."""

    deleted: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
