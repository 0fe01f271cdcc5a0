from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from blockbuster import blockbuster_ctx

from ec_s3.directory import DirectoryStore
from ec_s3.testing.conformance import StoreTests

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class TestDirectoryStore(StoreTests):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[DirectoryStore]:
        store = DirectoryStore(tmp_path / "store")
        with blockbuster_ctx("ec_s3"):  # a file operation on the loop is a failure
            yield store
        await store.aclose()


class TestBoundedExclusiveDirectoryStore(StoreTests):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[DirectoryStore]:
        store = DirectoryStore(tmp_path / "store", max_bytes=64 << 20, exclusive=True)
        yield store
        await store.aclose()
