"""Endpoints that are no S3 server, or not yet, on a port where one comes up later."""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import ssl
import threading
from typing import TYPE_CHECKING

from ec_s3.testing.faults import FaultServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PAGE = b"<!DOCTYPE html><html><head><title>Welcome</title></head><body><p>Hello.</body></html>\n"
_BACKLOG_FILLERS = 8


def taken_port() -> socket.socket:
    """A socket that holds a free port and does not listen: connections to it are refused."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def http(status: str, body: bytes = b"", *headers: str) -> Callable[[str], bytes]:
    """Answers every request alike."""

    def answer(method: str) -> bytes:
        lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "", ""]
        return "\r\n".join(lines).encode() + (b"" if method == "HEAD" else body)

    return answer


HTML = "Content-Type: text/html; charset=utf-8"
WEB_SERVERS: dict[str, Callable[[str], bytes]] = {
    "a page for everything": http("200 OK", PAGE, HTML, 'ETag: "65a0-1c9"'),
    "a page without a version for everything": http("200 OK", PAGE, HTML),
    "a yes to everything": http("200 OK", b'{"ok":true}', "Content-Type: application/json"),
    "an empty yes to everything": http("200 OK", b"", 'ETag: "d41d8"'),
    "nothing found": http("404 Not Found", PAGE, HTML),
    "nothing found, in XHTML": http(
        "404 Not Found", b'<?xml version="1.0"?><html><body>no</body></html>', HTML
    ),
    "a redirect to a login page": http("302 Found", PAGE, HTML, "Location: /login"),
    "methods not allowed": http("405 Not Allowed", PAGE, HTML),
    "bad requests": http("400 Bad Request", PAGE, HTML, "Connection: close"),
}


class _Strange(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, port: int, talk: Callable[[socket.socket], None]) -> None:
        super().__init__(("127.0.0.1", port), socketserver.BaseRequestHandler)
        self.talk = talk
        self.ended = threading.Event()
        self.connections: set[socket.socket] = set()

    def finish_request(self, request: object, client_address: object) -> None:
        del client_address
        assert isinstance(request, socket.socket)
        self.connections.add(request)
        with contextlib.suppress(OSError, ssl.SSLError):
            self.talk(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients hang up as they please."""


@contextlib.contextmanager
def strange(port: int, talk: Callable[[socket.socket], None]) -> Iterator[None]:
    """A server that does `talk` with every connection; in the end all of them are closed."""
    server = _Strange(port, talk)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        for connection in server.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        thread.join(10)


def answers(answer: Callable[[str], bytes]) -> Callable[[socket.socket], None]:
    """Speaks HTTP, as far as needed to say one thing."""

    def talk(connection: socket.socket) -> None:
        if connection.recv(1, socket.MSG_PEEK) == b"\x16":  # a client that speaks TLS
            connection.sendall(http("400 Bad Request", PAGE, HTML)("GET"))
            return
        with connection.makefile("rb") as stream:
            while line := stream.readline():
                method, length = line.split(b" ", 1)[0].decode("latin-1"), 0
                while (header := stream.readline()) not in (b"\r\n", b""):
                    if found := re.match(rb"(?i)content-length: *(\d+)", header):
                        length = int(found[1])
                stream.read(length)
                connection.sendall(answer(method))

    return talk


def silent(connection: socket.socket) -> None:
    """Reads everything and answers nothing."""
    while connection.recv(1 << 16):
        pass


def ssh(connection: socket.socket) -> None:
    """Talks first, and of something else."""
    connection.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n")
    connection.recv(1 << 16)
    connection.sendall(b"Invalid SSH identification string.\r\n")


def tls(certificate: Path) -> ssl.SSLContext:
    """What a server needs to speak TLS with the certificate and key of a PEM file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def speaks_tls(certificate: Path) -> Callable[[socket.socket], None]:
    """A web server on https, without a word for who does not speak TLS."""
    context = tls(certificate)

    def talk(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as inner:
            answers(http("200 OK", PAGE, HTML))(inner)

    return talk


@contextlib.contextmanager
def full_backlog(port: int) -> Iterator[None]:
    """An address that swallows whoever tries to connect."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(0)
        for _ in range(_BACKLOG_FILLERS):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield


@contextlib.contextmanager
def s3_at(port: int, upstream: str, certificate: Path | None = None) -> Iterator[FaultServer]:
    """The S3 server comes up on this port."""
    with FaultServer(
        upstream, port=port, tls=tls(certificate) if certificate is not None else None
    ) as server:
        yield server
