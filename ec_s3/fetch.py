"""Brings one stored object into host memory: ranged reads, checks, decoding.

Runs on the engine's event loop; decoding runs on the codec threads. Nothing enters the host tier
before every byte of it is checked. Buffers and pages are given back only when no thread writes to
them any more, also after a cancellation.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from ec_s3.buffers import Body
from ec_s3.chunks import RANGE_BYTES, Unpacking
from ec_s3.errors import (
    CapacityError,
    FrameError,
    FrameMismatchError,
    FrameStaleError,
    FrameTruncatedError,
)
from ec_s3.keys import identifier_digest, parse_key
from ec_s3.ranges import ObjectRead
from ec_s3.types import Expectation, ItemMeta, MissReason, TensorSpec
from ec_s3.wire import read_header

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ec_s3.arriving import Arriving
    from ec_s3.buffers import BufferPool
    from ec_s3.local import Lease, LocalTier, Reservation
    from ec_s3.metrics import Stats
    from ec_s3.signing import Keyring
    from ec_s3.store import Store
    from ec_s3.types import Extent
    from ec_s3.wire import Header


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

NO_SPARE = Miss(MissReason.NO_ROOM)
"""A good object for which no host memory is free, and none may be made so; told apart likewise."""


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
        identifier: str | None,
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
            identifier: whose tensor it must be. None: that of the key, whom nobody has asked for;
                nothing leaves the host tier for it.
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
        with Body(self._pool) as body, contextlib.ExitStack() as undo:
            read = ObjectRead(store, key, body, stats)
            async with read.reading(0, RANGE_BYTES) as first:
                try:
                    header = await self._header(first)
                    if header is None:
                        return Miss(MissReason.ABSENT)
                    self._accept(key, header, first, identifier=identifier, since=valid_after)
                    sink = self._reserve(key, header, resident=resident, spare=identifier is None)
                    if isinstance(sink, Miss):
                        return sink
                    undo.enter_context(sink)
                    kept = keep if keep is not None and keep.admit(header.object_bytes) else None
                    if kept is not None:
                        undo.callback(kept.withdraw, header.object_bytes)
                    unpacking = Unpacking(
                        read, header, sink, executor=self._executor, keep=kept is not None
                    )
                    stored = await unpacking.run(first)
                except FrameError as error:
                    return Miss(MissReason(error.reason), first.etag)
            item = sink.commit(header.spec, header.meta, dirty=False)
            undo.pop_all()
            if kept is not None:
                kept.take(key, stored, body.hand_over(), nbytes=header.object_bytes)
            return item

    async def _header(self, arriving: Arriving) -> Header | None:
        """The object's header, as soon as it is there; None when there is no object."""
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
        if arriving.info is not None:
            raise FrameTruncatedError("the object ends within its header")
        return None

    def _accept(
        self, key: str, header: Header, arriving: Arriving, *, identifier: str | None, since: float
    ) -> None:
        expected = parse_key(key)
        if identifier is None and identifier_digest(header.identifier) != expected.digest:
            raise FrameMismatchError("the object holds another item than its key names")
        header.check(
            identifier=header.identifier if identifier is None else identifier,
            namespace=expected.namespace,
            expect=Expectation(dtype=expected.dtype),
        )
        if header.created < since:
            raise FrameStaleError("the object was made before the time that counts")
        if header.object_bytes != arriving.size:
            raise FrameTruncatedError(
                f"the object has {arriving.size} bytes, declared {header.object_bytes}"
            )

    def _reserve(
        self, key: str, header: Header, *, resident: bool, spare: bool
    ) -> Reservation | _PrivateSink | Miss:
        lack = NO_SPARE if spare else Miss(MissReason.NO_ROOM)
        try:
            return self._tier.reserve(key, header.tensor_bytes, spare=spare) or lack
        except CapacityError:
            if resident:
                return OVERSIZED
            return _PrivateSink(key, header.tensor_bytes)


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
