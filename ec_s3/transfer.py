"""How object bodies move: one read into the caller's buffer, one upload in parts.

Owns what has arrived of a read and where it goes on, and the life of a multipart upload, which is
either completed or aborted. Runs inside a call of `ec_s3.s3`, under that call's deadline. It never
accepts more bytes than the answer's header announced, nor bytes of two objects in one read.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlencode

from botocore.exceptions import ClientError

from ec_s3.direct import IncomingBody
from ec_s3.errors import RemoteChangedError, RemoteUnavailableError
from ec_s3.failures import BODY_ERRORS, SDK_ERRORS, said, status_of
from ec_s3.store import GetResult, progress_of
from ec_s3.transport import Body
from ec_s3.types import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from types_aiobotocore_s3.client import S3Client

    from ec_s3.url import S3Options

    Told = Callable[[int], None]

logger = logging.getLogger(__name__)

PART_BYTES = 16 << 20
"""Size of every part but the last; some stores insist on equal sizes of at least 5 MiB."""

_PARTS_AT_ONCE = 4
_ABORT_SECONDS = 5.0
_COMPARED_BYTES = 64 << 10
_SPAN = re.compile(r"(?:bytes )?([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


def object_info(key: str, size: int, answer: Mapping[str, Any]) -> ObjectInfo:
    """The object that the header of an answer describes."""
    modified = answer.get("LastModified")
    return ObjectInfo(
        key, size, answer.get("ETag", ""), modified.timestamp() if modified is not None else 0.0
    )


class _Incoming(Protocol):
    """A body on its way; `close` it wherever reading stops."""

    async def readinto(self, view: memoryview, told: Told | None) -> int:
        """Receive up to as many bytes as the view holds; 0 at the end of the body.

        `told` may hear of those that come before the last.
        """
        ...

    def close(self) -> None: ...


class _SdkBody:
    def __init__(self, response: Any) -> None:
        self._response = response

    async def readinto(self, view: memoryview, told: Told | None) -> int:
        del told  # every piece comes by itself, and is told by who asked for it
        chunk = await self._response.content.readany()
        if len(chunk) > view.nbytes:
            return 0  # more than was announced
        view[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        self._response.close()  # no-op after a complete body: its connection is back in the pool


def _incoming(answer: Mapping[str, Any]) -> _Incoming:
    body: Any = answer["Body"]
    return body if isinstance(body, IncomingBody) else _SdkBody(body.raw_stream)


def close_body(answer: Mapping[str, Any]) -> None:
    """Give up the body of a GET's answer."""
    _incoming(answer).close()


class Download:
    """One read of an object or a range of it, over as many answers as it takes.

    Attributes:
        failure: how the last body ended, None when it was complete.
    """

    def __init__(
        self,
        key: str,
        into: Callable[[int], memoryview],
        *,
        start: int,
        length: int | None,
        etag: str,
    ) -> None:
        self.failure: Exception | None = None
        self._key = key
        self._into = into
        self._progress = progress_of(into)
        self._start = start
        self._length = length
        self._etag = etag
        self._info: ObjectInfo | None = None
        self._view = memoryview(b"")
        self._received = 0

    @property
    def started(self) -> bool:
        """Whether the caller's buffer was asked for: from then on the object may not change."""
        return self._info is not None

    @property
    def complete(self) -> bool:
        """Whether every byte has arrived."""
        return self.started and self._received == self._view.nbytes

    def request(self) -> dict[str, Any]:
        """Parameters of the next GET: the bytes that are missing, of the same object."""
        wanted: dict[str, Any] = {"IfMatch": self._etag} if self._etag else {}
        begin = self._start + self._received
        length = self._view.nbytes if self.started else self._length
        if length is not None:
            wanted["Range"] = f"bytes={begin}-{self._start + length - 1}"
        elif begin:
            wanted["Range"] = f"bytes={begin}-"
        return wanted

    async def receive(self, answer: Mapping[str, Any], grant: Callable[[int], None]) -> None:
        """Take in one answer; a body that breaks off is kept up to there, see `failure`.

        Args:
            answer: the SDK's answer to a GET.
            grant: told once how many bytes are to come.

        Raises:
            RemoteChangedError: the answer is about another object than the bytes before.
            RemoteUnavailableError: the answer is not the range that was asked for.
        """
        body = _incoming(answer)
        try:
            self._accept(answer, grant)
            self.failure = None
            told = self._tell if self._progress is not None else None
            while not self.complete:
                count = await body.readinto(self._view[self._received :], told)
                if not count:
                    raise self._protocol("sent a body of another length than announced")
                if told is not None:
                    told(count)
                self._received += count
        except BODY_ERRORS as exc:
            self.failure = exc
        finally:
            body.close()

    def _tell(self, more: int) -> None:
        assert self._progress is not None
        self._progress.arrived(self._received + more)

    def result(self) -> GetResult:
        """What the caller gets, once complete."""
        assert self._info is not None
        return GetResult(self._view, self._start, self._info)

    def empty(self, info: ObjectInfo) -> GetResult:
        """The result of a range that holds no bytes of this object."""
        if self._etag and info.etag != self._etag:
            raise self._changed()
        return GetResult(self._buffer(info, 0), self._start, info)

    def _accept(self, answer: Mapping[str, Any], grant: Callable[[int], None]) -> None:
        begin, count, size = self._extent(answer)
        info = object_info(self._key, size, answer)
        if self._etag and info.etag and info.etag != self._etag:
            raise self._changed()
        if begin != self._start + self._received:
            raise self._protocol("ignores ranges")
        if self._info is None:
            left = size - begin if self._length is None else min(size - begin, self._length)
            if count < left:
                raise self._protocol("sent fewer bytes than were asked for")
            count = left
            self._view = self._buffer(info, count)
            self._info, self._etag = info, info.etag
            grant(count)
        elif size != self._info.size or count != self._view.nbytes - self._received:
            raise self._changed()

    def _buffer(self, info: ObjectInfo, count: int) -> memoryview:
        """Tell what the body is of, and ask where it goes."""
        if self._progress is not None:
            self._progress.answered(info)
        view = self._into(count)[:count]
        if view.nbytes != count:
            raise ValueError(f"the buffer for {self._key!r} is smaller than {count} bytes")
        return view

    def _extent(self, answer: Mapping[str, Any]) -> tuple[int, int, int]:
        """First byte, number of bytes and whole size, as the answer's header has them."""
        count = answer.get("ContentLength")
        if count is None:
            raise self._protocol("does not announce the size of an object")
        if not answer.get("ContentRange"):
            if answer.get("ResponseMetadata", {}).get("HTTPStatusCode") == 206:
                raise self._protocol("sent a part without a Content-Range")
            return 0, count, count
        span = _SPAN.fullmatch(answer["ContentRange"])
        first, last, size = map(int, span.groups()) if span else (1, 0, 0)
        if not first <= last < size:
            raise self._protocol("sent a Content-Range that is none")
        if last - first + 1 != count:
            raise self._protocol("sent a Content-Range that contradicts Content-Length")
        return first, count, size

    def _changed(self) -> RemoteChangedError:
        return RemoteChangedError(
            "get failed: the object was replaced", operation="get", key=self._key
        )

    def _protocol(self, what: str) -> RemoteUnavailableError:
        return RemoteUnavailableError(
            f"get failed: the store {what}", operation="get", key=self._key
        )


async def holds(client: S3Client, target: Mapping[str, Any], body: Body) -> bool | None:
    """Whether the object in place is this very body; None when there is none, or none to be read.

    Compares sizes and the first bytes: those of an item or an index name its maker, the time and
    the digests of all that follows.
    """
    download = Download(
        *(target["Key"], lambda nbytes: memoryview(bytearray(nbytes))),
        start=0,
        length=min(body.nbytes, _COMPARED_BYTES),
        etag="",
    )
    try:
        await download.receive(
            await client.get_object(**target, **download.request()), lambda _: None
        )
    except ClientError:
        return None
    if download.failure is not None:
        raise download.failure
    there = download.result()
    expected = b"".join(body.cut(0, there.body.nbytes))
    return there.info.size == body.nbytes and there.body == expected


def stored_with(options: S3Options) -> dict[str, Any]:
    """The SDK's parameters of how new objects are stored."""
    chosen = {
        "ServerSideEncryption": options.sse,
        "SSEKMSKeyId": options.sse_kms_key_id,
        "StorageClass": options.storage_class,
        "Tagging": urlencode(options.tags),
    }
    return {name: value for name, value in chosen.items() if value}


class MultipartRefusedError(Exception):
    """The store does not know multipart uploads."""


async def upload_parts(
    client: S3Client,
    target: Mapping[str, Any],
    body: Body,
    *,
    created_with: Mapping[str, Any],
    completed_with: Mapping[str, Any],
) -> None:
    """Write one object in parts, four at a time; a failed or cancelled upload is aborted.

    Args:
        client: the SDK's client.
        target: bucket and key.
        body: what to write.
        created_with: storage options.
        completed_with: conditions on the object to be replaced.

    Raises:
        MultipartRefusedError: answered 501 at the start; nothing was sent.
        ClientError: and whatever else the SDK raises.
    """
    try:
        upload = (await client.create_multipart_upload(**target, **created_with))["UploadId"]
    except ClientError as exc:
        if status_of(exc)[0] == 501:
            raise MultipartRefusedError from exc
        raise
    try:
        parts = await _send_parts(client, {**target, "UploadId": upload}, body)
        await client.complete_multipart_upload(
            **target, UploadId=upload, MultipartUpload={"Parts": parts}, **completed_with
        )
    except BaseException:
        await _abort(client, {**target, "UploadId": upload})
        raise


async def _send_parts(client: S3Client, target: Mapping[str, Any], body: Body) -> list[Any]:
    free = asyncio.Semaphore(_PARTS_AT_ONCE)

    async def send(number: int) -> dict[str, Any]:
        start = (number - 1) * PART_BYTES
        part = Body(list(body.cut(start, min(body.nbytes, start + PART_BYTES))))
        async with free:
            answer = await client.upload_part(**{**target, "PartNumber": number, "Body": part})
        if not answer.get("ETag"):
            what = "put failed: the store names no version of a part"
            raise RemoteUnavailableError(what, operation="put", key=target["Key"])
        return {"PartNumber": number, "ETag": answer["ETag"]}

    count = -(-body.nbytes // PART_BYTES)
    tasks = [asyncio.ensure_future(send(number + 1)) for number in range(count)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _abort(client: S3Client, target: Mapping[str, Any]) -> None:
    """Give back the parts of a failed upload: they cost money and no listing shows them."""
    try:
        async with asyncio.timeout(_ABORT_SECONDS):
            await client.abort_multipart_upload(**target)
    except SDK_ERRORS as exc:
        if isinstance(exc, ClientError) and status_of(exc)[1] == "NoSuchUpload":
            return
        logger.warning(
            "a multipart upload could not be aborted; a lifecycle rule should remove its parts: %s",
            said(exc),
        )
