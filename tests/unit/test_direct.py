"""What the direct transport does by itself; what it shares with the SDK runs in `test_s3`."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from ec_s3.direct import DirectClient
from ec_s3.errors import (
    RemoteDeniedError,
    RemoteError,
    RemoteThrottledError,
    RemoteUnavailableError,
)
from ec_s3.exchange import Address, client_error, described, is_elsewhere, request_head
from ec_s3.failures import status_of
from ec_s3.http_grammar import Answer
from ec_s3.s3 import S3Store
from ec_s3.sigv4 import Credentials
from ec_s3.testing.conformance import buffer, read
from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.transport import Connection
from ec_s3.types import PutOutcome
from ec_s3.url import S3Location, S3Options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ec_s3.testing.moto import S3Server

DIRECT = S3Options(transport="direct", connect_timeout=20, read_timeout=20, total_timeout=60)
KEYS = ["a/b", "v1/x=y_z-1.2/k", "k=1..2", "-a/_b/=c"]


pytestmark = pytest.mark.usefixtures("no_pauses")


@asynccontextmanager
async def answering(
    *answers: bytes | Callable[[str], bytes],
) -> AsyncIterator[tuple[str, list[str]]]:
    """A server with these answers in turn, the last one for ever; its URL and its request heads."""
    heads: list[str] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                heads.append(head)
                length = re.search(r"(?i)content-length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                answer = answers[min(len(heads), len(answers)) - 1]
                data = answer if isinstance(answer, bytes) else answer(head)
                if head.startswith("HEAD") and data.startswith(b"HTTP/1.1 30"):
                    data = data[: data.index(b"\r\n\r\n") + 4]
                writer.write(data)
                await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
    finally:
        server.close()
        await asyncio.sleep(0.02)


def error(status: int, code: str, *headers: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message></Error>"
    lines = [f"HTTP/1.1 {status} E", *headers, f"Content-Length: {len(body)}", "", body]
    return "\r\n".join(lines).encode()


SIGNED = b"x-amz-request-id: 1\r\n"  # no other server sends one
OBJECT = b"HTTP/1.1 200 OK\r\n" + SIGNED + b'ETag: "e"\r\nContent-Length: 3\r\n\r\nabc'


# Requests


@pytest.mark.parametrize("addressing", ["path", "virtual"])
async def test_requests_are_addressed_quoted_and_described_as_by_the_sdk(
    addressing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo

    def loopback(name: str, *args: object, **more: object) -> object:
        return resolve("127.0.0.1", *args, **more)  # type: ignore[arg-type]  # passed on as they come

    monkeypatch.setattr(socket, "getaddrinfo", loopback)
    seen: dict[str, list[tuple[str, ...]]] = {}
    ok = b"HTTP/1.1 200 OK\r\n" + SIGNED + b'ETag: "e"\r\nContent-Length: 0\r\n\r\n'
    chosen = {
        "sse": "aws:kms",
        "sse_kms_key_id": "key-1",
        "storage_class": "STANDARD_IA",
        "tags": {"a": "b c", "d": "é&="},
    }
    for transport in ("sdk", "direct"):
        async with answering(ok) as (url, heads):
            url = url.replace("127.0.0.1", "localhost")
            location = S3Location("bkt", "pre=fix", url, region="eu-north-1", addressing=addressing)
            store = S3Store(location, S3Options(transport=transport, **chosen))  # type: ignore[arg-type]  # mixed values
            for key in KEYS:
                await store.put(key, [b"xyz"])
                await store.put(key, [b"xyz"], if_match='"e"')
                await store.head(key)
                await store.delete([key])
            await store.aclose()
        seen[transport] = [facts(head, url) for head in heads]
    assert len(seen["sdk"]) == 4 * len(KEYS)
    assert seen["direct"] == seen["sdk"]


def facts(head: str, url: str) -> tuple[str, ...]:
    """What must be the same of two requests: not the time, the port or the order of headers."""
    line, *headers = head.replace(url.rpartition(":")[2], "PORT").strip().split("\r\n")
    kept = sorted(
        header.lower().split(":")[0] + header[header.index(":") :]
        for header in headers
        if re.match(r"(?i)x-amz-(?!date|content)|if-|host:|content-length", header)
        and "invocation" not in header.lower()
        and "sdk-request" not in header.lower()
    )
    scope = re.search(r"Credential=\w+/\d+/(\S+),", head)
    assert scope is not None
    return line, scope[1], *[header for header in kept if header != "content-length: 0"]


def test_values_that_would_end_a_header_are_not_sent() -> None:
    address = Address("http://h/bucket/k", "us-east-1")
    credentials = Credentials("AKEY", "SECRET", None)
    for etag in ('"e"\r\nx: y', '"e"\n', '"\0"', '"é"'):
        with pytest.raises(RemoteError, match="IfMatch cannot be sent"):
            request_head(address, credentials, method="GET", params={"Key": "k", "IfMatch": etag})


@pytest.mark.parametrize(
    ("url", "host", "path"),
    [
        ("https://b.s3.eu-west-1.amazonaws.com/k", "b.s3.eu-west-1.amazonaws.com", "/"),
        ("http://127.0.0.1:80/b/k", "127.0.0.1", "/b/"),
        ("https://h:8443/base/b/k", "h:8443", "/base/b/"),
        ("http://[::1]:9000/b/k", "[::1]:9000", "/b/"),
    ],
)
def test_an_address_is_what_the_sdk_would_have_asked(url: str, host: str, path: str) -> None:
    address = Address(url, "us-east-1")
    assert (address.host, address.path) == (host, path)


async def test_connecting_ahead_prepares_requests_and_sends_none(
    s3_server: S3Server, bucket: str
) -> None:
    with FaultServer(s3_server.url) as proxy:
        store = S3Store(S3Location(bucket, endpoint=proxy.url), DIRECT)
        await store.connect()
        client: Any = await store._connection.client()
        assert client._way is not None
        assert not proxy.log
        await store.aclose()


async def test_aws_buckets_are_reached_as_by_the_sdk() -> None:
    location = S3Location("some-bucket", region="eu-west-1")
    connection = Connection(location, DIRECT)
    sdk = await connection.client()
    client = DirectClient(sdk, None, location=location, options=DIRECT)  # type: ignore[arg-type]  # not asked
    rehearsed = await client._rehearse()
    assert rehearsed.url == "https://some-bucket.s3.eu-west-1.amazonaws.com/k"
    assert rehearsed.scope[1:] == ["eu-west-1", "s3", "aws4_request"]
    await connection.aclose()


# Answers


@pytest.mark.parametrize(
    ("status", "document", "expected"),
    [
        (403, b"<Error><Code>AccessDenied</Code></Error>", (403, "AccessDenied")),
        (502, b"<html>bad gateway</html>", (502, "502")),
        (404, b"", (404, "404")),
        (200, b"<Error><Code>InternalError</Code></Error>", (500, "InternalError")),
        (400, b"<Code>" + b"A" * 100 + b"</Code>", (400, "400")),
        (400, b'<!DOCTYPE x [<!ENTITY a "b">]><Error><Code>&a;</Code></Error>', (400, "400")),
    ],
)
def test_error_documents_become_the_exception_of_the_sdk(
    status: int, document: bytes, expected: tuple[int, str]
) -> None:
    made = client_error(Answer(status, {}, len(document)), document, "put_object")
    assert isinstance(made, ClientError)
    assert status_of(made) == expected


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("Mon, 30 Nov 2026 10:00:01 GMT", 1796032801.0),
        ("Monday, 30-Nov-26 10:00:01 GMT", None),
        ("", None),
        ("Mon, 99 Nov 2026 10:00:01 GMT", None),
    ],
)
def test_dates_are_read_or_left_out(text: str, seconds: float | None) -> None:
    modified = described(Answer(200, {"last-modified": text}, 0))["LastModified"]
    assert (modified and modified.timestamp()) == seconds


async def test_interim_and_chunked_answers_are_understood() -> None:
    answer = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 403 No\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"1c\r\n<Error><Code>InvalidAccessKe\r\n11\r\nyId</Code></Error\r\n0\r\n\r\n"
    )
    async with answering(answer) as (url, _):
        store = S3Store(S3Location("b", endpoint=url), DIRECT)
        with pytest.raises(RemoteDeniedError, match=r"InvalidAccessKeyId.*credentials"):
            await store.get("k", into=buffer)
        await store.aclose()


@pytest.mark.parametrize("verb", ["get", "head"])
async def test_an_object_without_a_size_is_no_answer(verb: str) -> None:
    chunked = b"HTTP/1.1 200 OK\r\n" + SIGNED + b"Transfer-Encoding: chunked\r\n\r\n"
    async with answering(chunked + (b"3\r\nabc\r\n0\r\n\r\n" if verb == "get" else b"")) as (
        url,
        _,
    ):
        store = S3Store(S3Location("b", endpoint=url), DIRECT)
        with pytest.raises(RemoteUnavailableError, match="does not announce the size"):
            await (store.get("k", into=buffer) if verb == "get" else store.head("k"))
        await store.aclose()


@pytest.mark.parametrize(
    "answer",
    [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nA: " + b"a" * 70_000, b"HTTP/1.1 999 X\r\n\r\n"],
)
async def test_what_is_no_http_is_asked_again_and_then_named(answer: bytes) -> None:
    async with answering(answer, OBJECT) as (url, heads):
        store = S3Store(S3Location("b", endpoint=url), DIRECT)
        assert await read(store, "k") == b"abc"
        assert len(heads) == 2
        await store.aclose()
    async with answering(answer) as (url, heads):
        store = S3Store(S3Location("b", endpoint=url), DIRECT)
        with pytest.raises(RemoteUnavailableError, match="BadAnswerError"):
            await read(store, "k")
        assert len(heads) == 3
        await store.aclose()


async def test_throttling_of_a_lookup_is_named() -> None:
    async with answering(b"HTTP/1.1 503 Slow\r\nRetry-After: 1\r\nContent-Length: 9\r\n\r\n") as (
        url,
        heads,
    ):
        store = S3Store(S3Location("b", endpoint=url), DIRECT)
        with pytest.raises(RemoteThrottledError, match="503"):
            await store.head("k")
        assert len(heads) == 3
        await store.aclose()


# Repetitions


async def test_a_dead_endpoint_uses_up_the_quota_of_repetitions(
    s3_server: S3Server, bucket: str
) -> None:
    with FaultServer(s3_server.url) as proxy:
        proxy.add(Fault(status=500))
        store = S3Store(S3Location(bucket, endpoint=proxy.url), DIRECT)
        for _ in range(60):
            with pytest.raises(RemoteUnavailableError):
                await store.head("k")
        await store.aclose()
        assert proxy.count("HEAD") == 60 + 100  # 500 tokens, 5 for each repetition


async def test_a_conditional_put_on_a_closed_connection_is_sent_twice_and_not_more(
    s3_server: S3Server, bucket: str
) -> None:
    with FaultServer(s3_server.url) as proxy:
        store = S3Store(S3Location(bucket, endpoint=proxy.url), DIRECT)
        await store.put("first", [b"x"])
        proxy.add(Fault(method="PUT", drop_response=True, times=1))
        assert await store.put("k", [b"x"]) is PutOutcome.WRITTEN
        assert proxy.count("PUT", "/k$") == 2
        await store.aclose()


# What goes to the SDK


@pytest.mark.parametrize("status", [301, 307])
@pytest.mark.parametrize("verb", ["get", "head", "put"])
async def test_a_bucket_elsewhere_is_followed_by_the_sdk_with_one_reason(
    status: int, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(head: str) -> bytes:
        if "/eu-west-1/s3/" in head:
            return (
                OBJECT if head.startswith("GET") else OBJECT.replace(b"3\r\n\r\nabc", b"0\r\n\r\n")
            )
        return error(status, "PermanentRedirect", "x-amz-bucket-region: eu-west-1")

    async with answering(answer) as (url, heads):
        store = S3Store(S3Location("b", endpoint=url), DIRECT)
        with caplog.at_level(logging.WARNING, logger="ec_s3"):
            for _ in range(2):
                if verb == "get":
                    assert await read(store, "k") == b"abc"
                elif verb == "head":
                    assert await store.head("k") is not None
                else:
                    assert await store.put("k", [b"abc"]) is PutOutcome.WRITTEN
        await store.aclose()
    assert len(caplog.records) == 1
    assert "redirects; set region" in caplog.text
    assert sum("user-agent: ec_s3" in head for head in heads) == 1


async def test_a_redirect_that_leads_nowhere_names_the_remedy() -> None:
    async with answering(error(301, "PermanentRedirect")) as (url, heads):
        store = S3Store(S3Location("b", endpoint=url), DIRECT)
        with pytest.raises(RemoteDeniedError, match="set region in url"):
            await store.get("k", into=buffer)
        await store.aclose()
        assert len(heads) == 1


@pytest.mark.parametrize(("region", "elsewhere"), [("us-east-1", False), ("eu-west-1", True)])
@pytest.mark.parametrize(
    ("status", "document"),
    [
        (400, b""),
        (307, b"<Error><Code>TemporaryRedirect</Code></Error>"),
        (400, b"<Error><Code>AuthorizationHeaderMalformed</Code></Error>"),
    ],
)
def test_only_another_region_is_elsewhere(
    status: int, document: bytes, region: str, elsewhere: bool
) -> None:
    answer = Answer(status, {"x-amz-bucket-region": region}, 0)
    assert is_elsewhere(client_error(answer, document, "x"), "us-east-1") is elsewhere
    assert not is_elsewhere(client_error(Answer(status, {}, 0), document, "x"), "us-east-1")


async def test_proxies_of_the_environment_are_used_through_the_sdk(
    s3_server: S3Server,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with FaultServer(s3_server.url) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        store = S3Store(S3Location(bucket, endpoint="http://s3.example:9"), DIRECT)
        proxy.add(Fault(status=403, code="AccessDenied"))
        with pytest.raises(RemoteDeniedError):
            await store.put("k", [b"x"])
        assert proxy.log[0].path == f"http://s3.example:9/{bucket}/k"
        await store.aclose()
    assert "names a proxy" in caplog.text


async def test_buckets_with_another_signature_are_left_to_the_sdk(
    caplog: pytest.LogCaptureFixture,
) -> None:
    location = S3Location("fast--use1-az4--x-s3", region="us-east-1")
    client = DirectClient(None, None, location=location, options=DIRECT)  # type: ignore[arg-type]  # neither is asked
    assert await client.prepare() is None
    assert await client.prepare() is None
    assert len(caplog.records) == 1
    assert "another signature" in caplog.text


# Credentials


async def test_session_tokens_are_sent_and_signed(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token")
    with FaultServer(s3_server.url) as proxy:
        store = S3Store(S3Location(bucket, endpoint=proxy.url), DIRECT)
        await store.head("k")
        await store.aclose()
        (request,) = proxy.log
    assert request.header("x-amz-security-token") == "a-token"
    assert "x-amz-security-token" in request.header("Authorization")
