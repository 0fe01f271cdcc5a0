"""`prewarm`: put the encoder outputs of known media into the bucket before anybody asks for them.

Declares the command; `prewarm_job` is what it runs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ec_s3.cli.invocation import Invocation, finish

if TYPE_CHECKING:
    from ec_s3.cli.output import Output
    from ec_s3.config import ECConfig

commands = typer.Typer()

OptionsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- VLLM OPTIONS",
        help="The server's own options, as on its command line: dtype, revision, processor"
        " settings.",
        show_default=False,
    ),
]
ModelOption = Annotated[str, typer.Option(help="As the server's --model, spelled the same.")]
MediaOption = Annotated[
    str,
    typer.Option(
        help="Manifest (.jsonl or .csv of uri, modality, uuid, processor), folder, pattern, file,"
        " or s3://bucket/prefix."
    ),
]
ExpectOption = Annotated[
    str | None,
    typer.Option(
        help="Stop before the first upload unless a server would look for these objects: its URL,"
        " or a namespace.json.",
    ),
]
ErrorsOption = Annotated[
    Path | None, typer.Option(help="Write a JSON line for each entry that failed.")
]
ReportOption = Annotated[Path | None, typer.Option(help="Write the report as JSON.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Count and estimate; encode and write nothing.")
]
ShardOption = Annotated[
    str, typer.Option(help="This machine's share of the entries: 0/8 to 7/8 for eight.")
]
IndexOption = Annotated[
    bool | None,
    typer.Option(
        "--index/--no-index",
        help="Write the namespace's index at the end; without --shard that is the default.",
    ),
]
BatchOption = Annotated[
    int, typer.Option(min=1, max=4096, help="Entries that are encoded together.")
]
RequestsOption = Annotated[
    float | None, typer.Option(min=0.01, help="Most requests a second to the buckets.")
]
RateOption = Annotated[
    str | None, typer.Option(help="Most bytes a second to upload, such as 50MB/s.")
]
PricesOption = Annotated[Path | None, typer.Option(help="Prices for --dry-run, see `ec-s3 cost`.")]


@commands.command(
    epilog="Example: ec-s3 --url s3://bucket/cache prewarm --model Qwen/Qwen2.5-VL-7B-Instruct"
    " --media catalogue.jsonl --errors failed.jsonl -- --dtype bfloat16"
)
def prewarm(
    context: typer.Context,
    options: OptionsArgument = None,
    *,
    model: ModelOption,
    media: MediaOption,
    expect: ExpectOption = None,
    errors: ErrorsOption = None,
    report: ReportOption = None,
    dry_run: DryRunOption = False,
    shard: ShardOption = "0/1",
    index: IndexOption = None,
    batch_size: BatchOption = 32,
    max_requests: RequestsOption = None,
    upload_rate: RateOption = None,
    prices: PricesOption = None,
) -> None:
    """Encode media ahead of time, so that no user waits for the encoder.

    Ends with 1 when some entries failed, and with 4 when all did.
    """
    invocation: Invocation = context.obj
    if upload_rate is not None:
        invocation.arguments["upload_rate"] = upload_rate

    def run(config: ECConfig, out: Output) -> int:
        from ec_s3.cli.prewarm_job import Request, run_job
        from ec_s3.prewarm.shard import Shard

        share = Shard.parse(shard)
        connector = {name: str(value) for name, value in invocation.arguments.items()}
        if config.url is not None:
            connector["url"] = config.url  # the same bucket, whatever the server's options name
        request = Request(
            model=model,
            media=media,
            options=tuple(options or ()),
            expect=expect,
            errors=errors,
            report=report,
            shard=share,
            index=share.count == 1 if index is None else index,
            dry_run=dry_run,
            batch_size=batch_size,
            max_requests=max_requests,
            prices=prices,
            connector=connector,
        )
        return asyncio.run(run_job(request, config, out))

    finish(context, run)
