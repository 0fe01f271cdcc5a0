"""How bytes travel to S3: the SDK's client, its HTTP session and request bodies.

Owns the tuning of aiobotocore and aiohttp, and the life of the one client that a store keeps. Runs
on the event loop that first used the store; a second live loop is refused, and after a fork or a
closed loop the client is built anew. It never touches credentials: see `ec_s3.credentials`.

Locking: none. One task at a time opens a client, for whoever waits for it, and goes on when they
give up; all that a `Connection` holds changes between two awaits.

Closed traps: aiohttp sends an idempotent request again by itself when the answer is lost, so a
conditional PUT reports 412 for its own write (`_retry_connection`); large bodies given to aiohttp
whole are copied (`Body` sends slices); with checksums "when_required" the SDK hashes whole bodies
again unless payload signing is off; an `Expect` header that a proxy drops stalls the request;
aiohttp drops the answer to a HEAD that a server ends as if it had a body (`AnswerReader`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_writer import StreamWriter
from aiohttp.payload import Payload
from botocore import exceptions as boto
from botocore.loaders import create_loader
from botocore.utils import parse_timestamp

from ec_s3 import __version__
from ec_s3.credentials import Keeper
from ec_s3.errors import ClosedError, ConfigError
from ec_s3.failures import place, refuses_credentials
from ec_s3.http1 import probe_when_idle
from ec_s3.http_grammar import http_date
from ec_s3.trust import tls_context

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

    import aiohttp
    from aiohttp.abc import AbstractStreamWriter
    from types_aiobotocore_s3.client import S3Client

    from ec_s3.store import Buffer
    from ec_s3.url import S3Location, S3Options

    Wrapper = Callable[[S3Client, AioSession], AbstractAsyncContextManager[S3Client]]

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often the SDK sends one request, the first time included."""

_SLICE_BYTES = 512 << 10  # a slice that the kernel takes at once is never copied by asyncio
_READ_BUFFER_BYTES = 4 << 20
_KEEPALIVE_SECONDS = 8  # below the idle time after which servers hang up
_DEFAULT_REGION = "us-east-1"
_HEAD_END = b"\r\n\r\n"
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
        """All bytes in slices of at most 512 KiB, without copying."""
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
        if isinstance(writer, StreamWriter) and writer.transport is not None:
            writer.transport.set_write_buffer_limits(high=1)  # else it copies what could wait here
        for piece in self._value.slices():
            await writer.write(piece)
            await writer.drain()


class AnswerReader(ResponseHandler):
    """Reads answers; that to a HEAD is over with its head, whatever a server sends behind it.

    aiohttp would lose the head with what it cannot understand, if both come at once. Now it is told
    of them one after the other: the answer counts, and the connection serves no other request.
    """

    _before = b""  # the latest bytes: a head's end may be cut in two

    def data_received(self, data: bytes) -> None:
        """Take in what has arrived."""
        if self._skip_payload:
            seen = self._before + data
            end = seen.find(_HEAD_END) + len(_HEAD_END) - len(self._before)
            self._before = seen[-len(_HEAD_END) + 1 :]
            if _HEAD_END in seen and end < len(data):
                super().data_received(data[:end])
                data = data[end:]
        super().data_received(data)


class Session(AIOHTTPSession):
    """The SDK's HTTP session with a large read buffer, sliced bodies and no resend of its own."""

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)  # type: ignore[misc]  # not in the stubs
        assert session.connector is not None
        reader: Any = partial(AnswerReader, loop=asyncio.get_running_loop())
        session.connector._factory = reader  # noqa: SLF001  # no public setting here
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
    probe_when_idle(opened)
    return opened


def _timestamp(value: str) -> datetime.datetime | None:
    """Dates of headers, of which the SDK's own parser costs a tenth of a small request.

    None for what is no date, by which the SDK would fail.
    """
    try:
        return http_date(value) or parse_timestamp(value)
    except (ValueError, RuntimeError, OverflowError):
        return None


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
        # Directory buckets have sessions, and a signature of their own that the SDK chooses.
        signature_version=None if location.has_sessions else "s3v4",
        s3={"addressing_style": location.style, "payload_signing_enabled": False},
    )


def _session(location: S3Location) -> AioSession:
    session = AioSession(profile=location.profile or None)
    session.register_component("data_loader", _loader)
    parsers = session.get_component("response_parser_factory")
    parsers.set_parser_defaults(timestamp_parser=_timestamp)
    region = location.region or session.get_config_variable("region") or _DEFAULT_REGION
    session.set_config_variable("region", region)
    return session


class Connection:
    """The client of one store: opened at first use, rebuilt after a fork or a closed loop.

    Args:
        location: where the store is.
        options: how to talk to it.
        wrap: puts something with the same verbs in the place of the SDK's client.
    """

    def __init__(
        self, location: S3Location, options: S3Options, *, wrap: Wrapper | None = None
    ) -> None:
        self._location = location
        self._options = options
        self._wrap = wrap
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[S3Client] | None = None
        self._client: S3Client | None = None
        self._keeper: Keeper | None = None
        self._stack = AsyncExitStack()

    async def client(self) -> S3Client:
        """The client of this process and loop.

        Raises:
            ClosedError: it was closed meanwhile.
            ConfigError: a profile or CA file that does not exist.
            RuntimeError: the store is in use on another event loop that is still alive.
        """
        self._claim()
        if self._client is not None:
            return self._client
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
            self._opening.add_done_callback(self._opened)
        opening = self._opening
        await asyncio.wait([opening])  # whoever gives up does not end it: the next one needs it
        if opening.cancelled():
            raise ClosedError("the store is closed")
        return opening.result()

    def failed(self, exc: BaseException) -> None:
        """Hear of a failure: it may say that the credentials have ended."""
        if self._keeper is not None and refuses_credentials(exc):
            self._keeper.refused()

    async def aclose(self) -> None:
        """Close the client that belongs to this process and loop; idempotent."""
        if self._loop is None:
            return
        self._claim()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        self._client = None
        await self._stack.aclose()

    def _claim(self) -> None:
        loop, pid = asyncio.get_running_loop(), os.getpid()
        if self._loop is loop and self._pid == pid:
            return
        if self._loop is not None and self._pid != pid:
            _forked.append((self._client, self._stack, self._opening))
        elif self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("the store is in use on another event loop; open one store for each")
        self._loop, self._pid = loop, pid
        self._opening, self._client, self._stack = None, None, AsyncExitStack()

    def _opened(self, opening: asyncio.Task[S3Client]) -> None:
        if opening is self._opening:
            self._opening = None
        if not opening.cancelled():
            opening.exception()  # told to whoever waits, which may be nobody

    async def _open(self) -> S3Client:
        async with AsyncExitStack() as stack:
            client = await self._build(stack)
            self._client, self._stack = client, stack.pop_all()
        return client

    async def _build(self, stack: AsyncExitStack) -> S3Client:
        options, location = self._options, self._location
        if not options.verify:
            logger.warning("certificates of %s are not checked: verify is off", place(location))
        try:
            session = _session(location)
            region = session.get_config_variable("region")
            keeper = Keeper(lambda: _session(location).get_credentials(), place=place(location))
            session.register_component("credential_provider", keeper)
            if options.ca_bundle or not location.endpoint.startswith("http:"):
                await asyncio.to_thread(tls_context, options, session)  # whether it can be used
            self._keeper = keeper
            stack.push_async_callback(keeper.aclose)
            keeper.ask()
            opened: S3Client = await stack.enter_async_context(
                session.create_client(
                    "s3",
                    region_name=region,
                    endpoint_url=location.endpoint or None,
                    verify=(options.ca_bundle or None) if options.verify else False,
                    config=_config(location, options),
                )
            )
            if self._wrap is not None:
                opened = await stack.enter_async_context(self._wrap(opened, session))
        except (boto.ProfileNotFound, boto.ConfigParseError, boto.InvalidRegionError) as exc:
            raise ConfigError(f"url: AWS profile or region cannot be used: {exc}") from exc
        except ConfigError:
            raise
        except ValueError as exc:  # its text repeats the endpoint, whatever is in it
            raise ConfigError("url: the endpoint is no URL that the SDK can use") from exc
        return opened
