"""A real vLLM OpenAI server in a child process, on a free loopback port, its encoder counted.

For experiments with several engines that share nothing but a bucket: the end-to-end tests and
`examples/disaggregated` start their servers with it. Meant for the tiny models of `tiny_models` on
a CPU.

Runs in the caller's thread. Every wait has a deadline; a child that misses one is killed with all
its descendants. Must never import vLLM.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ec_s3.testing.vllm_process import PATIENT, VLLMProcessError, client_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    Json = dict[str, Any]

MODEL = "tiny"
"""Name under which every server serves its model."""

_ARGUMENTS = (
    *("--served-model-name", MODEL, "--host", "127.0.0.1", "--enforce-eager", "--seed", "0"),
    *("--max-model-len", "1024", "--max-num-seqs", "8", "--limit-mm-per-prompt", '{"image": 4}'),
    *("--shutdown-timeout", "10", "--disable-uvicorn-access-log"),
)
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers share few cores
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
_LOG_TAIL_LINES = 60
_STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer: status and body, parsed when it is JSON."""

    status: int
    body: Any

    @property
    def tokens(self) -> tuple[int, ...]:
        """Generated token ids of a chat completion that asked for them."""
        return tuple(self.body["choices"][0]["token_ids"])

    @property
    def transfer(self) -> Json | None:
        """What the server published about the request's media items."""
        params: Json | None = self.body.get("ec_transfer_params")
        return params


class VLLMServer:
    """One server; a context manager that kills it at its end. Not thread-safe.

    The constructor returns at once, so that several can start side by side; `wait` for each.

    Attributes:
        url: `http://127.0.0.1:port`.
        log: file with everything that the server and its descendants print.

    Args:
        model: model folder.
        workdir: folder for the log.
        name: begins the names of what is put there.
        role: `ec_producer`, `ec_consumer` or `ec_both`.
        settings: the connector's settings; deadlines are generous where they say nothing.
        arguments: further arguments of vLLM's server.
        dtype: of the model.
    """

    def __init__(
        self,
        model: Path,
        *,
        workdir: Path,
        name: str,
        role: str,
        settings: Mapping[str, object],
        arguments: Sequence[str] = (),
        dtype: str = "float32",
    ) -> None:
        folder = workdir / name
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = folder / "server.log"
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._encodes = folder / "encode.jsonl"
        self._started_items = 0
        transfer = {
            "ec_connector": "ECS3Connector",
            "ec_connector_module_path": "ec_s3.connector",
            "ec_role": role,
            "ec_connector_extra_config": {**PATIENT, **settings},
        }
        command = [
            *(sys.executable, "-m", "ec_s3.connector.encode_log", str(folder)),
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--port", str(self._port), "--dtype", dtype),
            *("--ec-transfer-config", json.dumps(transfer)),
            *_ARGUMENTS,
            *arguments,
        ]
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**client_environment(), **_ENVIRONMENT},
                process_group=0,  # its own children end with it, and Ctrl-C is ours
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait(self, timeout: float = 300.0) -> Self:
        """Wait until requests are answered and the ranks have mapped the host memory.

        Raises:
            VLLMProcessError: the server did not start.
        """
        deadline = time.monotonic() + timeout
        while not self._healthy():
            if self._child.poll() is not None:
                raise self._failure(f"ended with code {self._child.returncode}")
            if time.monotonic() > deadline:
                raise self._failure(f"was not up within {timeout:.0f} s")
            time.sleep(0.25)
        self.chat([{"type": "text", "text": "hello"}])
        self._started_items = self._items()
        return self

    @property
    def alive(self) -> bool:
        """Whether the server runs and its engine is well."""
        return self._child.poll() is None and self._healthy()

    @property
    def encoded(self) -> int:
        """Media items that the encoder has worked on for requests so far, per worker process."""
        return self._items() - self._started_items

    def chat(self, content: Sequence[Json], *, timeout: float = 120.0, **fields: object) -> Reply:
        """Ask with one user message, greedily; `fields` go into the request's body.

        Raises:
            OSError: no answer.
        """
        return self.post(
            "/v1/chat/completions",
            {**chat_body(content), **fields},
            timeout=timeout,
        )

    def post(self, path: str, body: object, *, timeout: float = 120.0) -> Reply:
        """Send JSON; returns whatever is answered.

        Raises:
            OSError: no answer.
        """
        return post(self.url, path, body, timeout=timeout)

    def get(self, path: str, *, timeout: float = 30.0) -> Reply:
        """Read a page.

        Raises:
            OSError: no answer.
        """
        return _exchange(self.url, "GET", path, None, timeout)

    def stop(self, timeout: float = _STOP_SECONDS) -> int | None:
        """Ask the server to end, as an operator does; returns its exit code, None when killed."""
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout)
        code = self._child.returncode
        self.kill()
        return code

    def kill(self) -> None:
        """End the server and its descendants at once; idempotent."""
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended already
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(30)

    def log_tail(self) -> str:
        """The last lines that the server printed."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])

    def _healthy(self) -> bool:
        try:
            return self.get("/health", timeout=5.0).status == 200
        except OSError:
            return False

    def _items(self) -> int:
        by_process: Counter[int] = Counter()
        if self._encodes.exists():
            for line in self._encodes.read_text(encoding="utf-8").splitlines():
                call = json.loads(line)
                by_process[call["pid"]] += len(call["rows"])
        return max(by_process.values(), default=0)

    def _failure(self, what: str) -> VLLMProcessError:
        self.kill()
        return VLLMProcessError(
            f"vLLM server {self.name!r} {what}; end of {self.log}:\n{self.log_tail()}"
        )


def text(words: str = "what is this?") -> Json:
    """A text part of a message."""
    return {"type": "text", "text": words}


def picture(path: Path, *, uuid: str | None = None) -> Json:
    """A picture as a part of a message, inline."""
    data = base64.b64encode(path.read_bytes()).decode()
    part: Json = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return part if uuid is None else {**part, "uuid": uuid}


def known_picture(uuid: str, metadata: Mapping[str, object]) -> Json:
    """A picture without its pixels: its identifier, and what lays it out."""
    return {"type": "image_embeds", "image_embeds": dict(metadata), "uuid": uuid}


def chat_body(content: Sequence[Json], *, max_tokens: int = 8) -> Json:
    """The body of a chat completion: one user message, greedy, with token ids in the answer."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": list(content)}],
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "return_token_ids": True,
    }


def post(url: str, path: str, body: object, *, timeout: float = 120.0) -> Reply:
    """Send JSON to a server; returns whatever is answered.

    Raises:
        OSError: no answer.
    """
    return _exchange(url, "POST", path, json.dumps(body).encode(), timeout)


def _exchange(url: str, method: str, path: str, body: bytes | None, timeout: float) -> Reply:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    except http.client.HTTPException as error:
        raise ConnectionError(f"{method} {url}{path}: {error!r}") from error
    finally:
        connection.close()
    with contextlib.suppress(ValueError):
        return Reply(response.status, json.loads(answer))
    return Reply(response.status, answer.decode("utf-8", "replace"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
