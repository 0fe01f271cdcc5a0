"""Believes an endpoint only once it has shown to be an S3 store.

A web server may say yes to everything: what it "has" is not there, what it "took" is lost. So until
an endpoint has shown who it is, its answers are checked, and those of another kind of server are
the error `RemoteUnavailableError` that names the remedy. Nearly every S3 store shows itself by the
headers of its first answer, and any by its first error document. After a failed connection, behind
which another server may have come up, it has to show itself again.

Stands in for the SDK's client and the direct one alike. Runs on the event loop of the store; adds
nothing to a request once the endpoint is known. Never decides what an S3 store's answer means.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Any, cast

from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from ec_s3.direct import direct_client
from ec_s3.failures import ANYBODYS, SDK_ERRORS, is_documented, no_s3_server, status_of
from ec_s3.transfer import close_body, holds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from aiobotocore.session import AioSession
    from types_aiobotocore_s3.client import S3Client

    from ec_s3.url import S3Location, S3Options

_OF_LISTINGS = ("Name", "IsTruncated", "KeyCount", "Contents", "CommonPrefixes")
_OF_S3 = ("x-amz-", "x-amzn-", "x-goog-")


@contextlib.asynccontextmanager
async def vetted_client(
    sdk: S3Client, session: AioSession, *, location: S3Location, options: S3Options
) -> AsyncIterator[S3Client]:
    """Wrap an SDK client, with the direct transport between where that is chosen."""
    async with contextlib.AsyncExitStack() as stack:
        client = sdk
        if options.transport == "direct":
            direct = direct_client(sdk, session, location=location, options=options)
            client = await stack.enter_async_context(direct)
        yield cast("S3Client", VettedClient(client, location))


def _is_signed(answer: Any) -> bool:
    """Whether an answer has a header that only S3 stores send."""
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return any(name.lower().startswith(_OF_S3) for name in headers)


class VettedClient:
    """The verbs of an S3 client; what is not here is the client's own."""

    def __init__(self, client: S3Client, location: S3Location) -> None:
        self._client = client
        self._location = location
        self._known = False
        self._lock = asyncio.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def get_object(self, **params: Any) -> Mapping[str, Any]:
        """The SDK's answer."""
        try:
            answer = await self._call("get_object", params)
        except ClientError as exc:
            if status_of(exc)[0] == 404 and not self._known:
                raise no_s3_server("get", self._location) from exc
            raise
        if not self._known:
            close_body(answer)
            await self._introduce("get", found=True)
            return await self._call("get_object", params)
        return answer

    async def head_object(self, **params: Any) -> Mapping[str, Any]:
        """The SDK's answer; a failed one has no document."""
        try:
            answer = await self._call("head_object", params)
        except ClientError as exc:
            if not self._known and status_of(exc)[0] in ANYBODYS:
                await self._introduce("head", found=False)
            raise
        if not self._known:
            await self._introduce("head", found=True)
            return await self._call("head_object", params)
        return answer

    async def put_object(self, **params: Any) -> Mapping[str, Any]:
        """The SDK's answer, once the object is known to be there."""
        answer = await self._call("put_object", params)
        if not self._known:
            target = {"Bucket": params["Bucket"], "Key": params["Key"]}
            self._known = bool(await holds(self._client, target, params["Body"]))
            if not self._known:
                await self._introduce("put", found=False)
                return await self._call("put_object", params)
        return answer

    async def create_multipart_upload(self, **params: Any) -> Mapping[str, Any]:
        """The SDK's answer, which holds an upload's name."""
        answer = await self._call("create_multipart_upload", params)
        if not answer.get("UploadId"):
            raise no_s3_server("put", self._location)
        self._known = True
        return answer

    async def list_objects_v2(self, **params: Any) -> Mapping[str, Any]:
        """The SDK's answer, in which an S3 store names the bucket; a page is no empty listing."""
        answer = await self._call("list_objects_v2", params)
        telling = _OF_LISTINGS if self._known else ("Name",)
        if not any(name in answer for name in telling):
            raise no_s3_server("list", self._location)
        return answer

    async def delete_object(self, **params: Any) -> Mapping[str, Any]:
        """The SDK's answer."""
        answer = await self._call("delete_object", params)
        if not self._known:
            await self._introduce("delete", found=False)
            return await self._call("delete_object", params)
        return answer

    async def _call(self, verb: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            answer: Mapping[str, Any] = await getattr(self._client, verb)(**params)
        except ClientError as exc:
            if is_documented(exc) or _is_signed(exc.response):
                self._known = True
            raise
        except ResponseParserError as exc:
            raise no_s3_server(verb.partition("_")[0], self._location) from exc
        except SDK_ERRORS:
            self._known = False
            raise
        if not self._known and _is_signed(answer):
            self._known = True
        return answer

    async def _introduce(self, operation: str, *, found: bool) -> None:
        """Ask for an object that nobody has written, and see what kind of server denies it.

        Args:
            operation: for the message.
            found: whether the endpoint says that it has an object, so that any "not found" shows
                that it can tell them apart.

        What it had answered before is asked again: another server may have been there then.

        Raises:
            RemoteUnavailableError: it is no S3 store.
        """
        async with self._lock:
            if self._known:
                return
            key = self._location.object_key(f"introduction-{secrets.token_hex(8)}")
            try:
                answer = await self._call(
                    "get_object", {"Bucket": self._location.bucket, "Key": key}
                )
            except ClientError as exc:
                status = status_of(exc)[0]
                self._known = self._known or (found and status == 404)
                if not self._known and status in ANYBODYS:
                    raise no_s3_server(operation, self._location) from exc
                if not self._known:
                    raise
            else:
                close_body(answer)
                raise no_s3_server(operation, self._location)
