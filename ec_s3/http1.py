"""One HTTP/1.1 connection, which receives bodies straight into the caller's buffer.

Owns a socket of the direct transport. Runs on one event loop. It never repeats a request, follows
a redirect or asks a proxy, and knows nothing of S3. Every wait for the peer ends, at the latest
after `read_timeout` of silence. Whatever ends a request before its answer was read to the end,
cancellation included, closes the connection, and from then on no buffer of the caller is written.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import sys
from typing import TYPE_CHECKING, cast

from ec_s3.http_grammar import Answer, BadAnswerError, HungUpError, parse_head, read_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Told = Callable[[int], None]

_BUFFER_BYTES = 64 << 10
_HEAD_BYTES = 32 << 10  # largest head; the rest is room for bytes that overtake their reader
_IDLE_SECONDS = 8.0  # below the idle time after which servers hang up


def probe_when_idle(opened: socket.socket) -> None:
    """Let the kernel find out whether a silent peer is still there."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class HttpConnection(asyncio.BufferedProtocol):
    """One connection: one request at a time, each followed by reading its answer to the end."""

    def __init__(self, read_timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = cast("asyncio.Transport", None)  # until connection_made
        self._read_timeout = read_timeout
        self._space = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._space)
        self._begin = self._end = 0  # of what has been received into the buffer and not been taken
        self._view: memoryview | None = None  # where the body goes, past the buffer
        self._at = 0
        self._plain = -1  # the socket's descriptor, where bytes come as they are sent
        self._waiting = select.poll()  # tells of bytes that the loop has not read yet
        self._told: Told | None = None
        self._left: int | None = 0  # bytes of the body to come; None: not known beforehand
        self._chunked = False
        self._bodiless = False
        self._busy = False
        self._used = False  # an earlier request was answered on it
        self._untouched = True  # nothing has arrived since the last request began
        self._kept = True
        self._answer: Answer | None = None
        self._failure: Exception | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._full = False
        self._unsent = 0
        self._paused = False
        self._heard = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up the socket."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=1)  # little is ever copied; 0 hangs with TLS
        self._timer = self._loop.call_later(self._step(), self._tick)
        opened: socket.socket = transport.get_extra_info("socket")
        probe_when_idle(opened)
        self._waiting.register(opened.fileno(), select.POLLIN)
        if transport.get_extra_info("sslcontext") is None:
            self._plain = opened.fileno()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # the loop's signature
        """Where the next bytes go: the caller's buffer while a body is read into one."""
        if self._view is not None:
            return self._view[self._at :]
        return self._buffer[self._end : _BUFFER_BYTES if self._answer else _HEAD_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Take in what has arrived."""
        self._heard = self._loop.time()
        self._untouched = False
        if self._view is not None:
            self._at += nbytes
            if self._at == self._view.nbytes:
                self._view = None
                self._wake()
            elif self._told is not None:
                self._told(self._at)
            return
        self._end += nbytes
        if not self._busy:
            self._fail(BadAnswerError("the server sent something unasked"))
            return
        if self._answer is None:
            try:
                self._find_head()
            except BadAnswerError as exc:
                self._fail(exc)
                return
        else:
            self._wake()
        if self._end == _BUFFER_BYTES:
            self._paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        """The kernel takes no more for now."""
        self._full = True

    def resume_writing(self) -> None:
        """All that was written is with the kernel."""
        self._full = False
        self._heard = self._loop.time()
        self._wake()

    def eof_received(self) -> None:
        """The peer has hung up."""
        self._ended = True
        self._fail(ConnectionResetError("the server closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self._plain = -1
        if self._timer is not None:
            self._timer.cancel()
        if self._failure is None:
            self._failure = exc or ConnectionResetError("the connection is closed")
        self._wake()

    # What a request does

    async def request(
        self, head: bytes, pieces: Iterable[memoryview], *, bodiless: bool = False
    ) -> Answer:
        """Send a request and wait for the head of its answer.

        A server that answers before it has heard all is not told the rest.

        Args:
            head: everything up to the empty line, that included.
            pieces: body, sent piece by piece; unchanged until the call returns.
            bodiless: the answer has no body whatever its head says (HEAD).

        Raises:
            HungUpError: the peer closed it, most likely before it saw the request.
            OSError: the connection is gone, silent or sends something else than HTTP.
        """
        self._busy = self._untouched = True
        self._bodiless, self._answer, self._left = bodiless, None, None
        self._heard = self._loop.time()
        try:
            return await self._exchange(head, pieces)
        except ConnectionError as exc:
            if self._used and self._untouched:
                raise HungUpError("the server had closed a kept connection") from exc
            raise

    async def _exchange(self, head: bytes, pieces: Iterable[memoryview]) -> Answer:
        if self._failure is not None:
            raise self._failure
        self._transport.write(head)
        for piece in pieces:
            while self._full and self._answer is None:
                await self._pause()
            if self._answer is not None or self._transport.is_closing():
                self._kept = False
                break
            self._transport.write(piece)
        while self._answer is None:
            await self._pause()
        return self._answer

    async def readinto(self, view: memoryview, told: Told | None = None) -> int:
        """Fill a buffer with what comes next of a body with an announced length.

        Args:
            view: the buffer.
            told: hears how many bytes are there, whenever some come before the last.

        Returns:
            Bytes received: fewer than asked for when the body or the connection ended, 0 at the
            end of the body.

        Raises:
            OSError: the connection failed and nothing came before.
        """
        assert self._left is not None
        view = view[: self._left]
        count = min(view.nbytes, self._end - self._begin)
        if count:
            view[:count] = self._buffer[self._begin : self._begin + count]
            self._begin += count
            self._left -= count
        if count < view.nbytes:
            if told is not None and count:
                told(count)
            self._told = told
            count = await self._receive(view, count)
        return count

    async def document(self, limit: int) -> bytes:
        """The whole body of an answer, however it is delimited.

        Raises:
            BadAnswerError: it is longer than `limit`.
            OSError: the connection failed before its end.
        """
        if self._left is not None:
            if self._left > limit:
                raise BadAnswerError("the answer's document is too large")
            body = memoryview(bytearray(self._left))
            received = 0
            while received < body.nbytes:
                received += await self.readinto(body[received:])
            return bytes(body)
        if self._chunked:
            document, behind = await read_chunks(self._some, limit)
            self._kept = self._kept and not behind
            self._left = 0
            return document
        raw = bytearray()
        while more := await self._some():
            raw += more
            if len(raw) > limit:
                raise BadAnswerError("the answer's document is too large")
        return bytes(raw)

    def rest(self) -> bool:
        """End a request; whether the connection may serve another one."""
        if (
            not self._kept
            or self._failure is not None
            or self._left != 0
            or self._begin != self._end
            or self._transport.get_write_buffer_size()
        ):
            self.abort()
            return False
        self._busy = False
        self._used = True
        self._begin = self._end = 0
        self._heard = self._loop.time()
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return True

    @property
    def alive(self) -> bool:
        """Whether it may be used again: nobody hung up, and nothing came behind the last answer."""
        failed = self._failure is not None or self._transport.is_closing()
        return not failed and not self._waiting.poll(0)

    def abort(self) -> None:
        """Close at once; nothing is received any more."""
        self._view = self._told = None
        self._fail(ConnectionAbortedError("the connection was given up"))

    # Within

    def _find_head(self) -> None:
        while True:
            stop = self._space.find(b"\r\n\r\n", self._begin, self._end)
            if stop < 0:
                if self._end == _HEAD_BYTES:
                    raise BadAnswerError("the answer's head is too large")
                return
            answer, kept = parse_head(bytes(self._buffer[self._begin : stop]))
            self._begin = stop + 4
            if answer.status == 101:
                raise BadAnswerError("the server switches protocols")
            if answer.status >= 200:
                break
        self._chunked = "transfer-encoding" in answer.headers
        self._kept = self._kept and kept and not (self._chunked and answer.length is not None)
        if self._bodiless or answer.status in (204, 304):
            self._left = 0
        elif self._chunked or answer.length is None:
            self._left = None
            self._kept = self._kept and self._chunked
            answer = Answer(answer.status, answer.headers, None)  # chunks end where they say
        else:
            self._left = answer.length
        self._answer = answer
        self._wake()

    async def _receive(self, view: memoryview, before: int) -> int:
        """Receive straight into a view, from a position on until it is full; see `readinto`."""
        if self._failure is not None:
            if before:
                return before
            raise self._failure
        assert self._left is not None
        self._begin = self._end = 0
        self._view, self._at = view, before
        self._glance()
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        try:
            while self._view is not None:
                await self._pause()
        except OSError:
            if not self._at:
                raise
        except BaseException:
            self.abort()
            raise
        finally:
            self._view = self._told = None
        self._left -= self._at - before
        return self._at

    def _glance(self) -> None:
        """Take what has arrived by now, which the loop would bring a turn later."""
        if self._plain < 0 or self._view is None:
            return
        try:
            nbytes = os.readv(self._plain, [self._view[self._at :]])
        except OSError:
            return  # nothing yet, or the loop will find out what is wrong
        if nbytes:
            self.buffer_updated(nbytes)

    async def _some(self) -> bytes:
        """What has arrived and was not taken, at least a byte; none at an orderly end."""
        if self._begin == self._end:
            self._begin = self._end = 0
            if self._paused:
                self._paused = False
                self._transport.resume_reading()
        while self._begin == self._end:
            if self._ended and not self._chunked:
                return b""
            await self._pause()
        data = bytes(self._buffer[self._begin : self._end])
        self._begin = self._end
        return data

    async def _pause(self) -> None:
        """Wait until something changes.

        Raises:
            OSError: the connection is gone.
        """
        if self._failure is not None:
            raise self._failure
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, exc: Exception) -> None:
        if self._failure is None:
            self._failure = exc
        self._transport.abort()
        self._wake()

    def _step(self) -> float:
        return min(self._read_timeout, _IDLE_SECONDS)

    def _tick(self) -> None:
        """One timer for the life of the connection: none is set or cancelled by a request."""
        now, unsent = self._loop.time(), self._transport.get_write_buffer_size()
        if unsent != self._unsent:  # a slow peer takes what it is sent: that is no silence
            self._unsent, self._heard = unsent, now
        limit = self._read_timeout if self._busy else _IDLE_SECONDS
        left = self._heard + limit - now
        if left <= 0:
            self._fail(TimeoutError("the server fell silent"))
        else:
            self._timer = self._loop.call_later(min(left, self._step()), self._tick)
