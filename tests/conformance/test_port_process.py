"""The engine in a child process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ec_s3.child import ProcessPort
from ec_s3.port import Ready, Want
from ec_s3.testing.port_conformance import (
    NAMESPACE,
    SPEC,
    OpenPort,
    PortTests,
    answer,
    config,
    read,
)

if TYPE_CHECKING:
    from ec_s3.pages import Slab


class TestProcessPort(PortTests):
    @pytest.fixture
    def open_port(self) -> OpenPort:
        return lambda config, slab: ProcessPort(config, NAMESPACE, slab)

    def test_child_that_is_killed_leaves_the_leases_and_answers_no_more(
        self, open_port: OpenPort, slab: Slab, url: str
    ) -> None:
        port = open_port(config(url), slab)
        assert isinstance(port, ProcessPort)
        body = self._save(port, slab, 1, "a")
        port.want(Want(ticket=2, identifier="a"))
        ready = answer(port, 2)
        assert isinstance(ready, Ready)
        os.kill(port.pid, signal.SIGKILL)
        give_up = time.monotonic() + 10
        while port.alive and time.monotonic() < give_up:
            time.sleep(0.01)
        assert not port.alive
        port.want(Want(ticket=3, identifier="b"))
        port.reserve(4, "c", 10)
        port.release(2)
        assert port.poll() == []
        assert read(slab, ready.extents, SPEC) == body
        started = time.monotonic()
        port.close(5.0)
        assert time.monotonic() - started < 5.0

    def test_burst_of_messages_neither_waits_nor_loses_any(
        self, open_port: OpenPort, slab: Slab, url: str
    ) -> None:
        port = open_port(config(url), slab)
        assert isinstance(port, ProcessPort)
        os.kill(port.pid, signal.SIGSTOP)
        try:
            for ticket in range(1, 5001):
                port.want(Want(ticket=ticket, identifier="x" * 200))
                port.release(ticket)
            port.reserve(9999, "a", SPEC.nbytes)
            assert port.alive
        finally:
            os.kill(port.pid, signal.SIGCONT)
        give_up = time.monotonic() + 20
        granted = False
        while not granted and time.monotonic() < give_up:
            granted = any(event.ticket == 9999 for event in port.poll())
            time.sleep(0.01)
        assert granted
        port.release(9999)
        assert port.close(5.0).complete

    def test_no_secret_is_on_the_command_line_or_in_the_environment(
        self, open_port: OpenPort, slab: Slab, url: str
    ) -> None:
        port = open_port(config(url, salt="not to be seen"), slab)
        assert isinstance(port, ProcessPort)
        proc = Path(f"/proc/{port.pid}")
        shown = (proc / "cmdline").read_bytes() + (proc / "environ").read_bytes()
        assert b"not to be seen" not in shown
        port.close(5.0)
