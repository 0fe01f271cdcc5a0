"""A byte server in a process of its own: S3's GET, HEAD, PUT and DELETE, and little else.

Fast enough that it is not what is measured: a thread per connection, which sends straight from the
stored bytes; the raw HTTP rows show its limit. Objects are kept by path, so path-style and
virtual-hosted clients both work; signatures are not checked. `POST /-/control` with a JSON object
sets it up: `delay` (seconds before each answer), `rate` (bytes per second of all bodies that it
sends or receives, 0 for no limit), `alias` ({new path: old path}), `clear` (true drops all).

Locking: one lock guards the objects, one the link's clock; neither is held while sending.
"""

from __future__ import annotations

import io
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

PIECE = 64 << 10
NOT_FOUND = b"<Error><Code>NoSuchKey</Code></Error>"


@dataclass(slots=True)
class Stored:
    body: bytearray
    etag: str
    modified: str


@dataclass(slots=True)
class Link:
    """A link of limited speed that all connections share: each piece waits for its turn."""

    rate: float = 0.0
    free_at: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pass_on(self, nbytes: int) -> None:
        with self.lock:
            # A millisecond may be caught up after an idle moment, so that sleeping too long
            # does not cost rate.
            self.free_at = max(self.free_at, time.monotonic() - 0.001) + nbytes / self.rate
            wait = self.free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


class State:
    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.lock = threading.Lock()
        self.delay = 0.0
        self.link = Link()
        self.requests: dict[str, int] = {}
        self.uploads: dict[str, dict[int, bytearray]] = {}

    def control(self, order: dict[str, Any]) -> dict[str, Any]:
        if "delay" in order:
            self.delay = float(order["delay"])
        if "rate" in order:
            self.link = Link(rate=float(order["rate"]))
        with self.lock:
            if order.get("clear"):
                self.objects.clear()
            for new, old in order.get("alias", {}).items():
                self.objects[new] = self.objects[old]
            sizes = {path: len(item.body) for path, item in self.objects.items()}
        used = resource.getrusage(resource.RUSAGE_SELF)
        counts, self.requests = self.requests, {}
        return {"sizes": sizes, "cpu": used.ru_utime + used.ru_stime, "requests": counts}


def stamp() -> str:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())


class Connection:
    """One client's connection; its thread's whole work."""

    def __init__(self, sock: socket.socket, state: State) -> None:
        self.sock = sock
        self.state = state
        self.reader = io.BufferedReader(socket.SocketIO(sock, "r"), PIECE)

    def serve(self) -> None:
        with self.sock, self.reader:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                while self.answer_one():
                    pass
            except (OSError, ValueError):
                return  # the client went away

    def answer_one(self) -> bool:
        line = self.reader.readline()
        if not line:
            return False
        method, path, _ = line.decode("latin-1").split(" ", 2)
        headers: dict[str, str] = {}
        while (line := self.reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        path, _, query = path.partition("?")
        path = unquote(path)
        if headers.get("expect", "").lower() == "100-continue":
            self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self.receive(int(headers.get("content-length", "0")))
        if path == "/-/control":
            answer = json.dumps(self.state.control(json.loads(body or b"{}"))).encode()
            self.send("200 OK", answer, counted=False)
            return True
        self.state.requests[method] = self.state.requests.get(method, 0) + 1
        if self.state.delay:
            time.sleep(self.state.delay)
        if "uploadId=" in query or query.startswith("uploads"):
            self.multipart(method, path, query, body)
        else:
            self.act(method, path, headers, body)
        return True

    def receive(self, nbytes: int) -> bytearray:
        body = bytearray(nbytes)
        view, at, link = memoryview(body), 0, self.state.link
        while at < nbytes:
            limit = min(nbytes, at + PIECE) if link.rate else nbytes
            got = self.reader.readinto(view[at:limit])
            if not got:
                raise ConnectionError("cut body")
            if link.rate:
                link.pass_on(got)
            at += got
        return body

    def act(self, method: str, path: str, headers: dict[str, str], body: bytearray) -> None:
        state = self.state
        with state.lock:
            found = state.objects.get(path)
        if method == "PUT":
            if found is not None and headers.get("if-none-match") == "*":
                self.send("412 Precondition Failed", b"")
                return
            item = Stored(body, f'"{time.time_ns():032x}"', stamp())
            with state.lock:
                state.objects[path] = item
            self.send("200 OK", b"", item)
        elif method == "DELETE":
            with state.lock:
                state.objects.pop(path, None)
            self.send("204 No Content", b"")
        elif found is None:
            self.send("404 Not Found", b"" if method == "HEAD" else NOT_FOUND)
        elif method == "HEAD":
            self.send("200 OK", b"", found, length=len(found.body))
        else:
            self.send_object(found, headers)

    def multipart(self, method: str, path: str, query: str, body: bytearray) -> None:
        """An upload in parts, as some clients send large objects; its id is its path."""
        parts = self.state.uploads.setdefault(path, {})
        number = re.search(r"partNumber=(\d+)", query)
        if method == "PUT" and number is not None:
            parts[int(number[1])] = body
            self.send("200 OK", b"", Stored(body, f'"part-{number[1]}"', ""))
        elif query.startswith("uploads"):
            answer = "<InitiateMultipartUploadResult><UploadId>1</UploadId>"
            self.send("200 OK", (answer + "</InitiateMultipartUploadResult>").encode())
        elif method == "POST":
            whole = bytearray().join(parts[n] for n in sorted(parts))
            self.state.uploads.pop(path)
            with self.state.lock:
                self.state.objects[path] = Stored(whole, f'"{time.time_ns()}-2"', stamp())
            answer = "<CompleteMultipartUploadResult><ETag>x</ETag>"
            self.send("200 OK", (answer + "</CompleteMultipartUploadResult>").encode())
        else:
            self.send("404 Not Found", NOT_FOUND)

    def send_object(self, found: Stored, headers: dict[str, str]) -> None:
        wanted = headers.get("if-match", found.etag)
        if wanted not in (found.etag, "*"):
            self.send("412 Precondition Failed", b"")
            return
        body, size = memoryview(found.body), len(found.body)
        span = headers.get("range", "")
        if not span.startswith("bytes="):
            self.send("200 OK", body, found)
            return
        first, _, last = span[6:].partition("-")
        begin = int(first) if first else max(0, size - int(last))
        end = min(size, int(last) + 1) if first and last else size
        if begin >= size:
            self.send("416 Range Not Satisfiable", b"")
            return
        extra = f"Content-Range: bytes {begin}-{end - 1}/{size}\r\n"
        self.send("206 Partial Content", body[begin:end], found, extra=extra)

    def send(
        self,
        status: str,
        body: bytes | memoryview,
        item: Stored | None = None,
        *,
        length: int | None = None,
        extra: str = "",
        counted: bool = True,
    ) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n"
        if item is not None:
            head += f"ETag: {item.etag}\r\nLast-Modified: {item.modified}\r\n"
            head += "Accept-Ranges: bytes\r\nContent-Type: application/octet-stream\r\n"
        start = (head + extra + "\r\n").encode()
        link = self.state.link
        if len(body) <= PIECE and not link.rate:
            self.sock.sendall(start + bytes(body))
            return
        self.sock.sendall(start)
        if not link.rate or not counted:
            self.sock.sendall(body)
            return
        view = memoryview(body)
        for at in range(0, len(view), PIECE):
            piece = view[at : at + PIECE]
            link.pass_on(len(piece))
            self.sock.sendall(piece)


def serve() -> None:
    """Listen on a free port of the loopback, print it, and serve until stdin ends."""
    state = State()
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(listener.getsockname()[1], flush=True)

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=Connection(sock, state).serve, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


class ByteServer:
    """The server from outside: starts its process, and controls it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ, PYTHONUNBUFFERED="1"),
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def control(self, **order: Any) -> dict[str, Any]:
        """Send an order; the answer holds all objects' sizes, CPU seconds and request counts."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("POST", "/-/control", json.dumps(order))
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
        finally:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


if __name__ == "__main__":
    serve()
