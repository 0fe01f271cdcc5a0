"""The S3 store against servers that fail: each test names what must come out."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import logging
import os
import socket
import ssl
from typing import TYPE_CHECKING

import pytest

from ec_s3.errors import (
    CapacityError,
    RemoteChangedError,
    RemoteDeniedError,
    RemoteError,
    RemoteThrottledError,
    RemoteTimeoutError,
    RemoteUnavailableError,
)
from ec_s3.testing.conformance import buffer, read
from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.transport import ATTEMPTS
from ec_s3.types import PutOutcome
from ec_s3.url import S3Location, S3Options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from ec_s3.s3 import S3Store
    from ec_s3.testing.moto import S3Server

BODY = os.urandom(300_000)
PATIENT = S3Options(connect_timeout=20.0, read_timeout=20.0, total_timeout=60.0)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK waits up to seconds between attempts; tests need not."""
    monkeypatch.setattr(
        "botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.001
    )


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultServer]:
    with FaultServer(s3_server.url) as server:
        yield server


@pytest.fixture
async def store(
    open_store: Callable[..., S3Store], proxy: FaultServer, bucket: str
) -> AsyncIterator[S3Store]:
    store = open_store(S3Location(bucket, "p", proxy.url), PATIENT)
    yield store
    await store.aclose()


@pytest.fixture
async def filled(store: S3Store, proxy: FaultServer) -> S3Store:
    """The store with one object, `k`, and an empty log."""
    await store.put("k", [BODY])
    proxy.clear()
    return store


async def answers_again(store: S3Store, key: str) -> bytes | None:
    """What a store with a short deadline reads once the machine lets it."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(RemoteTimeoutError):
                return await read(store, key)


# Lost answers


async def test_a_lost_answer_to_a_put_is_sent_as_often_as_the_sdk_says(
    store: S3Store, proxy: FaultServer
) -> None:
    proxy.add(Fault(method="PUT", drop_response=True))
    with pytest.raises(RemoteUnavailableError):
        await store.put("k", [BODY], if_absent=False)
    assert proxy.count("PUT") == ATTEMPTS


@pytest.mark.parametrize("size", [10, 2_000_000])
async def test_a_lost_answer_to_ones_own_put_counts_as_written(
    store: S3Store, proxy: FaultServer, size: int
) -> None:
    proxy.add(Fault(method="PUT", drop_response=True, times=1))
    body = os.urandom(size)
    assert await store.put("k", [body[:3], body[3:]]) is PutOutcome.WRITTEN
    assert proxy.count("PUT") == 2
    assert await read(store, "k") == body


async def test_a_put_whose_answers_were_all_lost_is_not_sent_again_by_the_next_one(
    store: S3Store, proxy: FaultServer
) -> None:
    proxy.add(Fault(method="PUT", drop_response=True, times=ATTEMPTS))
    with pytest.raises(RemoteUnavailableError):
        await store.put("k", [BODY])
    assert await store.put("k", [BODY[:9], BODY[9:]]) is PutOutcome.WRITTEN
    assert proxy.count("PUT") == ATTEMPTS
    assert await store.put("k", [BODY]) is PutOutcome.EXISTS


async def test_after_lost_answers_another_writers_object_is_not_taken_for_ones_own(
    filled: S3Store, proxy: FaultServer
) -> None:
    for body in (os.urandom(len(BODY)), BODY[:-1]):
        proxy.clear()
        proxy.add(Fault(method="PUT", refuse=True, times=ATTEMPTS))
        with pytest.raises(RemoteUnavailableError):
            await filled.put("k", [body])
        assert await filled.put("k", [body]) is PutOutcome.EXISTS
        assert proxy.count("PUT") == ATTEMPTS
    assert await read(filled, "k") == BODY


@pytest.mark.parametrize("compares", [True, False])
async def test_a_store_that_compares_versions_in_its_own_way_has_them_replaced_all_the_same(
    filled: S3Store, proxy: FaultServer, compares: bool
) -> None:
    """Ceph 16: an If-Match with the quotes of the ETag never matches."""
    info = await filled.head("k")
    assert info is not None
    quoted = r'(?i)\nif-match: *"' if compares else r"(?i)\nif-match:"
    proxy.add(Fault(method="PUT", header=quoted, status=412))
    assert await filled.put("k", [b"new"], if_match=info.etag) is PutOutcome.WRITTEN
    assert await read(filled, "k") == b"new"
    assert await filled.put("k", [b"newer"], if_match=info.etag) is PutOutcome.CHANGED
    assert await read(filled, "k") == b"new"


async def test_a_stale_kept_alive_connection_is_invisible(
    open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str
) -> None:
    with FaultServer(s3_server.url, idle_seconds=0.1) as proxy:
        store = open_store(S3Location(bucket, endpoint=proxy.url), PATIENT)
        for n in range(4):
            assert await store.put(f"k/{n}", [BODY]) is PutOutcome.WRITTEN
            await asyncio.sleep(0.15)
            assert await read(store, f"k/{n}") == BODY
        await store.aclose()


async def test_connections_dropped_after_each_answer_are_invisible(
    filled: S3Store, proxy: FaultServer
) -> None:
    proxy.add(Fault(close=True))
    for _ in range(10):
        assert await read(filled, "k") == BODY


# Bodies


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("span", [(0, None), (1000, 200_000)])
async def test_a_cut_body_is_continued_where_it_broke_off(
    filled: S3Store, proxy: FaultServer, reset: bool, span: tuple[int, int | None]
) -> None:
    start, length = span
    asked: list[int] = []

    def into(nbytes: int) -> memoryview:
        asked.append(nbytes)
        return buffer(nbytes)

    proxy.add(Fault(method="GET", cut_at=100_000, reset=reset, times=1))
    result = await filled.get("k", into=into, start=start, length=length)
    assert result is not None
    assert bytes(result.body) == BODY[start:][:length]
    assert asked == [result.body.nbytes]
    second = proxy.log[1]
    assert second.header("If-Match") == result.info.etag
    if not reset:  # after a reset the kernel may have thrown away what had arrived
        assert second.header("Range").startswith(f"bytes={start + 100_000}-")


async def test_a_body_that_always_breaks_off_is_no_answer(
    filled: S3Store, proxy: FaultServer
) -> None:
    proxy.add(Fault(method="GET", cut_at=0))
    with pytest.raises(RemoteUnavailableError):
        await filled.get("k", into=buffer)
    assert 2 <= proxy.count("GET") <= 10


async def test_an_object_replaced_between_two_parts_of_a_read_is_noticed(
    filled: S3Store, proxy: FaultServer, s3_server: S3Server, bucket: str
) -> None:
    client = s3_server.client()

    def replaced(nbytes: int) -> memoryview:
        """Called between the first answer's header and its body, which breaks off."""
        client.put_object(Bucket=bucket, Key="p/k", Body=os.urandom(len(BODY)))
        return buffer(nbytes)

    proxy.add(Fault(method="GET", cut_at=1000, times=1))
    with pytest.raises(RemoteChangedError):
        await filled.get("k", into=replaced)
    assert proxy.count("GET") == 2
    client.close()


async def test_a_body_longer_than_announced_overruns_nothing(
    filled: S3Store, proxy: FaultServer
) -> None:
    proxy.add(Fault(method="GET", extra=b"\xff" * 70_000, times=3))
    for _ in range(4):
        space = bytearray(b"\1" * (len(BODY) + 1000))
        result = await filled.get("k", into=lambda _, space=space: memoryview(space))  # type: ignore[misc]  # mypy infers no lambda with a default
        assert result is not None
        assert bytes(result.body) == BODY
        assert space[len(BODY) :] == b"\1" * 1000


async def test_a_flipped_byte_is_for_the_reader_to_find(
    filled: S3Store, proxy: FaultServer
) -> None:
    proxy.add(Fault(method="GET", flip_at=5, times=1))
    body = await read(filled, "k")
    assert body is not None
    assert (body[:5], body[5], body[6:]) == (BODY[:5], BODY[5] ^ 0xFF, BODY[6:])


@pytest.mark.usefixtures("filled")
async def test_a_stalled_body_is_continued(
    open_store: Callable[..., S3Store], proxy: FaultServer, bucket: str
) -> None:
    store = open_store(S3Location(bucket, "p", proxy.url), S3Options(read_timeout=0.5))
    proxy.add(Fault(method="GET", stall_at=50_000, times=1))
    assert await read(store, "k") == BODY
    assert proxy.count("GET") >= 2
    await store.aclose()


async def test_refusing_a_size_drops_only_that_answer(filled: S3Store, proxy: FaultServer) -> None:
    proxy.add(Fault(method="GET", rate=1e6, times=1))

    def refuse(nbytes: int) -> memoryview:
        raise CapacityError("too large")

    with pytest.raises(CapacityError):
        await filled.get("k", into=refuse)
    assert await read(filled, "k") == BODY


# Deadlines


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    "fault",
    [Fault(hang=True), Fault(rate=50_000.0), Fault(delay=0.35, status=500)],
    ids=["hanging", "trickling", "failing slowly"],
)
async def test_every_call_ends_at_its_deadline(
    open_store: Callable[..., S3Store],
    proxy: FaultServer,
    bucket: str,
    fault: Fault,
) -> None:
    options = S3Options(connect_timeout=20.0, read_timeout=20.0, total_timeout=0.6)
    store = open_store(S3Location(bucket, "p", proxy.url), options)
    await store.connect()
    proxy.add(fault)
    async with asyncio.timeout(15.0):
        with pytest.raises(RemoteTimeoutError) as caught:
            await store.get("k", into=buffer)
    assert (caught.value.operation, caught.value.key) == ("get", "k")
    if fault.hang:
        async with asyncio.timeout(15.0):
            for call in (store.head("k"), store.put("k2", [BODY]), anext(store.list())):
                with pytest.raises(RemoteTimeoutError):
                    await call
            assert list((await store.delete(["k"])).failed) == ["k"]
    proxy.clear()
    assert await answers_again(store, "k") == BODY
    await store.aclose()


@pytest.mark.usefixtures("filled")
async def test_hanging_calls_give_their_connections_back(
    open_store: Callable[..., S3Store], proxy: FaultServer, bucket: str
) -> None:
    options = S3Options(read_timeout=0.2, total_timeout=0.4, max_connections=2)
    store = open_store(S3Location(bucket, "p", proxy.url), options)
    proxy.add(Fault(method="GET", hang=True))
    calls = (store.get("k", into=buffer) for _ in range(6))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, RemoteTimeoutError) for result in results)
    proxy.clear()
    assert await answers_again(store, "k") == BODY
    await store.aclose()


async def test_cancelled_reads_give_their_connections_back(
    open_store: Callable[..., S3Store], proxy: FaultServer, bucket: str
) -> None:
    options = S3Options(read_timeout=20.0, total_timeout=40.0, max_connections=1)
    store = open_store(S3Location(bucket, endpoint=proxy.url), options)
    await store.put("k", [BODY])
    for fault in (Fault(method="GET", hang=True), Fault(method="GET", stall_at=1000)):
        proxy.clear()
        proxy.add(fault)
        reading = asyncio.ensure_future(store.get("k", into=buffer))
        while not proxy.count("GET"):  # noqa: ASYNC110  # the log fills on another thread
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        proxy.clear()
        assert await read(store, "k") == BODY
    await store.aclose()


async def test_an_unreachable_endpoint_is_named_and_comes_back(
    filled: S3Store, proxy: FaultServer
) -> None:
    proxy.refuse()
    with pytest.raises(RemoteUnavailableError, match="reachable") as caught:
        await filled.get("k", into=buffer)
    assert isinstance(caught.value, ConnectionError)
    proxy.accept()
    assert await read(filled, "k") == BODY


async def test_one_timeout_does_not_break_the_store(filled: S3Store, proxy: FaultServer) -> None:
    proxy.add(Fault(method="GET", refuse=True, times=ATTEMPTS))
    with pytest.raises(RemoteUnavailableError):
        await filled.get("k", into=buffer)
    assert await read(filled, "k") == BODY


# Throttling and server errors


@pytest.mark.parametrize("retry_after", [None, 0])
async def test_a_short_throttling_is_waited_out(
    filled: S3Store, proxy: FaultServer, retry_after: int | None
) -> None:
    proxy.add(Fault(status=503, retry_after=retry_after, times=2))
    assert await read(filled, "k") == BODY
    proxy.clear()
    proxy.add(Fault(status=503, retry_after=retry_after, times=2))
    assert await filled.put("k2", [BODY]) is PutOutcome.WRITTEN


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (429, "TooManyRequests")])
async def test_lasting_throttling_is_named_and_slows_writers_not_readers(
    filled: S3Store, proxy: FaultServer, status: int, code: str
) -> None:
    proxy.add(Fault(method="PUT", status=status, code=code, retry_after=10))
    with pytest.raises(RemoteThrottledError, match=code):
        await filled.put("k2", [BODY])
    tried = proxy.count("PUT")
    writing = asyncio.ensure_future(filled.put("k3", [BODY]))
    assert await read(filled, "k") == BODY
    await asyncio.sleep(0.2)
    assert proxy.count("PUT") == tried
    writing.cancel()
    await asyncio.wait({writing})
    proxy.clear()
    filled._pace._resume = 0.0  # the ten seconds are over
    assert await filled.put("k3", [BODY]) is PutOutcome.WRITTEN


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_server_errors_are_retried_then_named(
    filled: S3Store, proxy: FaultServer, status: int
) -> None:
    proxy.add(Fault(status=status, times=1))
    assert await read(filled, "k") == BODY
    proxy.add(Fault(status=status))
    with pytest.raises(RemoteUnavailableError, match=str(status)) as caught:
        await filled.put("k2", [BODY])
    assert caught.value.__cause__ is not None
    assert caught.value.retryable


async def test_an_error_document_with_status_200_is_no_success(
    store: S3Store, proxy: FaultServer
) -> None:
    proxy.add(Fault(method="PUT", status=200, code="InternalError"))
    with pytest.raises(RemoteUnavailableError, match="InternalError"):
        await store.put("k", [BODY])


# Denials and misconfiguration


async def test_without_the_right_to_list_a_403_is_a_miss_with_one_warning(
    filled: S3Store, proxy: FaultServer, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.add(Fault(method="GET", status=403), Fault(method="HEAD", status=403))
    with caplog.at_level(logging.WARNING, logger="ec_s3"):
        for _ in range(3):
            assert await filled.get("k", into=buffer) is None
            assert await filled.head("k") is None
    assert len(caplog.records) == 1
    for named in ("403", proxy.url, "ListBucket"):
        assert named in caplog.text
    assert "testing" not in caplog.text.replace("ec_s3.testing", "")


async def test_a_denied_put_is_reported_and_not_repeated(
    store: S3Store, proxy: FaultServer
) -> None:
    proxy.add(Fault(method="PUT", status=403))
    with pytest.raises(RemoteDeniedError, match="403 AccessDenied") as caught:
        await store.put("k", [BODY])
    assert not caught.value.retryable
    assert isinstance(caught.value, PermissionError)
    assert proxy.count("PUT") == 1


@pytest.mark.parametrize(
    "code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "RequestTimeTooSkewed"]
)
async def test_wrong_credentials_are_no_miss(
    filled: S3Store, proxy: FaultServer, code: str
) -> None:
    proxy.add(Fault(status=403, code=code))
    with pytest.raises(RemoteDeniedError, match=f"{code}.*(credentials|clock)"):
        await filled.get("k", into=buffer)


async def test_a_wrong_bucket_is_no_miss(
    open_store: Callable[..., S3Store], proxy: FaultServer
) -> None:
    store = open_store(S3Location("no-such-bucket", endpoint=proxy.url), PATIENT)
    for call in (store.get("k", into=buffer), store.put("k", [b"x"]), anext(store.list())):
        with pytest.raises(RemoteDeniedError, match=r"NoSuchBucket.*'no-such-bucket'") as caught:
            await call
        assert proxy.url in str(caught.value)
    await store.aclose()


async def test_a_deleted_object_is_absent_at_once(filled: S3Store, proxy: FaultServer) -> None:
    assert (await filled.delete(["k"])).deleted == ("k",)
    assert await filled.head("k") is None
    assert await filled.get("k", into=buffer) is None


async def test_failed_deletes_are_reported_one_by_one(filled: S3Store, proxy: FaultServer) -> None:
    proxy.add(Fault(method="DELETE", path="bad", status=403))
    report = await filled.delete(["k", "bad/1", "never"])
    assert report.deleted == ("k", "never")
    assert list(report.failed) == ["bad/1"]
    assert "AccessDenied" in report.failed["bad/1"]


async def test_no_secret_reaches_an_error_a_log_or_a_repr(
    open_store: Callable[..., S3Store],
    proxy: FaultServer,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "HUSHKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "HUSHSECRET")
    store = open_store(S3Location(bucket, endpoint=proxy.url), PATIENT)
    with caplog.at_level(logging.INFO):
        for fault in (Fault(status=403, code="SignatureDoesNotMatch"), Fault(refuse=True)):
            proxy.clear()
            proxy.add(fault)
            with pytest.raises(RemoteError) as caught:
                await store.put("k", [BODY])
            assert "HUSH" not in f"{caught.value!r}{caught.value.__cause__!r}"
    assert "HUSH" not in caplog.text + repr(store)
    await store.aclose()


# Conditional writes


@pytest.mark.parametrize("status", [304, 412])
async def test_a_failed_condition_means_already_there(
    store: S3Store, proxy: FaultServer, status: int
) -> None:
    proxy.add(Fault(method="PUT", status=status))
    assert await store.put("k", [BODY]) is PutOutcome.EXISTS
    assert await store.put("k", [BODY], if_match='"e"') is PutOutcome.CHANGED
    assert proxy.count("PUT") == 2


async def test_a_conflict_is_tried_again(store: S3Store, proxy: FaultServer) -> None:
    proxy.add(Fault(method="PUT", status=409, times=2))
    assert await store.put("k", [BODY]) is PutOutcome.WRITTEN
    assert proxy.count("PUT") == 3
    proxy.add(Fault(method="PUT", status=409))
    with pytest.raises(RemoteUnavailableError, match="another write"):
        await store.put("k2", [BODY])


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (501, "NotImplemented"),
        (501, "Whatever"),
        (400, "NotImplemented"),
        (400, "InvalidArgument"),
        (400, "InvalidRequest"),
    ],
)
async def test_a_store_without_conditions_gets_plain_puts_from_then_on(
    store: S3Store, proxy: FaultServer, status: int, code: str
) -> None:
    condition = r"(?i)\nif-(none-)?match:"
    proxy.add(Fault(method="PUT", header=condition, status=status, code=code))
    assert await store.put("k", [BODY]) is PutOutcome.WRITTEN
    assert proxy.count("PUT") == 2
    assert await store.put("k2", [BODY]) is PutOutcome.WRITTEN
    assert proxy.count("PUT") == 3
    assert await store.put("k", [b"other"]) is PutOutcome.EXISTS
    info = await store.head("k")
    assert info is not None
    assert await store.put("k", [b"new"], if_match='"stale"') is PutOutcome.CHANGED
    assert await store.put("k", [b"new"], if_match=info.etag) is PutOutcome.WRITTEN
    assert await store.put("gone", [b"new"], if_match=info.etag) is PutOutcome.CHANGED
    assert await read(store, "k") == b"new"


@pytest.mark.parametrize(
    ("status", "code"), [(501, "NotImplemented"), (400, "InvalidArgument"), (400, "BadDigest")]
)
async def test_a_store_that_refuses_the_plain_put_too_keeps_its_conditions(
    store: S3Store, proxy: FaultServer, status: int, code: str
) -> None:
    proxy.add(Fault(method="PUT", status=status, code=code))
    with pytest.raises(RemoteError, match=code):
        await store.put("k", [BODY])
    proxy.clear()
    assert await store.put("k", [BODY]) is PutOutcome.WRITTEN
    assert await store.put("k", [BODY]) is PutOutcome.EXISTS
    assert proxy.count("PUT") == 2


# Stores with limits


async def test_a_store_that_refuses_checksums_is_sent_none(
    store: S3Store, proxy: FaultServer
) -> None:
    refused = r"(?i)\n(x-amz-(sdk-)?checksum|x-amz-trailer|content-encoding: *aws-chunked|expect:)"
    proxy.add(Fault(header=refused, status=400))
    assert await store.put("k", [BODY]) is PutOutcome.WRITTEN
    assert await read(store, "k") == BODY
    assert [info.key async for info in store.list()] == ["k"]
    assert (await store.delete(["k"])).deleted == ("k",)


async def test_a_store_without_multipart_gets_one_plain_put(
    open_store: Callable[..., S3Store], proxy: FaultServer, bucket: str
) -> None:
    store = open_store(S3Location(bucket, endpoint=proxy.url))
    proxy.add(Fault(path=r"\?uploads", status=501))
    parts = [memoryview(bytes(1 << 20))] * 65
    for n in range(2):
        assert await store.put(f"k/{n}", parts) is PutOutcome.WRITTEN
    assert await store.put("k/0", parts) is PutOutcome.EXISTS
    assert proxy.count("POST") == 1
    assert [request.nbytes for request in proxy.log if request.method == "PUT"] == [65 << 20] * 3
    await store.aclose()


@pytest.mark.parametrize("cancel", [False, True])
async def test_a_failed_or_cancelled_multipart_upload_is_aborted(
    open_store: Callable[..., S3Store],
    proxy: FaultServer,
    s3_server: S3Server,
    bucket: str,
    cancel: bool,
) -> None:
    store = open_store(S3Location(bucket, endpoint=proxy.url))
    third = r"partNumber=3"
    proxy.add(Fault(path=third, hang=True) if cancel else Fault(path=third, status=403))
    writing = asyncio.ensure_future(store.put("k", [memoryview(bytes(1 << 20))] * 80))
    if cancel:
        while not proxy.count("PUT", third):  # noqa: ASYNC110  # the log fills on another thread
            await asyncio.sleep(0.01)
        writing.cancel()
    with pytest.raises(asyncio.CancelledError if cancel else RemoteDeniedError):
        await writing
    assert proxy.count("DELETE", "uploadId") >= 1  # the mock may fail while it takes in a part
    assert await store.head("k") is None
    client = s3_server.client()
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)
    client.close()
    await store.aclose()


@pytest.mark.parametrize("if_absent", [True, False])
async def test_a_lost_answer_to_the_end_of_a_multipart_upload_counts_as_written(
    open_store: Callable[..., S3Store],
    proxy: FaultServer,
    bucket: str,
    caplog: pytest.LogCaptureFixture,
    if_absent: bool,
) -> None:
    store = open_store(S3Location(bucket, endpoint=proxy.url))
    proxy.add(
        Fault(method="POST", path="uploadId", drop_response=True, times=1),
        Fault(method="POST", path="uploadId", status=404, code="NoSuchUpload"),
        Fault(method="DELETE", path="uploadId", status=404, code="NoSuchUpload"),
    )
    parts = [memoryview(bytes(1 << 20))] * 65
    assert await store.put("k", parts, if_absent=if_absent) is PutOutcome.WRITTEN
    assert "could not be aborted" not in caplog.text
    await store.aclose()


async def test_a_multipart_upload_that_cannot_be_aborted_is_told(
    open_store: Callable[..., S3Store],
    proxy: FaultServer,
    bucket: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = open_store(S3Location(bucket, endpoint=proxy.url))
    proxy.add(Fault(path=r"partNumber=2", status=403), Fault(method="DELETE", status=403))
    with pytest.raises(RemoteDeniedError):
        await store.put("k", [memoryview(bytes(1 << 20))] * 65)
    assert "could not be aborted" in caplog.text
    assert "its parts: 403 AccessDenied" in caplog.text
    assert "Traceback" not in caplog.text, "it ends in what the store has said"
    await store.aclose()


# Addressing and TLS


@pytest.mark.parametrize(
    ("addressing", "path", "host"),
    [
        ("path", "/{bucket}/p/k", "localhost"),
        ("auto", "/{bucket}/p/k", "localhost"),
        ("virtual", "/p/k", "{bucket}.localhost"),
    ],
)
async def test_both_ways_of_addressing_reach_the_bucket(
    open_store: Callable[..., S3Store],
    proxy: FaultServer,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    addressing: str,
    path: str,
    host: str,
) -> None:
    resolve = socket.getaddrinfo

    def loopback(name: str, *args: object, **more: object) -> object:
        return resolve("127.0.0.1" if name.endswith("localhost") else name, *args, **more)  # type: ignore[arg-type]  # passed on as they come

    monkeypatch.setattr(socket, "getaddrinfo", loopback)
    port = proxy.url.rpartition(":")[2]
    location = S3Location(bucket, "p", f"http://localhost:{port}", addressing=addressing)
    store = open_store(location, PATIENT)
    assert await store.put("k", [BODY]) is PutOutcome.WRITTEN
    assert await read(store, "k") == BODY
    await store.aclose()
    for request in proxy.log:
        assert request.path == path.format(bucket=bucket)
        assert request.header("Host") == f"{host.format(bucket=bucket)}:{port}"


async def test_a_dotted_bucket_is_addressed_by_path(
    open_store: Callable[..., S3Store], s3_server: S3Server, proxy: FaultServer
) -> None:
    name = s3_server.create_bucket(f"dotted.{os.urandom(6).hex()}.name")
    store = open_store(S3Location(name, endpoint=proxy.url), PATIENT)
    assert await store.put("k", [BODY]) is PutOutcome.WRITTEN
    assert proxy.log[0].path == f"/{name}/k"
    await store.aclose()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PEM file with a self-signed certificate for 127.0.0.1 and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ec_s3 test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path


@pytest.fixture
def tls_proxy(s3_server: S3Server, authority: Path) -> Iterator[FaultServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority)
    with FaultServer(s3_server.url, tls=context) as server:
        yield server


@pytest.mark.parametrize("way", ["option", "environment", "off"])
async def test_a_private_authority_can_be_trusted(
    open_store: Callable[..., S3Store],
    tls_proxy: FaultServer,
    bucket: str,
    authority: Path,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = S3Options()
    if way == "option":
        options = S3Options(ca_bundle=str(authority))
    elif way == "environment":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority))
    else:
        options = S3Options(verify=False)
    store = open_store(S3Location(bucket, endpoint=tls_proxy.url), options)
    assert await store.put("k", [BODY]) is PutOutcome.WRITTEN
    assert await read(store, "k") == BODY
    assert tls_proxy.log[0].header("x-amz-content-sha256") == "UNSIGNED-PAYLOAD"
    assert ("certificates" in caplog.text) == (way == "off")
    await store.aclose()
