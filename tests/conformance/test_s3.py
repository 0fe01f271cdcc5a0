from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ec_s3.testing.conformance import StoreTests
from ec_s3.url import S3Location

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ec_s3.s3 import S3Store
    from ec_s3.testing.moto import S3Server


class TestS3Store(StoreTests):
    @pytest.fixture
    async def store(
        self, open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str
    ) -> AsyncIterator[S3Store]:
        store = open_store(S3Location(bucket, prefix="some/prefix", endpoint=s3_server.url))
        yield store
        await store.aclose()
