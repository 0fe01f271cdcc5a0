"""What a refused read means, and that the reason of a refused HEAD is found out, sparingly."""

from __future__ import annotations

import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from ec_s3.errors import RemoteDeniedError
from ec_s3.testing.conformance import read
from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.url import S3Location

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ec_s3.s3 import S3Store
    from ec_s3.testing.moto import S3Server


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultServer]:
    with FaultServer(s3_server.url) as server:
        yield server


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "UserSuspended"])
async def test_a_head_whose_credentials_are_refused_is_a_denial_that_says_why(
    open_store: Callable[..., S3Store], proxy: FaultServer, bucket: str, code: str
) -> None:
    proxy.add(Fault(method="HEAD", status=403), Fault(method="GET", status=403, code=code))
    async with aclosing(open_store(S3Location(bucket, endpoint=proxy.url))) as store:
        for _ in range(5):
            with pytest.raises(RemoteDeniedError, match=rf"head failed: 403 {code}.*credentials"):
                await store.head("k")
    assert proxy.count("HEAD") == 5
    assert proxy.count("GET") == 1


async def test_a_head_that_may_not_be_asked_is_a_miss_with_one_warning(
    open_store: Callable[..., S3Store],
    proxy: FaultServer,
    bucket: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy.add(
        Fault(method="HEAD", status=403), Fault(method="GET", status=403, code="AccessDenied")
    )
    async with aclosing(open_store(S3Location(bucket, endpoint=proxy.url))) as store:
        for _ in range(5):
            assert await store.head("k") is None
    assert proxy.count("GET") == 1
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "s3:GetObject" in record.getMessage()
    assert "s3:ListBucket" in record.getMessage()


async def test_a_head_that_alone_is_refused_is_a_miss_and_leaves_the_store_usable(
    open_store: Callable[..., S3Store], proxy: FaultServer, bucket: str
) -> None:
    async with aclosing(open_store(S3Location(bucket, endpoint=proxy.url))) as store:
        await store.put("k", [b"xyz"])
        proxy.add(Fault(method="HEAD", status=403))
        assert await store.head("k") is None
        assert await read(store, "k") == b"xyz"
        proxy.clear()
        assert await store.head("k") is not None
