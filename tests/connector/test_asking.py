"""Ranks that suspend and resume their engine: over the socket, and through every kind of engine."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import small_engine
from small_engine import SmallEngine, prompt, until

from ec_s3.connector import packets
from ec_s3.connector.asking import RESUME, SUSPEND, Asking, WeightChanges
from ec_s3.connector.link import RankHub, RankLink
from ec_s3.control import Control
from ec_s3.errors import ClosedError, ECS3Error
from ec_s3.header import read_header
from ec_s3.keys import parse_key
from ec_s3.pages import Slab

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import torch
    from vllm_play import Feature

_names = itertools.count()


class Engine:
    """A hub that remembers what was asked for, and ranks."""

    def __init__(self, slab: Slab, *, world: int = 1, name: str = "") -> None:
        self.name = name or f"ec_s3-test-asking-{os.getpid()}-{next(_names)}"
        self.asked: list[tuple[str, str]] = []
        self.problem: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.links: list[RankLink] = []
        self._slabs: list[Slab] = []
        self._slab, self._world = slab, world
        self.hub: RankHub | None = None

    def open(self) -> RankHub:
        self.hub = RankHub(
            self.name,
            nonce="n",
            slab=self._slab,
            world=self._world,
            on_answer=lambda _: None,
            on_request=self.carry_out,
        )
        return self.hub

    def carry_out(self, what: str, argument: str) -> None:
        self.gate.wait(10)
        if self.problem is not None:
            raise self.problem
        self.asked.append((what, argument))

    def join(self, rank: int = 0) -> RankLink:
        self.links.append(
            RankLink(self.name, rank=rank, prepare=lambda slab, _: self._slabs.append(slab))
        )
        return self.links[-1]

    def close(self) -> None:
        self.gate.set()
        for link in self.links:
            link.close()
        if self.hub is not None:
            self.hub.close()
        for slab in self._slabs:
            slab.close()


@pytest.fixture
def slab() -> Iterator[Slab]:
    with Slab.create(1 << 20) as slab:
        yield slab


@pytest.fixture
def engine(slab: Slab) -> Iterator[Engine]:
    engine = Engine(slab, world=2)
    yield engine
    engine.close()


def test_what_a_rank_asks_for_has_been_done_when_it_goes_on(engine: Engine) -> None:
    engine.open()
    one, two = engine.join(0), engine.join(1)
    one.ask(SUSPEND, "", timeout=20)
    assert engine.asked == [(SUSPEND, "")]
    two.ask(RESUME, "step-\N{SNOWMAN}", timeout=20)
    assert engine.asked[1:] == [(RESUME, "step-\N{SNOWMAN}")]


def test_every_rank_may_ask_at_the_same_time(engine: Engine) -> None:
    engine.open()
    ranks = [engine.join(0), engine.join(1)]
    threads = [
        threading.Thread(target=rank.ask, args=(RESUME, "x"), kwargs={"timeout": 20})
        for rank in ranks
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert engine.asked == [(RESUME, "x")] * 10


def test_a_rank_that_asks_before_it_is_connected_waits(engine: Engine) -> None:
    rank = engine.join()
    asking = threading.Thread(target=rank.ask, args=(SUSPEND, ""), kwargs={"timeout": 20})
    asking.start()
    time.sleep(0.05)
    engine.open()
    asking.join(20)
    assert engine.asked == [(SUSPEND, "")]


def test_no_answer_is_an_error_at_the_deadline(engine: Engine) -> None:
    rank = engine.join()
    with pytest.raises(TimeoutError, match=r"did not suspend within 0\.05 s"):
        rank.ask(SUSPEND, "", timeout=0.05)
    engine.open()
    engine.gate.clear()
    with pytest.raises(TimeoutError):
        rank.ask(SUSPEND, "", timeout=0.2)
    engine.gate.set()
    rank.ask(RESUME, "x", timeout=20)
    assert engine.asked[-1] == (RESUME, "x")


def test_what_goes_wrong_is_told_to_the_rank_and_costs_nothing_else(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    hub = engine.open()
    rank = engine.join(0)
    engine.join(1)
    engine.problem = LookupError("no such weights")
    with pytest.raises(ECS3Error, match="could not resume: no such weights"):
        rank.ask(RESUME, "x", timeout=20)
    engine.problem = ValueError("x" * 100_000)
    with pytest.raises(ECS3Error, match="xxx"):
        rank.ask(RESUME, "x", timeout=20)
    engine.problem = None
    rank.ask(RESUME, "x", timeout=20)
    until(lambda: hub.ready, "both ranks are there")
    assert "could not be done" in caplog.text


@pytest.mark.parametrize("length", [packets.MAX_MESSAGE, 1 << 20])
def test_a_name_too_long_to_be_sent_is_refused_and_costs_nothing_else(
    engine: Engine, length: int
) -> None:
    hub = engine.open()
    rank = engine.join(0)
    engine.join(1)
    with pytest.raises(ECS3Error, match=r"could not resume: .* too long"):
        rank.ask(RESUME, "x" * length, timeout=2)
    rank.ask(RESUME, "x", timeout=20)
    assert engine.asked == [(RESUME, "x")]
    until(lambda: hub.ready, "both ranks are there")


def test_a_request_whose_connection_broke_is_made_again(engine: Engine, slab: Slab) -> None:
    hub = engine.open()
    rank = engine.join()
    rank.ask(SUSPEND, "", timeout=20)
    engine.gate.clear()
    asking = threading.Thread(target=rank.ask, args=(RESUME, "x"), kwargs={"timeout": 30})
    asking.start()
    other = Engine(slab, world=2)
    other.open()
    time.sleep(0.05)
    rank.redirect(other.name)  # the engine's memory is to be had elsewhere
    asking.join(20)
    assert other.asked == [(RESUME, "x")]
    engine.gate.set()
    hub.close()
    rank.close()
    other.close()


def test_whoever_waits_when_the_rank_closes_is_told(engine: Engine) -> None:
    rank = engine.join()
    problems: list[Exception] = []

    def ask() -> None:
        try:
            rank.ask(SUSPEND, "", timeout=30)
        except ClosedError as problem:
            problems.append(problem)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.05)
    rank.close()
    asking.join(20)
    assert len(problems) == 1
    with pytest.raises(ClosedError):
        rank.ask(SUSPEND, "", timeout=30)


def test_only_a_rank_that_has_the_memory_is_listened_to(engine: Engine) -> None:
    hub = engine.open()
    ask = json.dumps({"kind": "ask", "number": 1, "what": SUSPEND, "argument": ""}).encode()
    for messages in ([ask], [b'{"kind": "hello", "rank": 0}', ask]):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(20)
            sock.connect(f"\0{hub.address}")
            for message in messages:
                sock.send(message)
            if len(messages) > 1:
                _, fds, _, _ = socket.recv_fds(sock, 1 << 16, 1)
                for fd in fds:
                    os.close(fd)
            assert sock.recv(1 << 16) == b"", "the connection is closed"
    assert engine.asked == []


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"kind": "answer", "number": 1},
        {"kind": "answer", "number": "1", "error": ""},
        {"kind": "other", "number": 1, "error": ""},
    ],
)
def test_whatever_is_no_answer_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is (not expected|None|'1')"):
        Asking(lambda _: None).take(message)


def test_answers_to_nobody_are_passed_over() -> None:
    asking = Asking(lambda _: None)
    asking.take({"kind": "answer", "number": 7, "error": ""})


def test_changes_are_carried_out_by_the_scheduler_part_once_there_is_one() -> None:
    class Scheduler:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def suspend(self) -> None:
            self.calls.append("suspend")

        def resume(self, weight_version: str) -> None:
            self.calls.append(weight_version)

    changes, scheduler = WeightChanges(), Scheduler()
    with pytest.raises(ECS3Error, match="still starting"):
        changes.carry_out(SUSPEND, "")
    changes.scheduler = scheduler  # type: ignore[assignment]  # as much of it as is needed
    changes.carry_out(SUSPEND, "")
    changes.carry_out(RESUME, "x")
    with pytest.raises(ECS3Error, match="not known"):
        changes.carry_out("explode", "")
    assert scheduler.calls == ["suspend", "x"]


# -- with the engine behind it -------------------------------------------------------------------


def _objects(folder: Path) -> dict[str, str]:
    """Key to the namespace in its header, of every item in the bucket."""
    found = {}
    for path in folder.rglob("*"):
        if len(path.name) == 64:
            header = read_header(path.read_bytes(), max_tensor_bytes=1 << 20)
            found[str(path.relative_to(folder))] = header.namespace
    return found


def _change_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the encoder makes something else of everything."""
    before = small_engine.reference

    def after(item: Feature, *, width: int) -> torch.Tensor:
        return before(item, width=width) + 1

    monkeypatch.setattr(small_engine, "reference", after)


@pytest.mark.usefixtures("small_engines")
@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_items_of_other_weights_are_never_loaded(
    kind: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong tensor would be told by the engine at play, which knows what is right."""
    folder = tmp_path / "bucket"
    with SmallEngine(ranks=ranks, url=f"file://{folder}", engine=kind) as engine:
        engine.serve(prompt("r1", "a"))
        until(lambda: len(_objects(folder)) == 1, "it is uploaded")
        engine.serve(prompt("r2", "a"))
        assert (engine.encoded, engine.loaded) == (["a"], ["a"])

        for worker in engine.workers:
            worker.suspend(20)
        engine.serve(prompt("r3", "a"))
        assert (engine.encoded, engine.loaded) == (["a"] * 2, ["a"]), "as if there were no cache"
        _change_weights(monkeypatch)
        for worker in engine.workers:
            worker.resume("next", 20)

        engine.serve(prompt("r4", "a"))
        assert (engine.encoded, engine.loaded) == (["a"] * 3, ["a"]), "nothing old answers"
        until(lambda: len(_objects(folder)) == 2, "it is uploaded")
        engine.serve(prompt("r5", "a"))
        assert engine.loaded == ["a"] * 2
        objects = _objects(folder)
    assert len(set(objects.values())) == 2
    assert all(parse_key(key).namespace == named for key, named in objects.items())


@pytest.mark.usefixtures("small_engines")
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_save_that_was_ordered_before_the_change_is_lost(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bucket"
    with SmallEngine(url=f"file://{folder}", engine=kind) as engine:
        [worker] = engine.workers
        encode = engine.encoder

        def change_meanwhile(items: Sequence[Feature]) -> Sequence[torch.Tensor]:
            outputs = encode(items)
            worker.suspend(20)
            _change_weights(monkeypatch)
            worker.resume("next", 20)
            return [output + 1 for output in outputs]

        engine.encoder = change_meanwhile
        engine.serve(prompt("r1", "a"))
        engine.encoder = encode
        engine.serve(prompt("r2", "a"))
        assert engine.loaded == []
        until(lambda: len(_objects(folder)) == 1, "the second one is uploaded")
        engine.serve(prompt("r3", "a"))
        assert engine.loaded == ["a"]


@pytest.mark.usefixtures("small_engines")
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_an_operator_reaches_an_engine_that_serves(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "bucket"
    with SmallEngine(url=f"file://{folder}", engine=kind) as engine:
        engine.serve(prompt("r1", "a"))
        until(lambda: len(_objects(folder)) == 1, "it is uploaded")
        [key] = _objects(folder)
    control = folder / parse_key(key).control_key
    control.write_bytes(Control(enabled=False).pack())
    with SmallEngine(url=f"file://{folder}", engine=kind) as engine:
        until(lambda: engine.stats["switched_off_disabled"] == 1, "the first look is at the start")
        engine.serve(prompt("r2", "a", "b"))
        assert (sorted(engine.encoded), engine.loaded) == (["a", "b"], [])
    assert list(_objects(folder)) == [key]
    control.unlink()
    with SmallEngine(url=f"file://{folder}", engine=kind) as engine:
        engine.serve(prompt("r3", "a"))
        assert engine.loaded == ["a"]
