"""What every `EnginePort` promises of weights that are changed in place; a part of a test class.

    class TestMyPort(PortTests, WeightTests):
        ...   # as for `port_conformance.PortTests`, whose fixtures it uses

Every test ends with the weights that the shared port was opened with.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ec_s3.keys import parse_key
from ec_s3.testing.port_conformance import (
    NAMESPACE,
    SPEC,
    config,
    fill,
    make_slab,
    put_in_bucket,
    read,
    release,
    reserve,
    save,
    until,
    want,
)
from ec_s3.tickets import Absent, Granted, Present, Ready, Want
from ec_s3.types import ItemMeta, MissReason, TensorSpec
from ec_s3.wire import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ec_s3.pages import Slab
    from ec_s3.port import EnginePort
    from ec_s3.testing.port_conformance import OpenPort
    from ec_s3.tickets import Event

_tickets = itertools.count(1_000_000)  # beyond those that the helpers draw
_SMALL = TensorSpec("float32", (16, 16))


@contextlib.contextmanager
def _changed_back(port: EnginePort) -> Iterator[None]:
    try:
        yield
    finally:
        port.resume("")


def _is_absent(event: Event, reason: MissReason) -> bool:
    return isinstance(event, Absent) and (event.reason, event.extents) == (reason, None)


def _objects(url: str) -> dict[str, tuple[str, float]]:
    """Of every object in the bucket: its header's namespace and the one value of its tensor."""
    folder = Path(url.removeprefix("file://"))
    found = {}
    for path in folder.rglob("*"):
        if len(path.name) == 64 and path.is_file():
            header, body = decode(path.read_bytes(), max_tensor_bytes=1 << 20)
            values = set(np.frombuffer(body, dtype=np.float32).tolist())
            assert len(values) == 1, "a tensor of two kinds of weights"
            found[str(path.relative_to(folder))] = (header.namespace, values.pop())
    return found


class _Model:
    """A scheduler, encoders that never pause, and weights: the value of all that they encode."""

    def __init__(self, port: EnginePort, slab: Slab) -> None:
        self._port, self._slab = port, slab
        self._weights = 0.0
        self._lines = threading.Lock()  # a port has one scheduler
        self._stop = threading.Event()
        self._served: list[tuple[float, float]] = []

    def change_weights(self, *, versions: int) -> list[tuple[float, float]]:
        """Change them so many times; the weights in use and the value of every item served."""
        workers = [
            threading.Thread(target=self._work, args=(job,))
            for job in (self._encode, self._encode, self._serve)
        ]
        for worker in workers:
            worker.start()
        for version in range(1, versions + 1):
            time.sleep(0.1)
            with self._lines:
                self._port.suspend()
                self._weights = float(version)
                self._port.resume(f"{version}")
        self._stop.set()
        for worker in workers:
            worker.join(30)
        return self._served

    def _work(self, job: Callable[[str], None]) -> None:
        for number in itertools.count():
            if self._stop.is_set():
                return
            job(f"item-{number % 40}")

    def _encode(self, name: str) -> None:
        with self._lines:
            granted = reserve(self._port, name, _SMALL.nbytes)
        if granted.extents is None:
            return
        time.sleep(random.random() * 0.002)
        tensor = np.full(_SMALL.nbytes // 4, self._weights, dtype=np.float32)
        self._slab.view(granted.extents[0])[: _SMALL.nbytes] = tensor.tobytes()
        time.sleep(random.random() * 0.002)
        self._port.filled(granted.ticket, _SMALL, ItemMeta())

    def _serve(self, name: str) -> None:
        with self._lines:
            event = want(self._port, name)
            if isinstance(event, Ready):
                body = read(self._slab, event.extents, _SMALL)
                value = float(np.frombuffer(body, dtype=np.float32)[0])
                self._served.append((self._weights, value))
            release(self._port, event)


class WeightTests:
    """The promises."""

    def test_nothing_is_served_or_reserved_while_suspended(
        self, port: EnginePort, slab: Slab, name: str
    ) -> None:
        body = save(port, slab, name)
        with _changed_back(port):
            port.suspend()
            port.suspend()
            for event in (
                want(port, name),
                want(port, f"{name}-absent", save=SPEC.nbytes),
                want(port, name, probe=True),
            ):
                assert _is_absent(event, MissReason.SUSPENDED)
            assert reserve(port, name).extents is None
        ready = want(port, name)
        assert isinstance(ready, Ready), "with the same weights it goes on where it was"
        assert read(slab, ready.extents, SPEC) == body
        release(port, ready)

    def test_other_weights_know_nothing_of_these(
        self, port: EnginePort, slab: Slab, url: str, name: str
    ) -> None:
        save(port, slab, name)
        put_in_bucket(url, f"{name}-shared")
        until(lambda: isinstance(want(port, name, probe=True), Present), "it was not uploaded")
        with _changed_back(port):
            port.suspend()
            port.resume("next")
            for asked in (name, f"{name}-shared"):
                assert _is_absent(want(port, asked, fresh=True), MissReason.ABSENT)
                assert _is_absent(want(port, asked, probe=True), MissReason.ABSENT)
            body = save(port, slab, name)
            ready = want(port, name)
            assert isinstance(ready, Ready)
            assert read(slab, ready.extents, SPEC) == body
            release(port, ready)

    def test_a_reservation_of_before_keeps_nothing_when_it_is_filled(
        self, port: EnginePort, slab: Slab, name: str
    ) -> None:
        with _changed_back(port):
            during, after = reserve(port, name), reserve(port, name)
            absent = want(port, f"{name}-b", save=SPEC.nbytes)
            assert isinstance(absent, Absent)
            port.suspend()
            for granted in (during, absent):
                fill(slab, granted.extents or (), SPEC, 1)
                port.filled(granted.ticket, SPEC, ItemMeta())
            port.resume("next")
            fill(slab, after.extents or (), SPEC, 2)
            port.filled(after.ticket, SPEC, ItemMeta())
            for asked in (name, f"{name}-b"):
                assert _is_absent(want(port, asked), MissReason.ABSENT)
        for asked in (name, f"{name}-b"):
            assert isinstance(want(port, asked), Absent), "nor under the old weights' name"

    def test_an_answer_of_before_is_a_no_afterwards(
        self, port: EnginePort, slab: Slab, name: str
    ) -> None:
        save(port, slab, name)
        found, missed, granted = (next(_tickets) for _ in range(3))
        with _changed_back(port):
            port.want(Want(ticket=found, identifier=name))
            port.want(Want(ticket=missed, identifier=f"{name}-b", save_nbytes=SPEC.nbytes))
            port.reserve(granted, f"{name}-c", SPEC.nbytes)
            time.sleep(0.2)  # let the answers come; whether they have makes no difference
            port.suspend()
            port.resume("next")
            told: dict[int, Event] = {}
            until(lambda: told.update({e.ticket: e for e in port.poll()}) or len(told) == 3, "told")
        assert _is_absent(told[found], MissReason.SUSPENDED)
        assert _is_absent(told[missed], MissReason.SUSPENDED)
        assert told[granted] == Granted(granted, None)

    def test_a_fetch_under_way_never_becomes_ready(
        self, port: EnginePort, url: str, name: str
    ) -> None:
        names = [f"{name}-{i}" for i in range(4)]
        for each in names:
            put_in_bucket(url, each, _SMALL)
        for pause in (0.0, 0.001, 0.003, 0.01):
            tickets = [next(_tickets) for _ in names]
            with _changed_back(port):
                for ticket, each in zip(tickets, names, strict=True):
                    port.want(Want(ticket=ticket, identifier=each))
                time.sleep(pause)
                port.suspend()
                port.resume(f"next-{pause}")
                told: list[Event] = []
                until(lambda told=told: told.extend(port.poll()) or len(told) == 4, "told")  # type: ignore[misc]  # mypy infers no lambda with a default
            assert {event.ticket for event in told} == {*tickets}
            assert not any(isinstance(event, Ready) for event in told)

    def test_a_lease_stays_until_it_is_released(
        self, port: EnginePort, slab: Slab, name: str
    ) -> None:
        body = save(port, slab, name)
        ready = want(port, name)
        assert isinstance(ready, Ready)
        with _changed_back(port):
            port.suspend()
            port.resume("next")
            pages = []
            while (page := reserve(port, "page", 1 << 18)).extents:
                fill(slab, page.extents, TensorSpec("uint8", (1 << 18,)), page.ticket)
                pages.append(page)
            assert read(slab, ready.extents, SPEC) == body
            for page in pages:
                release(port, page)
        release(port, ready)

    def test_every_rank_may_say_so_at_its_own_time(
        self, port: EnginePort, slab: Slab, name: str
    ) -> None:
        with _changed_back(port):
            port.suspend()
            port.resume("next")
            save(port, slab, name)
            granted = reserve(port, f"{name}-b")
            port.resume("next")
            ready = want(port, name)
            assert isinstance(ready, Ready)
            release(port, ready)
            fill(slab, granted.extents or (), SPEC, 3)
            port.filled(granted.ticket, SPEC, ItemMeta())
            ready = want(port, f"{name}-b")
            assert isinstance(ready, Ready)
            release(port, ready)

    def test_nothing_is_stored_under_the_name_of_other_weights(
        self, open_port: OpenPort, tmp_path: Path
    ) -> None:
        """Encoders that never pause, while the weights change again and again."""
        url = f"file://{tmp_path}/bucket"
        with make_slab() as slab:
            port = open_port(config(url), slab)
            served = _Model(port, slab).change_weights(versions=12)
            port.close(10.0)
        assert served
        assert all(asked == value for asked, value in served)
        names = {NAMESPACE.id: 0.0}
        for version in range(1, 13):
            names[_named(f"{version}")] = float(version)
        objects = _objects(url)
        assert len({namespace for namespace, _ in objects.values()}) > 3
        for key, (namespace, value) in objects.items():
            assert parse_key(key).namespace == namespace
            assert names[namespace] == value


def _named(weight_version: str) -> str:
    return replace(NAMESPACE, weight_version=weight_version).id
