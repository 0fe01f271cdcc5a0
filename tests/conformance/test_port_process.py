"""The engine in a child process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ec_s3 import child
from ec_s3.child import ProcessPort
from ec_s3.errors import ConfigError, ECS3Error
from ec_s3.header import pack_header
from ec_s3.port import Absent, Ready, Want
from ec_s3.restart import RestartingPort
from ec_s3.testing.port_conformance import (
    NAMESPACE,
    SPEC,
    OpenPort,
    PortTests,
    config,
    make_slab,
    read,
    release,
    reserve,
    save,
    until,
    want,
)
from ec_s3.testing.weight_conformance import WeightTests
from ec_s3.types import ItemMeta, MissReason, TensorSpec
from ec_s3.wire import encode

if TYPE_CHECKING:
    from ec_s3.pages import Slab

PARENT = """
import os, sys, time
from ec_s3 import child
from ec_s3.child import ProcessPort
from ec_s3.testing.port_conformance import NAMESPACE, config, make_slab, save
with make_slab() as slab:
    port = ProcessPort(config(sys.argv[1]), NAMESPACE, slab)
    save(port, slab, "a")
    bystander = os.fork()
    if bystander == 0:
        time.sleep(60)
        os._exit(0)
    print(port.pid, bystander, flush=True)
    time.sleep(60)
"""


def objects(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if len(path.name) == 64]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def open_files(proc: Path) -> set[str]:
    """What a process has open beyond its standard streams."""
    found = set()
    for fd in os.listdir(proc / "fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(proc / "fd" / fd))
    return found - {os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)} - {os.devnull}


class TestProcessPort(PortTests, WeightTests):
    @pytest.fixture(scope="class")
    @classmethod
    def open_port(cls) -> OpenPort:
        return lambda config, slab: ProcessPort(config, NAMESPACE, slab)

    def test_child_has_no_secret_in_sight_and_none_of_our_files(self, port: ProcessPort) -> None:
        proc = Path(f"/proc/{port.pid}")
        shown = (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()
        assert NAMESPACE.salt.encode() not in shown
        common = open_files(Path("/proc/self")) & open_files(proc)
        assert {name.split(" ")[0] for name in common} == {"/memfd:ec_s3"}

    def test_no_message_to_a_child_that_stands_still_is_lost(
        self, port: ProcessPort, name: str
    ) -> None:
        os.kill(port.pid, signal.SIGSTOP)
        try:
            for i in range(500):
                ticket = 10_000_000 + i
                port.reserve(ticket, f"{name}-{'x' * 2000}", SPEC.nbytes)
                port.release(ticket)
            assert port.alive
        finally:
            os.kill(port.pid, signal.SIGCONT)
        granted = reserve(port, name)  # comes after all others, and pages are free again
        assert granted.extents
        release(port, granted)

    def test_identifier_of_any_length_is_answered(self, port: ProcessPort) -> None:
        huge = "x" * (1 << 20)
        absent = want(port, huge, save=SPEC.nbytes)
        assert isinstance(absent, Absent)
        assert absent.reason is MissReason.TOO_LARGE
        assert reserve(port, huge).extents is None

    def test_messages_that_make_no_sense_do_not_end_the_engine(
        self, port: ProcessPort, name: str
    ) -> None:
        port._post(kind="want", ticket=1, nonsense=True)
        port._post(kind="filled", ticket=2, spec=["no such type", []], meta={})
        assert isinstance(want(port, name), Absent)

    def test_interrupt_from_the_terminal_is_left_to_the_parent(
        self, port: ProcessPort, name: str
    ) -> None:
        os.kill(port.pid, signal.SIGINT)
        assert isinstance(want(port, name), Absent)


def test_child_that_is_killed_leaves_the_leases_and_answers_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_slab() as slab:
        port = ProcessPort(config(f"file://{tmp_path}/bucket"), NAMESPACE, slab)
        body = save(port, slab, "a")
        ready = want(port, "a")
        assert isinstance(ready, Ready)
        os.kill(port.pid, signal.SIGKILL)
        until(lambda: not port.alive, "its end was not noticed")
        port.want(Want(ticket=1000, identifier="b"))
        port.reserve(1001, "c", 10)
        port.filled(1001, SPEC, ItemMeta())
        release(port, ready)
        assert port.poll() == []
        assert read(slab, ready.extents, SPEC) == body
        started = time.monotonic()
        assert not port.close(60.0).complete, "nobody knows what was uploaded"
        assert time.monotonic() - started < 20.0
        assert "the encoder cache is off" in caplog.text


def open_restarting(url: str, slab: Slab) -> RestartingPort:
    return RestartingPort(
        lambda namespace: ProcessPort(config(url), namespace, slab), NAMESPACE, first_pause=0.0
    )


class TestRestartingPort(PortTests, WeightTests):
    @pytest.fixture(scope="class")
    @classmethod
    def open_port(cls) -> OpenPort:
        return lambda config, slab: RestartingPort(
            lambda namespace: ProcessPort(config, namespace, slab), NAMESPACE
        )


def test_child_that_is_killed_is_started_again_once_its_leases_have_ended(tmp_path: Path) -> None:
    with make_slab() as slab:
        port = open_restarting(f"file://{tmp_path}/bucket", slab)
        body = save(port, slab, "a")
        ready = want(port, "a")
        assert isinstance(ready, Ready)
        until(lambda: objects(tmp_path), "the item was not uploaded")
        killed = children()
        os.kill(killed.pop(), signal.SIGKILL)
        until(lambda: not port.alive, "its end was not noticed")
        time.sleep(0.3)
        assert not port.alive, "another engine would take the leased pages for free"
        assert read(slab, ready.extents, SPEC) == body
        release(port, ready)
        until(lambda: port.alive, "no other engine was started")
        again = want(port, "a")
        assert isinstance(again, Ready), "from the bucket: the dead engine's index is gone"
        assert read(slab, again.extents, SPEC) == body
        release(port, again)
        assert port.close(5.0).complete
        assert not children()


def children() -> set[int]:
    """Engines that this process has started and that run."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        int(pid) for pid in listed if b"ec_s3.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


def test_child_that_is_asked_to_end_flushes_first(tmp_path: Path) -> None:
    with make_slab() as slab:
        url, facts = f"file://{tmp_path}/bucket", {"served_model": "org/model"}
        port = ProcessPort(config(url), NAMESPACE, slab, facts=facts)
        save(port, slab, "a")
        os.kill(port.pid, signal.SIGTERM)
        until(lambda: not port.alive, "its end was not noticed")
        assert port.close(5.0).complete
        assert objects(tmp_path)
        (manifest,) = tmp_path.rglob("namespace.json")
        assert "org/model" in manifest.read_text()


def test_child_flushes_and_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    # Also while another process that the parent forked has all its sockets.
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, f"file://{tmp_path}/bucket"], stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        engine, bystander = map(int, parent.stdout.readline().split())
        parent.kill()
        try:
            until(lambda: not is_running(engine), "the engine's process lives on")
        finally:
            os.kill(bystander, signal.SIGKILL)
    assert objects(tmp_path)


@pytest.mark.parametrize("variable", ["EC_S3_CONFIG", "LMCACHE_CONFIG_FILE"])
def test_child_needs_no_file_that_its_parent_has_read(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(f"file://{tmp_path}/bucket")
    monkeypatch.setenv(variable, str(tmp_path / "gone.yaml"))  # it may start again days later
    with make_slab() as slab:
        port = ProcessPort(settings, NAMESPACE, slab)
        save(port, slab, "a")
        assert port.close(5.0).complete
    assert objects(tmp_path)


def test_hostile_metadata_of_an_object_keeps_nobody_waiting(tmp_path: Path) -> None:
    head = encode(
        TensorSpec(NAMESPACE.dtype, (0, 4)),
        [],
        identifier="a",
        namespace=NAMESPACE.id,
        meta=ItemMeta(),
        created=1.0,
    ).parts[0]
    metadata: dict[str, object] = {}
    for _ in range(600):  # the child could read that, and not hand it on
        metadata = {"x": metadata}
    fields = {**json.loads(bytes(head)[24:-16]), "placeholder": metadata}
    path = tmp_path / "bucket" / NAMESPACE.object_key("a")
    path.parent.mkdir(parents=True)
    path.write_bytes(pack_header(fields))
    with make_slab() as slab:
        port = ProcessPort(config(f"file://{tmp_path}/bucket"), NAMESPACE, slab)
        answer = want(port, "a")
        assert isinstance(answer, Absent)
        assert answer.reason is MissReason.CORRUPT
        port.close(5.0)


def test_settings_that_the_child_cannot_use_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_dump", lambda _: {"url": "ftp://nowhere", "max_fetches": 3})
    with make_slab() as slab, pytest.raises(ConfigError, match="url"):
        ProcessPort(config(None), NAMESPACE, slab)


@pytest.mark.parametrize("program", ["/bin/false", "/nonexistent"])
def test_child_that_does_not_start_is_an_error(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    with make_slab() as slab, pytest.raises(ECS3Error, match="process"):
        ProcessPort(config(None), NAMESPACE, slab)
