"""An embedded S3 server (moto) on a free loopback port, and pytest fixtures for it.

Owns the server's thread and a log of its requests. It is a mock: it checks neither secrets nor
digests, so it is for unit tests and demonstrations, never for measurements.
"""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Request:
    """A request that reached the server: method, path as sent, and the Host header."""

    method: str
    path: str
    host: str


class S3Server:
    """The server, as a context manager; thread-safe.

    Attributes:
        url: endpoint, `http://127.0.0.1:port`.
        log: requests in order of arrival.
    """

    def __init__(self) -> None:
        self.url = ""
        self.log: list[Request] = []
        self._lock = threading.Lock()
        self._server: Any = None
        self._wsgi: Any = None

    def __enter__(self) -> Self:
        from moto.moto_server.threaded_moto_server import ThreadedMotoServer  # slow to import

        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        self._wsgi = self._server._server  # noqa: SLF001  # moto offers no hook for a log
        inner = self._wsgi.app

        def logged(environ: dict[str, Any], start_response: Any) -> Any:
            request = Request(
                environ["REQUEST_METHOD"],
                environ.get("RAW_URI", environ["PATH_INFO"]),
                environ.get("HTTP_HOST", ""),
            )
            with self._lock:
                self.log.append(request)
            return inner(environ, start_response)

        self._wsgi.app = logged
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.stop()
        self._wsgi.server_close()  # moto leaves the socket open

    def create_bucket(self, name: str = "") -> str:
        """Make a bucket and return its name; without one, a name that no other test has."""
        name = name or f"test-{uuid.uuid4().hex[:16]}"
        client = self.client()
        try:
            client.create_bucket(Bucket=name)
        finally:
            client.close()
        return name

    def client(self) -> Any:
        """A synchronous boto3 client for this server, with fake keys; the caller closes it."""
        import boto3  # slow to import

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )

    def count(self, method: str = "", path: str = "") -> int:
        """Requests so far with this method whose path contains the text; empty matches all."""
        with self._lock:
            return sum(
                (not method or request.method == method) and path in request.path
                for request in self.log
            )


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for the whole test session."""
    with S3Server() as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    """A bucket of its own for each test."""
    return s3_server.create_bucket()
