"""Reads stored objects for the commands, by their header or whole, with every check.

Coroutines on the command's event loop; decoding runs on threads. What is read is untrusted: nothing
is allocated before its size has been looked at, and a chunk is decoded into memory that is used
again where the tensor itself is not wanted. Slow to import: for the body of a command only.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ec_s3.cli.crew import patiently
from ec_s3.cli.targets import ROOT
from ec_s3.errors import FrameMismatchError, FrameTooLargeError, FrameTruncatedError
from ec_s3.keys import identifier_digest
from ec_s3.lookup import header_at
from ec_s3.wire import CHUNK_BYTES, MAX_HEAD_BYTES, decode, decode_chunk, read_header

if TYPE_CHECKING:
    from ec_s3.config import ECConfig
    from ec_s3.header import Header
    from ec_s3.signing import Keyring
    from ec_s3.store import GetResult, Store
    from ec_s3.types import ObjectInfo


@dataclass(frozen=True, slots=True)
class Demands:
    """What an object must be to be read: not larger, and signed by one of the keys, if any."""

    max_tensor_bytes: int
    keyring: Keyring | None

    @classmethod
    def of(cls, config: ECConfig) -> Demands:
        """Those of a server with the same settings."""
        return cls(config.max_item_size, config.keyring())


async def header_of(store: Store, key: str, demands: Demands) -> Header | None:
    """The header of the object of a key, None when there is none.

    Raises:
        FrameError: it is damaged, too large, not signed, or lies under a key that is not its own.
        RemoteError: the store failed.
    """
    header = await patiently(
        lambda: header_at(
            store, key, max_tensor_bytes=demands.max_tensor_bytes, keyring=demands.keyring
        )
    )
    if header is not None:
        _check_key(header, key)
    return header


async def body_of(store: Store, info: ObjectInfo, demands: Demands) -> GetResult | None:
    """All bytes of an object as it is now, None when it is gone.

    Raises:
        FrameTooLargeError: it is larger than any object of a tensor that is demanded.
        RemoteError: the store failed.
    """

    def into(nbytes: int) -> memoryview:
        limit = demands.max_tensor_bytes
        if nbytes > limit + limit // 8 + MAX_HEAD_BYTES:
            raise FrameTooLargeError(f"{nbytes} stored bytes; raise max_item_size to read them")
        return memoryview(bytearray(nbytes))

    into(info.size)
    return await patiently(lambda: store.get(info.key, into=into))


async def decoded(result: GetResult, demands: Demands) -> tuple[Header, bytearray]:
    """The tensor of an object after every check, the one of its name included.

    Raises:
        FrameError: anything about the object is not as it should be.
    """
    header, tensor = await asyncio.to_thread(
        decode, result.body, max_tensor_bytes=demands.max_tensor_bytes, keyring=demands.keyring
    )
    _check_key(header, result.info.key)
    return header, tensor


async def inspect(result: GetResult, demands: Demands) -> None:
    """The same checks; the tensor is thrown away as it is decoded.

    Raises:
        FrameError: anything about the object is not as it should be.
    """
    await asyncio.to_thread(_inspect, result, demands)


def _inspect(result: GetResult, demands: Demands) -> None:
    view = result.body
    header = read_header(view, max_tensor_bytes=demands.max_tensor_bytes, keyring=demands.keyring)
    _check_key(header, result.info.key)
    if len(view) != header.object_bytes:
        raise FrameTruncatedError(f"{len(view)} bytes, but the object has {header.object_bytes}")
    scratch = memoryview(bytearray(min(CHUNK_BYTES, header.tensor_bytes)))
    for index in range(len(header.chunks)):
        offset, stored = header.chunk_range(index)
        raw = header.chunk_tensor_range(index)[1]
        decode_chunk(header, index, view[offset : offset + stored], (scratch[:raw],))


def _check_key(header: Header, key: str) -> None:
    """An intact object may still lie under a name that is not its own."""
    digest = identifier_digest(header.identifier)
    if key != f"{ROOT}{header.namespace}/{digest[:2]}/{digest}":
        raise FrameMismatchError("the object lies under another item's key")
    if header.namespace.rpartition("/")[2] != header.spec.dtype:
        raise FrameMismatchError(f"the object holds {header.spec.dtype}, unlike its folder")
