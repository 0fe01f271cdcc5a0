"""Deletion across tiers: what is reported when stores fail in part or as a whole."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import pytest

from ec_s3.deletion import delete
from ec_s3.errors import RemoteUnavailableError
from ec_s3.local import LocalTier
from ec_s3.pages import Slab
from ec_s3.presence import Presence, Refused
from ec_s3.testing.memory import MemoryStore
from ec_s3.tiers import Tiers
from ec_s3.types import DeleteReport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

    from ec_s3.reader import Reader


class Bars:
    """The one thing that a deletion needs of a reader."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @asynccontextmanager
    async def barred(self, keys: Iterable[str]) -> AsyncIterator[None]:
        self.log += [f"bar {key}" for key in keys]
        yield
        self.log.append("end")


class Partial(MemoryStore):
    """Cannot delete `stuck`; raises `error` when it is set."""

    def __init__(self, *stuck: str, error: RemoteUnavailableError | None = None) -> None:
        super().__init__()
        self.stuck = stuck
        self.error = error

    async def delete(self, keys: Sequence[str]) -> DeleteReport:
        if self.error is not None:
            raise self.error
        done = [key for key in keys if key not in self.stuck]
        await super().delete(done)
        return DeleteReport(tuple(done), dict.fromkeys(self.stuck, "in use"))


@pytest.fixture
def tier() -> Iterator[LocalTier]:
    with Slab.create(1 << 20) as slab:
        yield LocalTier(slab)


def tiers(local: LocalTier, disk: MemoryStore | None, remote: MemoryStore | None) -> Tiers:
    return Tiers(
        local=local,
        disk=disk,
        remote=remote,
        writeback=None,
        presence=Presence(positive_ttl=60, negative_ttl=60),
        refused=Refused(),
    )


async def test_failures_of_all_stores_are_reported_together(tier: LocalTier) -> None:
    bars = Bars()
    where = tiers(tier, Partial("a"), Partial("b"))
    report = await delete(["a", "b", "c"], tiers=where, reader=cast("Reader", bars), queue=None)
    assert report == DeleteReport(("c",), {"a": "in use", "b": "in use"})
    assert bars.log == ["bar a", "bar b", "bar c", "end"]


async def test_what_was_believed_of_a_key_is_forgotten_even_after_a_failure(
    tier: LocalTier,
) -> None:
    remote = MemoryStore()
    remote.objects["a"] = b"x"
    failing = Partial(error=RemoteUnavailableError("down", operation="delete"))
    where = tiers(tier, failing, remote)
    where.presence.set("a", present=True, now=0)
    where.refused.add("a", "v")
    with pytest.raises(RemoteUnavailableError):
        await delete(["a"], tiers=where, reader=cast("Reader", Bars()), queue=None)
    assert remote.objects == {}
    assert where.presence.get("a", now=1) is None
    assert not where.refused.knows("a")


async def test_without_stores_everything_is_deleted(tier: LocalTier) -> None:
    where = tiers(tier, None, None)
    report = await delete(["a"], tiers=where, reader=cast("Reader", Bars()), queue=None)
    assert report == DeleteReport(("a",))
