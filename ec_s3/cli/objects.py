"""The commands that look at stored objects: `ls`, `stat`, `get`.

Each is one coroutine on an open store; none needs an engine, and none changes anything in it.
Objects are never trusted before their checks have passed.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path  # noqa: TC003  typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from ec_s3.cli.inventory import survey
from ec_s3.cli.invocation import (
    IdentifierOption,
    NamespaceOption,
    TargetArgument,
    with_store,
)
from ec_s3.cli.namespaces import describe_all
from ec_s3.cli.output import ExitCode, Output, counted, human_bytes, human_seconds
from ec_s3.cli.targets import ROOT, Target, absent, matching
from ec_s3.errors import ConfigError, FrameError

if TYPE_CHECKING:
    from ec_s3.cli.reading import Demands
    from ec_s3.config import ECConfig
    from ec_s3.header import Header
    from ec_s3.store import Store
    from ec_s3.types import ObjectInfo

commands = typer.Typer()


@commands.command("ls", epilog="Example: ec-s3 ls v1/org-model-0123456789abcdef/bfloat16 --long")
def _ls(
    context: typer.Context,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Beginning of keys.")] = "",
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Exact sizes and times, and what else is known.")
    ] = False,
) -> None:
    """List namespaces, or the objects below a prefix."""

    async def run(store: Store, out: Output, _config: ECConfig) -> int:
        return await ls(store, out, prefix=prefix, long=long)

    with_store(context, run)


@commands.command("stat", epilog="Example: ec-s3 stat --namespace NAMESPACE --identifier ID")
def _stat(
    context: typer.Context,
    key: TargetArgument = "",
    identifier: IdentifierOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Describe one object."""

    async def run(store: Store, out: Output, config: ECConfig) -> int:
        from ec_s3.cli.reading import Demands

        target = Target(key, identifier, namespace)
        return await stat(store, out, target, demands=Demands.of(config))

    with_store(context, run)


@commands.command("get", epilog="Example: ec-s3 get KEY -o picture.safetensors")
def _get(
    context: typer.Context,
    key: TargetArgument = "",
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The safetensors file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    identifier: IdentifierOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Write one tensor into a safetensors file."""

    async def run(store: Store, out: Output, config: ECConfig) -> int:
        from ec_s3.cli.reading import Demands

        target, demands = Target(key, identifier, namespace), Demands.of(config)
        return await get(store, out, target, path=output, force=force, demands=demands)

    with_store(context, run)


async def ls(store: Store, out: Output, *, prefix: str = "", long: bool = False) -> ExitCode:
    """List namespaces, or the objects below a prefix."""
    if prefix:
        return await _list_objects(store, out, prefix, long=long)
    inventory = await survey(store, out)
    folders = inventory.folders
    described = await describe_all(store, (name.partition("/")[0] for name in folders))
    rows = []
    for namespace, folder in folders.items():
        description = described.get(namespace.partition("/")[0])
        model = None if description is None else description.model
        details = {} if description is None else description.details()
        stored = human_bytes(folder.nbytes)
        if out.json:
            sums = {"objects": folder.objects, "bytes": folder.nbytes}
            ages = {"oldest": folder.oldest, "newest": folder.newest}
            out.record({"namespace": namespace, "model": model, **details, **sums, **ages})
        elif long:
            said = [f"model {model or 'unknown'}"]
            said += [f"{name.replace('_', ' ')} {text}" for name, text in details.items() if text]
            ages_text = f"newest {_age(folder.newest)}, oldest {_age(folder.oldest)}"
            out.line(namespace)
            out.line(f"    {', '.join(said)}")
            out.line(f"    {counted(folder.objects, 'object')}, {stored}, {ages_text}")
        rows.append((namespace, model or "-", folder.objects, stored, _age(folder.newest)))
    if out.json:
        return ExitCode.OK
    if not long:
        out.table("", ("Namespace", "Model", "Objects", "Stored", "Newest"), rows)
    out.note(f"{counted(len(rows), 'namespace')}; `ec-s3 ls {ROOT}NAMESPACE` lists objects")
    return ExitCode.OK


async def stat(store: Store, out: Output, target: Target, *, demands: Demands) -> ExitCode:
    """Describe one object from its header."""
    from ec_s3.cli.reading import header_of
    from ec_s3.errors import FrameMismatchError

    info = await _one(store, target)
    if info is None:
        return absent(out, target)
    try:
        header = await header_of(store, info.key, demands)
        if header is None:  # deleted meanwhile
            return absent(out, target)
        if info.size != header.object_bytes:
            raise FrameMismatchError(f"{info.size} bytes stored, {header.object_bytes} declared")
    except FrameError as error:
        return bad(out, info.key, error)
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
    from ec_s3.cli.reading import body_of, decoded

    _refuse_to_replace(path, force=force)
    info = await _one(store, target)
    if info is None:
        return absent(out, target)
    try:
        result = await body_of(store, info, demands)
        if result is None:  # deleted meanwhile
            return absent(out, target)
        header, tensor = await decoded(result, demands)
    except FrameError as error:
        return bad(out, info.key, error)
    await asyncio.to_thread(_save, path, header, tensor)
    if out.json:
        out.record({**_facts(result.info, header), "file": str(path)})
    else:
        shape = " x ".join(str(n) for n in header.spec.shape)
        out.line(f"{path}: {header.spec.dtype} {shape}, {human_bytes(header.tensor_bytes)}")
    return ExitCode.OK


def bad(out: Output, key: str, error: FrameError) -> ExitCode:
    """Say what is wrong with an object."""
    if out.json:
        kind, reason = type(error).__name__, error.reason
        out.record({"key": key, "error": kind, "reason": reason, "message": str(error)})
    else:
        out.line(f"{key}: {error}", style="red")
    return ExitCode.FINDING


async def _list_objects(store: Store, out: Output, prefix: str, *, long: bool) -> ExitCode:
    found = False
    async for info in store.list(prefix):
        found = True
        if out.json:
            facts = {"key": info.key, "bytes": info.size, "modified": info.modified}
            out.record({**facts, "etag": info.etag})
        elif long:
            moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(info.modified))
            out.line(f"{info.size:>14}  {moment}  {info.etag}  {info.key}")
        else:
            out.line(f"{human_bytes(info.size):>10}  {_age(info.modified):>8}  {info.key}")
    if not found:
        out.note(f"no object begins with {prefix}")
    return ExitCode.OK if found else ExitCode.FINDING


async def _one(store: Store, target: Target) -> ObjectInfo | None:
    found: ObjectInfo | None = None
    async for info in matching(store, target.prefix()):
        if found is not None:
            raise ConfigError(f"more than one object begins with {target.prefix()}; name one")
        found = info
    return found


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


def _age(modified: float) -> str:
    return human_seconds(max(0.0, time.time() - modified)) if modified else "-"


def _when(seconds: float) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    return f"{moment}, {_age(seconds)} ago"
