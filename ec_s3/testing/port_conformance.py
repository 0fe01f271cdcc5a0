"""What every `EnginePort` promises, as a test class to subclass.

    class TestMyPort(PortTests):
        @pytest.fixture
        def open_port(self): ...   # a function (slab, url) -> port

Runs against the engine on a thread and in a child process. Needs pytest; a bucket is a folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ec_s3.config import ECConfig
from ec_s3.keys import Namespace
from ec_s3.pages import Slab
from ec_s3.port import Absent, EnginePort, Event, Granted, Present, Ready, Want
from ec_s3.types import Extent, ItemMeta, MissReason, TensorSpec

NAMESPACE = Namespace(model="org/model", dtype="float32", salt="not to be seen")
SPEC = TensorSpec("float32", (96, 1024))
SLAB_BYTES = 4 << 20
_SECONDS = 20.0

OpenPort = Callable[[ECConfig, Slab], EnginePort]


def config(url: str | None, **settings: object) -> ECConfig:
    """Settings of a small engine."""
    values = {"max_local_cpu_size": SLAB_BYTES, "flush_timeout": 5, "url": url, **settings}
    return ECConfig.from_mapping(values)


def answer(port: EnginePort, ticket: int) -> Event:
    """The port's answer to a ticket; others are not expected meanwhile."""
    give_up = time.monotonic() + _SECONDS
    while time.monotonic() < give_up:
        for event in port.poll():
            assert event.ticket == ticket
            return event
        time.sleep(0.002)
    raise AssertionError(f"no answer to ticket {ticket}")


def fill(slab: Slab, extents: tuple[Extent, ...], spec: TensorSpec, seed: int) -> bytes:
    """Write recognisable bytes where a reservation lies."""
    body = bytes((seed + i) % 251 for i in range(1024)) * (spec.nbytes // 1024)
    at = 0
    for extent in extents:
        run = body[at : at + extent.nbytes]
        slab.view(Extent(extent.offset, len(run)))[:] = run
        at += len(run)
    return body


def read(slab: Slab, extents: tuple[Extent, ...], spec: TensorSpec) -> bytes:
    """The bytes of a leased item."""
    return b"".join(slab.view(extent) for extent in extents)[: spec.nbytes]


class PortTests:
    """The promises."""

    @pytest.fixture
    def slab(self) -> Iterator[Slab]:
        """Host memory as a scheduler's process makes it."""
        with Slab.create(SLAB_BYTES) as slab:
            slab.populate()
            yield slab

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        """A bucket."""
        return f"file://{tmp_path}/bucket"

    @pytest.fixture
    def port(self, open_port: OpenPort, slab: Slab, url: str) -> Iterator[EnginePort]:
        """The port under test."""
        port = open_port(config(url), slab)
        yield port
        port.close(5.0)

    def _save(self, port: EnginePort, slab: Slab, ticket: int, name: str) -> bytes:
        port.reserve(ticket, name, SPEC.nbytes)
        granted = answer(port, ticket)
        assert isinstance(granted, Granted)
        assert granted.extents is not None
        body = fill(slab, granted.extents, SPEC, ticket)
        port.filled(ticket, SPEC, ItemMeta(0.25, {"grid": [1, 2]}))
        return body

    def _wait_until_uploaded(self, port: EnginePort, ticket: int, name: str) -> None:
        give_up = time.monotonic() + _SECONDS
        while time.monotonic() < give_up:
            port.want(Want(ticket=ticket, identifier=name, probe=True, fresh=True))
            if isinstance(answer(port, ticket), Present):
                return
            time.sleep(0.02)
        raise AssertionError("not uploaded")

    def test_saved_item_is_leased_where_its_bytes_lie(self, port: EnginePort, slab: Slab) -> None:
        body = self._save(port, slab, 1, "a")
        port.want(Want(ticket=2, identifier="a"))
        ready = answer(port, 2)
        assert isinstance(ready, Ready)
        assert ready.spec == SPEC
        assert read(slab, ready.extents, SPEC) == body
        assert (ready.meta.encode_seconds, dict(ready.meta.placeholder)) == (0.25, {"grid": [1, 2]})
        port.release(2)

    def test_item_of_the_bucket_is_brought_in(
        self, open_port: OpenPort, slab: Slab, url: str
    ) -> None:
        first = open_port(config(url), slab)
        body = self._save(first, slab, 1, "a")
        assert first.close(5.0).complete
        with Slab.create(SLAB_BYTES) as other:
            other.populate()
            second = open_port(config(url), other)
            try:
                second.want(Want(ticket=1, identifier="a", save_nbytes=SPEC.nbytes))
                ready = answer(second, 1)
                assert isinstance(ready, Ready)
                assert read(other, ready.extents, SPEC) == body
                second.release(1)
            finally:
                second.close(5.0)

    def test_absence_comes_with_the_reservation_that_was_asked_for(
        self, port: EnginePort, slab: Slab
    ) -> None:
        port.want(Want(ticket=1, identifier="a", save_nbytes=SPEC.nbytes))
        absent = answer(port, 1)
        assert isinstance(absent, Absent)
        assert absent.reason is MissReason.ABSENT
        assert absent.extents is not None
        body = fill(slab, absent.extents, SPEC, 7)
        port.filled(1, SPEC, ItemMeta())
        port.want(Want(ticket=2, identifier="a"))
        ready = answer(port, 2)
        assert isinstance(ready, Ready)
        assert read(slab, ready.extents, SPEC) == body
        port.release(2)

    def test_probe_says_whether_the_bucket_has_it(self, port: EnginePort, slab: Slab) -> None:
        port.want(Want(ticket=1, identifier="a", probe=True))
        assert isinstance(answer(port, 1), Absent)
        self._save(port, slab, 2, "a")
        self._wait_until_uploaded(port, 3, "a")

    def test_absence_is_remembered_but_not_for_those_who_ask_afresh(
        self, open_port: OpenPort, slab: Slab, url: str
    ) -> None:
        reader = open_port(config(url, negative_ttl="60s"), slab)
        with Slab.create(SLAB_BYTES) as other:
            other.populate()
            writer = open_port(config(url), other)
            reader.want(Want(ticket=1, identifier="a"))
            assert isinstance(answer(reader, 1), Absent)
            self._save(writer, other, 1, "a")
            assert writer.close(5.0).complete
        reader.want(Want(ticket=2, identifier="a"))
        assert isinstance(answer(reader, 2), Absent)
        reader.want(Want(ticket=3, identifier="a", fresh=True))
        assert isinstance(answer(reader, 3), Ready)
        reader.release(3)
        reader.close(5.0)

    @pytest.mark.parametrize("name", ["../x", "", "a\0b", "\N{SNOWMAN}", "\ud800", "x" * 10_000])
    def test_any_identifier_goes_through(self, port: EnginePort, slab: Slab, name: str) -> None:
        body = self._save(port, slab, 1, name)
        port.want(Want(ticket=2, identifier=name))
        ready = answer(port, 2)
        assert isinstance(ready, Ready)
        assert read(slab, ready.extents, SPEC) == body
        port.release(2)

    def test_no_room_is_said_and_ends_with_the_leases(self, port: EnginePort) -> None:
        whole = SLAB_BYTES - (256 << 10)
        port.reserve(1, "a", whole)
        assert answer(port, 1) == Granted(1, (Extent(0, whole),))
        port.reserve(2, "b", SPEC.nbytes)
        assert answer(port, 2) == Granted(2, None)
        port.release(1)
        port.reserve(3, "c", SPEC.nbytes)
        granted = answer(port, 3)
        assert isinstance(granted, Granted)
        assert granted.extents
        port.release(3)

    def test_pages_of_an_unanswered_lease_are_never_handed_out_again(
        self, port: EnginePort, slab: Slab
    ) -> None:
        body = self._save(port, slab, 1, "a")
        port.want(Want(ticket=2, identifier="a"))
        ready = answer(port, 2)
        assert isinstance(ready, Ready)
        granted = []
        for ticket in range(3, 30):
            port.reserve(ticket, f"x{ticket}", SPEC.nbytes)
            event = answer(port, ticket)
            if isinstance(event, Granted) and event.extents:
                fill(slab, event.extents, SPEC, ticket)
                granted.append(ticket)
        assert granted
        assert read(slab, ready.extents, SPEC) == body
        for ticket in (2, *granted):
            port.release(ticket)

    def test_what_was_filled_with_something_else_never_becomes_ready(
        self, port: EnginePort
    ) -> None:
        for ticket, wrong in (
            (1, TensorSpec("float32", (95, 1024))),
            (2, TensorSpec("float16", (192, 1024))),
        ):
            port.reserve(ticket, "a", SPEC.nbytes)
            assert isinstance(answer(port, ticket), Granted)
            port.filled(ticket, wrong, ItemMeta())
        port.want(Want(ticket=3, identifier="a"))
        assert isinstance(answer(port, 3), Absent)

    def test_released_wants_answer_no_more_and_unknown_tickets_are_ignored(
        self, port: EnginePort, slab: Slab
    ) -> None:
        port.release(99)
        port.filled(98, SPEC, ItemMeta())
        self._save(port, slab, 1, "a")
        for ticket in range(2, 20):
            port.want(Want(ticket=ticket, identifier=f"other-{ticket}", save_nbytes=SPEC.nbytes))
            port.release(ticket)
        time.sleep(0.1)
        for event in port.poll():  # an answer may have crossed the release; it holds nothing
            port.release(event.ticket)
        port.reserve(50, "b", 3 << 20)
        granted = answer(port, 50)
        assert isinstance(granted, Granted)
        assert granted.extents is not None, "nothing was left behind"
        port.release(50)

    def test_engine_counts(self, port: EnginePort, slab: Slab) -> None:
        self._save(port, slab, 1, "a")
        port.want(Want(ticket=2, identifier="a"))
        assert isinstance(answer(port, 2), Ready)
        port.release(2)
        give_up = time.monotonic() + _SECONDS
        hits: float = 0
        while not hits and time.monotonic() < give_up:
            value = port.drain_stats().get("hits|local", 0)
            hits += value if isinstance(value, int | float) else 0
            time.sleep(0.02)
        assert hits == 1

    def test_closing_flushes_and_is_idempotent(
        self, open_port: OpenPort, slab: Slab, url: str
    ) -> None:
        port = open_port(config(url), slab)
        self._save(port, slab, 1, "a")
        before = port.alive
        assert port.close(5.0).complete
        assert (before, port.alive) == (True, False)
        port.close(5.0)
        port.want(Want(ticket=2, identifier="a"))
        port.release(2)
        assert [p for p in Path(url.removeprefix("file://")).rglob("*") if p.is_file()]
