"""The `Store` protocol: what the engine needs of an object store.

Implemented by `s3`, `directory` and `testing.memory`; all three pass `testing.conformance`.
Every method runs on one event loop and may be cancelled at any await. Keys are relative to the
store's own prefix, ASCII, and never the folder of another key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from ec_s3.types import DeleteReport, ObjectInfo, PutOutcome

Buffer = bytes | bytearray | memoryview
"""Anything that a store accepts as part of a body."""


@dataclass(frozen=True, slots=True)
class GetResult:
    """A whole object or a range of it.

    Attributes:
        body: the bytes received, in the buffer that the caller's `into` supplied.
        start: offset of the first byte of `body` in the object.
        info: the object; `info.size` is the size of the whole object, not of the range.
    """

    body: memoryview
    start: int
    info: ObjectInfo


@runtime_checkable
class Progress(Protocol):
    """An `into` of `Store.get` that wants to use a body's beginning before its end is there.

    Whoever relies on what it is told waits for the call's return all the same.
    """

    def answered(self, info: ObjectInfo) -> None:
        """The body will be of this object: `GetResult.info`, told once before the buffer's call."""
        ...

    def __call__(self, nbytes: int) -> memoryview:
        """The buffer; see `Store.get`."""
        ...

    def arrived(self, nbytes: int) -> None:
        """So many bytes of the body are in the buffer, and will not change.

        Cheap, and told as often as a store likes; it need not tell at all.
        """
        ...


def progress_of(into: Callable[[int], memoryview]) -> Progress | None:
    """The `into` as what it is told through, None when it does not want to be told."""
    return cast("Progress", into) if hasattr(into, "answered") else None  # isinstance takes 20 us


class Store(Protocol):
    """Asynchronous access to one prefix of an object store."""

    async def get(
        self,
        key: str,
        *,
        into: Callable[[int], memoryview],
        start: int = 0,
        length: int | None = None,
        if_match: str | None = None,
        if_none_match: str | None = None,
    ) -> GetResult | None:
        """Read an object or a range of it.

        A range that reaches beyond the end is cut there; a range of an empty object is empty.

        Args:
            key: object key below the store's prefix.
            into: called once with the number of bytes to come (after the answer's header);
                returns a writable buffer of at least that size. May raise `ECS3Error` to refuse.
                A `Progress` is told more.
            start: first byte.
            length: bytes wanted, None for all up to the end.
            if_match: ETag that the object must still have.
            if_none_match: ETag that the caller knows: of an object that still has it nothing is
                read, `into` is not called, and only `info.etag` is told.

        Returns:
            None when there is no such object. Never a short body.

        Raises:
            RemoteChangedError: the object has another ETag than `if_match`.
            RemoteError: any other failure.
        """
        ...

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        if_match: str | None = None,
    ) -> PutOutcome:
        """Write one object, whole or not at all; the body is the concatenation of `parts`.

        Args:
            key: object key below the store's prefix.
            parts: body, in order; must not change until the call returns.
            if_absent: leave an existing object alone (`EXISTS`).
            if_match: replace only the object with this ETag (`CHANGED` otherwise, also when it
                is gone); excludes `if_absent`, which is then ignored.
        """
        ...

    async def head(self, key: str) -> ObjectInfo | None:
        """Describe an object, None when there is none."""
        ...

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, in no order; no foreign ones."""
        ...

    async def delete(self, keys: Sequence[str]) -> DeleteReport:
        """Delete keys; one that does not exist counts as deleted, one that fails is reported."""
        ...

    async def connect(self) -> None:
        """Get everything ready that the first call would otherwise wait for; sends no request.

        Raises:
            ConfigError: the settings cannot be used here.
            RemoteError: the store cannot be used now; a later call may find it otherwise.
        """
        ...

    async def aclose(self) -> None:
        """Release connections; idempotent. Later calls raise `ClosedError`."""
        ...
