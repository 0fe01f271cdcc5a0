"""Unfinished uploads: pages are followed, and stores that know none have none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ec_s3.errors import RemoteDeniedError
from ec_s3.multiparts import Multiparts
from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.url import S3Location, S3Options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ec_s3.testing.moto import S3Server


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultServer]:
    with FaultServer(upstream=s3_server.url) as server:
        yield server


def opened(proxy: FaultServer, bucket: str) -> Multiparts:
    location = S3Location(bucket=bucket, prefix="p", endpoint=proxy.url, region="us-east-1")
    return Multiparts(location, S3Options())


@pytest.mark.parametrize("status", [405, 501])
async def test_a_store_without_multipart_uploads_has_none(
    proxy: FaultServer, bucket: str, status: int
) -> None:
    proxy.add(Fault(method="GET", path=r"\?.*uploads", status=status))
    multiparts = opened(proxy, bucket)
    assert [upload async for upload in multiparts.list()] == []
    await multiparts.aclose()


async def test_a_refusal_is_told(proxy: FaultServer, bucket: str) -> None:
    proxy.add(Fault(method="GET", path=r"\?.*uploads", status=403))
    multiparts = opened(proxy, bucket)
    with pytest.raises(RemoteDeniedError, match="grant what is missing"):
        await anext(multiparts.list())
    await multiparts.aclose()


async def test_pages_are_followed_to_their_end(
    proxy: FaultServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import UTC, datetime

    moment = datetime(2026, 1, 1, tzinfo=UTC)
    asked: list[dict[str, Any]] = []

    def entry(name: str) -> dict[str, Any]:
        return {"Key": f"p/{name}", "UploadId": f"id-{name}", "Initiated": moment}

    pages: list[dict[str, Any]] = [
        {
            "Uploads": [entry("a"), entry("b")],
            "IsTruncated": True,
            "NextKeyMarker": "p/b",
            "NextUploadIdMarker": "id-b",
        },
        {"Uploads": [entry("c")], "IsTruncated": True, "NextUploadIdMarker": "id-c"},  # SeaweedFS
        {"Uploads": [entry("d")], "IsTruncated": False},
        {"Parts": [{"Size": 5}, {"Size": 6}], "IsTruncated": True, "NextPartNumberMarker": 2},
        {"Parts": [{"Size": 7}], "IsTruncated": False},
    ]

    class Client:
        async def list_multipart_uploads(self, **arguments: Any) -> dict[str, Any]:
            asked.append(arguments)
            return pages.pop(0)

        list_parts = list_multipart_uploads

    multiparts = opened(proxy, bucket)

    async def client() -> Client:
        return Client()

    monkeypatch.setattr(multiparts._connection, "client", client)
    uploads = [upload async for upload in multiparts.list()]
    assert [upload.key for upload in uploads] == ["a", "b", "c", "d"]
    assert asked[0] == {"Bucket": bucket, "Prefix": "p/"}
    assert (asked[1]["KeyMarker"], asked[1]["UploadIdMarker"]) == ("p/b", "id-b")
    assert (asked[2]["KeyMarker"], asked[2]["UploadIdMarker"]) == ("", "id-c")
    assert uploads[0].started == moment.timestamp()
    assert await multiparts.size(uploads[0]) == 18
    assert asked[4]["PartNumberMarker"] == 2
