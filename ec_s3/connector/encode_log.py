"""A log of every call of a model's multimodal encoder, one JSON line per call.

`python -m ec_s3.connector.offline` uses it to prove that a warm bucket saves the encoder's work;

    python -m ec_s3.connector.encode_log WORKDIR COMMAND...

runs any command with it, for example a vLLM server, and the log is `WORKDIR/encode.jsonl`.

It counts where the work happens: in each worker process, around the model class's
`embed_multimodal`, for any model. It gets there as a vLLM general plugin that exists only for the
processes started below `installed()`; no server of a user ever loads it.

Runs in every vLLM process of an offline job. Must never change what the encoder returns.

Locking: none. Each call appends one short line with O_APPEND, which the kernel does not interleave.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PATH_VARIABLE = "ENCODE_LOG_OF_EC_S3"  # not EC_S3_*: those are settings
_PLUGIN = "ec_s3_encode_log"
_MODULE = "ec_s3.connector.encode_log"  # not __name__: that is `__main__` when run as a program


@dataclass(frozen=True, slots=True)
class EncodeCall:
    """One call of the encoder in one process.

    Attributes:
        started: seconds since the epoch.
        seconds: duration; on a GPU only that of queueing the work.
        rows: rows of each item that was encoded, in the order of the call.
        pid: the worker process.
    """

    started: float
    seconds: float
    rows: tuple[int, ...]
    pid: int


class EncodeLog:
    """The reading side: calls made since the last `drain`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def drain(self) -> list[EncodeCall]:
        """Calls of all processes since the previous drain, oldest first."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        rows = [json.loads(line) for line in data.splitlines()]
        calls = [EncodeCall(**{**row, "rows": tuple(row["rows"])}) for row in rows]
        return sorted(calls, key=lambda call: call.started)


@contextlib.contextmanager
def installed(workdir: Path) -> Iterator[EncodeLog]:
    """Make this process and its descendants log encoder calls; call before vLLM is imported."""
    path = workdir / "encode.jsonl"
    path.touch()
    plugins = workdir / "plugins"
    info = plugins / f"{_PLUGIN}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PLUGIN}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{_PLUGIN} = {_MODULE}:register\n"
    )
    previous = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(plugins), previous) if p)
    os.environ[_PATH_VARIABLE] = str(path)
    sys.path.insert(0, str(plugins))
    try:
        yield EncodeLog(path)
    finally:
        sys.path.remove(str(plugins))
        del os.environ[_PATH_VARIABLE]
        if previous is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = previous


def register() -> None:
    """Plugin hook of vLLM: wrap each model class as vLLM's registry hands it out."""
    path = os.environ.get(_PATH_VARIABLE)
    if path is None:
        return
    from vllm.model_executor.models import ModelRegistry

    registry: Any = type(ModelRegistry)
    resolve = registry.resolve_model_cls

    @functools.wraps(resolve)
    def resolve_and_wrap(self: Any, *args: Any, **kwargs: Any) -> Any:
        model_class, architecture = resolve(self, *args, **kwargs)
        _wrap(model_class, Path(path))
        return model_class, architecture

    registry.resolve_model_cls = resolve_and_wrap


def _wrap(model_class: Any, path: Path) -> None:
    encode = getattr(model_class, "embed_multimodal", None)
    if encode is None or hasattr(encode, "ec_s3_logged"):
        return

    @functools.wraps(encode)
    def logged(self: Any, **kwargs: Any) -> Any:
        started = time.time()
        output = encode(self, **kwargs)
        call = EncodeCall(
            started=started,
            seconds=time.time() - started,
            rows=tuple(item.shape[0] for item in output),
            pid=os.getpid(),
        )
        with path.open("a") as file:
            file.write(json.dumps(asdict(call)) + "\n")
        return output

    logged.ec_s3_logged = True  # type: ignore[attr-defined]  # marks the function as wrapped
    model_class.embed_multimodal = logged


def main(arguments: Sequence[str]) -> NoReturn:
    """Become the command, with the log installed."""
    if len(arguments) < 2:
        raise SystemExit("usage: python -m ec_s3.connector.encode_log WORKDIR COMMAND...")
    workdir, *command = arguments
    with installed(Path(workdir)):
        os.execvp(command[0], command)  # noqa: S606  running a command is what this is for


if __name__ == "__main__":
    main(sys.argv[1:])
