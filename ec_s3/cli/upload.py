"""`upload`: encoder outputs made elsewhere, from safetensors files into the bucket.

Opens the store, runs the pipeline of `ingest`, says what became of the items. What is in the bucket
already stays as it is, so an interrupted upload is continued by running it again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003  typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from ec_s3.cli.invocation import Invocation, with_store
from ec_s3.cli.output import ExitCode, Output, counted, human_bytes, human_seconds
from ec_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ec_s3.config import ECConfig
    from ec_s3.intake import UploadReport
    from ec_s3.keys import Namespace
    from ec_s3.store import Store

commands = typer.Typer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the servers' namespace has beside the settings; see `Namespace`."""

    dtype: str
    encoder_config: str
    quantization: str
    hash_scheme: str


@commands.command(
    "upload",
    epilog="Example: ec-s3 upload outputs/ --model org/model --encoder-config 0123456789abcdef",
)
def command(
    context: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH", help="Safetensors files, or folders of them; repeatable."),
    ],
    *,
    model: Annotated[
        str | None, typer.Option(help="Identity of the model; unset: setting `model`.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Its revision; unset: setting `revision`.")
    ] = None,
    weight_version: Annotated[
        str | None, typer.Option(help="Name of the weights; unset: setting `weight_version`.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="Fingerprint of an adapter; unset: setting `adapter`.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Element type of the tensors.")] = "bfloat16",
    encoder_config: Annotated[
        str, typer.Option(help="Fingerprint of the encoder's configuration.")
    ] = "",
    quantization: Annotated[str, typer.Option(help="How the encoder is quantised.")] = "",
    hash_scheme: Annotated[str, typer.Option(help="How identifiers are made of content.")] = "",
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Uploads at a time; unset: setting `max_uploads`.")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Bytes a second, such as 50MB/s; unset: setting `upload_rate`."),
    ] = None,
) -> None:
    """Store encoder outputs that were made elsewhere: one tensor per item, named by `mm_hash`.

    What namespace.json of the servers' namespace says goes into the options; `salt` is a setting.
    """
    invocation: Invocation = context.obj
    given = {
        "model": model,
        "revision": revision,
        "weight_version": weight_version,
        "adapter": adapter,
        "max_uploads": parallel,
        "upload_rate": rate,
    }
    invocation.arguments.update({k: v for k, v in given.items() if v is not None})
    identity = Identity(
        dtype=dtype,
        encoder_config=encoder_config,
        quantization=quantization,
        hash_scheme=hash_scheme,
    )

    async def run(store: Store, out: Output, config: ECConfig) -> int:
        return await upload(store, out, paths, config=config, identity=identity)

    with_store(context, run)


async def upload(
    store: Store, out: Output, paths: Sequence[Path], *, config: ECConfig, identity: Identity
) -> ExitCode:
    """Upload what files hold, and report.

    Raises:
        ConfigError: no model, no such path, or the namespace is switched off.
        RemoteError: the store could not be used, at once or later.
    """
    from ec_s3.ingest import ingest, tensor_files

    namespace = _namespace(config, identity)
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} does not exist; name files of safetensors or folders")
    with _told(out) as tell:
        sources = tensor_files(paths, namespace)
        report = await ingest(store, sources, config, namespace, on_item=tell)
    _report(report, namespace, out)
    if report.stopped is not None:
        raise report.stopped
    if not report.failures:
        return ExitCode.OK
    return ExitCode.FINDING if report.written + report.present else ExitCode.NOTHING


def _namespace(config: ECConfig, identity: Identity) -> Namespace:
    from ec_s3.keys import Namespace

    if config.model is None:
        raise ConfigError("model is not set: give --model as the servers have it")
    return Namespace(
        model=config.model,
        dtype=identity.dtype,
        revision=config.revision,
        encoder_config=identity.encoder_config,
        quantization=identity.quantization,
        weight_version=config.weight_version,
        adapter=config.adapter,
        hash_scheme=identity.hash_scheme,
        salt=config.salt.get_secret_value() if config.salt is not None else "",
    )


@contextlib.contextmanager
def _told(out: Output) -> Iterator[Callable[[str, str, int], object]]:
    """What is called for every item: moves the progress, names what fails."""
    from ec_s3.types import PutOutcome

    with out.progress("uploading") as advance:

        def tell(name: str, outcome: str, _nbytes: int) -> None:
            advance(1)
            if outcome in set(PutOutcome):
                return
            if out.json:
                out.record({"item": name, "error": outcome})
            else:
                out.line(f"{name}: {outcome}", style="red")

        yield tell


def _report(report: UploadReport, namespace: Namespace, out: Output) -> None:
    if out.json:
        out.record(
            {
                "namespace": namespace.id,
                "written": report.written,
                "present": report.present,
                "failed": report.failures,
                "raw_bytes": report.raw_bytes,
                "stored_bytes": report.stored_bytes,
                "seconds": report.seconds,
                "most_items": report.most_items,
                "most_bytes": report.most_bytes,
                "complete": report.stopped is None,
            }
        )
        return
    rate = report.raw_bytes / max(report.seconds, 1e-9)
    out.line(f"namespace  {namespace.id}")
    out.line(
        f"written    {report.written:,}, {human_bytes(report.raw_bytes)} as "
        f"{human_bytes(report.stored_bytes)}"
    )
    out.line(f"present    {report.present:,}")
    out.line(f"failed     {report.failures:,}")
    out.note(
        f"{counted(report.items, 'item')} in {human_seconds(report.seconds)}, "
        f"{human_bytes(rate)}/s; at most {report.most_items:,} under way, "
        f"{human_bytes(report.most_bytes)}"
    )
