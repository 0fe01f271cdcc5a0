from __future__ import annotations

import pytest

from ec_s3.testing.conformance import StoreTests
from ec_s3.testing.memory import MemoryStore


class TestMemoryStore(StoreTests):
    @pytest.fixture
    async def store(self) -> MemoryStore:
        return MemoryStore()
