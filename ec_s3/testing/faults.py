"""`FaultServer`: a loopback HTTP proxy that makes an S3 server misbehave on purpose.

Put it in front of any S3 server (or of none) and script what goes wrong, request by request:

    with FaultServer(upstream="http://127.0.0.1:9000") as proxy:
        proxy.add(Fault(method="GET", status=503, retry_after=1, times=2))
        proxy.add(Fault(method="PUT", drop_response=True, times=1))
        ...                                   # use proxy.url as the endpoint
        assert proxy.count("PUT") == 2

The Host header is passed on unchanged, so signatures stay valid. The first fault that matches a
request and has `times` left is applied; requests without one are relayed. Without an upstream they
are answered 404.

Owns one thread with one event loop, and every connection on it. Bodies are held in memory whole:
it is for tests, not for traffic.

Locking: one lock guards the script and the log, which the test's thread and the loop share.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import ssl

_CODES = {
    400: "InvalidRequest",
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    429: "TooManyRequests",
    500: "InternalError",
    501: "NotImplemented",
    503: "SlowDown",
}
_NO_BODY = (204, 304)
_CHUNKED = re.compile(rb"(?i)\r\ntransfer-encoding:\s*chunked")
_PIECE_BYTES = 64 << 10
_WAIT_SECONDS = 10.0


@dataclass(slots=True, kw_only=True)
class Fault:
    """What goes wrong, and with which requests.

    Attributes:
        method: HTTP method, empty for all.
        path: regular expression searched in path and query, empty for all.
        header: regular expression searched in the request's header lines, empty for all; for
            example `(?i)x-amz-(sdk-)?checksum` for stores that refuse checksums.
        times: how often it may happen, None for always.
        chance: probability with which it happens to a matching request.
        skip: matching requests that are let through first.
        delay: seconds before anything else happens.
        hang: never answer.
        refuse: reset the connection instead of answering; the upstream sees nothing.
        drop_response: let the upstream do the work, then reset instead of answering.
        status: answer with this status and an S3 error document; the upstream sees nothing.
        code: S3 error code for `status`; the usual one when empty.
        retry_after: seconds for a Retry-After header.
        rate: bytes per second of the answer's body.
        cut_at: stop the body after so many bytes and close the connection.
        reset: close it with a reset, otherwise in order.
        stall_at: fall silent for good after so many bytes of the body.
        flip_at: invert the byte at this offset of the body.
        flip_sent_at: invert the byte at this offset of the request's body before it goes upstream.
        extra: bytes sent behind the announced end of the body.
        close: close the kept-alive connection after a whole answer, without announcing it.
        met: how often it has happened; counted by the server.
    """

    method: str = ""
    path: str = ""
    header: str = ""
    times: int | None = None
    chance: float = 1.0
    skip: int = 0
    delay: float = 0.0
    hang: bool = False
    refuse: bool = False
    drop_response: bool = False
    status: int = 0
    code: str = ""
    retry_after: int | None = None
    rate: float = 0.0
    cut_at: int | None = None
    reset: bool = False
    stall_at: int | None = None
    flip_at: int | None = None
    flip_sent_at: int | None = None
    extra: bytes = b""
    close: bool = False
    met: int = field(default=0, compare=False)

    def matches(self, request: Request) -> bool:
        """Whether the fault is about this request, whatever its counters say."""
        return (
            self.method in ("", request.method)
            and re.search(self.path, request.path) is not None
            and re.search(self.header, request.head) is not None
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it arrived: `head` is the request line and all header lines."""

    method: str
    path: str
    head: str = field(repr=False)
    nbytes: int

    def header(self, name: str) -> str:
        """A header's value, empty when it is missing."""
        found = re.search(rf"(?im)^{re.escape(name)}:[ \t]*(.*?)\r?$", self.head)
        return found[1] if found else ""


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    head: bytes
    body: bytes


class FaultServer:
    """The proxy; a context manager, usable from any thread.

    Args:
        upstream: `http(s)://host:port` of the S3 server behind it, empty for none.
        port: to listen on, 0 for any that is free.
        tls: server-side TLS context; the proxy then speaks https.
        upstream_tls: whom to trust as an https upstream.
        idle_seconds: close connections that were idle for so long, without a word.
        seed: of the dice for faults that have a `chance`.

    Attributes:
        url: endpoint of the proxy.
    """

    def __init__(
        self,
        upstream: str = "",
        *,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        upstream_tls: ssl.SSLContext | None = None,
        idle_seconds: float = 60.0,
        seed: int = 0,
    ) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname, parts.port) if upstream else None
        self._tls = tls
        self._upstream_tls = upstream_tls if parts.scheme == "https" else None
        self._idle_seconds = idle_seconds
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._log: list[Request] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = port
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self.accept()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.refuse()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_SECONDS)
        self._loop.close()

    def accept(self) -> None:
        """Listen, on the same port as before; the state after entering."""
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(_WAIT_SECONDS)

    def refuse(self) -> None:
        """Drop all connections and refuse new ones until `accept`."""
        asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result(_WAIT_SECONDS)

    def add(self, *faults: Fault) -> None:
        """Append to the script."""
        with self._lock:
            self._faults.extend(faults)

    def clear(self) -> None:
        """Forget script and log."""
        with self._lock:
            self._faults.clear()
            self._log.clear()

    def clear_log(self) -> None:
        """Forget the log and keep the script."""
        with self._lock:
            self._log.clear()

    @property
    def log(self) -> list[Request]:
        """Requests so far, in order of arrival."""
        with self._lock:
            return list(self._log)

    def count(self, method: str = "", path: str = "") -> int:
        """Requests so far with this method whose path matches the expression; empty means all."""
        return sum(
            method in ("", request.method) and re.search(path, request.path) is not None
            for request in self.log
        )

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._connected, "127.0.0.1", self._port, ssl=self._tls, limit=1 << 20
        )
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    async def _hang_up(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note(self, request: Request) -> Fault:
        """Log a request and pick its fault; one without effect when none is due."""
        with self._lock:
            self._log.append(request)
            for fault in self._faults:
                if fault.times == 0 or not fault.matches(request):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                if fault.chance < 1.0 and self._dice.random() >= fault.chance:
                    continue
                if fault.times is not None:
                    fault.times -= 1
                fault.met += 1
                return fault
        return Fault()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._serve(reader, writer):
                pass
            writer.close()
            await writer.wait_closed()
        except (OSError, EOFError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection stays open."""
        async with asyncio.timeout(self._idle_seconds):
            head = await reader.readuntil(b"\r\n\r\n")
        body = await _read_body(reader, head)
        method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        fault = self._note(Request(method, path, head.decode("latin-1"), len(body)))
        await asyncio.sleep(fault.delay)
        if fault.hang:
            await asyncio.Event().wait()
        if fault.refuse:
            return _reset(writer)
        sent = _flipped(body, fault.flip_sent_at)
        answer = _error(fault) if fault.status else await self._relay(method, head, sent)
        if fault.drop_response:
            return _reset(writer)
        writer.write(answer.head)
        if method != "HEAD" and answer.status not in _NO_BODY:
            whole = await _send_body(writer, answer.body, fault)
            if not whole:
                return _reset(writer) if fault.reset else False
        writer.write(fault.extra)
        await writer.drain()
        return not fault.close

    async def _relay(self, method: str, head: bytes, body: bytes) -> _Answer:
        """Ask the upstream, on a connection of its own."""
        if self._upstream is None:
            return _error(Fault(status=404))
        reader, writer = await asyncio.open_connection(
            *self._upstream, limit=1 << 20, ssl=self._upstream_tls
        )
        try:
            kept = re.sub(rb"(?i)\r\n(connection|expect):[^\r]*", b"", head)
            if _CHUNKED.search(head):  # a server may well insist on a length
                body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
            writer.write(kept[:-2] + b"Connection: close\r\n\r\n" + body)
            await writer.drain()
            while True:
                answer = await reader.readuntil(b"\r\n\r\n")
                status = int(answer.split(b" ", 2)[1])
                if status != 100:
                    break
            if method == "HEAD" or status in _NO_BODY:
                return _Answer(status, _kept_alive(answer), b"")
            received = await _read_body(reader, answer, to_end=True)
        finally:
            writer.transport.abort()  # nothing is left to be sent, or nobody waits for it
        plain = re.sub(rb"(?i)\r\n(transfer-encoding|content-length):[^\r]*", b"", answer)
        length = b"Content-Length: %d\r\n\r\n" % len(received)
        return _Answer(status, _kept_alive(plain[:-2] + length), received)


def _kept_alive(head: bytes) -> bytes:
    return re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head)


async def _read_body(reader: asyncio.StreamReader, head: bytes, *, to_end: bool = False) -> bytes:
    """The body behind a head; `to_end` where one without a length goes up to the end."""
    if _CHUNKED.search(head):
        pieces = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            pieces.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readuntil(b"\r\n")
        return b"".join(pieces)
    length = re.search(rb"(?i)\r\ncontent-length:\s*(\d+)", head)
    if length:
        return await reader.readexactly(int(length[1]))
    return await reader.read() if to_end else b""


async def _send_body(writer: asyncio.StreamWriter, body: bytes, fault: Fault) -> bool:
    """Send a body the way the fault has it; whether all of it was sent."""
    body = _flipped(body, fault.flip_at)
    ends = [end for end in (fault.cut_at, fault.stall_at) if end is not None]
    stop = min([len(body), *ends])
    step = max(1, int(fault.rate / 20)) if fault.rate else _PIECE_BYTES
    for start in range(0, stop, step):
        writer.write(body[start : min(stop, start + step)])
        await writer.drain()
        if fault.rate:
            await asyncio.sleep(step / fault.rate)
    if fault.stall_at is not None and stop == fault.stall_at:
        await asyncio.Event().wait()
    return stop == len(body)


def _flipped(body: bytes, at: int | None) -> bytes:
    if at is None or at >= len(body):
        return body
    return body[:at] + bytes([body[at] ^ 0xFF]) + body[at + 1 :]


def _error(fault: Fault) -> _Answer:
    code = fault.code or _CODES.get(fault.status, "InternalError")
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>made up by a test</Message></Error>"
    ).encode()
    lines = [f"HTTP/1.1 {fault.status} {code}", "Content-Type: application/xml"]
    if fault.retry_after is not None:
        lines.append(f"Retry-After: {fault.retry_after}")
    if fault.status not in _NO_BODY:
        lines.append(f"Content-Length: {len(body)}")
    return _Answer(fault.status, "\r\n".join((*lines, "", "")).encode(), body)


def _reset(writer: asyncio.StreamWriter) -> bool:
    opened = writer.get_extra_info("socket")
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False
