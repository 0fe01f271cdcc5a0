"""A bench for experiments with real vLLM: tiny models, pictures, one bucket, child processes.

The end-to-end tests are written in its words. Owns the processes that it starts and kills them at
its end; the server belongs to the caller. One thread. Must never import vLLM.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ec_s3.header import Header, read_header
from ec_s3.testing import vllm_process
from ec_s3.testing.photographs import photographs
from ec_s3.testing.tiny_models import MODELS
from ec_s3.testing.vllm_process import PATIENT, VLLMProcess, client_environment
from ec_s3.testing.vllm_server import VLLMServer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ec_s3.testing.traffic import RecordedServer, Served

_UPLOAD_SECONDS = 60.0
_MAX_TENSOR_BYTES = 1 << 24
_EDGE = 224


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a prompt with one picture.

    Attributes:
        tokens: generated token ids.
        finish_reason: vLLM's, `error` for a request that failed.
        encoded: images that the encoder worked on for it, per worker process.
        transfer: `ec_transfer_params` of the answer.
    """

    tokens: tuple[int, ...]
    finish_reason: str
    encoded: int
    transfer: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdRun:
    """What a process with an empty bucket did with every picture.

    Attributes:
        prefix: where in the bucket the encoder outputs are.
        answers: by picture.
        keys: full object key in the bucket, by picture.
    """

    prefix: str
    answers: Mapping[str, Answer]
    keys: Mapping[str, str]


class Lab:
    """Everything that an experiment needs; a context manager.

    Args:
        server: the S3 server, running.
        scratch: folder for models, pictures and logs.

    Attributes:
        pictures: name -> file; quarters of real photographs, all different.
    """

    def __init__(self, server: RecordedServer, scratch: Path) -> None:
        self.server = server
        self.pictures = _cut_pictures(scratch / "pictures")
        self._scratch = scratch
        self._models: dict[tuple[str, str], Path] = {}
        self._cold: dict[tuple[str, str], ColdRun] = {}
        self._processes: list[VLLMProcess | VLLMServer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()

    def start(
        self,
        model: str = "llava",
        *,
        prefix: str,
        dtype: str = "float32",
        role: str = "ec_both",
        endpoint: str = "",
        settings: Mapping[str, object] | None = None,
        transfer: Mapping[str, object] | None = None,
        **job: object,
    ) -> VLLMProcess:
        """Start vLLM with ec_s3 on a prefix of the bucket.

        Args:
            model: name out of `MODELS`.
            prefix: prefix in the bucket.
            dtype: of the model.
            role: `ec_producer`, `ec_consumer` or `ec_both`.
            endpoint: of a proxy before the server.
            settings: further settings of the connector.
            transfer: further fields of `ec_transfer_config`, for example `engine_id`.
            **job: further fields of `ec_s3.connector.offline.Job`.
        """
        url = self.server.location(prefix, endpoint=endpoint)
        process = VLLMProcess(
            {
                "model": str(self.model(model, dtype)),
                "dtype": dtype,
                "ec_transfer_config": {
                    "ec_connector": "ECS3Connector",
                    "ec_connector_module_path": "ec_s3.connector",
                    "ec_role": role,
                    "ec_connector_extra_config": {"url": url, **PATIENT, **(settings or {})},
                    **(transfer or {}),
                },
                **job,
            },
            workdir=self._scratch / "logs",
            name=f"{len(self._processes):02d}-{prefix}",
            environment=client_environment(),
        )
        self._processes.append(process)
        # The ranks map the host memory meanwhile; before that, items are not cached.
        process.generate([vllm_process.prompt(text="hello")])
        return process

    def serve(
        self,
        model: str = "qwen2-vl",
        *,
        prefix: str,
        role: str,
        endpoint: str = "",
        settings: Mapping[str, object] | None = None,
        arguments: Sequence[str] = (),
    ) -> VLLMServer:
        """Begin to start a vLLM server on a prefix of the bucket; the caller waits for it.

        Args:
            model: name out of `MODELS`.
            prefix: prefix in the bucket.
            role: `ec_producer`, `ec_consumer` or `ec_both`.
            endpoint: of a proxy before the S3 server.
            settings: further settings of the connector.
            arguments: further arguments of the server.
        """
        url = self.server.location(prefix, endpoint=endpoint)
        process = VLLMServer(
            self.model(model, "float32"),
            workdir=self._scratch / "logs",
            name=f"{len(self._processes):02d}-{prefix}-{role}",
            role=role,
            settings={"url": url, **(settings or {})},
            arguments=arguments,
        )
        self._processes.append(process)
        return process

    def ask(self, process: VLLMProcess, picture: str) -> Answer:
        """Let vLLM answer a prompt with one picture, alone in its batch."""
        return self.ask_with(process, vllm_process.image(self.pictures[picture]))

    def ask_with(self, process: VLLMProcess, media: dict[str, Any]) -> Answer:
        """The same for media made by `vllm_process.image` or `known_image`."""
        batch = process.generate([vllm_process.prompt(media)])
        answer = batch["answers"][0]
        return Answer(
            tokens=tuple(answer["token_ids"]),
            finish_reason=answer["finish_reason"],
            encoded=batch["encoder_items"],
            transfer=answer["ec_transfer_params"],
        )

    def cold(self, model: str = "llava", dtype: str = "float32") -> ColdRun:
        """The answers of a process with an empty bucket, which it fills; made once, then kept."""
        if (model, dtype) not in self._cold:
            self._cold[model, dtype] = self._run_cold(model, dtype)
        return self._cold[model, dtype]

    def copy(self, run: ColdRun, prefix: str, *, pictures: Iterable[str]) -> dict[str, str]:
        """Copy objects to another prefix; returns their keys there, by picture."""
        keys = {
            name: f"{prefix}/{run.keys[name].removeprefix(f'{run.prefix}/')}" for name in pictures
        }
        client = self.server.client()
        try:
            for name, key in keys.items():
                source = {"Bucket": self.server.bucket, "Key": run.keys[name]}
                client.copy_object(Bucket=self.server.bucket, Key=key, CopySource=source)
        finally:
            client.close()
        return keys

    def read(self, key: str) -> bytes:
        """The body of an object."""
        client = self.server.client()
        try:
            body: bytes = client.get_object(Bucket=self.server.bucket, Key=key)["Body"].read()
        finally:
            client.close()
        return body

    def replace(self, key: str, body: bytes | None) -> None:
        """Write an object, or delete it."""
        client = self.server.client()
        try:
            if body is None:
                client.delete_object(Bucket=self.server.bucket, Key=key)
            else:
                client.put_object(Bucket=self.server.bucket, Key=key, Body=body)
        finally:
            client.close()

    def unfinished_uploads(self, prefix: str) -> list[str]:
        """Keys of multipart uploads that were begun below a prefix and not ended."""
        client = self.server.client()
        try:
            answer = client.list_multipart_uploads(Bucket=self.server.bucket, Prefix=f"{prefix}/")
        finally:
            client.close()
        return [upload["Key"] for upload in answer.get("Uploads", ())]

    def moved(self, prefix: str) -> list[Served]:
        """Requests that moved an encoder output's body below a prefix."""
        return [request for request in self.server.served(f"{prefix}/") if request.moved_item]

    def wait_for_uploads(self, prefix: str, number: int) -> list[str]:
        """Wait until so many items have been stored below a prefix; returns their keys in order."""
        deadline = time.monotonic() + _UPLOAD_SECONDS
        while True:
            keys = [request.key for request in self.moved(prefix) if request.method == "PUT"]
            if len(keys) >= number:
                return keys
            if time.monotonic() > deadline:
                raise AssertionError(f"{len(keys)} of {number} uploads to {prefix} in time")
            time.sleep(0.01)

    def stored(self, prefix: str, identifier: str) -> tuple[str, Header]:
        """Wait until an item has been stored below a prefix; its key there, and its header."""
        deadline = time.monotonic() + _UPLOAD_SECONDS
        while time.monotonic() < deadline:
            for key in self.server.items(prefix):
                header = read_header(self.read(key), max_tensor_bytes=_MAX_TENSOR_BYTES)
                if header.identifier == identifier:
                    return key.removeprefix(f"{prefix}/"), header
            time.sleep(0.1)
        raise AssertionError(f"{identifier!r} was not stored below {prefix} in time")

    def log_tails(self, *, processes: int = 2) -> str:
        """The ends of the logs of the processes started last."""
        tails = [f"{p.log}\n{p.log_tail()}" for p in self._processes[-processes:]]
        return "\n\n".join(tails)

    def _run_cold(self, model: str, dtype: str) -> ColdRun:
        prefix = f"cold-{model}-{dtype}"
        answers: dict[str, Answer] = {}
        keys: dict[str, str] = {}
        process = self.start(model, prefix=prefix, dtype=dtype)
        for number, name in enumerate(self.pictures, start=1):
            answers[name] = self.ask(process, name)
            keys[name] = self.wait_for_uploads(prefix, number)[-1]
        process.finish()
        return ColdRun(prefix=prefix, answers=answers, keys=keys)

    def model(self, model: str, dtype: str = "float32") -> Path:
        """The folder of a tiny model, made on first use."""
        if (model, dtype) not in self._models:
            folder = self._scratch / "models" / dtype / model
            self._models[model, dtype] = MODELS[model].make(folder, dtype=dtype)
        return self._models[model, dtype]


def _cut_pictures(folder: Path) -> dict[str, Path]:
    """Quarters of the photographs, each of another shape."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    pictures = {}
    for name, path in photographs().items():
        with Image.open(path) as photograph:
            width, height = photograph.size
            for corner in range(4):
                left, top = width // 2 * (corner % 2), height // 2 * (corner // 2)
                box = (left, top, left + width // 2, top + height // 2)
                size = (_EDGE - 28 * corner, _EDGE)
                file = folder / f"{name}-{corner}.png"
                photograph.convert("RGB").crop(box).resize(size).save(file)
                pictures[f"{name}-{corner}"] = file
    return pictures
