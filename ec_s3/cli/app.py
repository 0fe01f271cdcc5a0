"""The `ec-s3` command: global options, sub-commands, errors to exit codes.

Each command imports what it needs when it runs, so that `ec-s3 --help` is quick. One process, one
event loop; nothing here outlives the command.
"""

from __future__ import annotations

import asyncio
import io
import logging
import sys
from pathlib import Path  # noqa: TC003  typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from ec_s3 import __version__
from ec_s3.cli import (
    bench,
    control,
    cost,
    gc,
    index,
    objects,
    policy,
    prewarm,
    removal,
    settings,
    upload,
    usage,
    verify,
)
from ec_s3.cli.invocation import Invocation, finish
from ec_s3.cli.output import Output

if TYPE_CHECKING:
    from ec_s3.config import ECConfig

app = typer.Typer(
    name="ec-s3",
    help="Look after the store of encoder outputs: check it, fill it, clean it, cost it.",
    epilog="Exit codes: 0 all well, 1 something was found, 2 wrong arguments or settings, "
    "3 the store could not be used, 4 nothing of a job came about.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for part in (objects, verify, usage, removal, gc):
    app.add_typer(part.commands)
app.add_typer(control.commands, name="control")
app.add_typer(index.commands)
app.add_typer(prewarm.commands)
app.add_typer(upload.commands)
app.add_typer(cost.commands)
app.add_typer(bench.commands)
app.add_typer(policy.commands)
app.add_typer(settings.commands)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ec-s3 {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help="Store, in place of the configured one.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log to standard error.")] = False,
    version: Annotated[  # noqa: ARG001  its callback answers
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Remember the global options; settings are read when a command needs them."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    if verbose:
        logging.getLogger("ec_s3").setLevel(logging.DEBUG)
    arguments = {"url": url, "config_file": config}
    given = {name: value for name, value in arguments.items() if value is not None}
    context.obj = Invocation(given, Output(json=json))


@app.command(epilog="Example: ec-s3 --url s3://bucket/cache doctor")
def doctor(context: typer.Context) -> None:
    """Show every setting and its source; check credentials, speed and what the store does."""

    def run(config: ECConfig, out: Output) -> int:
        from ec_s3.cli.doctor import examine

        return asyncio.run(examine(config, out))

    finish(context, run)


@app.command(epilog="Example: ec-s3 demo --model qwen2-vl --workdir demo")
def demo(
    context: typer.Context,
    workdir: Annotated[Path | None, typer.Option(help="Folder for logs and pictures.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Tiny model; repeatable.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Element type; repeatable.")] = None,
) -> None:
    """Show a cold and a warm vLLM on an embedded S3 server."""
    from ec_s3.cli import demo as demonstration

    invocation: Invocation = context.obj
    code = demonstration.run(
        workdir=workdir, model=model or [], dtype=dtype or [], json=invocation.output.json
    )
    raise typer.Exit(code)


def main() -> None:
    """Entry point of the `ec-s3` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name of a model need not fit the locale
        sys.stdout.reconfigure(errors="backslashreplace")
    app()


if __name__ == "__main__":
    main()
