"""A store whose server must not be trusted: every verb fails, and says the same."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from ec_s3.errors import RemoteUnavailableError
from ec_s3.testing.conformance import buffer, keys

if TYPE_CHECKING:
    from ec_s3.s3 import S3Store


async def refused(store: S3Store, remedy: str) -> None:
    """Check that all verbs fail with the bucket and the remedy, each within a minute; close it."""
    verbs: dict[str, Any] = {
        "get": lambda: store.get("v1/k", into=buffer),
        "head": lambda: store.head("v1/k"),
        "put": lambda: store.put("v1/k", [b"x"]),
        "list": lambda: keys(store),
    }
    try:
        for operation, call in verbs.items():
            with pytest.raises(RemoteUnavailableError) as caught:
                async with asyncio.timeout(60):
                    await call()
            assert f"{operation} failed" in str(caught.value)
            assert remedy in str(caught.value)
            assert "some-bucket" in str(caught.value)
        assert remedy in (await store.delete(["v1/k"])).failed["v1/k"]
    finally:
        await store.aclose()
