"""`RestartingPort` over engines that die when a test says so."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import pytest

from ec_s3.errors import ConfigError, ECS3Error
from ec_s3.keys import Namespace
from ec_s3.port import UNKNOWN, Absent, Granted, Ready, Want
from ec_s3.restart import RestartingPort
from ec_s3.testing.fake_port import FakePort
from ec_s3.types import FlushReport, ItemMeta, MissReason, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ec_s3.metrics import Data

NAMESPACE = Namespace(model="org/model", weight_version="1")
SPEC = TensorSpec("bfloat16", (4, 8))


class Engine(FakePort):
    """One that dies."""

    def __init__(self, namespace: Namespace) -> None:
        super().__init__()
        self.namespace = namespace
        self.items["a"] = SPEC
        self.stats: Data = {}
        self.gone = threading.Event()

    def die(self) -> None:
        self.alive = False
        self.gone.set()

    def wait_for_end(self) -> None:
        assert self.gone.wait(20)

    def drain_stats(self) -> Data:
        data, self.stats = self.stats, {}
        return data

    def close(self, timeout: float) -> FlushReport:
        self.gone.set()
        return super().close(timeout)


class Engines:
    def __init__(self) -> None:
        self.all: list[Engine] = []
        self.refusals = 0
        self.refusal: Exception = ECS3Error("no process")

    def open(self, namespace: Namespace) -> Engine:
        if self.refusals:
            self.refusals -= 1
            raise self.refusal
        self.all.append(Engine(namespace))
        return self.all[-1]


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def port(engines: Engines) -> Iterator[RestartingPort]:
    port = RestartingPort(engines.open, NAMESPACE, first_pause=0.01)
    yield port
    port.close(1.0)


def until(done: Callable[[], object]) -> None:
    give_up = time.monotonic() + 20
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def end(port: RestartingPort, engine: Engine) -> None:
    """Let an engine die, and wait until its tickets are answered for."""
    engine.die()
    until(lambda: port._port is not engine)


def test_questions_to_an_engine_that_dies_are_answered_by_misses(
    port: RestartingPort, engines: Engines
) -> None:
    engines.all[0].slow = True
    port.want(Want(ticket=1, identifier="x", save_nbytes=64))
    port.reserve(2, "y", 64)
    end(port, engines.all[0])
    assert port.poll() == [Absent(1, MissReason.CLOSED), Granted(2, None)]


def test_pages_that_are_in_use_keep_the_next_engine_from_the_slab(
    port: RestartingPort, engines: Engines
) -> None:
    port.want(Want(ticket=1, identifier="a"))
    port.reserve(2, "b", SPEC.nbytes)
    port.want(Want(ticket=3, identifier="x", save_nbytes=SPEC.nbytes))
    engines.all[0].absent(3)
    port.want(Want(ticket=4, identifier="a"))
    assert [type(event) for event in port.poll()] == [Ready, Granted, Absent, Ready]
    port.release(4)
    end(port, engines.all[0])
    ends: list[Callable[[], None]] = [
        lambda: port.release(1),
        lambda: port.filled(2, SPEC, ItemMeta()),
        lambda: port.release(3),
    ]
    for end_ticket in ends:
        time.sleep(0.05)
        assert len(engines.all) == 1
        assert not port.alive
        port.want(Want(ticket=9, identifier="a"))
        assert port.poll() == [Absent(9, MissReason.CLOSED)]
        end_ticket()
    until(lambda: port.alive)
    assert engines.all[1].filled_items == [], "the pages were another engine's"
    port.want(Want(ticket=10, identifier="a"))
    assert isinstance(port.poll()[0], Ready)


def test_an_answer_that_came_just_before_the_end_still_counts(
    port: RestartingPort, engines: Engines
) -> None:
    port.want(Want(ticket=1, identifier="a"))
    end(port, engines.all[0])
    assert isinstance(port.poll()[0], Ready)
    time.sleep(0.05)
    assert len(engines.all) == 1
    port.release(1)
    until(lambda: port.alive)


@pytest.mark.parametrize(
    "refusal",
    [
        ECS3Error("no process"),
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        RuntimeError("can't start new thread"),
    ],
)
def test_engines_are_tried_again_until_one_starts(
    port: RestartingPort, engines: Engines, refusal: Exception
) -> None:
    engines.refusals, engines.refusal = 2, refusal
    end(port, engines.all[0])
    until(lambda: port.alive)
    assert engines.refusals == 0
    end(port, engines.all[1])
    until(lambda: port.alive)


def test_a_process_that_neither_starts_nor_ends_is_said_and_no_other_gets_the_slab(
    port: RestartingPort, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    engines.refusals, engines.refusal = 1, subprocess.TimeoutExpired("engine", 2.0)
    end(port, engines.all[0])
    port._keeper.join(20)
    assert "the engine's process does not end; the encoder cache stays off" in caplog.text
    assert not port.alive
    port.want(Want(ticket=1, identifier="x"))
    assert port.poll() == [Absent(1, MissReason.CLOSED)]


def test_the_next_engine_begins_with_the_weights_of_the_day(
    port: RestartingPort, engines: Engines
) -> None:
    port.suspend()
    port.resume("2")
    port.want(Want(ticket=1, identifier="kept"))
    engines.all[0].items["kept"] = SPEC
    engines.all[0].ready(1)
    port.poll()
    end(port, engines.all[0])
    port.suspend()
    port.release(1)
    until(lambda: len(engines.all) == 2 and port._port is not None)
    assert engines.all[1].namespace.weight_version == "2"
    assert engines.all[1].suspended
    port.resume("3")
    assert engines.all[1].weight_versions == ["3"]


def test_answers_from_before_a_change_of_the_weights_are_a_no(
    port: RestartingPort, engines: Engines
) -> None:
    port.want(Want(ticket=1, identifier="a"))
    end(port, engines.all[0])
    port.suspend()
    assert port.poll() == [Absent(1, MissReason.SUSPENDED)]
    until(lambda: len(engines.all) == 2)


def test_what_a_dead_engine_has_counted_is_not_lost(port: RestartingPort, engines: Engines) -> None:
    engines.all[0].stats = {"queries": 2.0}
    end(port, engines.all[0])
    until(lambda: port.alive)
    engines.all[1].stats = {"queries": 3.0}
    assert port.drain_stats() == {"queries": 5.0}


def test_closing_ends_the_engine_and_starts_no_other(engines: Engines) -> None:
    port = RestartingPort(engines.open, NAMESPACE, first_pause=0.0)
    report = port.close(1.0)
    assert report == FlushReport()
    assert port.close(1.0) is report
    port._keeper.join(20)
    assert not port._keeper.is_alive()
    assert len(engines.all) == 1


def test_closing_while_there_is_no_engine_is_never_complete(engines: Engines) -> None:
    port = RestartingPort(engines.open, NAMESPACE, first_pause=60.0)
    end(port, engines.all[0])
    assert port.close(1.0) == UNKNOWN
    port._keeper.join(20)
    assert not port._keeper.is_alive()


def test_closing_goes_on_without_a_process_that_does_not_end(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = RestartingPort(engines.open, NAMESPACE)

    def close(timeout: float) -> FlushReport:
        engines.all[0].gone.set()
        raise subprocess.TimeoutExpired("engine", timeout)

    monkeypatch.setattr(engines.all[0], "close", close)
    assert port.close(1.0) == port.close(1.0) == UNKNOWN
    assert "the engine did not close" in caplog.text


def test_settings_that_cannot_be_used_are_the_callers_to_see() -> None:
    def refuse(namespace: Namespace) -> Engine:
        raise ConfigError("url")

    with pytest.raises(ConfigError):
        RestartingPort(refuse, NAMESPACE)
