"""Engines that follow their operator and their weights: control.json, suspend and resume."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from stubborn import outlast

from ec_s3.blocking import ECCacheEngine
from ec_s3.config import ECConfig
from ec_s3.control import Control, edit
from ec_s3.directory import DirectoryStore
from ec_s3.engine import EncoderCache
from ec_s3.errors import ClosedError, RemoteUnavailableError
from ec_s3.keys import Namespace, identifier_digest, parse_key
from ec_s3.local import Lease, Reservation
from ec_s3.testing.memory import MemoryStore
from ec_s3.wire import decode, encode, read_header

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from ec_s3.store import Buffer, Store
    from ec_s3.testing.moto import S3Server
    from ec_s3.types import DeleteReport, PutOutcome

NAMESPACE = Namespace(model="org/model")
NEXT = replace(NAMESPACE, weight_version="next")
PAGE = 256 << 10


class Bucket(MemoryStore):
    """Outlives its engines; holds up what is put while `gate` is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.inside = 0

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        if_match: str | None = None,
    ) -> PutOutcome:
        self.inside += 1
        try:
            await self.gate.wait()
        finally:
            self.inside -= 1
        return await super().put(key, parts, if_absent=if_absent, if_match=if_match)

    async def aclose(self) -> None:
        return None

    def items(self) -> list[str]:
        return sorted(key for key in self.objects if not key.endswith(".json"))


def tensor(seed: int, rows: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 128, generator=generator).to(torch.bfloat16)


def same(got: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return got is not None and torch.equal(got, expected)


@asynccontextmanager
async def engine(
    store: Store | None, *, disk: Store | None = None, **settings: object
) -> AsyncIterator[EncoderCache]:
    defaults = {"max_local_cpu_size": 16 * PAGE, "blocking_timeout": 20.0, "flush_timeout": 10.0}
    config = ECConfig().model_copy(update={**defaults, **settings})
    cache = await EncoderCache.open(config, NAMESPACE, store=store, disk=disk)
    try:
        yield cache
    finally:
        await cache.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # other tasks and threads make it true
            await asyncio.sleep(0.001)


async def hear(*caches: EncoderCache) -> None:
    """Let the engines look at the control document now."""
    for cache in caches:
        assert cache.governor.poll is not None
        await cache.governor.poll.look()


async def tell(store: Store, control: Control) -> None:
    await edit(store, NAMESPACE.control_key, lambda _: control)


def count(cache: EncoderCache, name: str) -> float:
    return cache.stats()[name]


# -- the kill switch -----------------------------------------------------------------------------


async def test_the_first_look_is_at_the_start_and_holds_nothing_up() -> None:
    bucket = Bucket()
    await tell(bucket, Control(enabled=False))
    async with engine(bucket) as cache:
        await until(lambda: count(cache, "control_polls_changed") == 1)
        assert count(cache, "switched_off_disabled") == 1
        assert not await cache.put("a", tensor(1))


async def test_without_a_bucket_nobody_looks() -> None:
    async with engine(None) as cache:
        assert cache.governor.poll is None
        assert await cache.put("a", tensor(1))


async def test_switched_off_everything_is_a_miss_and_nothing_is_kept_or_sent() -> None:
    bucket = Bucket()
    async with engine(bucket) as cache:
        assert await cache.put("a", tensor(1))
        assert (await cache.flush()).complete
        bucket.gate.clear()
        assert await cache.put("running", tensor(2))
        assert await cache.put("waiting", tensor(3))
        await until(lambda: bucket.inside > 0)
        await cache.governor.obey(Control(enabled=False))
        bucket.gate.set()
        assert (await cache.flush()).complete
        assert bucket.items() == [NAMESPACE.object_key("a")]
        assert await cache.get("a") is None
        assert not await cache.contains("a")
        cache.prefetch(["a"])
        assert not await cache.put("b", tensor(4))
        assert count(cache, "misses_disabled") == 1
        assert count(cache, "rejected_puts_disabled") == 1
        assert count(cache, "uploads_disabled") == 2


async def test_switched_on_again_it_goes_on_by_itself() -> None:
    bucket = Bucket()
    async with engine(bucket) as cache:
        await cache.put("a", tensor(1))
        await cache.flush()
        await tell(bucket, Control(enabled=False))
        await hear(cache)
        assert await cache.get("a") is None
        await tell(bucket, Control())
        await hear(cache)
        assert same(await cache.get("a"), tensor(1))
        assert await cache.put("b", tensor(2))
        assert (await cache.flush()).complete
        assert len(bucket.items()) == 2
        assert count(cache, "switched_off_disabled") == 0


# -- the time from which objects count -------------------------------------------------------------


@pytest.mark.parametrize("with_disk", [False, True])
async def test_older_objects_are_misses_in_every_tier_and_are_replaced(
    with_disk: bool, tmp_path: Path
) -> None:
    bucket = Bucket()
    disk = DirectoryStore(tmp_path) if with_disk else None
    async with engine(bucket, disk=disk) as cache:
        await cache.put("a", tensor(1))
        await cache.flush()
        await asyncio.sleep(0.01)
        await tell(bucket, Control(valid_after=time.time()))
        await hear(cache)
        assert await cache.get("a") is None
        assert not await cache.contains("a")
        assert count(cache, "misses_stale") == 1
        assert count(cache, "corrupt_objects_remote") == count(cache, "corrupt_objects_disk") == 0
        await asyncio.sleep(0.01)
        assert await cache.put("a", tensor(2))
        assert (await cache.flush()).complete
        assert count(cache, "repaired_objects") == 1
        cache.tier.clear()
        assert same(await cache.get("a"), tensor(2))
    async with engine(bucket) as other:
        await hear(other)
        assert same(await other.get("a"), tensor(2))


async def test_an_older_time_brings_objects_back() -> None:
    bucket = Bucket()
    async with engine(bucket) as cache:
        await cache.put("a", tensor(1))
        await cache.flush()
        await tell(bucket, Control(valid_after=time.time() + 10))
        await hear(cache)
        assert await cache.get("a") is None
        await tell(bucket, Control())
        await hear(cache)
        assert same(await cache.get("a"), tensor(1))


async def test_what_waits_for_its_upload_is_as_old_as_what_is_stored() -> None:
    bucket = Bucket()
    async with engine(bucket) as cache:
        bucket.gate.clear()
        await cache.put("a", tensor(1))
        await until(lambda: bucket.inside > 0)
        await cache.governor.obey(Control(valid_after=time.time()))
        bucket.gate.set()
        assert (await cache.flush()).complete
        assert bucket.items() == []
        assert await cache.get("a") is None
        assert count(cache, "uploads_stale") == 1


async def test_a_producer_that_only_asks_for_existence_knows_old_objects_by_their_date() -> None:
    bucket = Bucket()
    async with engine(bucket) as cache:
        key = NAMESPACE.object_key("a")
        await cache.put("a", tensor(1))
        await cache.flush()
        await cache.governor.obey(Control(valid_after=time.time() + 10))
        assert not await cache.is_shared("a")
        assert cache.reader.tiers.refused.knows(key)


async def test_a_producer_knows_an_old_object_that_was_written_again_by_its_header() -> None:
    bucket = Bucket()
    async with engine(bucket) as cache:
        key = NAMESPACE.object_key("a")
        await cache.put("a", tensor(1))
        await cache.flush()
        made = read_header(bucket.objects[key], max_tensor_bytes=1 << 20).created
        await asyncio.sleep(0.002)
        await bucket.put(key, [bucket.objects[key]], if_absent=False)
        await cache.governor.obey(Control(valid_after=made + 0.001))
        assert not await cache.is_shared("a")
        assert cache.reader.tiers.refused.knows(key)
        await cache.governor.obey(Control(valid_after=made))
        assert await cache.is_shared("a")


# -- deleted items ---------------------------------------------------------------------------------


async def test_deleted_items_are_gone_everywhere_and_do_not_come_back(tmp_path: Path) -> None:
    bucket, disk = Bucket(), DirectoryStore(tmp_path)
    key = NAMESPACE.object_key("a")
    async with engine(bucket, disk=disk) as cache:
        for name in ("a", "b"):
            await cache.put(name, tensor(1))
        await cache.flush()
        del bucket.objects[key]  # as `rm` does, after it has told
        deleted = {identifier_digest("a"): time.time() + 3600}
        await tell(bucket, Control(deleted=deleted))
        await hear(cache)
        assert await cache.get("a") is None
        assert not await cache.contains("a")
        assert not await cache.put("a", tensor(1))
        assert await disk.head(key) is None
        assert bucket.items() == [NAMESPACE.object_key("b")]
        assert same(await cache.get("b"), tensor(1))
        assert count(cache, "misses_deleted") == count(cache, "rejected_puts_deleted") == 1


async def test_an_upload_of_a_deleted_item_is_called_off() -> None:
    bucket = Bucket()
    async with engine(bucket) as cache:
        bucket.gate.clear()
        await cache.put("a", tensor(1))
        await until(lambda: bucket.inside > 0)
        await cache.governor.obey(Control(deleted={identifier_digest("a"): time.time() + 3600}))
        bucket.gate.set()
        assert (await cache.flush()).complete
        assert bucket.items() == []
        assert count(cache, "uploads_deleted") == 1


async def test_after_its_time_a_deleted_item_may_be_stored_again() -> None:
    bucket = Bucket()
    async with engine(bucket) as cache:
        until_then = time.time() + 3600
        await cache.governor.obey(Control(deleted={identifier_digest("a"): until_then}))
        assert not await cache.put("a", tensor(1))
        cache.gate._wall_clock = lambda: until_then
        assert await cache.put("a", tensor(1))
        assert (await cache.flush()).complete
        assert bucket.items() == [NAMESPACE.object_key("a")]


async def test_an_item_that_is_deleted_again_after_its_time_is_gone_again(tmp_path: Path) -> None:
    bucket, disk = Bucket(), DirectoryStore(tmp_path)
    key, digest = NAMESPACE.object_key("a"), identifier_digest("a")
    async with engine(bucket, disk=disk) as cache:
        for until_then in (time.time() + 3600, time.time() + 9000):
            assert await cache.put("a", tensor(1))
            assert (await cache.flush()).complete
            del bucket.objects[key]  # as `rm` does
            await cache.governor.obey(Control(deleted={digest: until_then}))
            cache.gate._wall_clock = partial(float, until_then)
            assert await cache.get("a") is None
            assert await disk.head(key) is None


async def test_an_item_that_is_deleted_in_two_namespaces_is_gone_from_both(tmp_path: Path) -> None:
    disk = DirectoryStore(tmp_path)
    deleted = Control(deleted={identifier_digest("a"): time.time() + 3600})
    async with engine(Bucket(), disk=disk) as cache:
        cache.resume(weight_version="next")
        assert await cache.put("a", tensor(1))
        assert (await cache.flush()).complete
        cache.resume(weight_version="")
        await cache.governor.obey(deleted)
        assert await disk.head(NEXT.object_key("a")) is not None
        cache.resume(weight_version="next")
        await cache.governor.obey(deleted)
        assert await disk.head(NEXT.object_key("a")) is None


async def test_a_deletion_that_the_disk_refused_is_tried_again_with_the_next_document(
    tmp_path: Path,
) -> None:
    class Broken(DirectoryStore):
        broken = True

        async def delete(self, keys: Sequence[str]) -> DeleteReport:
            if self.broken:
                raise RemoteUnavailableError("gone", operation="delete")
            return await super().delete(keys)

    disk, deleted = Broken(tmp_path), {identifier_digest("a"): time.time() + 3600}
    async with engine(Bucket(), disk=disk) as cache:
        assert await cache.put("a", tensor(1))
        assert (await cache.flush()).complete
        await cache.governor.obey(Control(deleted=deleted))
        disk.broken = False
        await cache.governor.obey(Control(deleted={**deleted, identifier_digest("b"): 1.0}))
        assert await disk.head(NAMESPACE.object_key("a")) is None


async def test_a_disk_that_fails_does_not_keep_the_document_from_holding(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Broken(DirectoryStore):
        async def delete(self, keys: Sequence[str]) -> DeleteReport:
            raise RemoteUnavailableError("gone", operation="delete")

    async with engine(Bucket(), disk=Broken(tmp_path)) as cache:
        await cache.put("a", tensor(1))
        await cache.governor.obey(Control(deleted={identifier_digest("a"): time.time() + 3600}))
        assert await cache.get("a") is None
        assert "could not be removed from the disk" in caplog.text


async def test_a_file_of_a_deleted_item_that_stays_on_the_disk_is_told_of(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, deleted = DirectoryStore(tmp_path), {identifier_digest("a"): time.time() + 3600}

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    async with engine(Bucket(), disk=disk) as cache:
        assert await cache.put("a", tensor(1))
        assert (await cache.flush()).complete
        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", fail)
            await cache.governor.obey(Control(deleted=deleted))
        assert "could not be removed from the disk" in caplog.text
        assert os.strerror(errno.EROFS) in caplog.text
        await cache.governor.obey(Control(deleted={**deleted, identifier_digest("b"): 1.0}))
        assert await disk.head(NAMESPACE.object_key("a")) is None


async def test_two_engines_follow_one_document_on_s3(bucket: str, s3_server: S3Server) -> None:
    from ec_s3.s3 import S3Store
    from ec_s3.url import S3Location, parse_url

    location = parse_url(f"s3://{bucket}/p?endpoint={s3_server.url}&region=us-east-1")
    assert isinstance(location, S3Location)
    operator = S3Store(location)
    async with engine(S3Store(location)) as one, engine(S3Store(location)) as two:
        await one.put("a", tensor(1))
        await one.put("b", tensor(2))
        assert (await one.flush()).complete
        assert same(await two.get("a"), tensor(1))
        digests = [identifier_digest("a")]
        until_then = time.time() + 3600
        await asyncio.gather(
            edit(
                operator,
                NAMESPACE.control_key,
                lambda c: c.with_deleted(digests, until=until_then, now=0),
            ),
            edit(operator, NAMESPACE.control_key, lambda c: replace(c, enabled=False)),
        )
        await hear(one, two)
        assert [await cache.get("b") for cache in (one, two)] == [None, None]
        await edit(operator, NAMESPACE.control_key, lambda c: replace(c, enabled=True))
        await hear(one, two, one, two)
        assert [await cache.get("a") for cache in (one, two)] == [None, None]
        assert all([same(await cache.get("b"), tensor(2)) for cache in (one, two)])
        assert count(two, "control_polls_unchanged") > 0
    await operator.aclose()


# -- weights ---------------------------------------------------------------------------------------


def stored(bucket: Bucket) -> dict[str, str]:
    """Key to the namespace in its header."""
    return {
        key: read_header(bucket.objects[key], max_tensor_bytes=1 << 30).namespace
        for key in bucket.items()
    }


async def test_suspended_nothing_is_served_or_kept_and_uploads_go_on() -> None:
    bucket = Bucket()
    async with engine(bucket) as cache:
        bucket.gate.clear()
        await cache.put("a", tensor(1))
        cache.suspend()
        assert await cache.get("a") is None
        assert not await cache.contains("a")
        assert not await cache.put("b", tensor(2))
        bucket.gate.set()
        assert (await cache.flush()).complete
        assert stored(bucket) == {NAMESPACE.object_key("a"): NAMESPACE.id}
        assert count(cache, "switched_off_suspended") == 1
        assert count(cache, "misses_suspended") == count(cache, "rejected_puts_suspended") == 1


async def test_other_weights_start_with_nothing_and_are_kept_apart(tmp_path: Path) -> None:
    bucket, disk = Bucket(), DirectoryStore(tmp_path)
    async with engine(bucket, disk=disk) as cache:
        await cache.put("a", tensor(1))
        await cache.flush()
        cache.suspend()
        cache.resume(weight_version="next")
        assert cache.namespace == NEXT
        assert cache.tier.stats().entries == 0
        assert await cache.get("a") is None
        assert await cache.put("a", tensor(2))
        assert (await cache.flush()).complete
        cache.tier.clear()
        assert same(await cache.get("a"), tensor(2))
        expected = {space.object_key("a"): space.id for space in (NAMESPACE, NEXT)}
        assert stored(bucket) == expected
        assert {info.key async for info in disk.list()} == set(expected)
        assert NEXT.manifest_key in bucket.objects
        cache.resume(weight_version="")
        assert same(await cache.get("a"), tensor(1))


async def test_uploads_of_the_old_weights_are_dropped_and_counted() -> None:
    bucket = Bucket()
    async with engine(bucket, max_uploads=1) as cache:
        bucket.gate.clear()
        for name in ("running", "waiting"):
            await cache.put(name, tensor(1))
        await until(lambda: bucket.inside > 0)
        cache.suspend()
        cache.resume(weight_version="next")
        assert await cache.put("new", tensor(2))
        await until(lambda: count(cache, "uploads_superseded") == 2)
        bucket.gate.set()
        assert (await cache.flush()).complete
        assert stored(bucket) == {NEXT.object_key("new"): NEXT.id}


async def test_an_upload_that_resumes_too_late_to_be_dropped_keeps_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = Bucket()
    async with engine(bucket) as cache:

        def change_meanwhile(*args: object, **kwargs: object) -> object:
            cache.suspend()
            cache.gate.resume("next")  # and whatever would be called off goes on
            return encode(*args, **kwargs)  # type: ignore[arg-type]  # as they came

        monkeypatch.setattr("ec_s3.uploads.encode", change_meanwhile)
        await cache.put("a", tensor(1))
        await cache.flush()
        assert stored(bucket) == {NAMESPACE.object_key("a"): NAMESPACE.id}


async def test_a_put_that_is_overtaken_by_the_change_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = Bucket()
    async with engine(bucket) as cache:
        copy = cache._stager._copy

        def change_meanwhile(*args: object) -> None:
            copy(*args)  # type: ignore[arg-type]  # as they came
            cache.suspend()
            cache.resume(weight_version="next")

        monkeypatch.setattr(cache._stager, "_copy", change_meanwhile)
        assert not await cache.put("a", tensor(1))
        monkeypatch.undo()
        assert await cache.get("a") is None
        assert (await cache.flush()).complete
        assert bucket.items() == []


async def test_a_put_in_the_middle_of_which_its_item_is_deleted_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the item would be there again when the deletion is over."""
    commit = Reservation.commit
    async with engine(Bucket()) as cache:

        def delete_meanwhile(self: Reservation, *args: Any, **how: Any) -> Lease:
            cache.gate.apply(Control(deleted={identifier_digest("a"): time.time() + 3600}))
            cache.tier.discard(self.key)
            return commit(self, *args, **how)

        monkeypatch.setattr(Reservation, "commit", delete_meanwhile)
        assert not await cache.put("a", tensor(1))
        assert not cache.tier.contains(NAMESPACE.object_key("a"))
        assert count(cache, "rejected_puts_deleted") == 1


async def test_a_get_under_way_never_answers_for_other_weights() -> None:
    bucket = Bucket()
    async with engine(bucket) as cache:
        await cache.put("a", tensor(1))
        await cache.flush()
        cache.tier.clear()
        hold, entered = asyncio.Event(), asyncio.Event()
        read = bucket.get

        async def held(*args: object, **kwargs: object) -> object:
            entered.set()
            await hold.wait()
            return await read(*args, **kwargs)  # type: ignore[arg-type]  # as they came

        bucket.get = held  # type: ignore[method-assign, assignment]  # holds it up
        asking = asyncio.create_task(cache.get("a"))
        await entered.wait()
        cache.suspend()
        cache.resume(weight_version="next")
        hold.set()
        assert await asking is None
        assert count(cache, "misses_suspended") == 1
        assert cache.tier.stats().leased_bytes == 0


async def test_the_same_weights_go_on_where_they_were() -> None:
    async with engine(Bucket()) as cache:
        await cache.put("a", tensor(1))
        cache.suspend()
        cache.suspend()
        cache.resume(weight_version="")
        cache.resume(weight_version="")
        assert same(await cache.get("a"), tensor(1))


async def test_the_kill_switch_outlasts_a_change_of_the_weights() -> None:
    bucket = Bucket()
    async with engine(bucket) as cache:
        await tell(bucket, Control(enabled=False))
        await hear(cache)
        cache.suspend()
        cache.resume(weight_version="next")
        await hear(cache)
        assert not await cache.put("a", tensor(1))
        await edit(bucket, NEXT.control_key, lambda c: replace(c, valid_after=1.0))
        await hear(cache)
        assert await cache.put("a", tensor(1))


async def test_a_store_that_lets_go_of_nothing_does_not_keep_the_engine_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ec_s3.governor.STOP_SECONDS", 0.01)
    bucket, entered, end = Bucket(), asyncio.Event(), asyncio.Event()

    async def stuck(*_: object, **__: object) -> None:
        entered.set()
        await outlast(end)

    monkeypatch.setattr(bucket, "get", stuck)
    async with engine(bucket) as cache:
        await entered.wait()
        tasks = set(cache.governor._tasks)
    end.set()
    await asyncio.wait(tasks, timeout=20)


async def test_a_refresh_that_lets_go_of_nothing_does_not_keep_the_engine_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ec_s3.refresh.STOP_SECONDS", 0.01)
    monkeypatch.setattr("ec_s3.refresh.LONGEST_SPREAD", 0.0)
    bucket, entered, end = Bucket(), asyncio.Event(), asyncio.Event()

    async def stuck(*_: object, **__: object) -> None:
        entered.set()
        await outlast(end)

    async with engine(bucket, object_lifetime=3600.0) as cache:
        assert await cache.put("a", tensor(1))
        assert (await cache.flush()).complete
        monkeypatch.setattr(bucket, "head", stuck)
        refresher = cache.reader.tiers.refresher
        assert refresher is not None
        refresher.learn(NAMESPACE.object_key("a"), 0.0)
        assert same(await cache.get("a"), tensor(1))
        await entered.wait()
        tasks = set(refresher._tasks.values())
        async with asyncio.timeout(10):
            await cache.close()
    end.set()
    await asyncio.wait(tasks, timeout=20)


async def test_closed_it_says_so() -> None:
    async with engine(Bucket()) as cache:
        pass
    with pytest.raises(ClosedError):
        cache.suspend()
    with pytest.raises(ClosedError):
        cache.resume(weight_version="next")


def test_threads_that_put_while_the_weights_change_never_mix_them() -> None:
    """Each put begins before the next change, as generation is paused for one."""
    bucket = Bucket()
    names = {NAMESPACE.id: 0.0}
    pause = threading.Barrier(3)
    config = ECConfig(max_local_cpu_size=64 * PAGE)
    with ECCacheEngine(config, NAMESPACE, store=bucket) as cache:
        weights = [0.0]
        stop = threading.Event()

        def encode() -> None:
            while not stop.is_set():
                for i in range(10):
                    cache.put(f"item-{i}", torch.full((16, 16), weights[0]).to(torch.bfloat16))
                    cache.get(f"item-{i}")
                pause.wait(30)  # generation is paused
                pause.wait(30)

        threads = [threading.Thread(target=encode) for _ in range(2)]
        for thread in threads:
            thread.start()
        for version in range(1, 9):
            pause.wait(30)
            cache.suspend()
            weights[0] = float(version)
            cache.resume(weight_version=f"{version}")
            names[replace(NAMESPACE, weight_version=f"{version}").id] = float(version)
            if version == 8:
                stop.set()
            pause.wait(30)
        for thread in threads:
            thread.join(30)
        cache.put("last", torch.full((16, 16), 8.0).to(torch.bfloat16))
        assert cache.flush(20).complete
    kinds = stored(bucket)
    assert len(set(kinds.values())) > 1
    for key, namespace in kinds.items():
        assert parse_key(key).namespace == namespace
        _, body = decode(bucket.objects[key], max_tensor_bytes=1 << 20)
        values = torch.frombuffer(body, dtype=torch.bfloat16)
        assert set(values.tolist()) == {names[namespace]}


# -- items that are too large for the host tier ----------------------------------------------------


async def test_an_item_that_can_never_fit_is_not_read_for_the_host_tier() -> None:
    bucket = Bucket()
    large = tensor(1, rows=200_000)
    async with engine(bucket, max_local_cpu_size=1 << 30) as writer:
        await writer.put("large", large)
        assert (await writer.flush()).complete
    async with engine(bucket) as cache:
        before = count(cache, "remote_requests_get_ok")
        miss = await cache.reader.acquire("large", resident=True)
        assert getattr(miss, "reason", None) == "too_large"
        assert count(cache, "remote_requests_get_ok") - before == 1, "only what holds the header"
        assert count(cache, "corrupt_objects_remote") == 0
        refused, got = await asyncio.gather(
            cache.reader.acquire("large", resident=True), cache.get("large")
        )
        assert refused == miss
        assert same(got, large)
        assert cache.stats()["local_bytes_used"] == 0
