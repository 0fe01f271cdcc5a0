"""Multipart uploads that were begun below a store's prefix and never ended; they cost, unseen.

Beside `S3Store`, with a client of its own, as no other store has such a thing. Runs on the event
loop of a tool, never in a server. Must touch no upload that it was not given.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from ec_s3.errors import ECS3Error, RemoteError
from ec_s3.failures import SDK_ERRORS, map_error, status_of
from ec_s3.listings import Pages
from ec_s3.transport import Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ec_s3.url import S3Location, S3Options

_UNKNOWN = (405, 501)


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload under way, or left behind.

    Attributes:
        key: object key below the store's prefix.
        upload_id: the store's name for it.
        started: seconds since the epoch.
    """

    key: str
    upload_id: str
    started: float


class Multiparts:
    """The unfinished uploads of one prefix of a bucket.

    Args:
        location: where it is.
        options: how to talk to it.
    """

    def __init__(self, location: S3Location, options: S3Options) -> None:
        self._location = location
        self._options = options
        self._connection = Connection(location, options)

    async def list(self) -> AsyncIterator[Upload]:
        """All of them in key order; none where the store does not know multipart uploads.

        Raises:
            RemoteError: the store failed.
        """
        cut = len(self._location.object_key(""))
        verb, page = "list_multipart_uploads", {"Prefix": self._location.object_key("")}
        markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        pages = Pages(verb, self._location, **markers)
        while True:
            answer = await self._call(verb, "", **page)
            for entry in answer.get("Uploads") or ():
                key, upload, started = pages.told(entry, "Key", "UploadId", "Initiated")
                yield Upload(key[cut:], upload, started.timestamp())
            if not (more := pages.after(answer)):
                return
            page.update(more)

    async def size(self, upload: Upload) -> int:
        """Bytes of the parts that are there; 0 when the upload is gone.

        Raises:
            RemoteError: the store failed.
        """
        total = 0
        page: dict[str, Any] = {"UploadId": upload.upload_id}
        pages = Pages("list_parts", self._location, PartNumberMarker="NextPartNumberMarker")
        while True:
            answer = await self._call("list_parts", upload.key, **page)
            total += sum(int(pages.told(part, "Size")[0]) for part in answer.get("Parts") or ())
            if not (more := pages.after(answer)):
                return total
            page.update(more)

    async def abort(self, upload: Upload) -> None:
        """Throw an upload away with its parts; one that is gone is no error.

        Raises:
            RemoteError: the store failed.
        """
        await self._call("abort_multipart_upload", upload.key, UploadId=upload.upload_id)

    async def aclose(self) -> None:
        """Close the connections; idempotent."""
        await self._connection.aclose()

    async def _call(self, verb: str, key: str, **arguments: Any) -> Any:
        """One call within its time limit; an empty answer for what is not there."""
        target = {"Key": self._location.object_key(key)} if key else {}
        try:
            async with asyncio.timeout(self._options.total_timeout):
                method: Any = getattr(await self._connection.client(), verb)
                return await method(Bucket=self._location.bucket, **target, **arguments)
        except ECS3Error:
            raise
        except SDK_ERRORS as exc:
            if isinstance(exc, ClientError):
                status, code = status_of(exc)
                if code == "NoSuchUpload" or (status in _UNKNOWN and not key):
                    return {}
            error: RemoteError = map_error(exc, operation=verb, key=key, location=self._location)
            raise error from exc
