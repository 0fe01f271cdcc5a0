"""How bytes travel to S3: the SDK's client, its HTTP session, request bodies and errors.

Owns the tuning of aiobotocore and aiohttp, the life of the one client that a store keeps, and the
one table that turns their errors into ours. Runs on the event loop that first used the store; a
second live loop is refused, and after a fork or a closed loop the client is built anew. It never
touches credentials: they stay inside the SDK, and no message repeats what a server or URL said.

Locking: `Connection` holds one asyncio lock, and only while it opens a client; everything else
about it changes between two awaits.

Closed traps: aiohttp sends an idempotent request again by itself when the answer is lost, so a
conditional PUT reports 412 for its own write (`_retry_connection`); large bodies given to aiohttp
whole are copied (`Body` sends slices); with checksums "when_required" the SDK hashes whole bodies
again unless payload signing is off; an `Expect` header that a proxy drops stalls the request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from aiohttp.payload import Payload
from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import create_loader

from ec_s3 import __version__
from ec_s3.errors import (
    ConfigError,
    RemoteChangedError,
    RemoteDeniedError,
    RemoteError,
    RemoteThrottledError,
    RemoteTimeoutError,
    RemoteUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aiohttp.abc import AbstractStreamWriter
    from types_aiobotocore_s3.client import S3Client

    from ec_s3.store import Buffer
    from ec_s3.url import S3Location, S3Options

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often the SDK sends one request, the first time included."""

SDK_ERRORS = (ClientError, BotoCoreError, aiohttp.ClientError, OSError)
"""Whatever the SDK and the transport under it raise when a store fails."""

BODY_ERRORS = (aiohttp.ClientError, BotoCoreError, ConnectionError, TimeoutError)
"""What reading a response body raises when the connection breaks or falls silent."""

_SLICE_BYTES = 256 << 10  # a slice that the kernel takes at once is never copied by asyncio
_READ_BUFFER_BYTES = 4 << 20
_KEEPALIVE_SECONDS = 8  # below the idle time after which servers hang up
_DEFAULT_REGION = "us-east-1"
_loader = create_loader()  # its service files are large; one copy serves every client
_forked: list[object] = []  # a parent's clients: closing them in the child would harm the parent


class Body:
    """A request body made of several buffers, read by the SDK like a file, never joined."""

    def __init__(self, parts: Sequence[Buffer]) -> None:
        self._views = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
        self.nbytes = sum(view.nbytes for view in self._views)
        self._position = 0

    def __bool__(self) -> bool:
        return True  # an empty body is still a body: the SDK must send Content-Length: 0

    def __len__(self) -> int:
        return self.nbytes

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move like a file; the SDK measures the body and rewinds it for its retries."""
        base = (0, self._position, self.nbytes)[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Position in bytes."""
        return self._position

    def read(self, size: int = -1) -> bytes:
        """The bytes at the position, as a copy; only the SDK's own digests ask for it."""
        end = self.nbytes if size < 0 else min(self.nbytes, self._position + size)
        data = b"".join(self.cut(self._position, end))
        self._position = end
        return data

    def cut(self, start: int, stop: int) -> Iterator[memoryview]:
        """The views that make up bytes `start` to `stop`, without copying."""
        offset = 0
        for view in self._views:
            piece = view[max(0, start - offset) : max(0, stop - offset)]
            offset += view.nbytes
            if piece.nbytes:
                yield piece

    def slices(self) -> Iterator[memoryview]:
        """All bytes in slices of at most 256 KiB, without copying."""
        for view in self._views:
            for start in range(0, view.nbytes, _SLICE_BYTES):
                yield view[start : start + _SLICE_BYTES]


class _Slices(Payload):
    """Sends a `Body` slice by slice, so that nothing waits in a buffer as a copy."""

    _autoclose = True
    _value: Body

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self._size = body.nbytes

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._value.read().decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self.write_with_length(writer, None)

    async def write_with_length(
        self,
        writer: AbstractStreamWriter,
        content_length: int | None,  # noqa: ARG002  # aiohttp's signature; the writer enforces it
    ) -> None:
        for piece in self._value.slices():
            await writer.write(piece)
            await writer.drain()


class Session(AIOHTTPSession):
    """The SDK's HTTP session with a large read buffer, sliced bodies and no resend of its own."""

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)  # type: ignore[misc]  # not in the stubs
        session._read_bufsize = _READ_BUFFER_BYTES  # noqa: SLF001  # no public setting here
        session._retry_connection = False  # noqa: SLF001  # no public setting; see above
        return session

    async def send(self, request: Any) -> Any:
        """Send one request; `request.body` is the SDK's own again afterwards, for its retries."""
        body = request.body
        if "Expect" in request.headers:
            del request.headers["Expect"]
        if isinstance(body, Body):
            request.body = _Slices(body)
        try:
            return await super().send(request)
        finally:
            request.body = body


def _open_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return opened


def _config(location: S3Location, options: S3Options) -> AioConfig:
    return AioConfig(
        http_session_cls=Session,
        connector_args={"keepalive_timeout": _KEEPALIVE_SECONDS, "socket_factory": _open_socket},
        warm_up_loader_caches=True,  # reads the SDK's service files on a thread, not on the loop
        max_pool_connections=options.max_connections,
        connect_timeout=options.connect_timeout,
        read_timeout=options.read_timeout,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        request_checksum_calculation="when_required",  # stores refuse what they do not know
        response_checksum_validation="when_required",
        user_agent=f"ec_s3/{__version__}",  # fixed: the SDK builds its own anew for each request
        signature_version="s3v4",
        s3={"addressing_style": location.style, "payload_signing_enabled": False},
    )


class Connection:
    """The client of one store: opened at first use, rebuilt after a fork or a closed loop."""

    def __init__(self, location: S3Location, options: S3Options) -> None:
        self._location = location
        self._options = options
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._client: S3Client | None = None
        self._stack = AsyncExitStack()

    async def client(self) -> S3Client:
        """The client of this process and loop.

        Raises:
            ConfigError: a profile or CA file that does not exist.
            RuntimeError: the store is in use on another event loop that is still alive.
        """
        self._claim()
        if self._client is not None:
            return self._client
        async with self._lock:
            if self._client is None:
                self._client = await self._open()
            return self._client

    async def aclose(self) -> None:
        """Close the client that belongs to this process and loop; idempotent."""
        if self._loop is None:
            return
        self._claim()
        self._client = None
        await self._stack.aclose()

    def _claim(self) -> None:
        loop, pid = asyncio.get_running_loop(), os.getpid()
        if self._loop is loop and self._pid == pid:
            return
        if self._loop is not None and self._pid != pid:
            _forked.append((self._client, self._stack))
        elif self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("the store is in use on another event loop; open one store for each")
        self._loop, self._pid = loop, pid
        self._lock, self._client, self._stack = asyncio.Lock(), None, AsyncExitStack()

    async def _open(self) -> S3Client:
        options, location = self._options, self._location
        if options.ca_bundle and not await asyncio.to_thread(Path(options.ca_bundle).is_file):
            raise ConfigError(f"ca_bundle: no such file: {options.ca_bundle!r}")
        if not options.verify:
            logger.warning("certificates of %s are not checked: verify is off", place(location))
        try:
            session = AioSession(profile=location.profile or None)
            session.register_component("data_loader", _loader)
            region = location.region or session.get_config_variable("region") or _DEFAULT_REGION
            opened: S3Client = await self._stack.enter_async_context(
                session.create_client(
                    "s3",
                    region_name=region,
                    endpoint_url=location.endpoint or None,
                    verify=(options.ca_bundle or None) if options.verify else False,
                    config=_config(location, options),
                )
            )
        except (boto.ProfileNotFound, boto.ConfigParseError, boto.InvalidRegionError) as exc:
            raise ConfigError(f"url: AWS profile or region cannot be used: {exc}") from exc
        return opened


_CREDENTIALS = "check the credentials of the AWS chain (environment, profile, role) and the clock"
_BUCKET = "check bucket, endpoint and addressing in the store's URL"
_POLICY = "grant the missing permission on the bucket"
_NETWORK = "check that the endpoint is up and reachable"
_PACE = "the store asks for a slower pace"

_BY_CODE: dict[str, tuple[type[RemoteError], str]] = {
    "NoSuchBucket": (RemoteDeniedError, _BUCKET),
    "PermanentRedirect": (RemoteDeniedError, "the bucket is in another region; set region in url"),
    "AuthorizationHeaderMalformed": (RemoteDeniedError, "check region in the store's URL"),
    **dict.fromkeys(
        (
            *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"),
            *("TokenRefreshRequired", "RequestTimeTooSkewed", "RequestExpired", "AccountProblem"),
        ),
        (RemoteDeniedError, _CREDENTIALS),
    ),
    **dict.fromkeys(
        (
            "SlowDown",
            "Throttling",
            "ThrottlingException",
            "TooManyRequests",
            "RequestLimitExceeded",
        ),
        (RemoteThrottledError, _PACE),
    ),
    "RequestTimeout": (RemoteTimeoutError, _NETWORK),
}
_BY_STATUS: dict[int, tuple[type[RemoteError], str]] = {
    401: (RemoteDeniedError, _CREDENTIALS),
    403: (RemoteDeniedError, _POLICY),
    408: (RemoteTimeoutError, _NETWORK),
    409: (RemoteUnavailableError, "another write of the same object is in progress"),
    412: (RemoteChangedError, "the object was replaced"),
    429: (RemoteThrottledError, _PACE),
    503: (RemoteThrottledError, _PACE),
}
_BY_TYPE: tuple[tuple[tuple[type[BaseException], ...], type[RemoteError], str], ...] = (
    (
        (
            *(boto.NoCredentialsError, boto.PartialCredentialsError, boto.NoAuthTokenError),
            *(boto.CredentialRetrievalError, boto.TokenRetrievalError, boto.SSOError),
        ),
        RemoteDeniedError,
        _CREDENTIALS,
    ),
    (
        (boto.SSLError, aiohttp.ClientSSLError),
        RemoteUnavailableError,
        "the server's certificate is not trusted; set ca_bundle or AWS_CA_BUNDLE to its CA",
    ),
    (
        (TimeoutError, boto.ReadTimeoutError, boto.ConnectTimeoutError),
        RemoteTimeoutError,
        _NETWORK,
    ),
    (
        (boto.ConnectionError, boto.HTTPClientError, aiohttp.ClientError, OSError),
        RemoteUnavailableError,
        _NETWORK,
    ),
)


def status_of(exc: ClientError) -> tuple[int, str]:
    """HTTP status and S3 error code; the code is cut to letters and digits, it comes from outside.

    HEAD has no error document: its code is the status as text.
    """
    status = int(exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = str(exc.response.get("Error", {}).get("Code", ""))
    return status, "".join(c for c in code if c.isalnum())[:40]


def retry_after(exc: BaseException | None) -> float:
    """Seconds that the server asks to wait, 0.0 when it does not say."""
    if not isinstance(exc, ClientError):
        return 0.0
    headers = exc.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    text = headers.get("retry-after", "")
    return float(text) if text.isdigit() else 0.0


def place(location: S3Location) -> str:
    """Bucket and endpoint for a message."""
    return f"bucket {location.bucket!r} at {location.endpoint or 'the AWS endpoint'}"


def map_error(exc: BaseException, *, operation: str, key: str, location: S3Location) -> RemoteError:
    """Our error for one of the SDK's; the caller raises it `from` the original."""
    kind, remedy, what = RemoteError, "see the cause", type(exc).__name__
    if isinstance(exc, ClientError):
        status, code = status_of(exc)
        what = f"{status} {code}" if code and code != str(status) else str(status)
        fallback = (RemoteUnavailableError, _NETWORK) if status >= 500 else (kind, remedy)
        kind, remedy = _BY_CODE.get(code) or _BY_STATUS.get(status) or fallback
    else:
        for types, mapped, advice in _BY_TYPE:
            if isinstance(exc, types):
                kind, remedy = mapped, advice
                break
    message = f"{operation} failed: {what} from {place(location)}; {remedy}"
    return kind(message, operation=operation, key=key)
