"""Answers that no sound server gives: each is a named error on either transport, or no harm."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from endpoints import answers, http, strange, taken_port

from ec_s3.errors import RemoteError, RemoteThrottledError, RemoteUnavailableError
from ec_s3.multiparts import Multiparts, Upload
from ec_s3.testing.conformance import buffer, read
from ec_s3.url import S3Location, S3Options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from ec_s3.s3 import S3Store

T = TypeVar("T")

pytestmark = pytest.mark.usefixtures("no_pauses")

SIGNED = "x-amz-request-id: 1"  # no other server sends one
XML = "Content-Type: application/xml"


@contextlib.contextmanager
def answering(answer: Callable[[str], bytes]) -> Iterator[S3Location]:
    """A server that answers each method alike."""
    with contextlib.closing(taken_port()) as held:
        port = held.getsockname()[1]
    with strange(port, answers(answer)):
        yield S3Location("b", "p", f"http://127.0.0.1:{port}")


@contextlib.asynccontextmanager
async def store_of(
    answer: Callable[[str], bytes], open_store: Callable[..., S3Store]
) -> AsyncIterator[S3Store]:
    """A store on such a server."""
    with answering(answer) as location:
        store = open_store(location)
        try:
            yield store
        finally:
            await store.aclose()


@contextlib.asynccontextmanager
async def multiparts_of(answer: Callable[[str], bytes]) -> AsyncIterator[Multiparts]:
    """The same for unfinished uploads."""
    with answering(answer) as location:
        multiparts = Multiparts(location, S3Options())
        try:
            yield multiparts
        finally:
            await multiparts.aclose()


async def failure(call: Any) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        await call
    return caught.value


async def drawn(items: AsyncIterator[T]) -> tuple[list[T], BaseException | None]:
    """What a listing gives, at most ten, and how it fails."""
    found: list[T] = []
    try:
        async for item in items:
            found.append(item)
            if len(found) == 10:
                break
    except RemoteError as error:
        return found, error
    return found, None


# Bodies


async def test_a_body_whose_length_is_told_in_two_ways_is_refused(
    open_store: Callable[..., S3Store],
) -> None:
    head = f"HTTP/1.1 200 OK\r\n{SIGNED}\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with store_of(lambda _: head.encode() + b"3\r\nabc\r\n0\r\n\r\n", open_store) as store:
        assert isinstance(await failure(read(store, "k")), RemoteUnavailableError)


@pytest.mark.parametrize("status", ["202 Accepted", "204 No Content"])
async def test_a_good_answer_that_is_no_object_is_none_or_refused(
    open_store: Callable[..., S3Store], status: str
) -> None:
    async with store_of(http(status, b"", SIGNED), open_store) as store:
        with contextlib.suppress(RemoteUnavailableError):
            assert await read(store, "k") == b""


@pytest.mark.parametrize(
    "span",
    ["bytes \xb2-4/5", "bytes 0-2/\xb3", f"bytes 0-2/{'9' * 5000}", "bytes 0-2/2", "bytes 2-0/3"],
)
async def test_a_range_that_is_none_is_named(open_store: Callable[..., S3Store], span: str) -> None:
    answer = http("206 Partial Content", b"abc", SIGNED)("GET")
    answer = answer.replace(b"\r\n", f"\r\nContent-Range: {span}\r\n".encode("latin-1"), 1)
    async with store_of(lambda _: answer, open_store) as store:
        error = await failure(store.get("k", into=buffer, start=0, length=3))
        assert isinstance(error, RemoteUnavailableError)


@pytest.mark.parametrize("length", [None, 50, 200])
async def test_fewer_bytes_than_were_asked_for_are_no_answer(
    open_store: Callable[..., S3Store], length: int | None
) -> None:
    part = http("206 Partial Content", b"x" * 10, SIGNED, "Content-Range: bytes 0-9/100")
    async with store_of(part, open_store) as store:
        error = await failure(store.get("k", into=buffer, length=length))
        assert isinstance(error, RemoteUnavailableError)


@pytest.mark.parametrize("kind", ["application/octet-stream", "multipart/byteranges; boundary=x"])
async def test_a_part_that_does_not_say_of_what_is_no_object(
    open_store: Callable[..., S3Store], kind: str
) -> None:
    part = http("206 Partial Content", b"x" * 10, SIGNED, f"Content-Type: {kind}")
    async with store_of(part, open_store) as store:
        error = await failure(store.get("k", into=buffer, length=10))
        assert isinstance(error, RemoteUnavailableError)


# Headers


async def test_a_pause_that_is_no_number_of_seconds_is_not_kept(
    open_store: Callable[..., S3Store],
) -> None:
    answer = http("503 Slow Down", b"", SIGNED)("HEAD")
    answer = answer.replace(b"\r\n", b"\r\nRetry-After: \xb2\r\n", 1)
    async with store_of(lambda _: answer, open_store) as store:
        expected = (RemoteThrottledError, RemoteUnavailableError)  # the SDK may not read it at all
        assert isinstance(await failure(store.head("k")), expected)


async def test_an_object_whose_date_cannot_be_read_is_read_all_the_same(
    open_store: Callable[..., S3Store],
) -> None:
    async with store_of(
        http("200 OK", b"abc", SIGNED, "Last-Modified: some day"), open_store
    ) as store:
        assert await read(store, "k") == b"abc"
        info = await store.head("k")
        assert info is not None
        assert (info.size, info.modified) == (3, 0.0)


# Documents


def listing(*lines: str) -> Callable[[str], bytes]:
    body = f"<ListBucketResult><Name>b</Name>{''.join(lines)}</ListBucketResult>".encode()
    return http("200 OK", body, SIGNED, XML)


ENTRY = (
    "<Contents><Key>p/k</Key><Size>3</Size><LastModified>2026-01-01T00:00:00Z</LastModified>"
    "</Contents>"
)


@pytest.mark.parametrize(
    "more",
    [
        "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>",
        "<IsTruncated>true</IsTruncated>",
        "<IsTruncated>true</IsTruncated><NextMarker>p/k</NextMarker>",
    ],
)
async def test_a_listing_that_cannot_go_on_ends_in_an_error(
    open_store: Callable[..., S3Store], more: str
) -> None:
    async with store_of(listing(ENTRY, more), open_store) as store:
        found, error = await drawn(store.list())
    assert found
    assert isinstance(error, RemoteUnavailableError)
    assert "list failed" in str(error)
    assert "how a listing goes on" in str(error)


@pytest.mark.parametrize(
    "entry",
    [
        "<Contents><Key>p/k</Key><Size>3</Size><LastModified>some day</LastModified></Contents>",
        "<Contents><Key>p/k</Key><Size>3</Size></Contents>",
    ],
)
async def test_an_object_without_a_date_is_not_taken_for_an_old_one(
    open_store: Callable[..., S3Store], entry: str
) -> None:
    async with store_of(listing(entry, "<IsTruncated>false</IsTruncated>"), open_store) as store:
        found, error = await drawn(store.list())
    assert not found
    assert "without a valid LastModified" in str(error)


async def test_a_page_in_the_place_of_a_listing_is_not_taken_for_an_empty_one(
    open_store: Callable[..., S3Store],
) -> None:
    page = b'<?xml version="1.0"?><html><body>We are back soon.</body></html>'
    given = iter([http("200 OK", b"abc", SIGNED)])

    def answer(method: str) -> bytes:
        return next(given, http("200 OK", page, "Content-Type: text/html"))(method)

    async with store_of(answer, open_store) as store:
        assert await read(store, "k") == b"abc"  # an S3 store, for now
        found, error = await drawn(store.list())
    assert not found
    assert "an answer of another kind" in str(error)


async def test_unfinished_uploads_without_an_end_are_an_error() -> None:
    upload = (
        "<Upload><Key>p/k</Key><UploadId>u</UploadId><Initiated>2026-01-01T00:00:00Z</Initiated>"
        "</Upload>"
    )
    part = "<Part><PartNumber>1</PartNumber><Size>5</Size></Part>"
    markers = "<NextKeyMarker>p/k</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>"
    document = (
        f"<R><IsTruncated>true</IsTruncated>{markers}{upload}{part}"
        "<NextPartNumberMarker>1</NextPartNumberMarker></R>"
    )
    async with multiparts_of(http("200 OK", document.encode(), SIGNED, XML)) as multiparts:
        found, error = await drawn(multiparts.list())
        assert found
        assert "list_multipart_uploads failed" in str(error)
        assert "list_parts failed" in str(await failure(multiparts.size(Upload("k", "u", 0.0))))


CUT = http("200 OK", b"<?xml version='1.0'?><InitiateMultipartUp", SIGNED, XML)


async def test_documents_that_break_off_are_named(
    open_store: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.s3._MULTIPART_BYTES", 1 << 20)
    begun = http("200 OK", b"<R><UploadId>u</UploadId></R>", SIGNED, XML)
    posts = itertools.chain([begun], itertools.repeat(CUT))
    part = http("200 OK", b"", SIGNED, 'ETag: "e"')

    def answer(method: str) -> bytes:
        return (next(posts) if method == "POST" else part)(method)

    async with store_of(answer, open_store) as store:
        error = await failure(store.put("k", [b"x" * (2 << 20)], if_absent=False))
        assert isinstance(error, RemoteUnavailableError)
        assert "put failed" in str(error)
    async with multiparts_of(CUT) as multiparts:
        assert isinstance(await failure(anext(multiparts.list())), RemoteUnavailableError)


async def test_a_part_that_was_stored_without_a_name_is_an_error(
    open_store: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.s3._MULTIPART_BYTES", 1 << 20)
    document = http("200 OK", b"<R><UploadId>u</UploadId></R>", SIGNED, XML)

    def answer(method: str) -> bytes:
        return document(method) if method == "POST" else http("200 OK", b"", SIGNED)(method)

    async with store_of(answer, open_store) as store:
        error = await failure(store.put("k", [b"x" * (2 << 20)], if_absent=False))
        assert isinstance(error, RemoteUnavailableError)
