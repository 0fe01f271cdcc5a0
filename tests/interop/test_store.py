"""Store protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from ec_s3.testing.conformance import StoreTests
from ec_s3.url import S3Location, S3Options, parse_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ec_s3.s3 import S3Store
    from ec_s3.testing.servers import RealServer

pytestmark = [pytest.mark.interop, pytest.mark.smoke]


class TestRealStore(StoreTests):
    @pytest.fixture
    async def store(
        self, open_store: Callable[..., S3Store], real_server: RealServer, shared_bucket: str
    ) -> AsyncIterator[S3Store]:
        location = parse_url(real_server.url(shared_bucket, f"some/{uuid4().hex}"))
        assert isinstance(location, S3Location)
        ca = real_server.ca_bundle
        store = open_store(location, S3Options(ca_bundle=str(ca) if ca else None))
        yield store
        await store.aclose()
