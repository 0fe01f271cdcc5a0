"""One end of a socket that carries whole JSON messages between two processes.

Sending never waits: what the socket does not take at once is kept, in order, and sent by a thread
of the channel's own. A peer that does not read for so long that the backlog reaches its bound is
as good as gone: the channel breaks, and never drops a single message. Messages may be of any size
up to that bound, and strings may hold anything, lone surrogates included.

`send` may be called from any thread; an end either waits in `receive`, on one thread, or takes
what is there with `receive_ready`, on one at a time.

Locking: one lock guards the backlog and the flag `broken`. Under it the socket is only written to
without waiting; the sending thread waits without it.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import threading
from collections import deque
from typing import Any

MAX_BACKLOG = 64 << 20
_LENGTH_BYTES = 4
_READ_BYTES = 256 << 10


class Channel:
    """Owns the socket, a connected stream one.

    Args:
        sock: the socket; blocking.
        name: name of the sending thread.

    Attributes:
        ended: whether `receive_ready` has met the end: no more messages will come.
    """

    def __init__(self, sock: socket.socket, *, name: str) -> None:
        self._sock = sock
        self._lock = threading.Condition()
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0
        self._broken = False
        self._inbox = bytearray()
        self.ended = False
        self._sender = threading.Thread(target=self._send_backlog, name=name, daemon=True)
        self._sender.start()

    @property
    def broken(self) -> bool:
        """Whether nothing can be sent any more; once True it stays so."""
        return self._broken

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, or keep it to be sent; dropped when the channel is broken."""
        # No ASCII escapes: an escaped pair of lone surrogates would read as one character.
        body = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
        raw = memoryview(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
        with self._lock:
            if self._broken:
                return
            if not self._backlog:
                raw = raw[self._send_now(raw) :]
            if not raw or self._broken:
                return
            if self._backlog_bytes + len(raw) > MAX_BACKLOG:
                self._break()
                self._shut(socket.SHUT_RDWR)
                return
            self._backlog.append(raw)
            self._backlog_bytes += len(raw)
            self._lock.notify_all()

    def _send_now(self, raw: memoryview) -> int:
        """Locked: how many bytes the socket took."""
        try:
            return self._sock.send(raw, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._break()
            return 0

    def _send_backlog(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._backlog or self._broken)
                if self._broken:
                    return
                raw = self._backlog[0]
            try:
                self._sock.sendall(raw)
            except OSError:
                with self._lock:
                    self._break()
                return
            with self._lock:
                if not self._broken:
                    self._backlog.popleft()
                    self._backlog_bytes -= len(raw)
                self._lock.notify_all()

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; None when the other end, or this one, has hung up."""
        head = self._receive(_LENGTH_BYTES)
        body = self._receive(int.from_bytes(head, "big")) if head else b""
        if not body:
            return None
        return _unpack(body)

    def receive_ready(self) -> list[dict[str, Any]]:
        """The messages that have come whole since the last call; never waits."""
        part = b"more"
        while part and not self.ended:
            try:
                part = self._sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            self._inbox += part
            self.ended = not part
        messages, at = [], 0
        while len(self._inbox) >= at + _LENGTH_BYTES:
            begin = at + _LENGTH_BYTES
            stop = begin + int.from_bytes(self._inbox[at:begin], "big")
            if len(self._inbox) < stop:
                break
            messages.append(_unpack(self._inbox[begin:stop]))
            at = stop
        del self._inbox[:at]
        return messages

    def wait_ready(self, timeout: float) -> None:
        """Wait until there is something to receive, or the end, at most so many seconds."""
        waiting = select.poll()
        with contextlib.suppress(ValueError, OSError):  # closed meanwhile
            waiting.register(self._sock, select.POLLIN)
            waiting.poll(max(0.0, timeout) * 1000)

    def _receive(self, nbytes: int) -> bytes:
        """Exactly so many bytes, none at the end."""
        body = bytearray()
        while len(body) < nbytes:
            try:
                part = self._sock.recv(nbytes - len(body))
            except OSError:
                return b""
            if not part:
                return b""
            body += part
        return bytes(body)

    def drain(self, timeout: float) -> bool:
        """Wait until everything is sent; whether it was."""
        with self._lock:
            self._lock.wait_for(lambda: self._broken or not self._backlog, timeout)
            return not self._broken and not self._backlog

    def stop_receiving(self) -> None:
        """Let `receive` answer None from now on; what is to be sent still is.

        The other end finds that it cannot send any more.
        """
        self._shut(socket.SHUT_RD)

    def stop_receiving_on(self, number: signal.Signals) -> None:
        """Do that when this process gets a signal; for its main thread, once.

        A handler in Python would not run before the main thread has left `receive`.
        """
        heard, told = socket.socketpair()
        told.setblocking(False)
        signal.set_wakeup_fd(told.detach())
        signal.signal(number, lambda *_: None)

        def heed() -> None:
            heard.recv(1)
            self.stop_receiving()

        threading.Thread(target=heed, name="ec_s3-signal", daemon=True).start()

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(how)

    def _break(self) -> None:
        """Locked: nothing is sent any more; what the other end has sent can still be received."""
        self._broken = True
        self._backlog.clear()
        self._backlog_bytes = 0
        self._lock.notify_all()

    def hang_up(self) -> None:
        """End both directions; `receive` answers None. Idempotent."""
        self._shut(socket.SHUT_RDWR)
        with self._lock:
            self._break()

    def close(self) -> None:
        """Hang up and give the socket back, once no other thread is in `receive`; idempotent."""
        self.hang_up()
        self._sender.join(2.0)
        self._sock.close()


def _unpack(body: bytes | bytearray) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(body.decode("utf-8", "surrogatepass"))
    return message
