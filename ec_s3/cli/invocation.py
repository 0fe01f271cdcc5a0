"""What every command of `ec-s3` shares: the global options, the open store, errors to exit codes.

Importing it is cheap; a command's own imports happen when it runs. One process, one event loop.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ec_s3.cli.output import ExitCode, Output
from ec_s3.errors import ConfigError, ECS3Error, InvalidKeyError, RemoteError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ec_s3.config import ECConfig
    from ec_s3.store import Store

NamespaceArgument = Annotated[
    str, typer.Argument(metavar="NAMESPACE", help="As `ls` shows it, with or without its dtype.")
]
TargetArgument = Annotated[
    str, typer.Argument(metavar="KEY", help="Object key, or the beginning of keys.")
]
IdentifierOption = Annotated[
    str | None, typer.Option("--identifier", help="The item's identifier, in place of a key.")
]
NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", help="Where the identifier belongs, or all of a namespace."),
]


_PIPE_CLOSED = 141
"""Exit code of a command whose reader has gone, as of one that the signal for it has killed."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """What the global options said."""

    arguments: dict[str, Any]
    output: Output


def with_store(
    context: typer.Context, action: Callable[[Store, Output, ECConfig], Awaitable[int]]
) -> NoReturn:
    """Run a command on the configured store, and close the store."""

    async def opened(config: ECConfig, out: Output) -> int:
        from ec_s3.remote import open_store

        store = open_store(config)
        if store is None:
            raise ConfigError("no store: give --url or set EC_S3_URL")
        try:
            return await action(store, out, config)
        finally:
            await store.aclose()

    finish(context, lambda config, out: asyncio.run(opened(config, out)))


def finish(context: typer.Context, action: Callable[[ECConfig, Output], int]) -> NoReturn:
    """Run a command and turn what comes out of it into an exit code."""
    invocation: Invocation = context.obj
    out = invocation.output
    try:
        from ec_s3.config import ECConfig

        code = action(ECConfig.from_mapping(invocation.arguments), out)
        sys.stdout.flush()
    except BrokenPipeError:  # as of `| head`; there is nobody to tell
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123  no file of anybody's
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # what is buffered goes out at exit
        code = _PIPE_CLOSED
    except RemoteError as error:
        out.error(error)
        code = ExitCode.REMOTE
    except (ConfigError, InvalidKeyError, OSError) as error:
        out.error(error)
        code = ExitCode.USAGE
    except ECS3Error as error:
        out.error(error)
        code = ExitCode.FINDING
    raise typer.Exit(code)
