"""The HTTP/1.1 client of the direct transport against scripted servers."""

from __future__ import annotations

import asyncio
import re
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_s3.http_grammar import BadAnswerError, HungUpError, parse_head
from ec_s3.pool import Pool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from ec_s3.http1 import HttpConnection
    from ec_s3.http_grammar import Answer

BODY = bytes(range(256)) * 1000
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
REQUEST = b"GET /k HTTP/1.1\r\nhost: h\r\n\r\n"
CLOSE = b"<close>"
SILENCE = b"<silence>"


class Script:
    """A server that has one answer for each request; `CLOSE` at its end hangs up after it."""

    def __init__(self, answers: list[bytes], piece: int) -> None:
        self.answers = answers
        self.piece = piece
        self.requests: list[bytes] = []
        self.open = self.most = self.connections = 0
        self.port = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            while await self._answer(reader, writer):
                pass
        except (OSError, EOFError):
            pass
        finally:
            self.open -= 1
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        self.requests.append(head)
        answer = self.answers.pop(0)
        if length and b"refuse-body" not in head:
            await reader.readexactly(int(length[1]))
        plain = answer.removesuffix(CLOSE).removesuffix(SILENCE)
        for start in range(0, len(plain), self.piece):
            writer.write(plain[start : start + self.piece])
            await writer.drain()
            await asyncio.sleep(0)
        if answer.endswith(SILENCE):
            await reader.read(1)
        return not answer.endswith(CLOSE)


@asynccontextmanager
async def serving(*answers: bytes, piece: int = 1 << 20) -> AsyncIterator[Script]:
    script = Script(list(answers), piece)
    server = await asyncio.start_server(script.connected, "127.0.0.1", 0)
    script.port = server.sockets[0].getsockname()[1]
    try:
        yield script
    finally:
        server.close()
        while script.open:  # noqa: ASYNC110  # the connections end by themselves
            await asyncio.sleep(0.01)


@asynccontextmanager
async def pool_of(
    script: Script, *, size: int = 4, read_timeout: float = 5.0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Pool]:
    pool = Pool(
        *("127.0.0.1", script.port),
        tls=tls,
        connect_timeout=0.3,
        read_timeout=read_timeout,
        size=size,
    )
    try:
        yield pool
    finally:
        await pool.aclose()


async def fetch(
    pool: Pool, *, bodiless: bool = False, limit: int = 1 << 20
) -> tuple[Answer, bytes]:
    connection = await pool.acquire()
    try:
        answer = await connection.request(REQUEST, (), bodiless=bodiless)
        return answer, await connection.document(1 << 20)
    finally:
        pool.release(connection)


async def fill(connection: HttpConnection, view: memoryview) -> int:
    received = 0
    while more := await connection.readinto(view[received:]):
        received += more
    return received


# Heads


def test_a_head_is_taken_apart() -> None:
    answer, kept = parse_head(b'HTTP/1.1 206 Partial\r\nETag: "e"\r\nX-A:1\r\nx-a: 2 \r\nX-B:')
    assert (answer.status, answer.length, kept) == (206, None, True)
    assert answer.headers == {"etag": '"e"', "x-a": "1, 2", "x-b": ""}


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"HTTP/1.1 200 OK", True),
        (b"HTTP/1.1 200", True),
        (b"HTTP/1.1 200 OK\r\nConnection: Close", False),
        (b"HTTP/1.0 200 OK", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive", True),
    ],
)
def test_who_keeps_a_connection_says_so(head: bytes, kept: bool) -> None:
    assert parse_head(head)[1] is kept


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/2 200 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 \xb2\xb2\xb2 OK",
        b"ICY 200 OK",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\nA: 1\r\n folded: 2",
        b"HTTP/1.1 200 OK\r\nA : 1",
        b"HTTP/1.1 200 OK\r\n: 1",
        b"HTTP/1.1 200 OK\r\nA: 1\nB: 2",
        b"HTTP/1.1 200 OK\r\nA: 1\rB: 2",
        b"HTTP/1.1 200 OK\r\nA: \0",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5",
        b"HTTP/1.1 200 OK\r\nContent-Length: +5",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0x5",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 40,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked",
        b"HTTP/1.1 200 OK" + b"\r\nA: 1" * 200,
    ],
)
def test_heads_that_are_none_or_have_two_meanings_are_refused(head: bytes) -> None:
    with pytest.raises(BadAnswerError):
        parse_head(head)


@given(st.binary(max_size=200) | st.from_regex(rb"HTTP/1\.[01] [0-9]{3} (\r\n[^\r]{0,20}){0,5}"))
def test_any_bytes_are_a_head_or_refused(head: bytes) -> None:
    try:
        answer, _ = parse_head(head)
    except BadAnswerError:
        return
    assert 100 <= answer.status < 600


# Bodies


@pytest.mark.parametrize("piece", [1000, 32_768, 65_000, 1 << 20])
@pytest.mark.parametrize("late", [False, True])
async def test_a_body_lands_in_the_buffer_that_was_lent(piece: int, late: bool) -> None:
    async with serving(WHOLE, EMPTY, piece=piece) as script, pool_of(script) as pool:
        connection = await pool.acquire()
        answer = await connection.request(REQUEST, ())
        assert answer.length == len(BODY)
        if late:
            await asyncio.sleep(0.05)  # more arrives than there is room for
        space = bytearray(b"\1" * (len(BODY) + 100))
        view = memoryview(space)
        assert await fill(connection, view[:1000]) == 1000
        assert await fill(connection, view[1000:]) == len(BODY) - 1000
        assert await connection.readinto(view) == 0
        pool.release(connection)
        assert space == BODY + b"\1" * 100
        assert (await fetch(pool))[1] == b""
        assert script.connections == 1


async def test_what_is_told_of_a_body_is_there() -> None:
    async with serving(WHOLE, piece=20_000) as script, pool_of(script) as pool:
        connection = await pool.acquire()
        await connection.request(REQUEST, ())
        view, heard = memoryview(bytearray(len(BODY))), [0]

        def told(nbytes: int) -> None:
            assert view[:nbytes] == BODY[:nbytes]
            heard.append(nbytes)

        assert await connection.readinto(view, told) == len(BODY)
        assert len(heard) > 1
        assert heard == sorted(set(heard))
        assert heard[-1] < len(BODY)
        pool.release(connection)


@pytest.mark.parametrize("piece", [1, 3, 1000])
async def test_answers_arrive_in_any_pieces(piece: int) -> None:
    answers = [
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nA: b\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 403 No\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\nde\r\nA ;x=y\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n",
        b"HTTP/1.1 204 None\r\nContent-Length: 9\r\n\r\n",
        b"HTTP/1.1 304 Same\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nup to the end" + CLOSE,
    ]
    async with serving(*answers, piece=piece) as script, pool_of(script) as pool:
        bodies = [(await fetch(pool))[1] for _ in answers]
        assert bodies == [b"abc", b"de0123456789", b"", b"", b"up to the end"]
        assert script.connections == 1


async def test_a_head_request_has_no_body_whatever_it_announces() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n"
    async with serving(head, EMPTY) as script, pool_of(script) as pool:
        answer, body = await fetch(pool, bodiless=True)
        assert (answer.length, body) == (77, b"")
        await fetch(pool)
        assert script.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc",
        b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\nmore",
    ],
)
async def test_a_connection_in_doubt_is_not_used_again(answer: bytes) -> None:
    async with serving(answer, EMPTY) as script, pool_of(script) as pool:
        assert (await fetch(pool))[1] == b"abc"
        await fetch(pool)
        assert script.connections == 2


async def test_what_lies_behind_an_answer_is_not_taken_for_the_next_one() -> None:
    forged = EMPTY.replace(b"200", b"299")
    async with serving(WHOLE + forged, EMPTY) as script, pool_of(script) as pool:
        connection = await pool.acquire()
        await connection.request(REQUEST, ())
        assert await fill(connection, memoryview(bytearray(len(BODY)))) == len(BODY)
        pool.release(connection)
        answer, _ = await fetch(pool)  # at once, before the loop looks at the socket again
        assert answer.status == 200
        assert script.connections == 2


async def test_bytes_that_nobody_asked_for_end_a_resting_connection() -> None:
    async with serving(EMPTY, EMPTY) as script, pool_of(script) as pool:
        connection = await pool.acquire()
        await connection.request(REQUEST, ())
        pool.release(connection)
        connection.get_buffer(-1)[:1] = b"x"
        connection.buffer_updated(1)
        assert not connection.alive
        await fetch(pool)
        assert script.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"a" * 70_000,
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1_100_000),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 3000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: b\r\n" * 200,
    ],
)
async def test_answers_without_bounds_or_sense_are_refused(answer: bytes) -> None:
    async with serving(answer + SILENCE) as script, pool_of(script) as pool:
        with pytest.raises(BadAnswerError):
            await fetch(pool)


async def test_a_cut_body_gives_what_came_and_then_its_failure() -> None:
    async with serving(WHOLE[:100_000] + CLOSE) as script, pool_of(script) as pool:
        connection = await pool.acquire()
        await connection.request(REQUEST, ())
        view = memoryview(bytearray(len(BODY)))
        received = await connection.readinto(view)
        with pytest.raises(ConnectionResetError):
            await connection.readinto(view[received:])
        head = WHOLE.index(b"\r\n\r\n") + 4
        assert bytes(view[:received]) == WHOLE[head:100_000]
        pool.release(connection)
        assert not connection.alive


# Ends


async def test_cancelling_within_a_body_closes_and_leaves_the_buffer_alone() -> None:
    async with serving(WHOLE[:50_000] + SILENCE, EMPTY) as script, pool_of(script) as pool:
        connection = await pool.acquire()
        await connection.request(REQUEST, ())
        space = bytearray(len(BODY))
        reading = asyncio.ensure_future(connection.readinto(memoryview(space)))
        await asyncio.sleep(0.05)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert not connection.alive
        assert connection.get_buffer(-1).obj is not space
        pool.release(connection)
        await fetch(pool)
        assert script.connections == 2


async def test_cancelling_before_the_answer_closes_the_connection() -> None:
    async with serving(SILENCE, EMPTY) as script, pool_of(script, size=1) as pool:
        reading = asyncio.ensure_future(fetch(pool))
        while not script.requests:  # noqa: ASYNC110  # the log fills in its own time
            await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await fetch(pool)
        assert script.connections == 2


async def test_cancelling_while_connecting_leaves_no_connection() -> None:
    async with serving(EMPTY) as script, pool_of(script, size=1) as pool:
        for turns in range(8):
            taking = asyncio.ensure_future(pool.acquire())
            for _ in range(turns):
                await asyncio.sleep(0)
            taking.cancel()
            (taken,) = await asyncio.gather(taking, return_exceptions=True)
            if not isinstance(taken, BaseException):
                taken.abort()
                pool.release(taken)
        while pool._opening or script.open:  # noqa: ASYNC110  # they end by themselves
            await asyncio.sleep(0.01)
        assert (await fetch(pool))[1] == b""


@pytest.mark.parametrize("start", [0, 10, 50_000])
async def test_silence_ends_a_request(start: int) -> None:
    async with (
        serving(WHOLE[:start] + SILENCE) as script,
        pool_of(script, read_timeout=0.1) as pool,
    ):
        with pytest.raises(TimeoutError):
            await fetch(pool)


async def test_a_slow_upload_is_no_silence_and_a_stuck_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = iter([*range(20, 0, -1), *[1] * 100])
    async with serving(SILENCE) as script, pool_of(script, read_timeout=0.05) as pool:
        connection = await pool.acquire()
        transport = connection._transport
        monkeypatch.setattr(transport, "get_write_buffer_size", lambda: next(waiting))
        with pytest.raises(TimeoutError):
            await connection.request(REQUEST, ())
        assert next(waiting) == 1  # it waited as long as anything was sent
        pool.release(connection)


async def test_connecting_has_a_deadline() -> None:
    tls = ssl.create_default_context()
    async with serving(SILENCE) as script, pool_of(script, tls=tls) as pool:
        with pytest.raises(TimeoutError):
            await fetch(pool)


async def test_a_kept_connection_that_was_closed_is_told_from_a_lost_answer() -> None:
    async with serving(EMPTY, CLOSE, CLOSE) as script, pool_of(script) as pool:
        await fetch(pool)
        with pytest.raises(HungUpError):
            await fetch(pool)
        with pytest.raises(ConnectionResetError) as caught:
            await fetch(pool)
        assert not isinstance(caught.value, HungUpError)


async def test_a_server_that_answers_early_is_not_sent_the_rest() -> None:
    sent = 0

    def pieces() -> Iterator[memoryview]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield memoryview(bytes(256 << 10))

    answer = b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno" + SILENCE
    async with serving(answer) as script, pool_of(script) as pool:
        connection = await pool.acquire()
        head = b"PUT /k HTTP/1.1\r\nrefuse-body: 1\r\ncontent-length: 262144000\r\n\r\n"
        assert (await connection.request(head, pieces())).status == 403
        assert await connection.document(100) == b"no"
        pool.release(connection)
        assert sent < 1000
        assert not connection.alive


async def test_no_more_connections_than_the_pool_has_room_for() -> None:
    async with serving(*[EMPTY] * 40) as script, pool_of(script, size=2) as pool:
        await asyncio.gather(*(fetch(pool) for _ in range(40)))
        assert (script.most, script.connections) == (2, 2)


async def test_a_fresh_connection_takes_the_place_of_a_kept_one() -> None:
    async with serving(*[EMPTY] * 2) as script, pool_of(script, size=1) as pool:
        await fetch(pool)
        connection = await pool.acquire(fresh=True)
        await connection.request(REQUEST, ())
        pool.release(connection)
        await asyncio.sleep(0.05)
        assert (script.open, script.connections) == (1, 2)
