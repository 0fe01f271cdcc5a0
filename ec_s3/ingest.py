"""Encoder outputs made elsewhere, into the bucket: `upload_items`, and files of safetensors.

Owns what an item is made of; how many get there is `intake`'s. Files are opened on the pipeline's
threads, and their tensors read only when the bucket lacks them. A file is untrusted: what cannot be
read, or was made for another namespace, is reported and passed over.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ec_s3.control import Control, load
from ec_s3.errors import ConfigError
from ec_s3.intake import Bad, Intake, Source, UploadReport
from ec_s3.loop import LoopThread
from ec_s3.remote import open_store
from ec_s3.tensors import spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from ec_s3.config import ECConfig
    from ec_s3.keys import Namespace
    from ec_s3.store import Store

SUFFIX = ".safetensors"
EXPORTED = "encoder_output"
"""What `ec-s3 get` calls the tensor of a file."""

_ITEM_BYTES = {"BF16": 2, "F16": 2, "I16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1, "F8_E5M2": 1}
_ITEM_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1}
_MOST_ITEM_BYTES = 8


def upload_items(
    items: Iterable[tuple[str, torch.Tensor]],
    config: ECConfig,
    namespace: Namespace,
) -> UploadReport:
    """Store encoder outputs that were made elsewhere; blocks until all are dealt with.

    Taken one at a time, on a thread, and only as fast as the bucket takes them: at most
    `upload_queue_items` items and `upload_queue_size` bytes are under way, `max_uploads` at a time
    on their way to the bucket, at `upload_rate`. What is there already is left as it is. Running
    it again after it was interrupted uploads what is missing.

    Args:
        items: identifier (vLLM's `mm_hash`) and tensor, dense, in CPU memory, of the namespace's
            dtype.
        config: settings; `url` says where to.
        namespace: what the tensors have in common; the servers' own.

    Returns:
        The report; items that cannot be stored are in it with their reasons.

    Raises:
        ConfigError: no store is configured, or its servers are switched off.
        RemoteError: the bucket cannot be used.
        Exception: whatever `items` raises; what it gave before is stored.
    """
    loop = LoopThread("ec_s3-ingest")

    async def run() -> UploadReport:
        store = open_store(config)
        if store is None:
            raise ConfigError("url is not set: there is nowhere to upload to")
        try:
            return await ingest(store, map(_held, items), config, namespace)
        finally:
            await store.aclose()

    try:
        report = loop.run(run(), timeout=None)
    finally:
        loop.close()
    if report.stopped is not None:
        raise report.stopped
    return report


async def ingest(
    store: Store,
    sources: Iterable[Source | Bad],
    config: ECConfig,
    namespace: Namespace,
    *,
    on_item: Callable[[str, str, int], object] = lambda *_: None,
    max_failures: int = 10_000,
) -> UploadReport:
    """The same on an open store, for items that may still be on a disk.

    Args:
        store: the bucket; stays open.
        sources: the items, and what could not be made one.
        config: settings.
        namespace: the items'.
        on_item: called with the name of each item that is dealt with, what became of it (a
            `PutOutcome` or why it failed), and the bytes of its tensor.
        max_failures: so many failed items are kept by name.

    Returns:
        The report, also when the bucket could no longer be used: `stopped` says so.

    Raises:
        ConfigError: the servers of the namespace are switched off.
        RemoteError: the bucket cannot be read.
        Exception: whatever `sources` raises; what it gave before is stored.
    """
    control = await load(store, namespace.control_key) or Control()
    if not control.enabled:
        raise ConfigError(
            f"{namespace.id} is switched off; `ec-s3 control enable` switches it on again"
        )
    job = Intake(store, config, namespace, control, on_item, max_failures)
    return await job.run(iter(sources))


def tensor_files(paths: Iterable[Path], namespace: Namespace) -> Iterator[Source | Bad]:
    """The items of safetensors files: each tensor's name is its identifier.

    A tensor called `encoder_output`, as `ec-s3 get` writes it, is the item that the file's metadata
    names, else the one that the file is named for.

    Args:
        paths: files, and folders, of which all files ending in `.safetensors` count.
        namespace: the items'.
    """
    for path in paths:
        for file in _files(path):
            if isinstance(file, Bad):
                yield file
            else:
                yield from _items(file, namespace)


def _files(path: Path) -> Iterator[Path | Bad]:
    if not path.is_dir():
        yield path
        return
    unlisted: list[OSError] = []
    for folder, folders, names in os.walk(path, onerror=unlisted.append):
        folders.sort()
        for name in sorted(names):
            if name.endswith(SUFFIX):
                yield Path(folder, name)
    for error in unlisted:
        yield Bad(str(error.filename), f"it cannot be listed: {error.strerror}")


def _items(file: Path, namespace: Namespace) -> Iterator[Source | Bad]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            notes = opened.metadata() or {}
            found = [(name, _nbytes(opened.get_slice(name))) for name in opened.keys()]  # noqa: SIM118  no mapping
    except (OSError, SafetensorError) as error:
        yield Bad(str(file), f"it cannot be read: {error}")
        return
    made_for = notes.get("namespace", namespace.id)
    if made_for != namespace.id:
        yield Bad(str(file), f"it was made for {made_for}, not for {namespace.id}")
        return
    for name, nbytes in found:
        identifier = _exported(file, notes) if name == EXPORTED else name
        yield Source(identifier, nbytes, _loader(file, name))


def _nbytes(described: Any) -> int:
    itemsize = _ITEM_BYTES.get(described.get_dtype(), _MOST_ITEM_BYTES)
    shape: list[int] = described.get_shape()
    return math.prod(shape) * itemsize


def _exported(file: Path, notes: dict[str, str]) -> str:
    try:
        identifier = json.loads(notes["identifier"])
    except (KeyError, ValueError):
        return file.name.removesuffix(SUFFIX)
    return identifier if isinstance(identifier, str) else file.name.removesuffix(SUFFIX)


def _loader(file: Path, name: str) -> Callable[[], torch.Tensor]:
    def load_tensor() -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor

    return load_tensor


def _held(item: tuple[str, torch.Tensor]) -> Source | Bad:
    name, tensor = item
    try:
        nbytes = spec_of(tensor).nbytes
    except ValueError as error:
        return Bad(name, str(error))
    return Source(name, nbytes, lambda: tensor, held=True)
