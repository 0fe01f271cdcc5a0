"""What every `EnginePort` promises, as a test class to subclass.

    class TestMyPort(PortTests):
        @pytest.fixture(scope="class")
        @classmethod
        def open_port(cls): ...   # a function (config, slab) -> port

Runs against the engine on a thread and in a child process. Most tests share one port, as starting
one may take seconds: every test takes tickets and names of its own, and gives back what it holds.
Needs pytest; a bucket is a folder, filled from outside by a `ThreadPort`.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from ec_s3.config import ECConfig
from ec_s3.keys import Namespace
from ec_s3.metrics import Stats
from ec_s3.pages import PAGE_BYTES, Slab
from ec_s3.port import Absent, EnginePort, Event, Granted, Present, Ready, ThreadPort, Want
from ec_s3.types import Extent, ItemMeta, MissReason, TensorSpec

NAMESPACE = Namespace(model="org/model", dtype="float32", salt="not to be seen")
SPEC = TensorSpec("float32", (96, 1024))
META = ItemMeta(0.25, {"grid": [1, 2]}, input_digest="5a" * 32)
SLAB_BYTES = 4 << 20
_SECONDS = 20.0
_NAMES = ("../x", "", "a\0b", "\N{SNOWMAN}", "\ud83d\ude00", "\N{GRINNING FACE}", "x" * 10_000)

if TYPE_CHECKING:
    from pathlib import Path

OpenPort = Callable[[ECConfig, Slab], EnginePort]

_tickets = itertools.count(1)


def config(url: str | None, **settings: object) -> ECConfig:
    """Settings of a small engine."""
    values = {"max_local_cpu_size": SLAB_BYTES, "flush_timeout": 5, "url": url, **settings}
    return ECConfig.from_mapping(values)


def until(done: Callable[[], object], what: str) -> None:
    """Wait for something that must come, if not at once."""
    give_up = time.monotonic() + _SECONDS
    while not done():
        assert time.monotonic() < give_up, what
        time.sleep(0.005)


@contextlib.contextmanager
def make_slab(nbytes: int = SLAB_BYTES) -> Iterator[Slab]:
    """Host memory as a scheduler's process makes it."""
    with Slab.create(nbytes) as slab:
        slab.populate()
        yield slab


def answer(port: EnginePort, ticket: int) -> Event:
    """The port's answer to a ticket; late ones to tickets that were released are passed over."""
    give_up = time.monotonic() + _SECONDS
    while time.monotonic() < give_up:
        events = port.poll()
        for event in events:
            if event.ticket == ticket:
                assert event is events[-1], "one answer per ticket, and none but to this one"
                return event
        time.sleep(0.002)
    raise AssertionError(f"no answer to ticket {ticket}")


def want(port: EnginePort, name: str, *, save: int = 0, **how: bool) -> Event:
    """Ask for an item on a new ticket; the answer."""
    ticket = next(_tickets)
    port.want(Want(ticket=ticket, identifier=name, save_nbytes=save, **how))
    return answer(port, ticket)


def reserve(port: EnginePort, name: str, nbytes: int = SPEC.nbytes) -> Granted:
    """Ask for pages on a new ticket; the answer."""
    ticket = next(_tickets)
    port.reserve(ticket, name, nbytes)
    granted = answer(port, ticket)
    assert isinstance(granted, Granted)
    return granted


def save(port: EnginePort, slab: Slab, name: str, spec: TensorSpec = SPEC) -> bytes:
    """Save a recognisable item; its bytes."""
    give_up = time.monotonic() + _SECONDS
    while not (granted := reserve(port, name, spec.nbytes)).extents:
        assert time.monotonic() < give_up, "an upload holds pages, but only for a moment"
        time.sleep(0.005)
    body = fill(slab, granted.extents, spec, granted.ticket)
    port.filled(granted.ticket, spec, META)
    return body


def put_in_bucket(url: str, name: str, spec: TensorSpec = SPEC) -> bytes:
    """Let another server save an item; its bytes."""
    with make_slab(2 * spec.nbytes) as slab:
        writer = ThreadPort(config(url), NAMESPACE, slab)
        body = save(writer, slab, name, spec)
        assert writer.close(10.0).complete
    return body


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


def release(port: EnginePort, event: Event) -> None:
    """End the ticket of an answer."""
    port.release(event.ticket)


def _offset(granted: Granted) -> int:
    return granted.extents[0].offset if granted.extents else -1


def _count(port: EnginePort, series: str) -> float:
    value = port.drain_stats().get(series, 0)
    assert isinstance(value, int | float)
    return value


class PortTests:
    """The promises."""

    @pytest.fixture(scope="class")
    @classmethod
    def slab(cls) -> Iterator[Slab]:
        """The shared port's host memory."""
        with make_slab() as slab:
            yield slab

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        """A bucket."""
        return f"file://{tmp_path_factory.mktemp('bucket')}"

    @pytest.fixture(scope="class")
    @classmethod
    def stats(cls) -> Stats:
        """All that the shared port has reported."""
        return Stats()

    @pytest.fixture(scope="class")
    @classmethod
    def port(cls, open_port: OpenPort, slab: Slab, url: str, stats: Stats) -> Iterator[EnginePort]:
        """The shared port, which never forgets an absence by itself."""
        port = open_port(config(url, negative_ttl="600s"), slab)
        yield port
        assert port.close(5.0).complete
        stats.merge(port.drain_stats())
        held = stats.snapshot()
        left = held["local_bytes_leased"], held["local_bytes_reserved"]
        assert left == (0, 0), "every test has given back what it held"

    @pytest.fixture
    def name(self) -> str:
        """A name of the test's own."""
        return f"item-{next(_tickets)}"

    def test_saved_item_is_leased_where_its_bytes_lie(
        self, port: EnginePort, slab: Slab, name: str
    ) -> None:
        body = save(port, slab, name)
        ready = want(port, name)
        assert isinstance(ready, Ready)
        assert ready.spec == SPEC
        assert read(slab, ready.extents, SPEC) == body
        assert ready.meta == META
        release(port, ready)

    def test_item_of_the_bucket_is_brought_in(
        self, port: EnginePort, slab: Slab, url: str, name: str
    ) -> None:
        body = put_in_bucket(url, name)
        ready = want(port, name, save=SPEC.nbytes)
        assert isinstance(ready, Ready)
        assert read(slab, ready.extents, SPEC) == body
        release(port, ready)

    def test_absence_comes_with_the_reservation_that_was_asked_for(
        self, port: EnginePort, slab: Slab, name: str
    ) -> None:
        bare = want(port, name)
        assert isinstance(bare, Absent)
        assert (bare.reason, bare.extents) == (MissReason.ABSENT, None)
        absent = want(port, name, save=SPEC.nbytes)
        assert isinstance(absent, Absent)
        assert absent.extents is not None
        body = fill(slab, absent.extents, SPEC, 7)
        port.filled(absent.ticket, SPEC, ItemMeta())
        ready = want(port, name)
        assert isinstance(ready, Ready)
        assert read(slab, ready.extents, SPEC) == body
        release(port, ready)

    def test_what_is_only_compared_is_not_kept(
        self, port: EnginePort, slab: Slab, stats: Stats, name: str
    ) -> None:
        body = save(port, slab, name)
        granted = reserve(port, name)
        fill(slab, granted.extents or (), SPEC, granted.ticket)
        port.filled(granted.ticket, SPEC, META, compare=True)

        def compared() -> bool:
            stats.merge(port.drain_stats())
            return stats.snapshot()["audits_different"] == 1

        until(compared, "it was not compared")
        ready = want(port, name)
        assert isinstance(ready, Ready)
        assert read(slab, ready.extents, SPEC) == body
        release(port, ready)

    def test_item_may_lie_in_scattered_pages(self, port: EnginePort, slab: Slab, name: str) -> None:
        pages = []
        while (page := reserve(port, "page", PAGE_BYTES)).extents:
            pages.append(page)
        assert len(pages) > 4
        for page in sorted(pages, key=_offset)[::2]:
            release(port, page)
        granted = reserve(port, name)
        assert granted.extents is not None
        assert len(granted.extents) == 2
        body = fill(slab, granted.extents, SPEC, granted.ticket)
        port.filled(granted.ticket, SPEC, ItemMeta())
        ready = want(port, name)
        assert isinstance(ready, Ready)
        assert read(slab, ready.extents, SPEC) == body
        release(port, ready)
        for page in pages:
            release(port, page)

    def test_probe_says_whether_the_bucket_has_it(
        self, port: EnginePort, slab: Slab, url: str, name: str
    ) -> None:
        assert isinstance(want(port, name, probe=True), Absent)
        save(port, slab, name)
        until(lambda: isinstance(want(port, name, probe=True), Present), "it was not uploaded")
        assert isinstance(want(port, f"{name}-2", probe=True), Absent)
        put_in_bucket(url, f"{name}-2")
        assert isinstance(want(port, f"{name}-2", probe=True), Absent)
        assert isinstance(want(port, f"{name}-2", probe=True, fresh=True), Present)

    def test_absence_is_remembered_but_not_for_those_who_ask_afresh(
        self, port: EnginePort, url: str, name: str
    ) -> None:
        assert isinstance(want(port, name), Absent)
        put_in_bucket(url, name)
        assert isinstance(want(port, name), Absent)
        ready = want(port, name, fresh=True)
        assert isinstance(ready, Ready)
        release(port, ready)

    def test_any_identifier_goes_through(self, port: EnginePort, slab: Slab) -> None:
        for name in _NAMES:
            body = save(port, slab, name)
            ready = want(port, name)
            assert isinstance(ready, Ready)
            assert read(slab, ready.extents, SPEC) == body, "two names are never one"
            release(port, ready)

    def test_no_room_is_said_and_ends_with_the_leases(
        self, port: EnginePort, url: str, name: str
    ) -> None:
        put_in_bucket(url, name)
        pages = []
        while (page := reserve(port, "page", PAGE_BYTES)).extents:
            pages.append(page)
        assert reserve(port, "b").extents is None
        absent = want(port, f"{name}-absent", save=SPEC.nbytes)
        assert isinstance(absent, Absent)
        assert (absent.reason, absent.extents) == (MissReason.ABSENT, None)
        full = want(port, name)
        assert isinstance(full, Absent)
        assert full.reason is MissReason.NO_ROOM
        for page in pages:
            release(port, page)
        ready = want(port, name)
        assert isinstance(ready, Ready)
        release(port, ready)

    def test_what_can_never_fit_is_too_large(self, port: EnginePort, url: str, name: str) -> None:
        assert reserve(port, name, SLAB_BYTES + 1).extents is None
        assert reserve(port, name, -1).extents is None
        put_in_bucket(url, name, TensorSpec("float32", (SLAB_BYTES // 4096 + 1, 1024)))
        absent = want(port, name, save=SLAB_BYTES + 1)
        assert isinstance(absent, Absent)
        assert (absent.reason, absent.extents) == (MissReason.TOO_LARGE, None)

    def test_pages_of_a_lease_are_never_handed_out_again(
        self, port: EnginePort, slab: Slab, name: str
    ) -> None:
        body = save(port, slab, name)
        ready = want(port, name)
        assert isinstance(ready, Ready)
        granted = []
        while (page := reserve(port, "page", PAGE_BYTES)).extents:
            fill(slab, page.extents, TensorSpec("uint8", (PAGE_BYTES,)), page.ticket)
            granted.append(page)
        assert granted
        assert read(slab, ready.extents, SPEC) == body
        release(port, ready)
        for page in granted:
            release(port, page)

    def test_what_was_filled_with_something_else_never_becomes_ready(
        self, port: EnginePort, name: str
    ) -> None:
        wrong_rows, wrong_type = (
            TensorSpec("float32", (95, 1024)),
            TensorSpec("float16", (192, 1024)),
        )
        for wrong in (wrong_rows, wrong_type):
            port.filled(reserve(port, name).ticket, wrong, ItemMeta())
        assert isinstance(want(port, name), Absent)

    def test_filled_ends_reservations_only(self, port: EnginePort, slab: Slab, name: str) -> None:
        port.filled(next(_tickets), SPEC, ItemMeta())
        body = save(port, slab, name)
        ready = want(port, name)
        assert isinstance(ready, Ready)
        port.filled(ready.ticket, SPEC, ItemMeta())
        assert read(slab, ready.extents, SPEC) == body
        release(port, ready)

    def test_tickets_end_by_release_in_every_state(
        self, port: EnginePort, url: str, name: str
    ) -> None:
        port.release(next(_tickets))
        put_in_bucket(url, name)
        for i in range(30):
            ticket = next(_tickets)
            wanted = name if i % 2 else f"{name}-{i}"
            port.want(Want(ticket=ticket, identifier=wanted, save_nbytes=SPEC.nbytes))
            time.sleep(i % 5 * 0.001)
            port.release(ticket)
        answered = [want(port, name), reserve(port, f"{name}-a")]
        for event in answered:
            release(port, event)
            release(port, event)
        assert port.poll() == []

    def test_events_are_handed_out_once(self, port: EnginePort, name: str) -> None:
        assert isinstance(want(port, name), Absent)
        time.sleep(0.05)
        assert port.poll() == []

    def test_metrics_are_handed_out_as_increments(self, open_port: OpenPort) -> None:
        counted: float = 0
        with make_slab() as slab:
            port = open_port(config(None), slab)
            save(port, slab, "a")
            for _ in range(2):
                release(port, want(port, "a"))
                counted += _count(port, "hits|local")
            port.close(5.0)
            counted += _count(port, "hits|local")
            assert (counted, _count(port, "hits|local")) == (2, 0)

    def test_closing_flushes_and_is_idempotent(self, open_port: OpenPort, tmp_path: Path) -> None:
        with make_slab() as slab:
            port = open_port(config(f"file://{tmp_path}/bucket"), slab)
            save(port, slab, "a")
            before = port.alive
            report = port.close(5.0)
            assert report.complete
            assert (before, port.alive) == (True, False)
            assert port.close(5.0) == report
            port.want(Want(ticket=1, identifier="a"))
            port.reserve(2, "b", 10)
            assert not any(getattr(event, "extents", None) for event in port.poll())
            assert isinstance(port.drain_stats(), dict)
            assert [p for p in (tmp_path / "bucket").rglob("*") if p.is_file()]
