"""`MemoryStore`: the store protocol over a dictionary, for tests.

Owns the objects. Runs on one event loop, without threads or I/O; it yields to the loop once in
each call, so that callers cannot come to rely on being uninterrupted.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING

from ec_s3.errors import ClosedError, RemoteChangedError
from ec_s3.store import GetResult, progress_of
from ec_s3.types import DeleteReport, ObjectInfo, PutOutcome
from ec_s3.url import check_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from ec_s3.store import Buffer


class MemoryStore:
    """Objects in memory; see `ec_s3.store.Store` for what the methods promise.

    Attributes:
        objects: body by key; a test may read and change it, which counts as another version only
            through `put`.
        calls: number of calls by verb.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: dict[str, int] = {}
        self._versions: dict[str, tuple[str, float]] = {}
        self._serial = itertools.count(1)
        self._closed = False

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
        await self._enter("get", key)
        info = self._info(key)
        if info is None:
            return None
        if if_match is not None and info.etag != if_match:
            raise RemoteChangedError("get failed: replaced", operation="get", key=key)
        if info.etag == if_none_match:
            return GetResult(memoryview(b""), start, info)
        end = info.size if length is None else start + max(0, length)
        data = self.objects[key][start:end]
        if (progress := progress_of(into)) is not None:
            progress.answered(info)
        view = into(len(data))[: len(data)]
        view[:] = data
        return GetResult(view, start, info)

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        if_match: str | None = None,
    ) -> PutOutcome:
        await self._enter("put", key)
        info = self._info(key)
        if if_match is not None:
            if info is None or info.etag != if_match:
                return PutOutcome.CHANGED
        elif if_absent and info is not None:
            return PutOutcome.EXISTS
        self.objects[key] = b"".join(parts)
        self._versions[key] = (f'"{next(self._serial)}"', time.time())
        return PutOutcome.WRITTEN

    async def head(self, key: str) -> ObjectInfo | None:
        await self._enter("head", key)
        return self._info(key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        await self._enter("list")
        for key in sorted(self.objects):
            info = self._info(key)
            if key.startswith(prefix) and info is not None:
                yield info

    async def delete(self, keys: Sequence[str]) -> DeleteReport:
        await self._enter("delete", *keys)
        for key in keys:
            self.objects.pop(key, None)
        return DeleteReport(tuple(keys))

    async def connect(self) -> None:
        """See `Store.connect`; nothing takes long here."""

    async def aclose(self) -> None:
        self._closed = True

    async def _enter(self, verb: str, *keys: str) -> None:
        if self._closed:
            raise ClosedError("the store is closed")
        for key in keys:
            check_key(key)
        self.calls[verb] = self.calls.get(verb, 0) + 1
        await asyncio.sleep(0)

    def _info(self, key: str) -> ObjectInfo | None:
        if key not in self.objects:
            return None
        etag, modified = self._versions.get(key, ('"0"', 0.0))
        return ObjectInfo(key, len(self.objects[key]), etag, modified)
