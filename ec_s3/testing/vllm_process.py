"""A child process that runs `python -m ec_s3.connector.offline`, driven batch by batch.

Real vLLM in a process of its own, so that a warm run shares nothing with a cold one, and a fault
that kills the engine kills only the child. Used by the end-to-end tests and by `ec-s3 demo`.

Runs in the caller's thread plus one reader thread per child, which only moves lines from a pipe to
a queue. Every wait has a deadline; a child that misses one is killed with all its descendants. Must
never import vLLM.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Json = dict[str, Any]

PATIENT = {
    "max_local_cpu_size": "64MiB",
    "connect_timeout": "30s",
    "read_timeout": "30s",
    "fetch_timeout": "30s",
}
"""Settings for a machine whose few cores are shared with a mock server and other work.

With deadlines made for serving, a slow moment there would look like a miss.
"""

_LOG_TAIL_LINES = 60
_DULL = re.compile("_created{|_bucket{|_info{")  # of no use in a log
_NOISE = "`torch.set_num_threads`"  # the CPU worker's warning at every step


class VLLMProcessError(RuntimeError):
    """The child died, missed a deadline or answered nonsense; the message ends with its log."""


def image(path: Path | str, *, uuid: str | None = None) -> Json:
    """One image of a prompt, from a file."""
    return {"path": str(path), "uuid": uuid}


def video(*frames: Path | str) -> Json:
    """One video of a prompt, its frames being images of one size."""
    encoded = (base64.b64encode(Path(frame).read_bytes()).decode() for frame in frames)
    url = f"data:video/jpeg;base64,{','.join(encoded)}"
    return {"part": {"type": "video_url", "video_url": {"url": url}}}


def known_image(uuid: str, metadata: Mapping[str, object]) -> Json:
    """One image of a prompt without its pixels, known by its identifier and layout."""
    return {"path": None, "uuid": uuid, "metadata": dict(metadata)}


def prompt(*media: Json, text: str = "what is this?", **fields: object) -> Json:
    """A request with these images; further fields are those of `ec_s3.connector.offline.Prompt`."""
    return {"text": text, "media": list(media), **fields}


class VLLMProcess:
    """One vLLM engine in a child process; not thread-safe.

    Attributes:
        started: the child's report once the engine is up (see `ec_s3.connector.offline.Started`).
        log: file with everything that the child and its descendants print.

    Args:
        job: see `ec_s3.connector.offline.Job`.
        workdir: folder for the job file and the log.
        name: begins the names of both files.
        environment: the child's whole environment, None for this process's own.
        start_timeout: seconds until the engine must be up.

    Raises:
        VLLMProcessError: the engine did not start.
    """

    def __init__(
        self,
        job: Mapping[str, object],
        *,
        workdir: Path,
        name: str,
        environment: Mapping[str, str] | None = None,
        start_timeout: float = 240.0,
    ) -> None:
        workdir.mkdir(parents=True, exist_ok=True)
        self.log = workdir / f"{name}.log"
        job_file = workdir / f"{name}.json"
        job_file.write_text(json.dumps(job), encoding="utf-8")
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "ec_s3.connector.offline", str(job_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                process_group=0,  # vLLM's own children are killed with it
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"vllm-{name}", daemon=True)
        self._reader.start()
        self._name = name
        self._counted: dict[str, float] = {}
        self.started = self._answer(start_timeout, "its start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def generate(self, prompts: Sequence[Json], *, timeout: float = 120.0) -> Json:
        """Answer the prompts as one batch (see `ec_s3.connector.offline.BatchResult`).

        Raises:
            VLLMProcessError: the engine died or did not answer in time.
        """
        self._tell({"prompts": list(prompts)})
        return self._answer(timeout, "a batch")

    def load(self, prompts: Sequence[Json], *, timeout: float = 120.0) -> Json:
        """Answer prompts that overlap, timed (see `ec_s3.connector.offline.LoadResult`).

        Raises:
            VLLMProcessError: as `generate`.
        """
        self._tell({"load": list(prompts)})
        return self._answer(timeout, "a load")

    def metrics(self, *, timeout: float = 30.0) -> dict[str, float]:
        """The encoder cache's metrics as vLLM last reported them, keyed like the text format.

        Raises:
            VLLMProcessError: as `generate`.
        """
        self._tell({"metrics": True})
        return self._answer(timeout, "its metrics")

    def finish(self, *, timeout: float = 60.0) -> Json:
        """Shut the engine down cleanly (see `ec_s3.connector.offline.Finished`).

        Raises:
            VLLMProcessError: it did not end in time, or not with exit code 0.
        """
        assert self._child.stdin is not None
        deadline = time.monotonic() + timeout
        self._child.stdin.close()
        report = self._answer(timeout, "its end")
        try:
            code = self._child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self._failure("did not exit") from None
        if code != 0:
            raise self._failure(f"exited with code {code}")
        self._counted = report["metrics"]
        return report

    @property
    def pid(self) -> int:
        """The child; vLLM's own children are in its process group."""
        return self._child.pid

    def kill(self) -> None:
        """End the child and its descendants at once; idempotent."""
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended already
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(30)
        self._reader.join(10)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()

    def log_tail(self) -> str:
        """The last lines that the child printed, and what it had counted once it has finished."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if _NOISE not in line]
        counted = [
            f"{series} {value:g}"
            for series, value in self._counted.items()
            if value and not _DULL.search(series)
        ]
        return "\n".join([*lines[-_LOG_TAIL_LINES:], *counted])

    def _tell(self, line: Json) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(line) + "\n")
            self._child.stdin.flush()
        except OSError as error:
            raise self._failure(f"took no request ({error})") from error

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _answer(self, timeout: float, what: str) -> Json:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise self._failure(f"did not report {what} within {timeout:.0f} s") from None
        if line is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(10)  # for its own exit code
            raise self._failure(f"ended before it reported {what}")
        report: Json = json.loads(line)
        return report

    def _failure(self, what: str) -> VLLMProcessError:
        self.kill()
        code = self._child.returncode
        return VLLMProcessError(
            f"vLLM process {self._name!r} {what} (exit code {code}); end of {self.log}:\n"
            f"{self.log_tail()}"
        )


def token_ids(batch: Json) -> list[list[int]]:
    """The answers of a batch as token ids."""
    return [list(answer["token_ids"]) for answer in batch["answers"]]


def client_environment() -> dict[str, str]:
    """The environment for a child process that talks to the server: fake keys, nothing else of AWS.

    What the machine has set for AWS or as a proxy does not reach the child.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "BOTO_", "EC_S3_")) and not name.lower().endswith("_proxy")
    }
    return kept | {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "OMP_NUM_THREADS": "1",  # threads that wait for a busy core stall a tiny model's steps
    }
