"""The processes of one server: started, paused, killed, and never left behind.

Owns the child processes and their logs. A watchdog process, one for each server, kills them when
this process ends without having done so, by whatever death: it sees its standard input close. (The
kernel's own signal for a dead parent comes when the *thread* that started the child ends.) Runs in
the caller's thread; not thread-safe.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_TAIL_BYTES = 4000
_END_SECONDS = 10.0
_WATCHDOG = """
import os, signal, sys
def born(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[19]
    except OSError:
        return None
children = {}
for line in sys.stdin:
    children[int(line)] = born(int(line))
for pid, at in children.items():
    if at is not None and born(pid) == at:
        os.kill(pid, signal.SIGKILL)
"""


class ServerError(RuntimeError):
    """A server did not start, died or does not answer; the message ends with its logs."""


def free_ports(count: int = 1) -> list[int]:
    """TCP ports of 127.0.0.1 that nothing listens on just now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def private_address() -> str:
    """A loopback address that no other server uses: for ports that only its own parts use."""
    numbers = random.SystemRandom()
    return f"127.{numbers.randrange(1, 255)}.{numbers.randrange(256)}.{numbers.randrange(1, 255)}"


class Processes:
    """The child processes of a server, by name, with their logs in a folder."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._watchdog: subprocess.Popen[str] | None = None

    def spawn(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start a process; its output is appended to `name.log`.

        Args:
            name: what the other methods call it.
            command: program and arguments.
            environment: additions to this process's environment.
            folder: working folder.
        """
        watchdog = self._watch()
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._log(name).open("ab") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                cwd=folder,
                process_group=0,  # an interrupt at the terminal is for the tests
            )
        self._children[name] = child
        assert watchdog.stdin is not None
        watchdog.stdin.write(f"{child.pid}\n")
        watchdog.stdin.flush()

    def run(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> str:
        """Run a program to its end and return what it printed; its errors go to `name.log`.

        Raises:
            ServerError: it failed, or took longer than `timeout` seconds.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._log(name).open("ab") as log:
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **(environment or {})},
                    timeout=timeout,
                    check=True,
                    text=True,
                )
            except (subprocess.SubprocessError, OSError) as exc:
                raise ServerError(f"{name}: {exc}\n{self.tail()}") from exc
        return done.stdout

    def alive(self, name: str) -> bool:
        """Whether the process runs."""
        child = self._children.get(name)
        return child is not None and child.poll() is None

    def dead(self) -> list[str]:
        """Names of processes that ended by themselves."""
        return [name for name, child in self._children.items() if child.poll() is not None]

    def pid(self, name: str) -> int:
        """Its process id."""
        return self._children[name].pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process; one that has ended gets none."""
        self._children[name].send_signal(number)

    def kill(self, name: str) -> None:
        """Kill a process and wait until it is gone; its name is free again."""
        child = self._children.pop(name, None)
        if child is not None:
            child.kill()
            child.wait(_END_SECONDS)

    def kill_all(self) -> None:
        """Kill all of them, the latest first, and the watchdog."""
        for name in reversed(list(self._children)):
            self.kill(name)
        if self._watchdog is not None:
            assert self._watchdog.stdin is not None
            self._watchdog.stdin.close()
            self._watchdog.wait(_END_SECONDS)
            self._watchdog = None

    def tail(self) -> str:
        """The end of every log, with its name."""
        tails = []
        for path in sorted(self._logs.glob("*.log")):
            with path.open("rb") as log:
                log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                text = log.read().decode(errors="replace").strip()
            if text:
                tails.append(f"--- {path.name}\n{text}")
        return "\n".join(tails)

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _watch(self) -> subprocess.Popen[str]:
        if self._watchdog is None:
            self._watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WATCHDOG],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                process_group=0,
            )
        return self._watchdog
