"""The desk and `ThreadPort`, beyond the promises of every port (tests/conformance)."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from ec_s3.control import Control
from ec_s3.errors import ConfigError, RemoteDeniedError
from ec_s3.keys import CONTROL_NAME, INDEX_NAME, identifier_digest
from ec_s3.local import Lease, Reservation
from ec_s3.port import UNKNOWN, Absent, Ready, ThreadPort, Want
from ec_s3.testing.memory import MemoryStore
from ec_s3.testing.port_conformance import (
    NAMESPACE,
    SPEC,
    config,
    make_slab,
    release,
    save,
    until,
    want,
)
from ec_s3.types import FlushReport, ItemMeta, MissReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ec_s3.pages import Slab


_TICKET = 10_000_000  # beyond those that the helpers draw


class Gated(MemoryStore):
    """A bucket whose calls for items wait until the gate opens, and then may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.entered = threading.Event()
        self.error: Exception | None = None
        self.cancelled = threading.Event()

    async def _enter(self, verb: str, *keys: str) -> None:
        if any(key.endswith((CONTROL_NAME, INDEX_NAME)) for key in keys):
            return
        self.entered.set()
        try:
            while not self.open.is_set():  # noqa: ASYNC110  the test opens it from its own thread
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.error is not None:
            raise self.error
        await super()._enter(verb, *keys)


@pytest.fixture
def slab() -> Iterator[Slab]:
    with make_slab() as slab:
        yield slab


@pytest.fixture
def store() -> Gated:
    return Gated()


@pytest.fixture
def port(slab: Slab, store: Gated) -> Iterator[ThreadPort]:
    port = ThreadPort(config(None), NAMESPACE, slab, store=store)
    yield port
    store.open.set()
    held = port._cache.tier.stats()
    port.close(5.0)
    assert held.reserved_bytes == 0
    assert port._cache.tier.stats().leased_bytes == 0
    assert port._desk._holders == {}
    assert port._desk._tasks == {}


def test_want_released_before_it_started_asks_nobody(port: ThreadPort, store: Gated) -> None:
    busy = threading.Event()
    port._loop.post(busy.wait, 10)
    port.want(Want(ticket=_TICKET, identifier="a", save_nbytes=SPEC.nbytes))
    port.release(_TICKET)
    busy.set()
    store.open.set()
    assert isinstance(want(port, "b"), Absent)
    assert store.calls == {"get": 1}


def test_flush_waits_for_what_was_saved_and_then_it_is_known_to_be_there(
    port: ThreadPort, slab: Slab, store: Gated
) -> None:
    save(port, slab, "a")
    key = port.cache.key_of("a")
    assert port.flush(0.01).pending == 1
    assert not port.cache.is_known_shared(key)
    store.open.set()
    assert port.flush(10).complete
    assert port.cache.is_known_shared(key)
    assert key in store.objects


def test_want_released_under_way_is_called_off(port: ThreadPort, store: Gated) -> None:
    port.want(Want(ticket=_TICKET, identifier="a", save_nbytes=SPEC.nbytes))
    assert store.entered.wait(10)
    port.release(_TICKET)
    assert store.cancelled.wait(10)
    assert port.poll() == []


def test_item_that_arrives_for_a_released_ticket_is_given_back(
    port: ThreadPort, slab: Slab
) -> None:
    save(port, slab, "a")
    lease = port._cache.tier.lookup(port._cache.key_of("a"))
    assert lease is not None
    since = port._cache.gate.now
    port._desk._answer(Want(ticket=_TICKET, identifier="a"), since, lease)
    other = Want(ticket=_TICKET + 1, identifier="b", save_nbytes=10)
    port._desk._absent(other, since, MissReason.ABSENT)
    assert port.poll() == []


def test_refusals_of_the_bucket_are_told_by_their_reason(port: ThreadPort, store: Gated) -> None:
    store.open.set()
    store.error = RemoteDeniedError("no", operation="get")
    for probe in (False, True):
        absent = want(port, f"{probe}", probe=probe, save=SPEC.nbytes)
        assert isinstance(absent, Absent)
        assert absent.reason is MissReason.DENIED
        assert absent.extents, "the encode can be saved all the same"
        release(port, absent)


def test_bug_in_the_engine_is_an_answer_and_is_counted(
    port: ThreadPort, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(port._cache.reader, "acquire", broken)
    absent = want(port, "a")
    assert isinstance(absent, Absent)
    assert absent.reason is MissReason.FAILED
    assert port.drain_stats()["errors|engine"] == 1
    assert "a bug" in caplog.text


def test_closed_engine_answers_that_it_is_closed(port: ThreadPort, store: Gated) -> None:
    store.open.set()
    port.close(1.0)
    absent = want(port, "a")
    assert isinstance(absent, Absent)
    assert absent.reason is MissReason.CLOSED


def test_engine_that_cannot_start_leaves_no_thread(
    slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise ConfigError("cannot be used")

    monkeypatch.setattr("ec_s3.wiring.open_store", broken)
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="cannot be used"):
        ThreadPort(config("s3://bucket"), NAMESPACE, slab)
    until(lambda: threading.active_count() <= threads, "a thread is left")


def test_flush_that_takes_too_long_is_reported_in_time(
    port: ThreadPort, slab: Slab, store: Gated
) -> None:
    save(port, slab, "a")
    started = time.monotonic()
    report = port.close(0.1)
    assert time.monotonic() - started < 10.0
    assert report.pending == 1
    assert not report.complete
    assert port.close(0.1) == report


def test_engine_that_does_not_close_is_not_reported_as_flushed(
    port: ThreadPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stuck(_: float) -> FlushReport:
        await asyncio.sleep(60)
        return FlushReport()

    with monkeypatch.context() as patch:
        patch.setattr("ec_s3.port.CLOSE_GRACE", 0.05)
        patch.setattr(port._cache, "close", stuck)
        assert port.close(0.0) == UNKNOWN
    assert not UNKNOWN.complete


def test_item_without_a_bucket_is_kept_and_counted_clean(slab: Slab) -> None:
    port = ThreadPort(config(None), NAMESPACE, slab)
    save(port, slab, "a")
    assert port._cache.tier.stats().dirty_bytes == 0
    assert port.close(1.0).complete


def test_save_in_the_middle_of_which_its_item_is_deleted_keeps_nothing(
    port: ThreadPort, store: Gated, slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.open.set()
    cache, commit, key = port.cache, Reservation.commit, NAMESPACE.object_key("a")

    def delete_meanwhile(self: Reservation, *args: Any, **how: Any) -> Lease:
        cache.gate.apply(Control(deleted={identifier_digest("a"): time.time() + 3600}))
        cache.tier.discard(self.key)
        return commit(self, *args, **how)

    monkeypatch.setattr(Reservation, "commit", delete_meanwhile)
    save(port, slab, "a")
    assert not cache.tier.contains(key)
    assert cache.stats()["rejected_puts_deleted"] == 1
    assert port.flush(5.0).complete
    assert key not in store.objects


def test_many_tickets_in_disorder_leave_nothing_behind(
    port: ThreadPort, slab: Slab, store: Gated
) -> None:
    store.open.set()
    save(port, slab, "a")
    for ticket in range(_TICKET, _TICKET + 400):
        name = ("a", "b", f"{ticket}")[ticket % 3]
        if ticket % 7:
            port.want(Want(ticket=ticket, identifier=name, save_nbytes=ticket % 2 * SPEC.nbytes))
        else:
            port.reserve(ticket, name, SPEC.nbytes)
        if ticket % 5 == 0:
            port.release(ticket - 3)
            port.filled(ticket - 2, SPEC, ItemMeta())
    for ticket in range(_TICKET, _TICKET + 400):
        port.release(ticket)
    ready = want(port, "a")
    assert isinstance(ready, Ready)
    release(port, ready)
