"""An embedded S3 server that remembers when each request came and how it was answered.

For statements about what vLLM's processes fetched and stored, counted where no client can cheat:
at the server. Owns one bucket. Requests are noted on the server's threads, under a lock, when their
answer has been produced.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote

from ec_s3.errors import InvalidKeyError
from ec_s3.keys import CONTROL_NAME, INDEX_NAME, parse_key
from ec_s3.testing.moto import S3Server

if TYPE_CHECKING:
    from collections.abc import Iterable


_POLLED = (f"/{CONTROL_NAME}", f"/{INDEX_NAME}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request and its answer.

    Attributes:
        time: arrival, in seconds since the epoch.
        key: key in the bucket; empty for a request about the bucket itself.
        status: HTTP status of the answer.
        nbytes: length of the answer's body as declared, 0 when it is not.
    """

    time: float
    method: str
    key: str
    status: int
    nbytes: int

    @property
    def moved_item(self) -> bool:
        """Whether the body of an encoder output went up or down."""
        return self.method in ("GET", "PUT") and 200 <= self.status < 300 and is_item(self.key)


class RecordedServer(S3Server):
    """`S3Server` with one bucket and a record of its traffic; thread-safe."""

    def __init__(self, *, bucket: str = "ec-s3") -> None:
        super().__init__()
        self.bucket = bucket
        self._served: list[Served] = []
        self._served_lock = threading.Lock()

    def __enter__(self) -> Self:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request, kept here
        super().__enter__()
        inner = self._wsgi.app

        def recorded(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            arrived = time.time()
            answers: list[tuple[str, list[tuple[str, str]]]] = []

            def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
                answers.append((status, headers))
                return start_response(status, headers, *rest)

            body: Iterable[bytes] = inner(environ, start)
            self._note(environ, arrived, answers[0])
            return body

        self._wsgi.app = recorded
        self.create_bucket(self.bucket)
        self._miss()
        return self

    def _miss(self) -> None:
        """Ask for nothing: moto's first error takes a second, in which it answers nobody."""
        client = self.client()
        with contextlib.closing(client), contextlib.suppress(client.exceptions.NoSuchKey):
            client.get_object(Bucket=self.bucket, Key="none")
        with self._served_lock:
            self._served.clear()

    def location(self, prefix: str, *, endpoint: str = "") -> str:
        """URL of a prefix for `ECConfig.url`, optionally through a proxy's endpoint."""
        return f"s3://{self.bucket}/{prefix}?endpoint={endpoint or self.url}&region=us-east-1"

    def served(self, prefix: str = "") -> list[Served]:
        """Requests so far for keys that start so, in order of their answers.

        Looks at control documents and indexes are left out: they come now and then, whatever a
        test does.
        """
        with self._served_lock:
            return [
                request
                for request in self._served
                if request.key.startswith(prefix) and not request.key.endswith(_POLLED)
            ]

    def items(self, prefix: str) -> dict[str, int]:
        """Key -> stored bytes of every encoder output below a prefix of the bucket."""
        client = self.client()
        try:
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=f"{prefix}/"
            )
            objects = [row for page in pages for row in page.get("Contents", ())]
        finally:
            client.close()
        return {row["Key"]: row["Size"] for row in objects if is_item(row["Key"])}

    def _note(
        self, environ: dict[str, Any], arrived: float, answer: tuple[str, list[tuple[str, str]]]
    ) -> None:
        status, headers = answer
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        path = unquote(environ.get("RAW_URI", environ["PATH_INFO"]).partition("?")[0])
        request = Served(
            time=arrived,
            method=environ["REQUEST_METHOD"],
            key=path.removeprefix(f"/{self.bucket}").lstrip("/"),
            status=int(status.partition(" ")[0]),
            nbytes=int(lengths[0]) if lengths else 0,
        )
        with self._served_lock:
            self._served.append(request)


def is_item(key: str) -> bool:
    """Whether a key of the bucket, below any prefix, is that of an encoder output."""
    _, marker, rest = key.rpartition("v1/")
    try:
        parse_key(marker + rest)
    except InvalidKeyError:
        return False
    return True
