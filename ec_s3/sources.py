"""Where settings come from, and what their values look like outside Python.

Owns reading the environment, the YAML files and LMCache's spellings, and parsing sizes and
durations. Runs wherever an `ECConfig` is built; reads files and nothing else, never validates a
setting (that is `config`'s), never touches credentials.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import yaml

from ec_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

ENV_PREFIX = "EC_S3_"
LMCACHE_ENV_PREFIX = "LMCACHE_EC_"
LMCACHE_FILE_VARIABLE = "LMCACHE_CONFIG_FILE"

LMCACHE_NAMES: Mapping[str, str] = {
    "url": "remote_url",
    "max_local_cpu_size": "max_local_cpu_size (GiB)",
    "local_disk": "local_disk",
    "max_local_disk_size": "max_local_disk_size (GiB)",
    "blocking_timeout": "blocking_timeout_secs",
}
"""Our settings that LMCache's encoder cache also has, with its spelling."""

_ENV_NAMES = {"config": "config_file"}
_GIB = 1 << 30
_CREDENTIAL = re.compile(r"access_?key|secret|session_?token|password|credential", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b|[kmgt]i|b)?", re.IGNORECASE | re.ASCII)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)?", re.IGNORECASE | re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 1e9
_AWS_HOST = re.compile(
    r"(?P<bucket>.+)\.s3(?:express-[a-z0-9-]+)?[.-](?P<region>[a-z]{2}(?:-[a-z]+)+-\d)\.amazonaws\.com"
)


@dataclass(frozen=True, slots=True)
class Located:
    """A raw value and the source that it came from, for example `environment EC_S3_URL`."""

    value: object
    source: str


Layer = dict[str, Located]
"""The settings of one source by name, unknown names included."""


def is_credential(name: str) -> bool:
    """Whether a setting's name says that its value is a credential."""
    return _CREDENTIAL.search(name) is not None


def read_arguments(arguments: Mapping[str, object]) -> Layer:
    """Settings passed in by the caller."""
    return {name: Located(value, "argument") for name, value in arguments.items()}


def read_environment(environ: Mapping[str, str]) -> Layer:
    """Settings in `EC_S3_*` variables; an empty variable counts as unset."""
    layer: Layer = {}
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX) and environ[variable]:
            name = variable.removeprefix(ENV_PREFIX).lower()
            layer[_ENV_NAMES.get(name, name)] = Located(
                environ[variable], f"environment {variable}"
            )
    return layer


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that reads its settings nowhere."""
    mine = (ENV_PREFIX, LMCACHE_ENV_PREFIX, LMCACHE_FILE_VARIABLE)
    return {name: value for name, value in environ.items() if not name.startswith(mine)}


def read_file(path: Path) -> Layer:
    """Settings in a YAML file: the `ec:` map, before `ec_` keys, before top-level keys.

    Raises:
        ConfigError: the file cannot be read or is no YAML map.
    """
    document, prefixed, nested = _split(path)
    source = f"file {path}"
    return {name: Located(v, source) for name, v in {**document, **prefixed, **nested}.items()}


def read_keys(path: Path) -> str:
    """Text of a file with signing keys; nothing of it is in any error.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error}; correct the path or the file") from error


def read_lmcache(environ: Mapping[str, str]) -> Layer:
    """Settings spelt for LMCache's encoder cache, translated to ours.

    Only what LMCache itself reserves for the encoder cache counts: `LMCACHE_EC_*` variables and
    the `ec:` map or `ec_` keys of its file. The rest of that file describes a KV cache.

    Raises:
        ConfigError: the file cannot be read, or a value cannot be translated.
    """
    raw: Layer = {}
    if file := environ.get(LMCACHE_FILE_VARIABLE):
        _, prefixed, nested = _split(Path(file))
        source = f"file {file} ({LMCACHE_FILE_VARIABLE})"
        raw.update({name: Located(v, source) for name, v in {**prefixed, **nested}.items()})
    for variable in sorted(environ):
        if variable.startswith(LMCACHE_ENV_PREFIX) and environ[variable]:
            name = variable.removeprefix(LMCACHE_ENV_PREFIX).lower()
            raw[name] = Located(environ[variable], f"environment {variable}")
    return _translate(raw)


def read_lmcache_file(path: Path) -> tuple[Layer, Layer]:
    """Every setting of an LMCache file: as it is spelt there, and translated to ours.

    Unlike `read_lmcache` it takes those of the KV cache too, where the encoder cache has none.

    Raises:
        ConfigError: the file cannot be read, or a value cannot be translated.
    """
    document, prefixed, nested = _split(path)
    values = {**document, **prefixed, **nested}
    raw = {name: Located(value, f"file {path}") for name, value in values.items()}
    return raw, _translate(raw)


def parse_size(value: object) -> int:
    """Bytes from an int or a text such as `8GiB`, `512MiB`, `1GB`, `8Gi`.

    Raises:
        ValueError: anything else, floats and negative numbers included.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a size: write bytes, or a number with a unit such as '8GiB'")
    unit = (match[2] or "b").lower()
    power = "bkmgt".index(unit[0])
    scale: int = (1024 if "i" in unit else 1000) ** power
    whole, _, fraction = match[1].partition(".")
    return int(whole) * scale + int(float(f"0.{fraction or 0}") * scale)


def parse_rate(value: object) -> int | None:
    """Bytes per second from what `parse_size` takes, with or without `/s`; None stays None."""
    if value is None:
        return None
    if isinstance(value, str):
        value = value.strip().removesuffix("/s")
    return parse_size(value)


def parse_duration(value: object) -> float:
    """Seconds from a number or a text such as `250ms`, `2s`, `1m`, `30d`.

    Raises:
        ValueError: anything else, negative numbers and those above 30 years included.
    """
    seconds: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        seconds = float(match[1]) * _SECONDS[(match[2] or "s").lower()]
    if seconds is not None and seconds > _LONGEST:  # no clock of the system could wait for it
        raise ValueError("not a duration that can be waited for: at most 30 years, in seconds 1e9")
    if seconds is None or not seconds >= 0:
        raise ValueError("not a duration: write seconds, or a number with a unit such as '250ms'")
    return float(seconds)


def parse_lifetime(value: object) -> float | None:
    """Seconds from what `parse_duration` takes; None stays None."""
    return None if value is None else parse_duration(value)


def parse_count(value: object) -> int:
    """A whole number from an int or its decimal text.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"\d+", value.strip(), re.ASCII):
        return int(value)
    raise ValueError("not a whole number")


def parse_switch(value: object) -> bool:
    """A yes or no from a bool or one of the usual words.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in {"true", "yes", "on", "1"}:
        return True
    if word in {"false", "no", "off", "0"}:
        return False
    raise ValueError("not a switch: write true or false")


def parse_tags(value: object) -> object:
    """Object tags from a map, its JSON, or `key=value,key=value`; other input comes back as is."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not valid JSON: {error}") from None
    pairs = [item.partition("=") for item in value.split(",") if item.strip()]
    return {key.strip(): text.strip() for key, _, text in pairs}


def parse_yaml(text: str) -> object:
    """What a YAML text holds; the error names the place and repeats nothing: secrets may be there.

    Raises:
        ValueError: it is no YAML, or has a value that is none of its type.
    """
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise ValueError(f"no YAML{place}") from None
    # A date that does not exist, a number too long, a tag that does not fit, too many brackets.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        raise ValueError("no YAML, or a value that is none of its kind") from None


def _split(path: Path) -> tuple[dict[str, object], dict[str, object], dict[str, object]]:
    """Top-level keys, `ec_` keys without their prefix, and the `ec:` map of a YAML file."""
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"configuration file {path} cannot be read: {error}; correct the path or the file"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"configuration file {path} cannot be read: {error}; correct the file"
        ) from None
    document = {} if document is None else document
    nested = document.get("ec") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(nested, dict | None):
        raise ConfigError(
            f"configuration file {path} holds no map of settings; write lines like 'url: s3://...'"
        )
    named = {str(key): value for key, value in document.items() if key != "ec"}
    prefixed = {key[3:]: value for key, value in named.items() if key.startswith("ec_")}
    plain = {key: value for key, value in named.items() if not key.startswith("ec_")}
    return plain, prefixed, {str(key): value for key, value in (nested or {}).items()}


def _translate(raw: Layer) -> Layer:
    """LMCache's names and units to ours; what it does not know passes through unchanged."""
    layer = dict(raw)
    extra = _extra_config(layer.pop("extra_config", None))
    layer.pop("local_cpu", None)  # the host tier is always on, as in LMCache's encoder cache
    for name in ("max_local_cpu_size", "max_local_disk_size"):
        if name in layer:
            size = _gibibytes(name, layer.pop(name))
            if size is not None:
                layer[name] = size
    if "local_disk" in layer and not layer["local_disk"].value:
        del layer["local_disk"]
    if "blocking_timeout_secs" in layer:
        layer["blocking_timeout"] = layer.pop("blocking_timeout_secs")
    remote = layer.pop("remote_url", None)
    if remote is not None and remote.value:
        options = {key: extra.pop(key, None) for key in _URL_OPTIONS}
        layer["url"] = Located(_remote_url(str(remote.value), options), remote.source)
    layer.update({f"extra_config.{key}": value for key, value in extra.items()})
    return layer


_URL_OPTIONS = ("s3_region", "s3_file_prefix", "disable_tls")


def _extra_config(located: Located | None) -> Layer:
    if located is None or not located.value:
        return {}
    value = located.value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise ConfigError(f"extra_config ({located.source}) is no map; write a JSON object")
    return {str(key): Located(item, located.source) for key, item in value.items()}


def _gibibytes(name: str, located: Located) -> Located | None:
    """LMCache counts GiB, in floats; nothing for zero, which means its default."""
    try:
        number = float(str(located.value)) * _GIB
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(
            f"{name}={located.value!r} ({located.source}): not a number of GiB; "
            "LMCache's spelling takes a plain number, such as 2"
        )
    return Located(int(number), located.source) if number > 0 else None


def _remote_url(url: str, options: Mapping[str, Located | None]) -> str:
    """LMCache's `s3://bucket.host` with its options in `extra_config`, as one URL of ours."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url  # whoever parses it says so
    if parts.scheme != "s3" or "@" in parts.netloc:
        return url
    query = dict(parse_qsl(parts.query))
    bucket, path = parts.netloc, parts.path
    plain_http = options["disable_tls"]
    tls_off = plain_http is not None and str(plain_http.value).lower() in {"true", "1"}
    if match := _AWS_HOST.fullmatch(bucket):
        bucket = match["bucket"]
        query.setdefault("region", match["region"])
    elif "." in bucket:  # LMCache knows virtual-hosted names only, so a dot begins the host
        bucket, _, host = bucket.partition(".")
        query.setdefault("endpoint", f"{'http' if tls_off else 'https'}://{host}")
    if (prefix := options["s3_file_prefix"]) is not None:
        path = f"{path.rstrip('/')}/{quote(str(prefix.value).strip('/'))}"
    if (region := options["s3_region"]) is not None:
        query["region"] = str(region.value)
    return parts._replace(netloc=bucket, path=path, query=urlencode(query)).geturl()
