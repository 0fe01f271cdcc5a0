"""Objects that are served near their end are written again, once, as they are."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from ec_s3.config import ECConfig
from ec_s3.control import Control
from ec_s3.engine import EncoderCache
from ec_s3.errors import RemoteUnavailableError
from ec_s3.gate import Gate
from ec_s3.keys import Namespace, identifier_digest
from ec_s3.metrics import Stats
from ec_s3.presence import Refused
from ec_s3.refresh import Refresher
from ec_s3.signing import parse_keys
from ec_s3.tensors import as_bytes
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import ItemMeta, TensorSpec
from ec_s3.wire import encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from ec_s3.signing import Keyring
    from ec_s3.store import Buffer
    from ec_s3.types import PutOutcome

NAMESPACE = Namespace(model="org/model", dtype="float32")
DAY = 86400.0
LIFETIME = 30 * DAY
NOW = time.time()
KEY = NAMESPACE.object_key("a")


class Bucket(MemoryStore):
    """Stores with a date of one's choice; runs `before_put` first, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.before_put: Callable[[], object] = lambda: None
        self.error: Exception | None = None
        self.listed: list[str] = []

    def store(self, key: str, body: bytes, *, days_old: float, etag: str = '"v1"') -> None:
        self.objects[key] = body
        self._versions[key] = (etag, NOW - days_old * DAY)

    def modified(self, key: str) -> float:
        return self._versions[key][1]

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        if_match: str | None = None,
    ) -> PutOutcome:
        self.before_put()
        if self.error is not None:
            raise self.error
        return await super().put(key, parts, if_absent=if_absent, if_match=if_match)


def encoded(name: str = "a", *, created: float = NOW, keyring: Keyring | None = None) -> bytes:
    frame = encode(
        TensorSpec("float32", (600, 1000)),  # more than one chunk
        [as_bytes(torch.arange(600_000, dtype=torch.float32))],
        identifier=name,
        namespace=NAMESPACE.id,
        meta=ItemMeta(),
        created=created,
        keyring=keyring,
    )
    return b"".join(frame.parts)


class Rig:
    def __init__(self, executor: ThreadPoolExecutor, *, keyring: Keyring | None = None) -> None:
        self.bucket = Bucket()
        self.gate = Gate(NAMESPACE)
        self.refused = Refused()
        self.stats = Stats()
        self.admitted: list[int] = []
        self.refresher = Refresher(
            self.bucket,
            self.gate,
            lifetime=LIFETIME,
            refused=self.refused,
            admit_bytes=self.admit,
            executor=executor,
            max_tensor_bytes=1 << 24,
            keyring=keyring,
            stats=self.stats,
            wall_clock=lambda: NOW,
        )

    def admit(self, nbytes: int) -> float:
        self.admitted.append(nbytes)
        return 0.0

    async def serve(self, key: str = KEY, *, known: float | None = None) -> str:
        """Serve an object whose date was learnt; what became of it, empty for nothing."""
        self.refresher.learn(key, self.bucket.modified(key) if known is None else known)
        before = self.stats.snapshot()
        self.refresher.served(key)
        await asyncio.sleep(0)
        while self.refresher.keys():
            await asyncio.wait(self.refresher._tasks.values())
        after = self.stats.snapshot()
        changed = [k for k in after if k.startswith("refreshed") and after[k] > before[k]]
        return changed[0].removeprefix("refreshed_objects_") if changed else ""


@pytest.fixture(autouse=True)
def no_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ec_s3.refresh.random.random", lambda: 0.0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with ThreadPoolExecutor(1) as executor:
        made = Rig(executor)
        yield made
        await made.refresher.close()


async def test_an_object_that_is_served_near_its_end_is_written_again_as_it_is(rig: Rig) -> None:
    body = encoded()
    rig.bucket.store(KEY, body, days_old=24.1)
    assert await rig.serve() == "written"
    assert rig.bucket.objects == {KEY: body}
    assert rig.bucket.modified(KEY) >= NOW - DAY
    assert rig.admitted == [len(body)], "within the uploads' rate limit"


async def test_a_young_object_is_not_even_looked_at(rig: Rig) -> None:
    rig.bucket.store(KEY, encoded(), days_old=23.9)
    assert await rig.serve() == ""
    assert rig.bucket.calls == {}


async def test_it_is_written_once_however_often_it_is_served(rig: Rig) -> None:
    rig.bucket.store(KEY, encoded(), days_old=25)
    rig.refresher.learn(KEY, NOW - 25 * DAY)
    for _ in range(10):
        rig.refresher.served(KEY)
    await asyncio.sleep(0)
    assert rig.refresher.keys() == {KEY}
    while rig.refresher.keys():
        await asyncio.wait(rig.refresher._tasks.values())
    for _ in range(10):
        rig.refresher.served(KEY)
    await asyncio.sleep(0)
    assert rig.refresher.keys() == set()
    assert rig.bucket.calls["put"] == 1


async def test_of_a_fleet_only_the_first_writes_and_the_others_see_it(rig: Rig) -> None:
    rig.bucket.store(KEY, encoded(), days_old=1)  # somebody has just written it
    assert await rig.serve(known=NOW - 25 * DAY) == "young"
    assert "put" not in rig.bucket.calls
    assert "get" not in rig.bucket.calls


async def test_servers_do_not_look_at_the_same_time(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def noted(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("ec_s3.refresh.random.random", lambda: 0.5)
    monkeypatch.setattr("ec_s3.refresh.asyncio.sleep", noted)
    rig.bucket.store(KEY, encoded(), days_old=25)
    rig.refresher.learn(KEY, NOW - 25 * DAY)
    await rig.refresher._try(KEY)
    assert pauses[0] == 150.0


async def test_an_object_of_unknown_age_is_looked_at_before_it_is_written(rig: Rig) -> None:
    rig.bucket.store(KEY, encoded(), days_old=2)
    assert await rig.serve(known=0.0) == "young"
    rig.bucket.store(KEY, encoded(), days_old=29)
    assert await rig.serve(known=0.0) == "written"


@pytest.mark.parametrize("moment", ["before", "after it was read", "before the put"])
async def test_what_is_deleted_meanwhile_does_not_come_back(rig: Rig, moment: str) -> None:
    rig.bucket.store(KEY, encoded(), days_old=25)

    def delete() -> None:
        del rig.bucket.objects[KEY]

    def delete_when_admitted(_: int) -> float:
        delete()
        return 0.0

    if moment == "before":
        delete()
    elif moment == "after it was read":
        rig.refresher._admit_bytes = delete_when_admitted
    else:
        rig.bucket.before_put = delete
    assert await rig.serve(known=NOW - 25 * DAY) == "changed"
    assert rig.bucket.objects == {}


async def test_what_was_replaced_meanwhile_is_left_as_it_is(rig: Rig) -> None:
    rig.bucket.store(KEY, encoded(), days_old=25)
    rig.bucket.before_put = lambda: rig.bucket.store(KEY, b"new", days_old=0, etag='"v2"')
    assert await rig.serve() == "changed"
    assert rig.bucket.objects[KEY] == b"new"


async def test_what_an_operator_has_deleted_or_outdated_is_left_to_expire(rig: Rig) -> None:
    rig.bucket.store(KEY, encoded(created=NOW - 25 * DAY), days_old=25)
    for control in (
        Control(deleted={identifier_digest("a"): time.time() + DAY}),
        Control(valid_after=NOW - DAY),
        Control(enabled=False),
    ):
        rig.gate.apply(control)
        assert await rig.serve() == "refused"
    assert "put" not in rig.bucket.calls
    rig.gate.apply(Control())
    assert await rig.serve() == "written"


async def test_objects_of_weights_that_are_not_in_use_are_left_to_expire(rig: Rig) -> None:
    rig.bucket.store(KEY, encoded(), days_old=25)
    rig.gate.resume("next")
    assert await rig.serve() == "refused"


@pytest.mark.parametrize("damage", ["flipped", "truncated", "nonsense", "refused by a reader"])
async def test_a_bad_object_is_not_kept_alive(rig: Rig, damage: str) -> None:
    body = bytearray(encoded())
    if damage == "flipped":
        body[-1] ^= 1
    elif damage == "truncated":
        del body[-10:]
    elif damage == "nonsense":
        body[:] = b"x" * 1000
    else:
        rig.refused.add(KEY, '"v1"')
    rig.bucket.store(KEY, bytes(body), days_old=25)
    assert await rig.serve() == "refused"
    assert "put" not in rig.bucket.calls


async def test_an_unsigned_object_is_not_kept_alive_where_objects_are_signed() -> None:
    keys = parse_keys("key:" + "ab" * 32)
    with ThreadPoolExecutor(1) as executor:
        rig = Rig(executor, keyring=keys)
        rig.bucket.store(KEY, encoded(), days_old=25)
        assert await rig.serve() == "refused"
        rig.bucket.store(KEY, encoded(keyring=keys), days_old=25)
        assert await rig.serve() == "written"


async def test_a_store_without_versions_or_dates_is_not_written_to(rig: Rig) -> None:
    rig.bucket.store(KEY, encoded(), days_old=25, etag="")
    assert await rig.serve() == "refused"
    rig.bucket._versions[KEY] = ('"v1"', 0.0)
    assert await rig.serve(known=NOW - 25 * DAY) == "refused"


async def test_a_bucket_that_fails_is_tried_again_much_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.bucket.store(KEY, encoded(), days_old=25)
    rig.bucket.error = RemoteUnavailableError("down", operation="put")
    assert await rig.serve() == "failed"
    rig.bucket.error = None
    rig.refresher.served(KEY)
    await asyncio.sleep(0)
    assert rig.refresher.keys() == set()
    monkeypatch.setattr(rig.refresher, "_wall_clock", lambda: NOW + 2 * DAY)
    rig.refresher.served(KEY)
    await asyncio.sleep(0)
    assert rig.refresher.keys() == {KEY}


async def test_an_unexpected_error_is_counted_and_ends_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.bucket.store(KEY, encoded(), days_old=25)
    rig.bucket.error = LookupError("a bug")
    assert await rig.serve() == "failed"
    assert rig.stats.snapshot()["errors_refresh"] == 1
    assert "a bug" in caplog.text


async def test_what_is_called_off_is_not_written(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ec_s3.refresh.random.random", lambda: 1.0)
    rig.bucket.store(KEY, encoded(), days_old=25)
    rig.refresher.learn(KEY, NOW - 25 * DAY)
    rig.refresher.served(KEY)
    await asyncio.sleep(0)
    await rig.refresher.call_off([KEY, "another"])
    assert rig.refresher.keys() == set()
    rig.refresher.served(KEY)
    await asyncio.sleep(0)
    await rig.refresher.close()
    rig.refresher.served(KEY)
    await asyncio.sleep(0)
    assert rig.refresher.keys() == set()
    assert rig.bucket.calls == {}


async def test_what_is_remembered_and_pending_is_bounded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.refresh.random.random", lambda: 1.0)
    monkeypatch.setattr("ec_s3.refresh.MAX_KNOWN", 20)
    monkeypatch.setattr("ec_s3.refresh.MAX_PENDING", 5)
    keys = [NAMESPACE.object_key(f"{i}") for i in range(30)]
    for key in keys:
        rig.refresher.learn(key, 1.0)
    for key in keys:
        rig.refresher.served(key)
    await asyncio.sleep(0)
    assert rig.refresher.keys() == set(keys[10:15])


# -- in an engine ----------------------------------------------------------------------------------


def engine_config(**settings: object) -> ECConfig:
    return ECConfig.from_mapping(
        {"max_local_cpu_size": 64 << 20, "object_lifetime": "30d", **settings}
    )


async def written_again(cache: EncoderCache) -> None:
    async with asyncio.timeout(20):
        while not cache.stats()["refreshed_objects_written"]:  # noqa: ASYNC110  it tells nobody
            await asyncio.sleep(0.001)


async def test_items_read_from_an_old_object_keep_it_alive() -> None:
    bucket = Bucket()
    bucket.store(KEY, encoded(), days_old=25)
    async with EncoderCache(engine_config(), NAMESPACE, store=bucket) as cache:
        assert await cache.get("a") is not None
        await written_again(cache)
        assert await cache.get("a") is not None
        assert await cache.get("absent") is None
    assert bucket.modified(KEY) > NOW - DAY
    assert bucket.calls["put"] == 1


async def test_items_that_live_in_host_memory_keep_their_object_alive() -> None:
    bucket = Bucket()
    bucket.store(KEY, encoded(), days_old=1)
    async with EncoderCache(engine_config(), NAMESPACE, store=bucket) as cache:
        assert await cache.get("a") is not None
        refresher = cache.reader.tiers.refresher
        assert refresher is not None
        later = NOW + 24 * DAY
        refresher._wall_clock = lambda: later
        assert await cache.get("a") is not None
        await written_again(cache)
    assert bucket.calls["put"] == 1


async def test_a_deletion_calls_off_what_is_about_to_be_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ec_s3.refresh.random.random", lambda: 1.0)
    bucket = Bucket()
    bucket.store(KEY, encoded(), days_old=25)
    async with EncoderCache(engine_config(), NAMESPACE, store=bucket) as cache:
        assert await cache.get("a") is not None
        await asyncio.sleep(0)
        assert KEY in cache.reader.under_way()
        await cache.delete(["a"])
        assert cache.reader.under_way() == set()
    assert KEY not in bucket.objects


async def test_without_a_lifetime_nothing_is_remembered_or_written() -> None:
    bucket = Bucket()
    bucket.store(KEY, encoded(), days_old=1000)
    config = engine_config(object_lifetime=None)
    async with EncoderCache(config, NAMESPACE, store=bucket) as cache:
        assert await cache.get("a") is not None
        assert cache.reader.tiers.refresher is None
