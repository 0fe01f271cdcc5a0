"""The grammar of HTTP/1.1 answers: heads and chunks, as far as an object store needs them.

Pure but for `read_chunks`, which asks its caller for more bytes. Everything comes from outside:
sizes are bounded, and what could be understood in two ways is refused.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_HEADER_LINES = 128
_LINE_BYTES = 1024
_HEAD = re.compile(  # names are printable ASCII but for the colon, values anything on one line
    r"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [^\r\n\0]*+)?+(?:\r\n[!-9;-~]++:[^\r\n\0]*+)*+"
)
_FIELD = re.compile(r"\r\n([^:]*+):([^\r]*+)")
_LENGTH = re.compile(r"[0-9]{1,18}")
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?")


class BadAnswerError(ConnectionError):
    """The peer does not speak HTTP/1.1, or more of it than is read here."""


class HungUpError(ConnectionResetError):
    """A connection that was kept from an earlier request was closed before it answered."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer.

    Attributes:
        status: HTTP status.
        headers: by lower-case name; repeated ones are joined by commas.
        length: bytes that `Content-Length` announces, also of a HEAD; None where it is missing or
            the body comes in chunks.
    """

    status: int
    headers: dict[str, str]
    length: int | None


def parse_head(head: bytes) -> tuple[Answer, bool]:
    """Parse the lines before the empty line; also tells whether the peer keeps the connection.

    Raises:
        BadAnswerError: it is no head of an HTTP/1 answer, or an ambiguous one.
    """
    text = head.decode("latin-1")
    valid = _HEAD.fullmatch(text)
    lines = _FIELD.findall(text) if valid else []
    if valid is None or len(lines) > _HEADER_LINES:
        raise BadAnswerError("the answer has no valid head")
    headers = {name.lower(): value.strip(" \t") for name, value in lines}
    if len(headers) < len(lines):
        headers = _joined(lines)
    length = headers.get("content-length")
    if length is not None and not _LENGTH.fullmatch(length):
        raise BadAnswerError("the answer has a Content-Length that is no number")
    if headers.get("transfer-encoding", "chunked").lower() != "chunked":
        raise BadAnswerError("the answer has an unknown Transfer-Encoding")
    connection = headers.get("connection", "").lower()
    kept = "close" not in connection if valid[1] == "1" else "keep-alive" in connection
    return Answer(int(valid[2]), headers, None if length is None else int(length)), kept


def _joined(lines: list[tuple[str, str]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for given, value in lines:
        name = given.lower()
        if name not in headers:
            headers[name] = value.strip(" \t")
        elif name in ("content-length", "transfer-encoding"):
            raise BadAnswerError("the answer announces its length twice")
        else:
            headers[name] += ", " + value.strip(" \t")
    return headers


@lru_cache(maxsize=1024)
def http_date(text: str) -> datetime.datetime | None:
    """The date of a header in the one form that servers send; None for any other."""
    try:
        return datetime.datetime(
            *(int(text[12:16]), _MONTHS.index(text[8:11]) + 1, int(text[5:7])),
            *(int(text[17:19]), int(text[20:22]), int(text[23:25])),
            tzinfo=datetime.UTC,
        )
    except ValueError:
        return None


async def read_chunks(more: Callable[[], Awaitable[bytes]], limit: int) -> tuple[bytes, bytes]:
    """Read a body in chunks: its bytes, and what came behind it.

    Args:
        more: the next bytes, at least one.
        limit: longest body.

    Raises:
        BadAnswerError: these are no chunks, or too many.
    """
    raw, body = bytearray(), bytearray()
    while True:
        size = _CHUNK.fullmatch(await _line(more, raw))
        if size is None:
            raise BadAnswerError("the answer has a chunk without a size")
        count = int(size[1], 16)
        if len(body) + count > limit:
            raise BadAnswerError("the answer's document is too large")
        if not count:
            break
        while len(raw) < count + 2:
            raw += await more()
        if raw[count : count + 2] != b"\r\n":
            raise BadAnswerError("the answer has a chunk of another size than announced")
        body += raw[:count]
        del raw[: count + 2]
    for _ in range(_HEADER_LINES):
        if not await _line(more, raw):
            return bytes(body), bytes(raw)
    raise BadAnswerError("the answer has too many trailers")


async def _line(more: Callable[[], Awaitable[bytes]], raw: bytearray) -> bytes:
    while (end := raw.find(b"\r\n")) < 0 and len(raw) <= _LINE_BYTES:
        raw += await more()
    if not 0 <= end <= _LINE_BYTES:
        raise BadAnswerError("the answer has a line that is too long")
    line = bytes(raw[:end])
    del raw[: end + 2]
    return line
