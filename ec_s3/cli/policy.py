"""`policy`: print the rights that each role needs, as IAM, bucket and lifecycle documents.

Reads the settings and nothing else: no request is sent. A document goes to standard output and
nothing beside it, so that it can be written into a file.
"""

from __future__ import annotations

import json
import math
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from ec_s3.cli.invocation import finish
from ec_s3.cli.output import ExitCode, Output
from ec_s3.errors import ConfigError

if TYPE_CHECKING:
    from ec_s3.config import ECConfig
    from ec_s3.permissions import Document, Scope

commands = typer.Typer()

EXPIRE_DAYS = 30
DAY = 86400.0


class Name(StrEnum):
    """The documents."""

    READER = "reader"
    WRITER = "writer"
    PREWARM = "prewarm"
    MAINTAINER = "maintainer"
    BUCKET = "bucket"
    LIFECYCLE = "lifecycle"


@commands.command("policy", epilog="Example: ec-s3 policy writer > writer.json")
def command(
    context: typer.Context,
    document: Annotated[
        Name | None,
        typer.Argument(
            metavar="DOCUMENT",
            help="IAM policy of a role (`reader`, `writer`, `prewarm`, `maintainer`), or the "
            "`bucket`'s policy or `lifecycle`; without one, a table of who needs what.",
        ),
    ] = None,
    partition: Annotated[str, typer.Option(help="Part of AWS: aws, aws-cn or aws-us-gov.")] = "aws",
    expire_days: Annotated[
        int | None,
        typer.Option(
            help="Age in days at which items expire, in `lifecycle`; unset: setting "
            f"`object_lifetime`, else {EXPIRE_DAYS}."
        ),
    ] = None,
) -> None:
    """Print the rights that each role needs in the configured bucket, and no more."""

    def run(config: ECConfig, out: Output) -> int:
        scope = _scope(config, partition)
        days = _days(config) if expire_days is None else expire_days
        if document is not None:
            _print(_document(document, scope, days), out)
        elif out.json:
            out.record({str(n): _document(n, scope, days) for n in Name})
        else:
            _table(scope, out)
        return ExitCode.OK

    finish(context, run)


def _scope(config: ECConfig, partition: str) -> Scope:
    from ec_s3.permissions import Scope
    from ec_s3.url import S3Location

    location = config.location()
    if not isinstance(location, S3Location):
        raise ConfigError("no bucket: give --url s3://bucket/prefix or set EC_S3_URL")
    return Scope.of(location, config.s3_options(), partition=partition)


def _days(config: ECConfig) -> int:
    lifetime = config.object_lifetime
    return EXPIRE_DAYS if lifetime is None else math.ceil(lifetime / DAY)


def _document(name: Name, scope: Scope, days: int) -> Document:
    from ec_s3.permissions import Role, bucket_policy, lifecycle, role_policy

    if name is Name.BUCKET:
        return bucket_policy(scope)
    if name is Name.LIFECYCLE:
        return lifecycle(scope, days=days)
    return role_policy(Role(name.value), scope)


def _print(document: Document, out: Output) -> None:
    if out.json:
        out.record(document)
    else:
        for line in json.dumps(document, indent=2).splitlines():
            out.line(line)


def _table(scope: Scope, out: Output) -> None:
    from ec_s3.permissions import Role, actions, purposes

    rows = []
    for action in sorted({action for role in Role for action in actions(role, scope)}):
        reasons = purposes(action, scope)
        every = list(dict.fromkeys(reason for given in reasons.values() for reason in given))
        rows.append((action, ", ".join(reasons), "; ".join(every)))
    out.table(f"Rights in {scope.objects_arn}", ("Action", "Roles", "Needed to"), rows)
    out.note("`ec-s3 policy ROLE`, `policy bucket` and `policy lifecycle` print the documents")
