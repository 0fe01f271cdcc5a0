"""`S3Store`: the store protocol over any S3-compatible object store.

Owns the verbs and what a store's answers mean. Runs on the event loop that first used it; any
number of calls may run at once. It never retries what the SDK has retried already: only a body
that broke off, and a conflicting conditional write, are asked for again, within the deadline.

A call has one deadline for everything it does, `S3Options.total_timeout`, plus as much again for
each further 64 MiB of its body. Closing the store makes the deadlines of running calls due.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import ClientError

from ec_s3.denials import Denials
from ec_s3.doubts import Doubts
from ec_s3.errors import (
    ClosedError,
    ECS3Error,
    RemoteError,
    RemoteThrottledError,
    RemoteUnavailableError,
)
from ec_s3.failures import SDK_ERRORS, map_error, place, repeated, retry_after, status_of
from ec_s3.listings import Pages
from ec_s3.pace import Pace, jitter
from ec_s3.profile import Capabilities, Support, condition_of
from ec_s3.quiet import Quiet
from ec_s3.store import GetResult
from ec_s3.transfer import (
    Download,
    MultipartRefusedError,
    holds,
    object_info,
    stored_with,
    upload_parts,
)
from ec_s3.transport import Body, Connection
from ec_s3.types import DeleteReport, ObjectInfo, PutOutcome
from ec_s3.url import S3Location, S3Options, check_key, is_key
from ec_s3.vetting import vetted_client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from types_aiobotocore_s3.client import S3Client

    from ec_s3.store import Buffer

T = TypeVar("T")

logger = logging.getLogger(__name__)

_MULTIPART_BYTES = 64 << 20
_DELETES_AT_ONCE = 16
_BODY_ATTEMPTS = 5
_CONFLICT_ATTEMPTS = 5
_CLOSE_SECONDS = 0.5
_UNSUPPORTED = ("NotImplemented", "InvalidArgument", "InvalidRequest")


@dataclass(frozen=True, slots=True)
class _Call:
    client: S3Client
    key: str
    target: dict[str, Any]
    deadline: asyncio.Timeout


class S3Store:
    """One prefix of a bucket; see `ec_s3.store.Store` for what the methods promise.

    A 404, and without the right to list the bucket a 403, mean "no such object" to a read. A store
    that does not know conditional writes gets a HEAD and a plain PUT instead, from the first time
    that a plain PUT succeeded where the conditional one was refused.

    Attributes:
        capabilities: what the store has shown so far, for any thread to read.
    """

    def __init__(
        self, location: S3Location, options: S3Options | None = None, *, any_key: bool = False
    ) -> None:
        self._location = location
        self._any_key = any_key  # also those that no store of ours would write
        self._options = options or S3Options()
        vetted = partial(vetted_client, location=location, options=self._options)
        self._connection = Connection(location, self._options, wrap=vetted)
        self._calls: set[asyncio.Timeout] = set()
        self._drained: asyncio.Event | None = None
        self._closed = False
        self._pace = Pace()
        self._doubts = Doubts()
        self.capabilities = Capabilities()
        self._quiet = Quiet()
        self._denials = Denials(place(location))

    def __repr__(self) -> str:
        return f"S3Store({str(self._location)!r})"

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
        """Read an object or a range of it; a body that breaks off is continued from there."""
        download = Download(key, into, start=start, length=length, etag=if_match or "")
        known: dict[str, Any] = {"IfNoneMatch": if_none_match} if if_none_match else {}
        if self.capabilities.refuses("conditional_get"):
            known.clear()

        async def read(call: _Call) -> GetResult | None:
            if length is not None and length <= 0:
                return await self._empty_range(call, download)
            for attempt in range(_BODY_ATTEMPTS):
                if attempt:
                    await asyncio.sleep(jitter(attempt))
                try:
                    answer = await call.client.get_object(
                        **call.target, **download.request(), **known
                    )
                except ClientError as exc:
                    if known and status_of(exc)[0] == 304:
                        info = ObjectInfo(key, 0, known["IfNoneMatch"])
                        return GetResult(memoryview(b""), start, info)
                    if known and status_of(exc)[0] == 501:
                        self.capabilities.learn("conditional_get", Support.REFUSED)
                        known.clear()
                        continue
                    if status_of(exc)[0] == 416 and not download.started:
                        return await self._empty_range(call, download)
                    if download.started or not await self._absent(exc, call):
                        raise
                    return None
                await download.receive(answer, self._grant(call))
                if download.complete:
                    return download.result()
            assert download.failure is not None
            raise download.failure

        return await self._call("get", key, read)

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        if_match: str | None = None,
    ) -> PutOutcome:
        """Write one object; waits first while the store asks for a slower pace.

        A body that an earlier attempt of this store brought there, whose answer was lost, counts
        as written.
        """
        body = Body(parts)
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if if_absent else {}
        if if_match is not None:
            condition = {"IfMatch": if_match}

        async def write(call: _Call) -> PutOutcome:
            await self._pace.wait()
            try:
                outcome = await self._settle(call, body, condition)
                outcome = outcome or await self._put(call, body, condition)
            except BaseException:
                self._doubts.add(key)
                raise
            self._doubts.settle(key)
            self._pace.faster()
            return outcome

        return await self._call("put", key, write, nbytes=body.nbytes)

    async def head(self, key: str) -> ObjectInfo | None:
        """Describe an object, None when there is none."""
        return await self._call("head", key, self._head)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Objects below the prefix; keys that no store of ours wrote are left out."""
        cut = len(self._location.object_key(""))
        bucket, begin = self._location.bucket, self._location.listed_prefix(prefix)
        page: dict[str, Any] = {"Bucket": bucket, "Prefix": begin}
        pages = Pages("list", self._location, ContinuationToken="NextContinuationToken")
        while True:
            answer: Any = await self._call(
                "list", prefix, lambda call: call.client.list_objects_v2(**page)
            )
            for entry in answer.get("Contents", ()):
                name, size, modified = pages.told(entry, "Key", "Size", "LastModified")
                key = name[cut:]
                if key.startswith(prefix) and (self._any_key or is_key(key)):
                    yield ObjectInfo(key, size, entry.get("ETag", ""), modified.timestamp())
            if not (more := pages.after(answer)):
                return
            page.update(more)

    async def delete(self, keys: Sequence[str]) -> DeleteReport:
        """Delete keys, each with a request of its own: many stores refuse the SDK's batches."""
        waiting = iter([check_key(key) for key in keys])
        failed: dict[str, str] = {}

        async def work() -> None:
            for key in waiting:
                try:
                    await self._call("delete", key, self._delete)
                except RemoteError as exc:
                    failed[key] = str(exc)

        await asyncio.gather(*(work() for _ in range(min(len(keys), _DELETES_AT_ONCE))))
        return DeleteReport(tuple(key for key in keys if key not in failed), failed)

    async def connect(self) -> None:
        """Build the client: most of a second of CPU time that no fetch should wait for."""
        if self._closed:
            raise ClosedError("the store is closed")
        await self._connection.client()

    async def aclose(self) -> None:
        """Fail running calls with `ClosedError` and close the connections, within a second."""
        if self._closed:
            return
        self._closed = True
        if self._calls:
            self._drained = asyncio.Event()
            for deadline in (call for call in self._calls if not call.expired()):
                deadline.reschedule(asyncio.get_running_loop().time())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), _CLOSE_SECONDS)
        await self._connection.aclose()

    async def _call(
        self, operation: str, key: str, work: Callable[[_Call], Awaitable[T]], *, nbytes: int = 0
    ) -> T:
        """One call: its deadline, its client, and the mapping of what goes wrong in it."""
        # No context manager: an asynchronous generator would cost each request 5 us.
        if self._closed:
            raise ClosedError("the store is closed")
        if operation != "list" and not self._any_key:
            check_key(key)
        target = {"Bucket": self._location.bucket, "Key": self._location.object_key(key)}
        try:
            async with asyncio.timeout(self._seconds(nbytes)) as deadline:
                self._calls.add(deadline)
                try:
                    client = await self._connection.client()
                    return await work(_Call(client, key, target, deadline))
                finally:
                    self._calls.discard(deadline)
        except ECS3Error:
            raise
        except SDK_ERRORS as exc:
            if self._closed:
                raise ClosedError("the store was closed during the call") from exc
            self._connection.failed(exc)
            error = map_error(exc, operation=operation, key=key, location=self._location)
            if isinstance(error, RemoteThrottledError):
                self._pace.slower(retry_after(exc))
            raise error from exc
        finally:
            if self._drained is not None and not self._calls:
                self._drained.set()

    def _seconds(self, nbytes: int) -> float:
        return self._options.total_timeout * (1 + nbytes // _MULTIPART_BYTES)

    def _grant(self, call: _Call) -> Callable[[int], None]:
        """More time for a large body, once its size is known."""

        def grant(nbytes: int) -> None:
            more, when = self._seconds(nbytes) - self._seconds(0), call.deadline.when()
            if more and when is not None and not self._closed:
                call.deadline.reschedule(when + more)

        return grant

    def _absent(self, exc: ClientError, call: _Call) -> Awaitable[bool]:
        return self._denials.absent(exc, call.client, call.target)

    def _warn(self, cause: str, message: str) -> None:
        if self._quiet.due(cause) is not None:
            logger.warning(message, place(self._location))

    async def _head(self, call: _Call) -> ObjectInfo | None:
        try:
            answer: Any = await call.client.head_object(**call.target)
        except ClientError as exc:
            if await self._absent(exc, call):
                return None
            raise
        size = answer.get("ContentLength")
        if size is None:
            what = "head failed: the store does not announce the size of an object"
            raise RemoteUnavailableError(what, operation="head", key=call.key)
        return object_info(call.key, size, answer)

    async def _empty_range(self, call: _Call, download: Download) -> GetResult | None:
        """Answer a range without bytes, which HTTP cannot ask for."""
        info = await self._head(call)
        return None if info is None else download.empty(info)

    async def _delete(self, call: _Call) -> None:
        try:
            await call.client.delete_object(**call.target)
        except ClientError as exc:
            if status_of(exc) != (404, "NoSuchKey"):
                raise

    async def _settle(
        self, call: _Call, body: Body, condition: dict[str, Any]
    ) -> PutOutcome | None:
        """How an earlier write of the key ended; None where there is something left to write."""
        if not condition or call.key not in self._doubts:
            return None
        own = await holds(call.client, call.target, body)
        if own:
            return PutOutcome.WRITTEN
        return PutOutcome.EXISTS if own is False and "IfNoneMatch" in condition else None

    async def _put(self, call: _Call, body: Body, condition: dict[str, Any]) -> PutOutcome:
        refused = PutOutcome.CHANGED if "IfMatch" in condition else PutOutcome.EXISTS
        used = condition_of(condition, in_parts=self._in_parts(body))
        if self.capabilities.refuses(used):
            return await self._put_plain(call, body, condition, used)
        sent = condition
        for attempt in range(1, _CONFLICT_ATTEMPTS + 1):
            try:
                await self._write(call, body, sent)
            except ClientError as exc:
                status, code = status_of(exc)
                if (code == "NoSuchUpload" or (status in (304, 412) and repeated(exc))) and (
                    await holds(call.client, call.target, body)
                ):
                    return PutOutcome.WRITTEN
                if not condition:
                    raise
                if status == 412 and await self._unchanged(call, condition):
                    if sent is not condition:
                        return await self._put_plain(call, body, condition, used)
                    sent = {"IfMatch": condition["IfMatch"].strip('"')}
                    continue
                if status in (304, 412) or (refused is PutOutcome.CHANGED and code == "NoSuchKey"):
                    self.capabilities.learn(used, Support.HONOURED)
                    return refused
                if status == 501 or (status == 400 and code in _UNSUPPORTED):
                    return await self._put_plain(call, body, condition, used)
                if status != 409 or attempt == _CONFLICT_ATTEMPTS:
                    raise
                await asyncio.sleep(jitter(attempt))
            else:
                return PutOutcome.WRITTEN
        raise AssertionError("unreachable")

    async def _unchanged(self, call: _Call, condition: dict[str, Any]) -> bool:
        """Whether a 412 was wrong: older Ceph compares an ETag only without its quotes."""
        info = await self._head(call) if "IfMatch" in condition else None
        return info is not None and info.etag == condition["IfMatch"]

    async def _put_plain(
        self, call: _Call, body: Body, condition: dict[str, Any], used: str
    ) -> PutOutcome:
        """HEAD and plain PUT, for a store that refused the condition."""
        info = await self._head(call)
        if "IfMatch" in condition:
            if info is None or info.etag != condition["IfMatch"]:
                return PutOutcome.CHANGED
        elif info is not None:
            return PutOutcome.EXISTS
        await self._write(call, body, {})
        if self.capabilities.learn(used, Support.REFUSED):
            self._warn("conditional", "%s does not know conditional writes; using HEAD and PUT")
        return PutOutcome.WRITTEN

    async def _write(self, call: _Call, body: Body, condition: dict[str, Any]) -> None:
        storage = stored_with(self._options)
        in_parts = self._in_parts(body)
        if in_parts:
            with contextlib.suppress(MultipartRefusedError):
                await upload_parts(
                    call.client, call.target, body, created_with=storage, completed_with=condition
                )
                return
        await call.client.put_object(**{**call.target, **storage, **condition, "Body": body})
        if in_parts and self.capabilities.learn("multipart", Support.REFUSED):
            self._warn("multipart", "%s does not know multipart uploads; using plain PUTs")

    def _in_parts(self, body: Body) -> bool:
        return body.nbytes > _MULTIPART_BYTES and not self.capabilities.refuses("multipart")
