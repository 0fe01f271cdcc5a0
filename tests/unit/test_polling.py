"""Following a document of a bucket; `control` and `indexing` test what they make of one."""

from __future__ import annotations

import asyncio

import pytest

from ec_s3.errors import ControlError, RemoteUnavailableError
from ec_s3.metrics import Stats
from ec_s3.polling import Followed, Poll, read_document
from ec_s3.testing.memory import MemoryStore

KEY = "v1/space/notes.txt"
NOTES = Followed(
    name="control",
    max_bytes=10,
    refuses=ControlError,
    taken="taken",
    refused="refused",
    complaint="no notes: %s",
    unread="not read: %s",
    bug="not taken in",
)


class Rig:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.stats = Stats()
        self.key = KEY
        self.error: Exception | None = None
        self.taken: list[tuple[str, bytes]] = []
        self.counted: list[str] = []
        self.lost = self.looked = 0
        self.poll = Poll(
            self.store,
            NOTES,
            key=lambda: self.key,
            take=self.take,
            count=self.counted.append,
            stats=self.stats,
            period=0.001,
            timeout=10.0,
            lost=self.lose,
            looked=self.look,
        )

    async def take(self, key: str, body: memoryview) -> None:
        if self.error is not None:
            raise self.error
        self.taken.append((key, bytes(body)))

    def lose(self) -> None:
        self.lost += 1

    def look(self) -> None:
        self.looked += 1

    async def write(self, body: bytes) -> None:
        await self.store.put(self.key, [body], if_absent=False)

    async def outcome(self) -> str:
        await self.poll.look()
        return self.counted[-1]


async def test_a_version_is_read_once() -> None:
    rig = Rig()
    await rig.write(b"one")
    assert [await rig.outcome() for _ in range(3)] == ["taken", "unchanged", "unchanged"]
    await rig.write(b"two")
    assert await rig.outcome() == "taken"
    assert rig.taken == [(KEY, b"one"), (KEY, b"two")]
    assert rig.looked == 4


async def test_that_there_is_none_is_told_every_time() -> None:
    rig = Rig()
    assert [await rig.outcome(), await rig.outcome()] == ["absent", "absent"]
    assert rig.lost == 2
    await rig.write(b"one")
    await rig.outcome()
    await rig.store.delete([KEY])
    await rig.outcome()
    await rig.write(b"one")
    assert await rig.outcome() == "taken", "it may have been another in between"


async def test_another_document_is_read_whatever_its_version() -> None:
    rig = Rig()
    await rig.write(b"one")
    await rig.outcome()
    rig.key = "v1/other/notes.txt"
    rig.store.objects[rig.key] = b"other"
    rig.store._versions[rig.key] = rig.store._versions[KEY]
    assert await rig.outcome() == "taken"
    assert rig.taken[-1] == (rig.key, b"other")


async def test_what_cannot_be_used_is_said_once_and_not_read_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.error = ControlError("nonsense")
    await rig.write(b"one")
    assert [await rig.outcome(), await rig.outcome()] == ["refused", "unchanged"]
    await rig.write(b"x" * 11)
    assert await rig.outcome() == "refused"
    assert [r.message for r in caplog.records] == ["no notes: nonsense"]
    with pytest.raises(ControlError, match=r"notes\.txt has 11 bytes, more than 10"):
        await read_document(rig.store, KEY, NOTES)


@pytest.mark.parametrize(
    "error",
    [LookupError("a bug"), TimeoutError(), RemoteUnavailableError("the disk", operation="delete")],
    ids=["bug", "timeout", "remote"],
)
async def test_after_an_unexpected_error_it_is_read_again(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    rig = Rig()
    rig.error = error
    await rig.write(b"one")
    assert await rig.outcome() == "failed"
    assert rig.stats.snapshot()["errors_control"] == 1
    assert str(error) in caplog.text
    rig.error = None
    assert await rig.outcome() == "taken"


async def test_a_bucket_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    await rig.write(b"one")
    await rig.outcome()

    async def fail(*_: object) -> None:
        raise RemoteUnavailableError("down", operation="get")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "_enter", fail)
        assert await rig.outcome() == "failed"
    assert await rig.outcome() == "unchanged"


async def test_the_first_look_is_told_whatever_it_finds() -> None:
    rig = Rig()
    rig.error = LookupError("a bug")
    await rig.write(b"one")
    assert not rig.poll.started.is_set()
    task = asyncio.ensure_future(rig.poll.run())
    async with asyncio.timeout(20):
        await rig.poll.started.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
