"""`index`: list what a namespace holds, and write that where its servers look for it.

One coroutine on an open store; changes nothing but the index. Run it after a prewarm, and now and
then beside servers that write: an index tells nothing of what was stored after its listing began.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from ec_s3.cli.invocation import NamespaceArgument, with_store
from ec_s3.cli.output import ExitCode, Output, counted, human_bytes, human_seconds
from ec_s3.keys import KEY_VERSION, parse_key

if TYPE_CHECKING:
    from ec_s3.config import ECConfig
    from ec_s3.signing import Keyring
    from ec_s3.store import Store


commands = typer.Typer()


@commands.command("index", epilog="Example: ec-s3 index org-model-0123456789abcdef")
def _index(context: typer.Context, namespace: NamespaceArgument) -> None:
    """List what a namespace holds, so that its servers need not ask for what it lacks."""

    async def run(store: Store, out: Output, config: ECConfig) -> int:
        return await index(store, out, namespace, keyring=config.keyring())

    with_store(context, run)


async def index(store: Store, out: Output, namespace: str, *, keyring: Keyring | None) -> ExitCode:
    """Make the index of a namespace anew.

    Raises:
        InvalidKeyError: no namespace as `ls` shows it, with or without its dtype.
    """
    from ec_s3.indexing import list_tags, write_index  # numpy takes longer than `--help` may

    name = namespace.strip("/").removeprefix(f"v{KEY_VERSION}/").partition("/")[0]
    parse_key(f"v{KEY_VERSION}/{name}/bfloat16/00/{'0' * 64}")
    made, started = time.time(), time.monotonic()
    with out.progress("listing") as advance:
        tags = await list_tags(store, name, on_item=advance)
    nbytes = await write_index(store, tags, namespace=name, made=made, keyring=keyring)
    seconds = time.monotonic() - started
    if out.json:
        record = {"namespace": name, "items": len(tags), "bytes": nbytes, "seconds": seconds}
        out.record({**record, "signed": keyring is not None})
        return ExitCode.OK
    out.line(f"items    {len(tags):,}")
    signed = f", signed with {keyring.signer}" if keyring is not None else ""
    out.line(f"stored   {human_bytes(nbytes)}{signed}")
    out.note(
        f"{counted(len(tags), 'item')} listed in {human_seconds(seconds)}; running servers read "
        "the index within two minutes"
    )
    return ExitCode.OK
