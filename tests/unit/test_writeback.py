"""DiskWriteback: budget, buffers given back, failures, calling off, closing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from ec_s3.buffers import Body, BufferPool
from ec_s3.errors import CapacityError, RemoteUnavailableError
from ec_s3.metrics import Stats
from ec_s3.testing.memory import MemoryStore
from ec_s3.writeback import DiskWriteback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ec_s3.store import Buffer
    from ec_s3.types import PutOutcome

NBYTES = 100_000


class Disk(MemoryStore):
    """Fails with `error`, and can be held up."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        if_match: str | None = None,
    ) -> PutOutcome:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super().put(key, parts, if_absent=if_absent, if_match=if_match)


class Rig:
    def __init__(self) -> None:
        self.disk = Disk()
        self.stats = Stats()
        self.pool = BufferPool(1 << 20)
        self.writeback = DiskWriteback(self.disk, self.stats)

    def write(self, key: str = "k") -> None:
        body = Body(self.pool)
        part = body.part(body.take(NBYTES)[:NBYTES])
        part[:4] = key.encode().ljust(4)
        assert self.writeback.admit(NBYTES)
        self.writeback.take(key, [part], body, nbytes=NBYTES)

    def count(self, outcome: str) -> float:
        return self.stats.snapshot()[f"disk_writes_{outcome}"]


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_an_object_is_written_and_its_buffer_can_be_used_again(rig: Rig) -> None:
    rig.write()
    await rig.writeback.close(10)
    assert rig.disk.objects["k"].startswith(b"k   ")
    assert rig.count("written") == 1
    assert rig.pool.idle_bytes >= NBYTES
    assert rig.writeback._pending == 0


@pytest.mark.parametrize(
    "error",
    [
        RemoteUnavailableError("disk full", operation="put", key="k"),
        CapacityError("larger than the whole disk tier"),
    ],
)
async def test_a_failing_disk_is_counted_and_nothing_is_lost(rig: Rig, error: Exception) -> None:
    rig.disk.error = error
    rig.write()
    await rig.writeback.close(10)
    assert rig.count("failed") == 1
    assert rig.pool.idle_bytes >= NBYTES
    assert rig.writeback._pending == 0


async def test_a_slow_disk_holds_no_more_than_the_budget(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.writeback.MAX_PENDING_BYTES", 2 * NBYTES)
    rig.disk.gate.clear()
    rig.write("a")
    assert rig.writeback.admit(NBYTES)  # a fetch under way counts, too
    assert not rig.writeback.admit(NBYTES)
    assert rig.count("skipped") == 1
    rig.writeback.withdraw(NBYTES)
    rig.write("b")
    rig.disk.gate.set()
    await rig.writeback.close(10)
    assert sorted(rig.disk.objects) == ["a", "b"]
    assert rig.writeback.admit(2 * NBYTES)


async def test_calling_off_ends_the_writes_of_those_keys_only(rig: Rig) -> None:
    rig.disk.gate.clear()
    rig.write("a")
    rig.write("b")
    await rig.writeback.call_off(["a", "unknown"])
    rig.disk.gate.set()
    await rig.writeback.close(10)
    assert list(rig.disk.objects) == ["b"]
    assert rig.pool.idle_bytes >= 2 * NBYTES


async def test_closing_does_not_wait_for_a_disk_that_hangs(rig: Rig) -> None:
    rig.disk.gate.clear()
    rig.write()
    await rig.writeback.close(0.01)
    assert rig.pool.idle_bytes >= NBYTES
    assert rig.disk.objects == {}
