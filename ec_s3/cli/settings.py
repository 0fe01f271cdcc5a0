"""`config`: every setting with its value and its source; settings converted from LMCache's.

Reads settings and files of settings, sends nothing. Never shows a secret, nor the value of anything
that a converted file holds beside the settings that are known here.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from ec_s3.cli.invocation import finish
from ec_s3.cli.output import ExitCode, Output, human_bytes, human_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ec_s3.config import ECConfig
    from ec_s3.sources import Located

commands = typer.Typer()
_config = typer.Typer(invoke_without_command=True)
commands.add_typer(_config, name="config")

_KV_ONLY: Mapping[str, str] = {
    "chunk_size": "items are stored whole, there are no chunks of tokens",
    "local_cpu": "the host tier is always on",
    "remote_serde": "objects have a format of their own",
    "save_decode_cache": "nothing is made while decoding",
    "cache_policy": "the tiers evict what was used least recently",
    "use_layerwise": "an item has no layers",
}
_URL_PARTS = frozenset({"s3_region", "s3_file_prefix", "disable_tls"})


@_config.callback(epilog="Example: ec-s3 --json config")
def command(context: typer.Context) -> None:
    """Show every setting, its value and where that came from."""
    if context.invoked_subcommand is not None:
        return

    def run(config: ECConfig, out: Output) -> int:
        if out.json:
            out.record(described(config))
        else:
            table(config, out)
        return ExitCode.OK

    finish(context, run)


@_config.command("from-lmcache", epilog="Example: ec-s3 config from-lmcache lmcache.yaml > ec.yaml")
def from_lmcache(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="LMCache's YAML file.")],
) -> None:
    """Convert LMCache's settings into ours, and say what was left out and why."""
    finish(context, lambda _config, out: convert(file, out))


def described(config: ECConfig) -> dict[str, object]:
    """Every setting and its source, for programs; secrets hidden."""
    settings = config.model_dump(mode="json")  # hides what is secret
    return {"settings": settings, "sources": {name: config.source(name) for name in settings}}


def table(config: ECConfig, out: Output) -> None:
    """Every setting and its source, for people."""
    names = type(config).model_fields
    rows = [(name, shown(config, name), config.source(name)) for name in names]
    out.table("Settings", ("Name", "Value", "Source"), rows)


def shown(config: ECConfig, name: str) -> str:
    """A setting's value for people, secrets hidden."""
    from ec_s3.complaints import SECRETS

    value = getattr(config, name)
    if value is None or value == "" or value == {}:
        return "-"
    if name in SECRETS:
        return "<hidden>"
    if name.endswith("_size"):
        return human_bytes(value)
    if name == "upload_rate":
        return f"{human_bytes(value)}/s"
    if isinstance(value, float):
        return human_seconds(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def convert(path: Path, out: Output) -> ExitCode:
    """Write the settings that an LMCache file has for us as YAML of ours.

    Raises:
        ConfigError: the file cannot be read, or a value in it cannot be used.
    """
    import yaml

    from ec_s3.config import ECConfig
    from ec_s3.sources import LMCACHE_NAMES, read_lmcache_file

    theirs, ours = read_lmcache_file(path)
    settings = {name: item.value for name, item in ours.items() if name in LMCACHE_NAMES}
    dropped = dict(_dropped(theirs, ours, settings))
    if str(settings.get("url", "s3://")).partition(":")[0] not in ("s3", "file"):
        dropped["remote_url"] = "only s3:// and file:// are stores here"
        del settings["url"]
    checked = ECConfig.from_mapping(settings)  # a file that does not work is no help
    settings = {name: _written(name, settings[name], checked) for name in settings}
    if out.json:
        out.record({"settings": settings, "dropped": dropped})
        return ExitCode.OK
    for line in yaml.safe_dump(settings, sort_keys=False).splitlines():
        out.line(line)
    for name, reason in dropped.items():
        out.note(f"left out {name}: {reason}")
    if "max_local_cpu_size" in settings or "local_disk" in settings:
        out.note("sizes and folders were LMCache's: check that both caches fit beside each other")
    return ExitCode.OK


def _dropped(
    theirs: Mapping[str, Located], ours: Mapping[str, Located], kept: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Names, never values, of what has no place here, with the reason."""
    from ec_s3.sources import LMCACHE_NAMES, is_credential

    known = {text.partition(" ")[0]: name for name, text in LMCACHE_NAMES.items()}
    for name in {**theirs, **ours}:
        bare = name.removeprefix("extra_config.")
        if name in kept or known.get(name) in kept or name == "extra_config":
            continue
        if is_credential(bare):
            yield name, "credentials belong to the AWS chain: AWS_* variables, a profile, a role"
        elif name in known:
            yield name, "it is empty or zero, which leaves our default"
        elif bare in _URL_PARTS:
            yield name, "it is a part of remote_url, which is not set"
        else:
            yield name, _KV_ONLY.get(bare, "it is about LMCache's KV cache")


def _written(name: str, value: object, checked: ECConfig) -> object:
    """A value as a person would write it."""
    if not name.endswith("_size"):
        return value if isinstance(value, int | float | bool) else str(getattr(checked, name))
    nbytes = int(getattr(checked, name))
    for unit in ("GiB", "MiB"):
        scale = 1 << (30 if unit == "GiB" else 20)
        if nbytes and nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    return nbytes
