"""The drivers from outside: starts them, gives orders, and checks their answers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Self

from suite.report import ROOT, out_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

LMCACHE_VENV = ROOT / "build" / "bench" / "lmcache-venv"


class WrongTensorError(Exception):
    """A system returned something else than what was stored."""


class Client:
    """A driver process.

    Args:
        system: its name in `driver.MODULES`.
        settings: what it is opened with.
        label: its name in tables.

    Raises:
        RuntimeError: it does not start; its stderr is in `build/bench/drivers.log`.
    """

    def __init__(self, system: str, settings: dict[str, Any], *, label: str = "") -> None:
        self.label = label or system
        python = str(LMCACHE_VENV / "bin" / "python") if "lmcache" in system else sys.executable
        self._log = (out_folder() / "drivers.log").open("a", encoding="utf-8")
        self._process = subprocess.Popen(
            [python, "-m", "suite.driver", system],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd="/",
            env=environment(),
        )
        self._send(settings)

    def ready(self) -> None:
        """Wait until it is open."""
        self._receive()

    def ask(self, **order: Any) -> dict[str, Any]:
        """Give an order, return the answer.

        Raises:
            WrongTensorError: a result was not what it must be.
        """
        self._send(order)
        answer = self._receive()
        if answer.get("wrong"):
            raise WrongTensorError(f"{self.label}: {order['do']} of {answer['wrong'][:3]}")
        return answer

    def measure(self, what: str, names: Sequence[str], callers: int) -> dict[str, Any]:
        """Have `names` put, got, looked up... by so many callers at a time."""
        return self.ask(do=what, names=list(names), callers=callers)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self._ended()) from None

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self._ended())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> str:
        status = self._process.wait(10)
        return f"{self.label}: its process ended with status {status}; see {self._log.name}"

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


def environment() -> dict[str, str]:
    """That of a driver: credentials that any server takes, nothing of the user's AWS settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "EC_S3_", "LMCACHE_"))}
    return kept | {
        "PYTHONPATH": str(ROOT / "benchmarks"),
        "AWS_ACCESS_KEY_ID": "testaccess",
        "AWS_SECRET_ACCESS_KEY": "testsecret",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "LMCACHE_LOG_LEVEL": "ERROR",
        "LMCACHE_TRACK_USAGE": "false",
        "HF_HUB_OFFLINE": "1",
        # Freed memory is used again, as in a server that has run for a while: otherwise it is the
        # allocator's luck, and the kernel's page faults, that gets of large tensors measure.
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2_000_000_000),
        "DO_NOT_TRACK": "1",
    }


class Clients:
    """Several drivers that take turns; a context manager that ends them all."""

    def __init__(self, *clients: Client) -> None:
        self.all = {client.label: client for client in clients}

    def __getitem__(self, label: str) -> Client:
        return self.all[label]

    def __enter__(self) -> Self:
        try:
            for client in self.all.values():
                client.ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.all.values():
            client.close()
