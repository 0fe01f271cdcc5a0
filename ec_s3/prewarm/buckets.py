"""The buckets that media lie in: read with the project's own S3 store, listed page by page.

Runs on one event loop. Objects go to files in pieces, so that memory does not grow with their size;
keys may be anybody's, with spaces and any Unicode. Writes to no bucket.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ec_s3.errors import (
    ConfigError,
    ECS3Error,
    RemoteError,
    RemoteThrottledError,
    RemoteTimeoutError,
    RemoteUnavailableError,
)
from ec_s3.url import S3Location, S3Options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ec_s3.prewarm.pace import Pace
    from ec_s3.s3 import S3Store
    from ec_s3.store import GetResult
    from ec_s3.types import ObjectInfo

PIECE_BYTES = 8 << 20
MAX_MEDIA_BYTES = 4 << 30
"""Largest object or file that is read."""

_AWAY = (RemoteThrottledError, RemoteTimeoutError, RemoteUnavailableError)


class MediaError(ECS3Error):
    """Why one entry's media cannot be used.

    Attributes:
        away: the bucket gave no answer, however often it was asked; None when it did.
    """

    away: RemoteError | None = None


def split_uri(uri: str) -> tuple[str, str]:
    """Bucket and key of `s3://bucket/key`; the key as it stands."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


class MediaBuckets:
    """Any number of buckets at one endpoint.

    Args:
        template: endpoint, region, addressing and profile of all of them; None for the AWS
            chain's.
        options: how to talk to them.
        pace: how fast.
    """

    def __init__(self, template: S3Location | None, options: S3Options, pace: Pace) -> None:
        self._template = template
        self._options = replace(options, transport="sdk")  # it takes keys of any kind
        self._pace = pace
        self._stores: dict[str, S3Store] = {}

    async def fetch(self, uri: str, target: Path) -> int:
        """Write an object into a file; its size in bytes.

        Raises:
            MediaError: there is no such object, it is empty, too large, or cannot be read.
        """
        bucket, key = split_uri(uri)
        try:
            size = await self._fetch(self._store(bucket), key, target)
        except (ConfigError, RemoteError, OSError, UnicodeError) as error:
            failure = MediaError(str(error))
            if isinstance(error, _AWAY) and error.retryable:
                failure.away = error
            raise failure from error
        if not size:
            raise MediaError("an empty object")
        return size

    async def _fetch(self, store: S3Store, key: str, target: Path) -> int:
        etag, size, start = "", 1, 0
        while start < size:
            piece = await self._pace.call(partial(_read, store, key, start=start, etag=etag))
            if piece is None:
                raise MediaError("no such object")
            etag, size = piece.info.etag, piece.info.size
            if size > MAX_MEDIA_BYTES:
                raise MediaError(f"{size} bytes, and more than {MAX_MEDIA_BYTES} are not read")
            if not len(piece.body):
                break
            await asyncio.to_thread(_append, target, piece.body)
            start += len(piece.body)
        return size

    async def list(self, bucket: str, prefix: str) -> AsyncIterator[ObjectInfo]:
        """The objects below a prefix, in the order of the bucket.

        Raises:
            RemoteError: the bucket cannot be listed.
        """
        async for info in self._store(bucket).list(prefix):
            yield info

    def _store(self, bucket: str) -> S3Store:
        from ec_s3.s3 import S3Store  # the SDK takes a third of a second to import

        if bucket not in self._stores:
            template = self._template or S3Location(bucket)
            location = replace(template, bucket=bucket, prefix="")
            self._stores[bucket] = S3Store(location, self._options, any_key=True)
        return self._stores[bucket]

    async def aclose(self) -> None:
        """Close the connections; idempotent."""
        for store in self._stores.values():
            await store.aclose()


async def _read(store: S3Store, key: str, *, start: int, etag: str) -> GetResult | None:
    return await store.get(
        key,
        into=lambda nbytes: memoryview(bytearray(nbytes)),
        start=start,
        length=PIECE_BYTES,
        if_match=etag or None,
    )


def _append(target: Path, body: memoryview) -> None:
    with target.open("ab") as file:
        file.write(body)
