from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ec_s3 import EncoderCache
from ec_s3.config import ECConfig
from ec_s3.control import Control
from ec_s3.errors import (
    ConfigError,
    RemoteDeniedError,
    RemoteError,
    RemoteThrottledError,
    RemoteUnavailableError,
)
from ec_s3.ingest import ingest, upload_items
from ec_s3.intake import Bad, Source
from ec_s3.keys import Namespace
from ec_s3.lookup import header_at
from ec_s3.policy import Probing
from ec_s3.testing.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ec_s3.store import Buffer
    from ec_s3.types import ObjectInfo, PutOutcome

SPACE = Namespace(model="org/model", dtype="bfloat16")
NBYTES = 256


def settings(**given: object) -> ECConfig:
    return ECConfig.from_mapping({"max_local_cpu_size": "4MiB", **given})


def tensor(value: float = 1.0, rows: int = 8) -> torch.Tensor:
    return torch.full((rows, 16), value, dtype=torch.bfloat16)


def lazy(name: str) -> Source:
    return Source(name, NBYTES, tensor)


def held(name: str) -> Source:
    return Source(name, NBYTES, tensor, held=True)


class Broken(MemoryStore):
    """Fails puts, the first `times` of them."""

    def __init__(self, error: type[RemoteError], times: float = float("inf")) -> None:
        super().__init__()
        self.error = error
        self.left = times

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        if_match: str | None = None,
    ) -> PutOutcome:
        if self.left > 0:
            self.left -= 1
            raise self.error("put failed", operation="put", key=key)
        return await super().put(key, parts, if_absent=if_absent, if_match=if_match)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ec_s3.intake.spread", lambda _: 0.0)


class TestBounds:
    async def test_two_thousand_items_never_take_more_than_their_share_of_memory(self) -> None:
        alive = most = 0

        def gone() -> None:
            nonlocal alive
            alive -= 1

        def made() -> Iterator[Source]:
            nonlocal alive, most
            for number in range(2000):
                one = torch.frombuffer(bytearray(1_000_000), dtype=torch.uint8)
                alive += 1
                most = max(most, alive)
                weakref.finalize(one, gone)
                yield Source(f"{number:064x}", 1_000_000, partial(torch.detach, one), held=True)

        config = settings(upload_queue_size="32MiB", upload_queue_items=64)
        space = Namespace(model="org/model", dtype="uint8")
        report = await ingest(MemoryStore(), made(), config, space)
        assert report.written == 2000
        assert report.most_bytes <= 32 << 20
        assert report.most_items <= 64
        assert most * 1_000_000 <= 32 << 20

    async def test_a_tensor_is_let_go_once_it_is_encoded(self) -> None:
        gone, let_go = threading.Event(), {}

        class Watching(MemoryStore):
            async def put(self, key: str, parts: Sequence[Buffer], **how: Any) -> PutOutcome:
                let_go[key] = await asyncio.to_thread(gone.wait, 10)  # of the codec's thread, too
                return await super().put(key, parts, **how)

        one = tensor()
        weakref.finalize(one, gone.set)
        items = iter([Source("name", NBYTES, partial(torch.detach, one), held=True)])
        del one
        report = await ingest(Watching(), items, settings(), SPACE)
        assert report.written == 1
        assert let_go[SPACE.object_key("name")]

    async def test_no_more_items_are_taken_than_have_room(self) -> None:
        store, taken = MemoryStore(), 0
        limit = 8

        def made() -> Iterator[Source]:
            nonlocal taken
            for number in range(100):
                taken += 1
                yield lazy(str(number))

        seen: list[int] = []

        def dealt_with(*_: object) -> None:
            seen.append(taken - len(seen))

        config = settings(upload_queue_items=limit)
        report = await ingest(store, made(), config, SPACE, on_item=dealt_with)
        assert report.written == 100
        assert max(seen) <= limit + 1
        assert report.most_items <= limit

    @pytest.mark.parametrize("size", [1, 2 * NBYTES, 5 * NBYTES])
    async def test_items_in_memory_and_on_disk_do_not_wait_for_each_other(self, size: int) -> None:
        items = [held(str(n)) if n % 2 else lazy(str(n)) for n in range(40)]
        config = settings(upload_queue_size=size, max_uploads=2)
        report = await ingest(MemoryStore(), items, config, SPACE)
        assert report.written == 40

    async def test_uploads_are_held_to_the_rate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []

        class Counting:
            def __init__(self, rate: float) -> None:
                assert rate == 50_000_000

            def take(self, nbytes: int, *, now: float) -> float:
                asked.append(nbytes)
                return 0.0

        monkeypatch.setattr("ec_s3.intake.TokenBucket", Counting)
        config = settings(upload_rate="50MB/s")
        report = await ingest(MemoryStore(), [lazy(str(n)) for n in range(5)], config, SPACE)
        assert sum(asked) == report.stored_bytes > 0


class TestExistence:
    async def test_what_is_there_is_neither_loaded_nor_sent(self) -> None:
        store = MemoryStore()
        names = [str(n) for n in range(50)]
        await ingest(store, map(lazy, names), settings(), SPACE)
        puts = store.calls["put"]

        def untouchable() -> torch.Tensor:
            raise AssertionError("loaded for nothing")

        again = [Source(name, NBYTES, untouchable) for name in names]
        report = await ingest(store, again, settings(), SPACE)
        assert (report.written, report.present, report.failures) == (0, 50, 0)
        assert store.calls["put"] == puts

    async def test_is_asked_for_many_items_at_a_time(self) -> None:
        class Patient(MemoryStore):
            waiting = 0
            enough = asyncio.Event()

            async def head(self, key: str) -> ObjectInfo | None:
                self.waiting += 1
                if self.waiting == 16:
                    self.enough.set()
                await self.enough.wait()
                return await super().head(key)

        async with asyncio.timeout(30):
            items = [lazy(str(n)) for n in range(16)]
            report = await ingest(Patient(), items, settings(max_uploads=1), SPACE)
        assert report.written == 16

    async def test_is_hardly_asked_for_where_nothing_is_there(self) -> None:
        store = MemoryStore()
        config = settings(upload_queue_items=4)
        await ingest(store, [lazy(str(n)) for n in range(400)], config, SPACE)
        assert store.calls["head"] < 60

    async def test_is_asked_for_again_before_a_body_that_comes_late(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ec_s3.intake.LATE_SECONDS", -1.0)
        store = MemoryStore()

        def meanwhile() -> torch.Tensor:
            store.objects[SPACE.object_key("a")] = b"theirs"
            return tensor()

        report = await ingest(store, [Source("a", NBYTES, meanwhile)], settings(), SPACE)
        assert (report.written, report.present) == (0, 1)
        assert store.calls.get("put", 0) == 0

    async def test_an_item_that_comes_twice_is_stored_once(self) -> None:
        store = MemoryStore()
        report = await ingest(store, [held("a"), held("a"), held("b")], settings(), SPACE)
        assert (report.written, report.present) == (2, 1)

    def test_of_large_and_of_found_items_is_asked_again(self) -> None:
        probing = Probing(limit=4)
        for _ in range(4):
            assert probing.wanted()
            probing.learn(present=False)
        asked = [probing.wanted() for _ in range(8)]
        assert asked.count(True) == 2
        probing.learn(present=True)
        assert all(probing.wanted() for _ in range(8))


class TestBadItems:
    async def test_are_named_with_their_reasons_and_end_no_other(self) -> None:
        def unreadable() -> torch.Tensor:
            raise RuntimeError("the disk is gone")

        items: list[Source | Bad] = [
            lazy("good"),
            Bad("file.safetensors", "it cannot be read: no header"),
            Source("unreadable", NBYTES, unreadable),
            Source("float", NBYTES, lambda: torch.zeros(8, 8)),
            Source("large", 1 << 20, tensor),
            Source("chatcmpl-1-image-0", NBYTES, tensor),
            Source("", NBYTES, tensor),
            held("last"),
        ]
        store = MemoryStore()
        report = await ingest(store, items, settings(max_item_size=1 << 19), SPACE)
        assert report.written == 2
        assert report.failures == 6
        assert report.failed["unreadable"] == "RuntimeError: the disk is gone"
        assert "float32" in report.failed["float"]
        assert "max_item_size" in report.failed["large"]
        assert "single request" in report.failed["chatcmpl-1-image-0"]
        stored = {SPACE.object_key("good"), SPACE.object_key("last"), SPACE.manifest_key}
        assert store.objects.keys() == stored

    async def test_only_so_many_are_kept_by_name(self) -> None:
        bad = (Bad(str(n), "no") for n in range(100))
        report = await ingest(MemoryStore(), bad, settings(), SPACE, max_failures=10)
        assert (len(report.failed), report.failures) == (10, 100)

    async def test_a_source_that_breaks_keeps_what_it_gave_before(self) -> None:
        def made() -> Iterator[Source]:
            yield lazy("a")
            yield lazy("b")
            raise OSError("the drive is gone")

        store = MemoryStore()
        with pytest.raises(OSError, match="drive"):
            await ingest(store, made(), settings(), SPACE)
        assert {SPACE.object_key("a"), SPACE.object_key("b")} <= store.objects.keys()


@pytest.mark.usefixtures("no_pauses")
class TestFailingStore:
    async def test_a_busy_store_is_asked_again(self) -> None:
        store = Broken(RemoteThrottledError, times=3)
        report = await ingest(store, [lazy("a"), lazy("b")], settings(), SPACE)
        assert report.written == 2

    async def test_a_denial_ends_the_job_at_once(self) -> None:
        endless = (lazy(str(n)) for n in itertools.count())
        report = await ingest(Broken(RemoteDeniedError), endless, settings(), SPACE)
        assert isinstance(report.stopped, RemoteDeniedError)
        assert report.written == 0

    async def test_a_store_that_stays_away_ends_the_job(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ec_s3.intake.RETRY_SECONDS", 0.0)
        endless = (held(str(n)) for n in itertools.count())
        report = await ingest(Broken(RemoteUnavailableError), endless, settings(), SPACE)
        assert isinstance(report.stopped, RemoteUnavailableError)

    async def test_an_object_that_is_refused_is_one_bad_item(self) -> None:
        class RefusalError(RemoteError):
            retryable = False

        report = await ingest(
            Broken(RefusalError, times=1), [lazy("a"), lazy("b")], settings(), SPACE
        )
        assert (report.written, report.failures) == (1, 1)
        assert report.stopped is None

    async def test_what_a_store_says_beyond_its_code_is_in_no_log(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class RefusalError(RemoteError):
            retryable = False

            def __init__(self, message: str, *, operation: str, key: str = "") -> None:
                super().__init__(message, operation=operation, key=key)
                self.__cause__ = ValueError("An error occurred: HUSH")  # as the SDK's is

        caplog.set_level("DEBUG", logger="ec_s3")
        report = await ingest(Broken(RefusalError), [lazy("a")], settings(), SPACE)
        assert report.failures == 1
        assert "could not be uploaded" in caplog.text
        assert "HUSH" not in caplog.text


class TestOperator:
    async def test_nothing_is_uploaded_while_the_namespace_is_switched_off(self) -> None:
        store = MemoryStore()
        store.objects[SPACE.control_key] = Control(enabled=False).pack()
        with pytest.raises(ConfigError, match="switched off"):
            await ingest(store, [lazy("a")], settings(), SPACE)
        assert "put" not in store.calls

    async def test_switching_off_ends_a_job_that_runs(self) -> None:
        class Switched(MemoryStore):
            async def get(self, key: str, **given: Any) -> Any:
                found = await super().get(key, **given)
                if key == SPACE.control_key:
                    self.objects[key] = Control(enabled=False).pack()
                return found

        endless = (lazy(str(n)) for n in itertools.count())
        report = await ingest(Switched(), endless, settings(), SPACE)
        assert isinstance(report.stopped, ConfigError)

    async def test_a_deleted_item_does_not_come_back(self) -> None:
        store = MemoryStore()
        digest = SPACE.object_key("a").rpartition("/")[2]
        store.objects[SPACE.control_key] = Control(deleted={digest: 9e10}).pack()
        report = await ingest(store, [lazy("a"), lazy("b")], settings(), SPACE)
        assert report.written == 1
        assert "deleted" in report.failed["a"]


class TestUploadItems:
    def test_tensors_come_back_from_a_server_of_the_namespace(self, tmp_path: Path) -> None:
        config = settings(url=f"file://{tmp_path}", salt="a-secret-salt")
        space = Namespace(model="org/model", dtype="bfloat16", salt="a-secret-salt")
        wanted = {f"{n:064x}": torch.randn(8, 16).bfloat16() for n in range(20)}
        report = upload_items(wanted.items(), config, space)
        assert (report.written, report.failures) == (20, 0)

        async def read() -> list[torch.Tensor | None]:
            async with EncoderCache(config, space) as cache:
                return await cache.get_many(list(wanted))

        found = asyncio.run(read())
        pairs = zip(found, wanted.values(), strict=True)
        assert all(one is not None and torch.equal(one, other) for one, other in pairs)

    def test_objects_are_signed_where_there_is_a_key(self, tmp_path: Path) -> None:
        config = settings(url=f"file://{tmp_path}", signing_key=f"k1:{'ab' * 32}")
        upload_items([("a", tensor())], config, SPACE)

        async def read(config: ECConfig) -> torch.Tensor | None:
            async with EncoderCache(config, SPACE) as cache:
                return await cache.get("a")

        assert asyncio.run(read(config)) is not None
        other = settings(url=f"file://{tmp_path}", signing_key=f"k2:{'cd' * 32}")
        assert asyncio.run(read(other)) is None

    def test_a_tensor_that_cannot_be_stored_is_reported(self, tmp_path: Path) -> None:
        config = settings(url=f"file://{tmp_path}")
        items = [("a", torch.zeros(2, dtype=torch.complex64)), ("b", tensor())]
        report = upload_items(items, config, SPACE)
        assert report.written == 1
        assert "complex64" in report.failed["a"]

    def test_without_a_store_nothing_is_done(self) -> None:
        with pytest.raises(ConfigError, match="url is not set"):
            upload_items([], settings(), SPACE)


class TestValidity:
    @pytest.mark.parametrize("refreshed", [False, True])
    async def test_objects_that_do_not_count_any_more_are_replaced(
        self, refreshed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = MemoryStore()
        await ingest(store, map(held, "abc"), settings(), SPACE)
        keys = [SPACE.object_key(name) for name in "abc"]
        valid_after = time.time()
        document = Control(valid_after=valid_after).pack()
        await store.put(SPACE.control_key, [document], if_absent=False)
        if refreshed:  # stored again since, and made before
            monkeypatch.setattr(MemoryStore, "head", _later(MemoryStore.head))
        report = await ingest(store, map(held, "abc"), settings(), SPACE)
        assert (report.written, report.present, report.failures) == (3, 0, 0)
        for key in keys:
            header = await header_at(store, key)
            assert header is not None
            assert header.created >= valid_after
        again = await ingest(store, map(held, "abc"), settings(), SPACE)
        assert (again.written, again.present) == (0, 3)


def _later(head: Any) -> Any:
    async def looked(store: MemoryStore, key: str) -> ObjectInfo | None:
        info: ObjectInfo | None = await head(store, key)
        return info and replace(info, modified=time.time() + 60)

    return looked
