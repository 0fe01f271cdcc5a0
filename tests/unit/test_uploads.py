"""UploadQueue: order, bounds, retries, repair, flush and close."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from stubborn import outlast

from ec_s3.errors import (
    CapacityError,
    ECS3Error,
    RemoteDeniedError,
    RemoteError,
    RemoteThrottledError,
    RemoteUnavailableError,
)
from ec_s3.fetch import PrivateItem
from ec_s3.gate import Gate
from ec_s3.keys import Namespace
from ec_s3.local import LocalTier
from ec_s3.manifest import Manifest
from ec_s3.metrics import Stats
from ec_s3.pages import PAGE_BYTES, Slab
from ec_s3.presence import Presence, Refused
from ec_s3.quiet import REPEAT_SECONDS
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import FlushReport, ItemMeta, ObjectInfo, PutOutcome, TensorSpec
from ec_s3.uploads import HEAD_ABOVE, LATE_SECONDS, Upload, UploadQueue, UploadTargets
from ec_s3.wire import decode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from ec_s3.store import Buffer

NAMESPACE = Namespace(model="org/model", dtype="uint8")
PAGES = 32


class Bucket(MemoryStore):
    """Raises the errors in `script`, in order, then works; can be held up."""

    def __init__(self) -> None:
        super().__init__()
        self.script: list[ECS3Error] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.inside = 0
        self.most_inside = 0
        self.order: list[str] = []

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        if_match: str | None = None,
    ) -> PutOutcome:
        self.order.append(key)
        self.inside += 1
        self.most_inside = max(self.inside, self.most_inside)
        try:
            await self.gate.wait()
            if self.script:
                raise self.script.pop(0)
            return await super().put(key, parts, if_absent=if_absent, if_match=if_match)
        finally:
            self.inside -= 1

    def items(self) -> dict[str, bytes]:
        return {key: body for key, body in self.objects.items() if not key.endswith(".json")}


class Rig:
    def __init__(self, slab: Slab, executor: ThreadPoolExecutor) -> None:
        self.tier = LocalTier(slab)
        self.executor = executor
        self.stats = Stats()
        self.now = 0.0
        self.bucket = Bucket()
        self.presence = Presence(positive_ttl=60, negative_ttl=5)
        self.refused = Refused()
        self.paused: list[int] = []
        self.refusals: dict[str, str] = {}
        self.queue = self.make()

    def make(
        self,
        *,
        disk: MemoryStore | None = None,
        remote: bool = True,
        max_items: int = 100,
        max_bytes: int = 1 << 30,
        workers: int = 2,
    ) -> UploadQueue:
        def admit(nbytes: int) -> float:
            self.paused.append(nbytes)
            return 0.0

        self.queue = UploadQueue(
            tier=self.tier,
            targets=UploadTargets(
                remote=self.bucket if remote else None,
                disk=disk,
                presence=self.presence,
                refused=self.refused,
                admit_bytes=admit,
                manifest=Manifest(Gate(NAMESPACE), {"vllm": "0.32"}),
                refusal=lambda key: self.refusals.get(key),
            ),
            executor=self.executor,
            stats=self.stats,
            max_items=max_items,
            max_bytes=max_bytes,
            workers=workers,
            level=1,
            clock=lambda: self.now,
            wall_clock=lambda: 1.0,
        )
        return self.queue

    def stage(self, name: str, nbytes: int = 1000) -> Upload:
        upload = Upload(NAMESPACE.object_key(name), name)
        reservation = self.tier.reserve(upload.key, nbytes)
        assert reservation is not None
        data, at = content(name, nbytes), 0
        with reservation:
            for segment in reservation.segments():
                segment[:] = data[at : at + len(segment)]
                at += len(segment)
            reservation.commit(TensorSpec("uint8", (nbytes,)), ItemMeta(), dirty=True).release()
        return upload

    def offer(self, name: str, nbytes: int = 1000) -> bool:
        return self.queue.offer(self.stage(name, nbytes))

    def count(self, outcome: str) -> float:
        return self.stats.snapshot()[f"uploads_{outcome}"]

    def assert_stored(self, name: str, nbytes: int = 1000) -> None:
        header, data = decode(
            self.bucket.objects[NAMESPACE.object_key(name)], max_tensor_bytes=1 << 30
        )
        assert data == content(name, nbytes)
        assert header.identifier == name


def content(name: str, nbytes: int) -> bytes:
    return np.random.default_rng(len(name)).bytes(nbytes)


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # other threads make it true
            await asyncio.sleep(0.001)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between attempts."""
    monkeypatch.setattr("ec_s3.uploads.spread", lambda _: 0.0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with Slab.create(PAGES * PAGE_BYTES) as slab, ThreadPoolExecutor(2) as executor:
        slab.populate()
        made = Rig(slab, executor)
        yield made
        made.bucket.gate.set()
        await made.queue.close(5)
        stats = made.tier.stats()
        assert (stats.leased_bytes, stats.reserved_bytes) == (0, 0)
        assert made.queue.pending == 0
        assert made.stats.snapshot()["upload_queue_bytes"] == 0


async def test_an_item_is_uploaded_and_becomes_clean(rig: Rig) -> None:
    assert rig.offer("a")
    assert NAMESPACE.object_key("a") in rig.queue
    assert await rig.queue.drain(10) == FlushReport(uploaded=1)
    rig.assert_stored("a")
    assert rig.count("written") == 1
    assert rig.tier.stats().dirty_bytes == 0
    assert rig.presence.get(NAMESPACE.object_key("a"), now=1) is True
    flat = rig.stats.snapshot()
    assert flat["upload_bytes_raw"] == 1000
    assert flat["save_seconds_encode_count"] == flat["save_seconds_store_count"] == 1


async def test_an_upload_is_no_use_of_the_entry(rig: Rig) -> None:
    old, new = rig.stage("old", PAGE_BYTES), rig.stage("new", PAGE_BYTES)
    rig.queue.offer(new)
    await rig.queue.drain(10)
    rig.queue.offer(old)
    await rig.queue.drain(10)
    reservation = rig.tier.reserve("more", (PAGES - 1) * PAGE_BYTES)
    assert reservation is not None
    reservation.abort()
    assert not rig.tier.contains(old.key)
    assert rig.tier.contains(new.key)


async def test_the_namespace_is_described_once(rig: Rig) -> None:
    for name in ("a", "b", "c"):
        rig.offer(name)
    await rig.queue.drain(10)
    key = NAMESPACE.manifest_key
    assert b'"vllm": "0.32"' in rig.bucket.objects[key]
    assert rig.bucket.order.count(key) == 1


async def test_a_description_that_cannot_be_written_hurts_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    class Deaf(Bucket):
        async def put(
            self,
            key: str,
            parts: Sequence[Buffer],
            *,
            if_absent: bool = True,
            if_match: str | None = None,
        ) -> PutOutcome:
            if key.endswith(".json"):
                raise RemoteDeniedError("no", operation="put", key=key)
            return await super().put(key, parts, if_absent=if_absent, if_match=if_match)

    rig.bucket = Deaf()
    await rig.queue.close(1)
    rig.make()
    with caplog.at_level(logging.INFO):
        rig.offer("a")
        assert (await rig.queue.drain(10)).complete
    assert rig.count("written") == 1
    assert caplog.records == []


async def test_a_key_is_queued_once(rig: Rig) -> None:
    rig.bucket.gate.clear()
    upload = rig.stage("a")
    assert [rig.queue.offer(upload) for _ in range(3)] == [True] * 3
    await settle()
    assert rig.queue.offer(upload)  # running now
    assert rig.queue.pending == 1
    rig.bucket.gate.set()
    await rig.queue.drain(10)
    assert rig.count("written") == 1


async def test_what_the_bucket_is_known_to_hold_is_clean(rig: Rig) -> None:
    """Else what others encoded, too, would stay in memory longest, and count as lost in the end."""
    rig.presence.set(NAMESPACE.object_key("a"), present=True, now=0)
    rig.offer("a")
    assert rig.tier.stats().dirty_bytes > 0
    await rig.queue.drain(10)
    assert rig.tier.stats().dirty_bytes == 0


async def test_what_the_bucket_is_known_to_hold_is_not_encoded_again(rig: Rig) -> None:
    rig.presence.set(NAMESPACE.object_key("a"), present=True, now=0)
    rig.offer("a")
    await rig.queue.drain(10)
    assert rig.count("exists") == 1
    assert rig.bucket.order == []
    rig.now = 61
    rig.queue.offer(Upload(NAMESPACE.object_key("a"), "a"))
    await rig.queue.drain(10)
    assert rig.count("written") == 1


async def test_a_batch_with_one_item_present_is_no_failure(rig: Rig) -> None:
    """Mooncake#2827: there one duplicate failed the whole batch."""
    await rig.bucket.put(NAMESPACE.object_key("n3"), [b"theirs"])
    for i in range(10):
        rig.offer(f"n{i}")
    report = await rig.queue.drain(10)
    assert report == FlushReport(uploaded=10)
    assert (rig.count("written"), rig.count("exists")) == (9, 1)
    assert rig.bucket.objects[NAMESPACE.object_key("n3")] == b"theirs"


@pytest.mark.parametrize(("nbytes", "heads"), [(1000, 0), (2 * HEAD_ABOVE, 1)])
async def test_a_large_body_follows_a_head(rig: Rig, nbytes: int, heads: int) -> None:
    await rig.bucket.put(NAMESPACE.object_key("a"), [b"theirs"])
    rig.bucket.order.clear()
    rig.offer("a", nbytes)
    await rig.queue.drain(10)
    assert rig.bucket.calls.get("head", 0) == heads
    assert rig.bucket.order.count(NAMESPACE.object_key("a")) == 1 - heads
    assert rig.count("exists") == 1


async def test_a_small_body_that_comes_late_follows_a_head(rig: Rig) -> None:
    """A fleet that encodes the same item at the same time sends its body once, if it can."""
    await rig.bucket.put(NAMESPACE.object_key("a"), [b"theirs"])
    rig.bucket.order.clear()
    upload = rig.stage("a")
    rig.now = upload.since + 2 * LATE_SECONDS
    rig.queue.offer(upload)
    await rig.queue.drain(10)
    assert rig.bucket.calls["head"] == 1
    assert upload.key not in rig.bucket.order
    assert rig.count("exists") == 1


@pytest.mark.parametrize("nbytes", [1000, 2 * HEAD_ABOVE])
async def test_what_a_lost_answer_was_about_is_for_the_store_to_find_out(
    rig: Rig, nbytes: int
) -> None:
    """A HEAD alone cannot tell whose object is there."""

    class Forgetful(Bucket):
        async def put(
            self,
            key: str,
            parts: Sequence[Buffer],
            *,
            if_absent: bool = True,
            if_match: str | None = None,
        ) -> PutOutcome:
            again = key in self.order
            outcome = await super().put(key, parts, if_absent=if_absent, if_match=if_match)
            if again or key.endswith(".json"):
                return PutOutcome.WRITTEN if again else outcome
            raise RemoteUnavailableError("the answer is lost", operation="put", key=key)

    rig.bucket = Forgetful()
    await rig.queue.close(1)
    rig.make()
    rig.offer("a", nbytes)
    assert (await rig.queue.drain(10)).complete
    assert rig.bucket.order.count(NAMESPACE.object_key("a")) == 2
    assert (rig.count("written"), rig.count("exists")) == (1, 0)


class Reluctant(Bucket):
    """Answers HEAD when it is let, first with the errors in `excuses`."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()
        self.excuses: list[ECS3Error] = []

    async def head(self, key: str) -> ObjectInfo | None:
        found = await super().head(key)
        await self.may_answer.wait()
        if self.excuses:
            raise self.excuses.pop(0)
        return found


@pytest.fixture
async def reluctant(rig: Rig) -> Reluctant:
    rig.bucket = bucket = Reluctant()
    await rig.queue.close(1)
    rig.make()
    return bucket


async def test_the_bucket_is_asked_while_the_body_is_made(rig: Rig, reluctant: Reluctant) -> None:
    rig.offer("a", 2 * HEAD_ABOVE)
    await until(lambda: rig.stats.snapshot()["save_seconds_encode_count"] == 1)
    assert reluctant.calls["head"] == 1
    assert reluctant.order == []
    reluctant.may_answer.set()
    assert (await rig.queue.drain(10)).complete
    rig.assert_stored("a", 2 * HEAD_ABOVE)
    assert reluctant.calls["head"] == 1


@pytest.mark.usefixtures("quick")
async def test_a_look_that_fails_is_taken_again_before_a_body_is_sent(
    rig: Rig, reluctant: Reluctant
) -> None:
    reluctant.excuses = [RemoteUnavailableError("no", operation="head", key="k")] * 2
    reluctant.may_answer.set()
    rig.offer("a", 2 * HEAD_ABOVE)
    assert (await rig.queue.drain(10)).complete
    assert reluctant.calls["head"] == 3
    assert reluctant.order.count(NAMESPACE.object_key("a")) == 1


async def test_an_upload_withdrawn_during_its_look_leaves_nothing(
    rig: Rig, reluctant: Reluctant
) -> None:
    before = asyncio.all_tasks()
    rig.offer("a", 2 * HEAD_ABOVE)
    await until(lambda: reluctant.calls.get("head", 0) == 1)
    await rig.queue.withdraw([NAMESPACE.object_key("a")], outcome="closed")
    await settle()
    assert asyncio.all_tasks() == before
    assert rig.count("closed") == 1
    assert reluctant.order == []


async def test_the_rate_limit_is_asked_for_each_body(rig: Rig) -> None:
    rig.offer("a")
    await rig.queue.drain(10)
    assert rig.paused == [len(rig.bucket.objects[NAMESPACE.object_key("a")])]


async def test_a_full_queue_drops_and_counts(rig: Rig) -> None:
    await rig.queue.close(1)
    rig.make(max_items=2, workers=1)
    rig.bucket.gate.clear()
    assert rig.offer("running")
    await settle()
    assert rig.offer("a")
    assert rig.offer("b")
    assert not rig.offer("c")
    assert rig.count("queue_full") == 1
    assert rig.stats.snapshot()["upload_queue_items"] == 3
    rig.bucket.gate.set()
    assert await rig.queue.drain(10) == FlushReport(uploaded=3, dropped=1)


async def test_encoded_bytes_are_bounded_and_no_lease_waits_for_them(rig: Rig) -> None:
    await rig.queue.close(1)
    rig.make(max_bytes=1500, workers=4)
    rig.bucket.gate.clear()
    for name in ("a", "b", "c"):
        rig.offer(name)
    await until(lambda: rig.bucket.inside > 0)
    assert rig.bucket.most_inside == 1
    assert rig.tier.stats().leased_bytes == 0
    assert rig.stats.snapshot()["upload_queue_bytes"] <= 1500
    rig.bucket.gate.set()
    assert (await rig.queue.drain(10)).uploaded == 3


async def test_private_items_are_bounded_in_bytes(rig: Rig) -> None:
    await rig.queue.close(1)
    rig.make(max_bytes=2500, workers=1)
    rig.bucket.gate.clear()

    def private(name: str) -> Upload:
        key = NAMESPACE.object_key(name)
        buffer = memoryview(bytearray(content(name, 1000)))
        item = PrivateItem(key, TensorSpec("uint8", (1000,)), ItemMeta(), buffer)
        return Upload(key, name, item)

    assert [rig.queue.offer(private(name)) for name in ("a", "bb", "ccc")] == [True, True, False]
    rig.bucket.gate.set()
    assert (await rig.queue.drain(10)).uploaded == 2
    rig.assert_stored("a")
    assert rig.queue.offer(private("ccc"))


async def test_an_item_evicted_before_its_turn_is_counted(rig: Rig) -> None:
    upload = rig.stage("a")
    rig.tier.discard(upload.key)
    rig.queue.offer(upload)
    report = await rig.queue.drain(10)
    assert rig.count("evicted") == 1
    assert report.dropped == 1


@pytest.mark.usefixtures("quick")
async def test_a_store_that_comes_back_gets_the_item(rig: Rig) -> None:
    rig.bucket.script = [
        RemoteUnavailableError("refused", operation="put"),
        RemoteThrottledError("slower", operation="put"),
    ]
    rig.offer("a")
    assert await rig.queue.drain(10) == FlushReport(uploaded=1)
    rig.assert_stored("a")


async def test_denial_is_not_retried_and_said_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """LMCache#3376: hundreds of lines there, and the engine went down."""
    denied = RemoteDeniedError("put denied: 403 for bucket b at http://e", operation="put")
    rig.bucket.script = [denied] * 20
    for i in range(20):
        rig.offer(f"n{i}")
    report = await rig.queue.drain(10)
    assert report == FlushReport(dropped=20)
    assert rig.count("denied") == 20
    assert [record.getMessage() for record in caplog.records] == [
        "an upload is given up: put denied: 403 for bucket b at http://e"
    ]
    rig.offer("good")
    await rig.queue.drain(10)
    rig.now += REPEAT_SECONDS
    rig.bucket.script = [denied]
    rig.offer("again")
    await rig.queue.drain(10)
    assert len(caplog.records) == 2  # a new outage is said again


@pytest.mark.usefixtures("quick")
async def test_an_item_is_given_up_after_a_while(rig: Rig) -> None:
    class Later(Bucket):
        async def put(
            self,
            key: str,
            parts: Sequence[Buffer],
            *,
            if_absent: bool = True,
            if_match: str | None = None,
        ) -> PutOutcome:
            rig.now += 50
            raise RemoteUnavailableError("refused", operation="put", key=key)

    rig.bucket = Later()
    await rig.queue.close(1)
    rig.make()
    rig.offer("a")
    assert await rig.queue.drain(10) == FlushReport(dropped=1)
    assert rig.count("failed") == 1


@pytest.mark.usefixtures("quick")
async def test_a_call_that_never_returns_is_ended(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.guard.CALL_SECONDS", 0.01)
    rig.bucket.gate.clear()
    rig.offer("a")
    await until(lambda: len(rig.bucket.order) > 1)  # tried again
    rig.bucket.gate.set()
    assert await rig.queue.drain(10) == FlushReport(uploaded=1)


async def test_one_bad_item_does_not_end_the_worker(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.queue.close(1)
    rig.make(workers=1)
    key = NAMESPACE.object_key("bad")
    meta = ItemMeta(placeholder={"not json": object()})
    item = PrivateItem(key, TensorSpec("uint8", (1,)), meta, memoryview(bytearray(1)))
    rig.queue.offer(Upload(key, "bad", item))
    rig.offer("good")
    assert await rig.queue.drain(10) == FlushReport(uploaded=1, dropped=1)
    assert rig.count("error") == 1
    assert rig.stats.snapshot()["errors_upload"] == 1
    assert "upload failed unexpectedly" in caplog.text


async def test_a_refused_object_is_replaced_once(rig: Rig) -> None:
    key = NAMESPACE.object_key("a")
    await rig.bucket.put(key, [b"bad"])
    rig.refused.add(key, '"1"')
    rig.presence.set(key, present=True, now=0)  # must not hide that it is bad
    rig.offer("a")
    await rig.queue.drain(10)
    rig.assert_stored("a")
    assert rig.stats.snapshot()["repaired_objects"] == 1
    assert rig.count("written") == 1

    rig.bucket.objects[key] = b"bad again"
    rig.refused.add(key, '"2"')
    rig.queue.offer(Upload(key, "a"))
    await rig.queue.drain(10)
    assert rig.bucket.objects[key] == b"bad again"  # at most once per hour
    assert rig.presence.get(key, now=0) is not False
    rig.now = 3601
    rig.queue.offer(Upload(key, "a"))
    await rig.queue.drain(10)
    assert rig.stats.snapshot()["repaired_objects"] == 2


async def test_an_object_that_somebody_else_repaired_is_left_alone(rig: Rig) -> None:
    key = NAMESPACE.object_key("a")
    await rig.bucket.put(key, [b"good by now"])
    rig.refused.add(key, '"0"')
    rig.offer("a")
    await rig.queue.drain(10)
    assert rig.bucket.objects[key] == b"good by now"
    assert rig.count("exists") == 1
    assert rig.stats.snapshot()["repaired_objects"] == 0


async def test_a_refused_object_without_a_version_is_overwritten(rig: Rig) -> None:
    key = NAMESPACE.object_key("a")
    await rig.bucket.put(key, [b"bad"])
    rig.refused.add(key, "")
    rig.offer("a")
    await rig.queue.drain(10)
    rig.assert_stored("a")
    assert rig.stats.snapshot()["repaired_objects"] == 1


async def test_the_disk_tier_gets_the_same_object(rig: Rig) -> None:
    disk = MemoryStore()
    await rig.queue.close(1)
    rig.make(disk=disk)
    rig.offer("a")
    await rig.queue.drain(10)
    assert disk.objects == rig.bucket.items()
    assert rig.stats.snapshot()["disk_writes_written"] == 1


@pytest.mark.parametrize(
    "error",
    [
        RemoteUnavailableError("no space left", operation="put"),
        CapacityError("larger than the disk tier"),
    ],
)
async def test_a_failing_disk_does_not_keep_the_item_from_the_bucket(
    rig: Rig, error: ECS3Error
) -> None:
    disk = Bucket()
    disk.script = [error]
    await rig.queue.close(1)
    rig.make(disk=disk)
    rig.offer("a")
    assert await rig.queue.drain(10) == FlushReport(uploaded=1)
    rig.assert_stored("a")
    assert rig.stats.snapshot()["disk_writes_failed"] == 1
    assert rig.stats.snapshot()["errors_upload"] == 0


async def test_a_disk_alone_is_a_target(rig: Rig) -> None:
    disk = MemoryStore()
    await rig.queue.close(1)
    rig.make(disk=disk, remote=False)
    rig.offer("a")
    assert await rig.queue.drain(10) == FlushReport(uploaded=1)
    assert list(disk.objects) == [NAMESPACE.object_key("a")]


async def test_flush_returns_by_its_deadline_and_says_what_is_pending(rig: Rig) -> None:
    rig.bucket.gate.clear()
    for name in ("a", "b", "c"):
        rig.offer(name)
    report = await rig.queue.drain(0.02)
    assert report == FlushReport(uploaded=0, pending=3, dropped=0)
    assert not report.complete
    rig.bucket.gate.set()
    assert await rig.queue.drain(10) == FlushReport(uploaded=3)
    assert await rig.queue.drain(0) == FlushReport()


async def test_close_gives_up_what_is_left_and_says_so(rig: Rig) -> None:
    rig.bucket.gate.clear()
    for i in range(5):
        rig.offer(f"n{i}")
    await settle()
    report = await rig.queue.close(0.02)
    assert report == FlushReport(uploaded=0, pending=5, dropped=5)
    assert rig.count("closed") == 5
    assert rig.bucket.inside == 0
    assert not rig.offer("late")
    assert rig.count("closed") == 6
    assert (await rig.queue.close(1)).pending == 0


async def test_close_without_patience_counts_what_had_not_begun(rig: Rig) -> None:
    for i in range(5):
        rig.offer(f"n{i}")
    assert (await rig.queue.close(0)).dropped == 5


async def test_close_does_not_wait_for_a_store_that_ignores_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.uploads.STOP_SECONDS", 0.02)
    end = asyncio.Event()
    entered: list[str] = []

    class Stubborn(Bucket):
        async def put(
            self,
            key: str,
            parts: Sequence[Buffer],
            *,
            if_absent: bool = True,
            if_match: str | None = None,
        ) -> PutOutcome:
            entered.append(key)
            await outlast(end)
            return PutOutcome.WRITTEN

    rig.bucket = Stubborn()
    await rig.queue.close(1)
    rig.make(workers=1)
    rig.offer("a")
    await until(lambda: bool(entered))
    assert (await rig.queue.close(0.01)).pending == 1
    end.set()
    await asyncio.wait(rig.queue._workers, timeout=10)


async def test_a_withdrawn_upload_does_not_write(rig: Rig) -> None:
    await rig.queue.close(1)
    rig.make(workers=1)
    rig.bucket.gate.clear()
    rig.offer("running")
    await until(lambda: rig.bucket.inside > 0)
    rig.offer("waiting")
    rig.offer("kept")
    keys = [NAMESPACE.object_key(name) for name in ("running", "waiting", "unknown")]
    await rig.queue.withdraw(keys, outcome="deleted")
    assert rig.bucket.inside == 0
    rig.bucket.gate.set()
    assert await rig.queue.drain(10) == FlushReport(uploaded=1, dropped=2)
    assert list(rig.bucket.items()) == [NAMESPACE.object_key("kept")]


async def test_errors_of_the_store_never_reach_the_caller_of_a_put(rig: Rig) -> None:
    errors: list[RemoteError] = [RemoteDeniedError("no", operation="put") for _ in range(3)]
    rig.bucket.script = [*errors]
    assert [rig.offer(f"n{i}") for i in range(3)] == [True] * 3
    await rig.queue.drain(10)
