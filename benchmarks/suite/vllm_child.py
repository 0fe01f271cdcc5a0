"""A vLLM engine in a process of its own, which a benchmark tells what to do, one thing at a time.

The script that wants one starts itself again with `--child ADDRESS`; its child connects there,
takes a job, and answers whatever it is sent. The parent's side is here, and what both halves share.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Listener
from typing import TYPE_CHECKING, Any, Self

from ec_s3.testing.vllm_process import client_environment

if TYPE_CHECKING:
    from pathlib import Path

START_SECONDS = 300.0


def cores_but_for_servers() -> set[int]:
    """Keep this process, and so the servers in it, on the last core; the cores of children.

    Elsewhere the bucket would be on another machine.
    """
    cores = os.sched_getaffinity(0)
    for thread in os.listdir("/proc/self/task"):  # the servers'; later threads inherit it
        os.sched_setaffinity(int(thread), {max(cores)})
    return cores


def transfer(url: str, **settings: object) -> dict[str, Any]:
    """VLLM's `ec_transfer_config` for ec_s3 at a URL."""
    return {
        "ec_connector": "ECS3Connector",
        "ec_connector_module_path": "ec_s3.connector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"url": url, "max_local_cpu_size": "64MiB", **settings},
    }


def counts() -> dict[str, float]:
    """ec_s3's samples in this process as vLLM last reported them, by name and label values."""
    from prometheus_client import REGISTRY

    prefix = "vllm:ec_s3_"
    return {
        "|".join(
            (
                sample.name.removeprefix(prefix),
                *(v for k, v in sample.labels.items() if k not in ("engine", "model_name")),
            )
        ): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith(prefix)
    }


class ChildProcess:
    """The parent's side of one child; enter it to wait until its engine is there."""

    def __init__(self, script: str, job: dict[str, Any], folder: Path, cores: set[int]) -> None:
        name = time.monotonic_ns()
        self._log = folder / f"{name}.log"
        address = str(folder / f"{name}.sock")
        with Listener(address, family="AF_UNIX") as listener, self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, script, "--child", address],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=client_environment()
                | {
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_NO_USAGE_STATS": "1",
                    "HF_HUB_OFFLINE": "1",
                },
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
            self._connection: Connection[Any, Any] = listener.accept()
        self._connection.send(job)

    def __enter__(self) -> Self:
        self._answer(START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _answer(self, seconds: float) -> Any:
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, ConnectionResetError):
            pass
        end = self._log.read_text(errors="replace")[-4000:]
        sys.exit(f"a child failed, exit code {self._process.poll()}:\n{end}")

    def tell(self, message: object, seconds: float) -> Any:
        """Let it do something; what it answers within so many seconds, or the end of all."""
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._connection.send(message)
        return self._answer(seconds)
