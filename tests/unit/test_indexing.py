"""The index in the bucket: listed, written, followed."""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING

import pytest

from ec_s3 import indexing
from ec_s3.errors import IndexObjectError, RemoteUnavailableError
from ec_s3.index import MAX_INDEX_BYTES, tag_of
from ec_s3.indexing import index_poll, list_tags, write_index
from ec_s3.keys import Namespace, identifier_digest
from ec_s3.metrics import Stats
from ec_s3.presence import Listing
from ec_s3.signing import parse_keys
from ec_s3.testing.memory import MemoryStore

if TYPE_CHECKING:
    from ec_s3.signing import Keyring

SPACE = Namespace(model="org/model", dtype="bfloat16")
OTHER = Namespace(model="org/model", dtype="bfloat16", weight_version="next")
NAME = SPACE.prefix.rpartition("/")[2]
KEYS = parse_keys("key:" + "ab" * 32)
NOW = 1000.0


@pytest.fixture(autouse=True)
def the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ec_s3.indexing.time.time", lambda: NOW)


class Rig:
    def __init__(self, *, keyring: Keyring | None = None) -> None:
        self.store = MemoryStore()
        self.stats = Stats()
        self.space = SPACE
        self.listing = Listing(wall_clock=lambda: NOW)
        self.poll = index_poll(
            self.store,
            namespace=lambda: self.space,
            listing=self.listing,
            max_age=3600.0,
            keyring=keyring,
            stats=self.stats,
            period=0.001,
        )

    async def write(
        self, *items: str, space: Namespace = SPACE, keyring: Keyring | None = None
    ) -> None:
        tags = array("I", [tag_of(identifier_digest(item)) for item in items])
        await write_index(self.store, tags, namespace=space, made=NOW, keyring=keyring)

    async def look(self) -> str:
        before = self.stats.snapshot()
        await self.poll.look()
        after = self.stats.snapshot()
        (outcome,) = [k for k in after if k.startswith("index_polls_") and after[k] > before[k]]
        return outcome.removeprefix("index_polls_")

    def lacks(self, item: str) -> bool:
        return self.listing.lacks(self.space.object_key(item))


async def test_what_is_listed_is_what_the_namespace_holds() -> None:
    rig = Rig()
    for item in ("a", "b"):
        rig.store.objects[SPACE.object_key(item)] = b"x"
    rig.store.objects[OTHER.object_key("c")] = b"x"
    rig.store.objects[SPACE.manifest_key] = b"x"
    await rig.write("old")
    seen: list[int] = []
    tags = await list_tags(rig.store, NAME, on_item=seen.append)
    assert sorted(tags) == sorted(tag_of(identifier_digest(item)) for item in ("a", "b"))
    assert seen == [1, 1]


async def test_a_folder_with_more_items_than_an_index_holds_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    for item in ("a", "b"):
        rig.store.objects[SPACE.object_key(item)] = b"x"
    monkeypatch.setattr(indexing, "MAX_ITEMS", 1)
    with pytest.raises(IndexObjectError, match="more items"):
        await list_tags(rig.store, NAME)
    monkeypatch.setattr(indexing, "MAX_INDEX_BYTES", 10)
    with pytest.raises(IndexObjectError, match="more than 10"):
        await rig.write("a")


async def test_an_index_is_read_once_and_again_when_it_is_another() -> None:
    rig = Rig()
    assert await rig.look() == "absent"
    assert not rig.lacks("a")
    await rig.write("a")
    assert await rig.look() == "loaded"
    assert (rig.lacks("a"), rig.lacks("b")) == (False, True)
    assert rig.stats.snapshot()["index_items"] == 1
    assert await rig.look() == "unchanged"
    await rig.write("a", "b")
    assert await rig.look() == "loaded"
    assert not rig.lacks("b")


async def test_a_deleted_index_is_believed_no_more() -> None:
    rig = Rig()
    await rig.write("a")
    await rig.look()
    await rig.store.delete([SPACE.index_key])
    assert await rig.look() == "absent"
    assert not rig.lacks("b")


@pytest.mark.parametrize("cause", ["bytes", "size", "another namespace"])
async def test_what_is_no_index_is_counted_and_the_last_one_holds(
    cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    await rig.write("a")
    await rig.look()
    if cause == "another namespace":
        await rig.write("b", space=OTHER)
        body = rig.store.objects[OTHER.index_key]
    else:
        body = b"nonsense" if cause == "bytes" else bytes(MAX_INDEX_BYTES + 1)
    await rig.store.put(SPACE.index_key, [body], if_absent=False)
    assert await rig.look() == "refused"
    await rig.look()
    assert rig.lacks("b")
    assert len(caplog.records) == 1, "said once"


async def test_an_unsigned_index_is_refused_where_objects_are_signed() -> None:
    rig = Rig(keyring=KEYS)
    await rig.write("a")
    assert await rig.look() == "refused"
    assert not rig.lacks("b")
    await rig.write("a", keyring=KEYS)
    assert await rig.look() == "loaded"
    assert rig.lacks("b")


async def test_a_bucket_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    await rig.write("a")
    await rig.look()

    async def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(rig.store, "get", broken)
    error: Exception = RemoteUnavailableError("down", operation="get")
    assert await rig.look() == "failed"
    error = LookupError("a bug")
    assert await rig.look() == "failed"
    assert rig.stats.snapshot()["errors_index"] == 1
    assert rig.lacks("b")


async def test_other_weights_have_an_index_of_their_own() -> None:
    rig = Rig()
    await rig.write("a")
    await rig.look()
    rig.space = OTHER
    assert not rig.lacks("b"), "of these nothing is known yet"
    await rig.write("b", space=OTHER)
    assert await rig.look() == "loaded"
    assert (rig.lacks("a"), rig.lacks("b")) == (True, False)


async def test_the_poll_goes_on_until_it_is_cancelled() -> None:
    rig = Rig()
    task = asyncio.ensure_future(rig.poll.run())
    while rig.stats.snapshot()["index_polls_absent"] < 3:  # noqa: ASYNC110  a counter tells nobody
        await asyncio.sleep(0.001)
    await rig.write("a")
    while not rig.lacks("b"):  # noqa: ASYNC110  as above
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
