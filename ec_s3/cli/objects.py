"""The commands on stored objects: ls, stat, get, verify, rm.

Each is one coroutine on an open store; none needs an engine. Objects are read whole or by their
header and never trusted before their checks have passed. Only `rm` changes anything.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ec_s3.cli.control import announce, spared
from ec_s3.cli.output import ExitCode, Output, counted, human_bytes, human_seconds
from ec_s3.errors import (
    ConfigError,
    FrameError,
    FrameMismatchError,
    FrameTooLargeError,
    InvalidKeyError,
)
from ec_s3.header import MAX_HEAD_BYTES
from ec_s3.keys import KEY_VERSION, identifier_digest, parse_key
from ec_s3.lookup import header_at
from ec_s3.wire import decode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ec_s3.header import Header
    from ec_s3.signing import Keyring
    from ec_s3.store import Store
    from ec_s3.types import ObjectInfo

_ROOT = f"v{KEY_VERSION}/"
_DELETE_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Target:
    """What a command is pointed at: a key or prefix, or an identifier in a namespace."""

    text: str = ""
    identifier: str | None = None
    namespace: str | None = None

    def prefix(self) -> str:
        """Key, or the beginning of keys.

        Raises:
            ConfigError: an identifier without its namespace, or nothing at all.
            InvalidKeyError: the namespace is not of the form `<slug>-<fingerprint>/<dtype>`.
        """
        if self.identifier is None:
            if not self.text:
                raise ConfigError("no object named: give a key or prefix, or --identifier")
            return self.text
        if self.namespace is None or self.text:
            raise ConfigError(
                "--identifier needs --namespace, as `ec-s3 ls` shows it, and no key beside it"
            )
        digest = identifier_digest(self.identifier)
        folder = self.namespace.strip("/").removeprefix(_ROOT)
        key = f"{_ROOT}{folder}/{digest[:2]}/{digest}"
        parse_key(key)
        return key


@dataclass(frozen=True, slots=True)
class Demands:
    """What an object must be to be read: not larger, and signed by one of the keys, if any."""

    max_tensor_bytes: int
    keyring: Keyring | None


@dataclass(slots=True)
class _Folder:
    objects: int = 0
    nbytes: int = 0
    newest: float = 0.0


async def ls(store: Store, out: Output, *, prefix: str = "") -> ExitCode:
    """List namespaces, or the objects below a prefix."""
    if prefix:
        return await _list_objects(store, out, prefix)
    folders: dict[str, _Folder] = {}
    with out.progress("listing") as advance:
        async for info in store.list(_ROOT):
            advance(1)
            namespace = _namespace(info.key)
            if namespace is not None:
                folder = folders.setdefault(namespace, _Folder())
                folder.objects += 1
                folder.nbytes += info.size
                folder.newest = max(folder.newest, info.modified)
    if out.json:
        for namespace, folder in folders.items():
            out.record(
                {
                    "namespace": namespace,
                    "objects": folder.objects,
                    "bytes": folder.nbytes,
                    "newest": folder.newest,
                }
            )
        return ExitCode.OK
    rows = [
        (name, folder.objects, human_bytes(folder.nbytes), _age(folder.newest))
        for name, folder in folders.items()
    ]
    out.table("", ("Namespace", "Objects", "Stored", "Newest"), rows)
    out.note(f"{counted(len(rows), 'namespace')}; `ec-s3 ls {_ROOT}NAMESPACE` lists objects")
    return ExitCode.OK


async def stat(store: Store, out: Output, target: Target, *, demands: Demands) -> ExitCode:
    """Describe one object from its header."""
    info = await _one(store, target)
    if info is None:
        return _absent(out, target)
    try:
        header = await header_at(
            store,
            info.key,
            etag=info.etag or None,
            max_tensor_bytes=demands.max_tensor_bytes,
            keyring=demands.keyring,
        )
        if header is None:  # deleted meanwhile
            return _absent(out, target)
        _check_name(header, info)
    except FrameError as error:
        return _bad(out, info.key, error)
    facts = _facts(info, header)
    if out.json:
        out.record(facts)
    else:
        for name, value in _described(facts).items():
            out.line(f"{name:<15}{value}")
    return ExitCode.OK


async def get(
    store: Store, out: Output, target: Target, *, path: Path, force: bool, demands: Demands
) -> ExitCode:
    """Write one object's tensor into a safetensors file, under the name `encoder_output`."""
    _refuse_to_replace(path, force=force)
    info = await _one(store, target)
    if info is None:
        return _absent(out, target)
    try:
        header, tensor = await _whole(store, info, demands)
    except FrameError as error:
        return _bad(out, info.key, error)
    await asyncio.to_thread(_save, path, header, tensor)
    if out.json:
        out.record({**_facts(info, header), "file": str(path)})
    else:
        shape = " x ".join(str(n) for n in header.spec.shape)
        out.line(f"{path}: {header.spec.dtype} {shape}, {human_bytes(header.tensor_bytes)}")
    return ExitCode.OK


async def verify(store: Store, out: Output, target: Target, *, demands: Demands) -> ExitCode:
    """Read and decode objects with every check; report those that fail."""
    infos = [info async for info in _matching(store, target) if _namespace(info.key) is not None]
    if not infos:
        return _absent(out, target)
    bad = 0
    with out.progress("verifying", len(infos)) as advance:
        for info in infos:
            try:
                await _whole(store, info, demands)
            except FrameError as error:
                bad += 1
                _bad(out, info.key, error)
            advance(1)
    if out.json:
        out.record({"checked": len(infos), "bad": bad})
    else:
        total = human_bytes(sum(info.size for info in infos))
        out.line(f"{counted(len(infos), 'object')}, {total}: {bad or 'none'} bad")
    return ExitCode.FINDING if bad else ExitCode.OK


async def rm(store: Store, out: Output, target: Target, *, yes: bool) -> ExitCode:
    """Delete objects, after `--yes` or their typed number."""
    named = target.prefix()
    infos = [info async for info in _matching(store, target) if not spared(info.key, named)]
    if not infos:
        return _absent(out, target)
    total = human_bytes(sum(info.size for info in infos))
    question = f"{counted(len(infos), 'object')}, {total}. Type the number to delete:"
    if not yes and not out.confirm(question, expected=str(len(infos))):
        raise ConfigError(
            f"nothing deleted: {counted(len(infos), 'object')}, without --yes or the typed number"
        )
    failed: dict[str, str] = {}
    keys = [info.key for info in infos]
    told = await announce(store, out, keys)
    with out.progress("deleting", len(keys)) as advance:
        for start in range(0, len(keys), _DELETE_BATCH):
            batch = keys[start : start + _DELETE_BATCH]
            failed.update((await store.delete(batch)).failed)
            advance(len(batch))
    if out.json:
        out.record({"deleted": len(keys) - len(failed), "failed": failed})
    else:
        for key, reason in failed.items():
            out.line(f"{key}: {reason}", style="red")
        out.line(f"{len(keys) - len(failed)} deleted, {len(failed)} failed")
    return ExitCode.OK if told and not failed else ExitCode.FINDING


async def _list_objects(store: Store, out: Output, prefix: str) -> ExitCode:
    found = 0
    async for info in store.list(prefix):
        found += 1
        if out.json:
            out.record(
                {
                    "key": info.key,
                    "bytes": info.size,
                    "modified": info.modified,
                    "etag": info.etag,
                }
            )
        else:
            out.line(f"{human_bytes(info.size):>10}  {_age(info.modified):>8}  {info.key}")
    if not found:
        out.note(f"no object begins with {prefix}")
    return ExitCode.OK if found else ExitCode.FINDING


async def _matching(store: Store, target: Target) -> AsyncIterator[ObjectInfo]:
    """The object of exactly this key, else all whose key begins with it."""
    prefix = target.prefix()
    if _namespace(prefix) is not None:
        info = await store.head(prefix)
        if info is not None:
            yield info
        return
    async for info in store.list(prefix):
        yield info


async def _one(store: Store, target: Target) -> ObjectInfo | None:
    found: list[ObjectInfo] = []
    async for info in _matching(store, target):
        found.append(info)
        if len(found) > 1:
            raise ConfigError(f"more than one object begins with {target.prefix()}; name one")
    return found[0] if found else None


async def _whole(store: Store, info: ObjectInfo, demands: Demands) -> tuple[Header, bytearray]:
    """The object after every check, the one of its name included."""
    limit = demands.max_tensor_bytes
    if info.size > limit + limit // 8 + MAX_HEAD_BYTES:
        raise FrameTooLargeError(f"{info.size} stored bytes; raise max_item_size to read them")
    result = await store.get(
        info.key,
        into=lambda nbytes: memoryview(bytearray(nbytes)),
        if_match=info.etag or None,
    )
    body = memoryview(b"") if result is None else result.body
    header, tensor = await asyncio.to_thread(
        decode, body, max_tensor_bytes=limit, keyring=demands.keyring
    )
    _check_name(header, info)
    return header, tensor


def _check_name(header: Header, info: ObjectInfo) -> None:
    """An intact object may still lie under a name that is not its own."""
    digest = identifier_digest(header.identifier)
    if info.key != f"{_ROOT}{header.namespace}/{digest[:2]}/{digest}":
        raise FrameMismatchError("the object lies under another item's key")
    if info.size != header.object_bytes:
        raise FrameMismatchError(f"{info.size} bytes stored, {header.object_bytes} declared")


def _refuse_to_replace(path: Path, *, force: bool) -> None:
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; choose another file or add --force")


def _save(path: Path, header: Header, tensor: bytearray) -> None:
    # Both take a second to import, and only this command needs them.
    from safetensors.torch import save

    from ec_s3.tensors import from_bytes

    notes = {
        "identifier": json.dumps(header.identifier),
        "namespace": header.namespace,
        "writer": header.writer,
    }
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_bytes(save({"encoder_output": from_bytes(tensor, header.spec)}, notes))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _facts(info: ObjectInfo, header: Header) -> dict[str, object]:
    return {
        "key": info.key,
        "identifier": header.identifier,
        "namespace": header.namespace,
        "dtype": header.spec.dtype,
        "shape": list(header.spec.shape),
        "tensor_bytes": header.tensor_bytes,
        "stored_bytes": info.size,
        "chunks": len(header.chunks),
        "layout": str(header.layout),
        "writer": header.writer,
        "created": header.created,
        "modified": info.modified,
        "etag": info.etag,
        "encode_seconds": header.meta.encode_seconds,
        "placeholder": dict(header.meta.placeholder),
        "input_digest": header.meta.input_digest,
        "key_id": header.key_id,
    }


def _described(facts: dict[str, object]) -> dict[str, object]:
    """The facts as a person reads them."""
    raw, stored = int(str(facts["tensor_bytes"])), int(str(facts["stored_bytes"]))
    shape = facts["shape"]
    seconds = facts["encode_seconds"]
    return {
        **{name: facts[name] for name in ("key", "identifier", "namespace")},
        "tensor": f"{facts['dtype']} {shape}, {human_bytes(raw)}",
        "stored": f"{human_bytes(stored)}, {stored / max(1, raw):.3f} of the tensor",
        "chunks": f"{facts['chunks']}, layout {facts['layout']}",
        "written by": facts["writer"],
        "created": _when(float(str(facts["created"]))),
        "etag": facts["etag"],
        "encoded in": "unknown" if seconds is None else human_seconds(float(str(seconds))),
        "placeholder": json.dumps(facts["placeholder"]),
        "bound to": facts["input_digest"] or "no input",
        "signed by": facts["key_id"] or "nobody",
    }


def _namespace(key: str) -> str | None:
    """`<slug>-<fingerprint>/<dtype>` of an item's key, None for any other."""
    try:
        parsed = parse_key(key)
    except InvalidKeyError:
        return None
    return f"{parsed.slug}-{parsed.fingerprint}/{parsed.dtype}"


def _absent(out: Output, target: Target) -> ExitCode:
    if out.json:
        out.record({"key": target.prefix(), "error": "absent"})
    else:
        out.note(f"no such object: {target.prefix()}")
    return ExitCode.FINDING


def _bad(out: Output, key: str, error: FrameError) -> ExitCode:
    if out.json:
        out.record({"key": key, "error": type(error).__name__, "message": str(error)})
    else:
        out.line(f"{key}: {error}", style="red")
    return ExitCode.FINDING


def _age(modified: float) -> str:
    return human_seconds(max(0.0, time.time() - modified)) if modified else "-"


def _when(seconds: float) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    return f"{moment}, {_age(seconds)} ago"
