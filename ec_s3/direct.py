"""The direct transport: the SDK's client with its frequent verbs sent without the SDK.

Owns what one object's GET, HEAD, PUT, DELETE and the parts of an upload look like on the wire, and
how often a request is sent. Stands in for the SDK's client, with its parameters, answers and
exceptions, so whatever is decided about them is decided once, in `ec_s3.s3`. Everything else goes
to the SDK: other verbs, all of them where a proxy or another signature is needed, and from then on
where the server redirects. Endpoint, addressing, region and credentials are the SDK's own.

A request is sent as often as the SDK would: three times, after its pauses and within its quota of
repetitions; a conditional PUT too, so its sender may meet its own write (412) and must expect it.
Only a kept connection that turns out to be closed before it answered costs no pause.

Runs on the event loop of the store. Credentials are in no repr, message or log line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from botocore.exceptions import ClientError
from botocore.retries.quota import RetryQuota
from botocore.retries.standard import ExponentialBackoff, RetryContext
from botocore.utils import get_environ_proxies

from ec_s3.errors import RemoteThrottledError
from ec_s3.exchange import Address, client_error, described, is_elsewhere, request_head
from ec_s3.failures import SDK_ERRORS, map_error, place, status_of
from ec_s3.http_grammar import HungUpError
from ec_s3.pool import Pool
from ec_s3.transport import ATTEMPTS
from ec_s3.trust import tls_context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from aiobotocore.session import AioSession
    from types_aiobotocore_s3.client import S3Client

    from ec_s3.credentials import Keeper
    from ec_s3.http1 import HttpConnection
    from ec_s3.transport import Body
    from ec_s3.url import S3Location, S3Options

logger = logging.getLogger(__name__)

_DOCUMENT_BYTES = 256 << 10
_REPEATED = (500, 502, 503, 504)
_ANSWERS = (304, 404, 412)  # to what was asked
_REPEAT_COST, _TIMEOUT_COST = 5, 10  # the SDK's, of its quota of 500
_OTHER_SIGNATURE = ("--x-s3", "--op-s3")
_BEFORE_SEND = "before-send.s3.HeadObject"


class IncomingBody:
    """The body of a GET's answer; to be closed by whoever got it, read to its end or not."""

    def __init__(self, pool: Pool, connection: HttpConnection) -> None:
        self._pool = pool
        self._connection: HttpConnection | None = connection

    async def readinto(self, view: memoryview, told: Callable[[int], None] | None) -> int:
        """See `HttpConnection.readinto`."""
        assert self._connection is not None
        return await self._connection.readinto(view, told)

    def close(self) -> None:
        """Give the connection back; idempotent."""
        if self._connection is not None:
            self._pool.release(self._connection)
            self._connection = None


@contextlib.asynccontextmanager
async def direct_client(
    sdk: S3Client, session: AioSession, *, location: S3Location, options: S3Options
) -> AsyncIterator[S3Client]:
    """Wrap an SDK client, see `DirectClient`; leaving closes the wrapper's connections only."""
    client = DirectClient(sdk, session, location=location, options=options)
    with contextlib.suppress(*SDK_ERRORS):  # whoever needs it tries again and is told
        await client.prepare()
    try:
        yield cast("S3Client", client)
    finally:
        await client.aclose()


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


class _Addressed(Exception):  # noqa: N818  # no error: it ends the SDK's rehearsal
    """What the SDK would have sent."""

    def __init__(self, request: Any) -> None:
        super().__init__("not sent")
        self.url: str = request.url
        scope = re.search(
            r"Credential=[^/]*/([^,]*)", _text(request.headers.get("Authorization", ""))
        )
        self.scope = scope[1].split("/") if scope else []


class _Way:
    """How a request reaches the bucket, and with whose credentials."""

    def __init__(
        self, address: Address, *, source: Keeper, tls: ssl.SSLContext | None, options: S3Options
    ) -> None:
        self.address = address
        self.pool = Pool(
            address.name,
            address.port,
            tls=tls,
            connect_timeout=options.connect_timeout,
            read_timeout=options.read_timeout,
            size=options.max_connections,
        )
        self.credentials = source.get_frozen_credentials


class DirectClient:
    """Verbs with the SDK's parameters and answers; what is not here is the SDK's own."""

    def __init__(
        self, sdk: S3Client, session: AioSession, *, location: S3Location, options: S3Options
    ) -> None:
        self._sdk = sdk
        self._session = session
        self._location = location
        self._options = options
        self._lock = asyncio.Lock()
        self._way: _Way | None = None
        self._off = False
        self._quota = RetryQuota()
        self._backoff = ExponentialBackoff()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sdk, name)

    async def get_object(self, **params: Any) -> Mapping[str, Any]:
        """The answer's head, with an `IncomingBody`."""
        return await self._call("get_object", "GET", params)

    async def head_object(self, **params: Any) -> Mapping[str, Any]:
        """The object's description."""
        return await self._call("head_object", "HEAD", params)

    async def put_object(self, **params: Any) -> Mapping[str, Any]:
        """Write an object."""
        return await self._call("put_object", "PUT", params)

    async def upload_part(self, **params: Any) -> Mapping[str, Any]:
        """Write a part of an upload."""
        return await self._call("upload_part", "PUT", params)

    async def delete_object(self, **params: Any) -> Mapping[str, Any]:
        """Delete an object."""
        return await self._call("delete_object", "DELETE", params)

    async def aclose(self) -> None:
        """Close this client's connections; idempotent."""
        if self._way is not None:
            await self._way.pool.aclose()

    async def _call(self, operation: str, method: str, params: dict[str, Any]) -> Mapping[str, Any]:
        way = self._way or await self.prepare()
        if way is not None and not self._off:
            try:
                return await self._repeat(way, operation, method, params)
            except ClientError as exc:
                if not is_elsewhere(exc, way.address.region):
                    raise
            self._leave("the server redirects; set region and endpoint in the store's url")
        answer: Mapping[str, Any] = await getattr(self._sdk, operation)(**params)
        return answer

    async def prepare(self) -> _Way | None:
        """Have the SDK address one request, and use what it makes of the settings.

        Returns:
            None where the SDK is to send the requests itself.
        """
        async with self._lock:
            if self._way is not None or self._off:
                return self._way
            if self._location.bucket.endswith(_OTHER_SIGNATURE):
                self._leave("the bucket's kind needs another signature")
                return None
            rehearsed = await self._rehearse()
            scheme = urlsplit(rehearsed.url).scheme
            if rehearsed.scope[2:] != ["s3", "aws4_request"]:
                self._leave("the bucket needs another signature")
            elif get_environ_proxies(rehearsed.url).get(scheme):
                self._leave("the environment names a proxy")
            else:
                self._way = _Way(
                    Address(rehearsed.url, rehearsed.scope[1]),
                    source=cast("Keeper", await self._session.get_credentials()),
                    tls=await asyncio.to_thread(tls_context, self._options, self._session)
                    if scheme == "https"
                    else None,
                    options=self._options,
                )
            return self._way

    async def _rehearse(self) -> _Addressed:
        """Have the SDK make a request up to the point where it would be sent."""

        def stop(request: Any, **_: Any) -> None:
            raise _Addressed(request)

        events = self._sdk.meta.events
        events.register_first(_BEFORE_SEND, stop)
        try:
            await self._sdk.head_object(Bucket=self._location.bucket, Key="k")
        except _Addressed as addressed:
            return addressed
        finally:
            events.unregister(_BEFORE_SEND, stop)
        raise AssertionError("unreachable")

    def _leave(self, reason: str) -> None:
        if not self._off:
            self._off = True
            logger.warning(
                "requests to %s go through the SDK, not the direct transport: %s",
                place(self._location),
                reason,
            )

    async def _repeat(
        self, way: _Way, operation: str, method: str, params: dict[str, Any]
    ) -> Mapping[str, Any]:
        """Send a request until it is answered, refused for good, or out of attempts."""
        spent = 0
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = await self._send(way, operation, method, params, fresh=attempt > 1)
            except (ClientError, OSError) as exc:
                cost = _TIMEOUT_COST if isinstance(exc, TimeoutError) else _REPEAT_COST
                if attempt == ATTEMPTS or not self._passes(exc) or not self._quota.acquire(cost):
                    if isinstance(exc, ClientError):
                        exc.response["ResponseMetadata"]["RetryAttempts"] = attempt - 1
                    raise
                spent += cost
                if not isinstance(exc, HungUpError):
                    await asyncio.sleep(self._backoff.delay_amount(RetryContext(attempt)))
            else:
                self._quota.release(spent or 1)
                return answer
        raise AssertionError("unreachable")

    def _passes(self, exc: ClientError | OSError) -> bool:
        """Whether the same request may fare better at once."""
        if not isinstance(exc, ClientError):
            return not isinstance(exc, ssl.SSLCertVerificationError)
        status, code = status_of(exc)
        if status in _ANSWERS:
            return False
        if status in _REPEATED or code == "RequestTimeout":
            return True
        error = map_error(exc, operation="", key="", location=self._location)
        return isinstance(error, RemoteThrottledError)

    async def _send(
        self, way: _Way, operation: str, method: str, params: dict[str, Any], *, fresh: bool
    ) -> Mapping[str, Any]:
        credentials = await way.credentials()
        connection = await way.pool.acquire(fresh=fresh)
        incoming = None
        try:
            head = request_head(way.address, credentials, method=method, params=params)
            body: Body | None = params.get("Body")
            pieces = () if body is None else body.slices()
            answer = await connection.request(head, pieces, bodiless=method == "HEAD")
            if method == "GET" and answer.status in (200, 206):
                incoming = IncomingBody(way.pool, connection)
                return {**described(answer), "Body": incoming}
            document = await connection.document(_DOCUMENT_BYTES)
        finally:
            if incoming is None:
                way.pool.release(connection)
        failed = not 200 <= answer.status < 300 or (method == "PUT" and b"<Error>" in document)
        if failed or method == "GET":  # there is no object in it
            raise client_error(answer, document, operation)
        return described(answer)
