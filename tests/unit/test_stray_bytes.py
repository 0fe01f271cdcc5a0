"""Servers that end the answer to a HEAD as if it had a body, as OpenStack Swift's may.

They announce `Transfer-Encoding: chunked`, as a GET's answer would, and send the last chunk.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest
from aiohttp.http_exceptions import HttpProcessingError

from ec_s3.testing.conformance import read
from ec_s3.transport import AnswerReader
from ec_s3.types import PutOutcome
from ec_s3.url import S3Location

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ec_s3.s3 import S3Store

STRAY = b"0\r\n\r\n"
ABSENT = b"HTTP/1.1 404 Not Found\r\nX-Trans-Id: tx1\r\nTransfer-Encoding: chunked\r\n\r\n"
LATE = "before the next answer"


class Swift:
    """One bucket; it refuses conditional writes, and sends `STRAY` behind HEADs of what is absent.

    Args:
        when: the stray bytes come at once, or just before the connection's next answer (`LATE`).

    Attributes:
        log: method and status of each request, in turn.
    """

    def __init__(self, when: str) -> None:
        self.log: list[str] = []
        self._when = when
        self._objects: dict[str, bytes] = {}

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stray = b""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = re.search(r"(?i)\ncontent-length: (\d+)", head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                method, key = head.split()[:2]
                answer = self._answer(head, method, key, body)
                self.log.append(f"{method} {answer[9:12].decode()}")
                writer.write(stray + answer)
                stray = STRAY if method == "HEAD" and answer is ABSENT else b""
                if self._when != LATE:
                    writer.write(stray)
                    stray = b""
                await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.transport.abort()

    def _answer(self, head: str, method: str, key: str, body: bytes) -> bytes:
        if method == "PUT" and re.search(r"(?i)\nif-(none-)?match:", head):
            return self._error("501 Not Implemented", "NotImplemented")
        if method == "PUT":
            self._objects[key] = body
            return b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\n\r\n'
        if method == "DELETE":
            self._objects.pop(key, None)
            return b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n"
        found = self._objects.get(key)
        if found is None:
            return ABSENT if method == "HEAD" else self._error("404 Not Found", "NoSuchKey")
        described = f'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: {len(found)}\r\n\r\n'.encode()
        return described if method == "HEAD" else described + found

    def _error(self, status: str, code: str) -> bytes:
        document = f"<Error><Code>{code}</Code></Error>"
        return (
            f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n"
            f"{len(document):x}\r\n{document}\r\n"
        ).encode() + STRAY


@pytest.fixture(params=["with the answer", LATE])
async def swift(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Swift, S3Location]]:
    made = Swift(request.param)
    server = await asyncio.start_server(made.connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield made, S3Location("bucket", "p", f"http://127.0.0.1:{port}", "us-east-1")
    server.close()


@pytest.mark.usefixtures("no_pauses")
async def test_items_go_in_and_out_of_a_server_that_sends_stray_bytes(
    open_store: Callable[..., S3Store], swift: tuple[Swift, S3Location]
) -> None:
    server, location = swift
    store = open_store(location)
    for _ in range(2):
        assert await store.head("k") is None
        assert await store.put("k", [b"one"]) is PutOutcome.WRITTEN
        assert await store.put("k", [b"two"]) is PutOutcome.EXISTS
        assert await read(store, "k") == b"one"
        assert not (await store.delete(["k"])).failed
        assert await read(store, "k") is None
    many = [f"k/{number}" for number in range(20)]
    found = await asyncio.gather(*(store.head(name) for name in many))
    written = await asyncio.gather(*(store.put(name, [name.encode()]) for name in many))
    assert (set(found), set(written)) == ({None}, {PutOutcome.WRITTEN})
    assert [await read(store, name) for name in many] == [name.encode() for name in many]
    await store.aclose()
    assert server.log.count("PUT 501") == 1, "it is known from then on"


def fed(reader: AnswerReader, *pieces: bytes) -> AnswerReader:
    reader.set_response_params(skip_payload=True)
    for piece in pieces:
        reader.data_received(piece)
    return reader


async def test_answer_without_a_body_counts_whatever_is_behind_it_and_however_it_is_cut() -> None:
    for cut in range(1, len(ABSENT + STRAY)):
        whole = ABSENT + STRAY
        reader = fed(AnswerReader(asyncio.get_running_loop()), whole[:cut], whole[cut:])
        answer, _ = await reader.read()
        assert answer.code == 404
        assert reader.should_close, cut
        with pytest.raises(HttpProcessingError):
            await reader.read()


async def test_connection_is_kept_where_nothing_stray_came() -> None:
    for cut in range(1, len(ABSENT)):
        reader = AnswerReader(asyncio.get_running_loop())
        for _ in range(2):
            fed(reader, ABSENT[:cut], b"", ABSENT[cut:])
            answer, _ = await reader.read()
            assert answer.code == 404
            assert not reader.should_close
