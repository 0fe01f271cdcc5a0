"""Whether a job's outputs go where a server looks for them: compared before the first upload.

A server's word comes from its `/metrics`, or from the `namespace.json` that it wrote into the
bucket. Reads, and never writes; waits for the network only in `read_expected`.
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ec_s3.errors import ConfigError, ECS3Error
from ec_s3.remote import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ec_s3.config import ECConfig
    from ec_s3.keys import Namespace

SECONDS = 20.0
"""How long a server or a bucket may take to answer."""

MAX_PAGE_BYTES = 64 << 20
"""Most that is read of a server's metrics."""

MAX_MANIFEST_BYTES = 1 << 20
"""Most that is read of a `namespace.json` in a bucket."""

METRIC = "namespace_info"
"""What tells of a server's namespace, in the table of metrics."""

HELP = "--expect takes a server's URL, or a namespace.json: s3://..., or a path"

_SAMPLE = re.compile(rf"^vllm:ec_s3_{METRIC}\{{(.*)\}} 1(?:\.0)?$", re.MULTILINE)
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")

_OF_NAMESPACE = (
    *("model", "revision", "quantization", "weight_version", "adapter"),
    *("encoder_config", "hash_scheme", "salt", "key_version"),
)
_SETTINGS = ("mm_processor_kwargs", "media_io_kwargs")
_OF_FACTS = ("dtype", "model_argument", *_SETTINGS)
FIELDS = (*_OF_NAMESPACE, *_OF_FACTS)
"""What is compared, in the order in which differences are told."""

_MEANING = {
    "model_argument": "vLLM's --model, which identifiers are made of, letter by letter",
    "encoder_config": "the model's own configuration, or settings that change its encoder's output",
    "hash_scheme": "how vLLM makes identifiers: its version, or --mm-hasher-algorithm",
    "key_version": "another release of ec_s3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a server uses.

    Attributes:
        source: who says so.
        fields: values by name, those of `FIELDS` that it tells; `vllm` is its version.
    """

    source: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which server and job do not agree."""

    field: str
    server: object
    job: object

    def __str__(self) -> str:
        meaning = f" ({_MEANING[self.field]})" if self.field in _MEANING else ""
        if self.field == "salt":
            return "salt: differs"
        return f"{self.field}: server {_shown(self.server)}, job {_shown(self.job)}{meaning}"


def fields_of(manifest: bytes | str) -> dict[str, object]:
    """What a `namespace.json` says, as the fields of an `Expected`.

    Raises:
        ValueError: it is none.
    """
    body = json.loads(manifest)
    try:
        return {"hash_scheme": "", **body["extra"], **body["namespace"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"no description of a namespace: {error!r}") from error


def compare(
    expected: Expected, namespace: Namespace, facts: Mapping[str, object]
) -> list[Difference]:
    """The fields in which a job differs from a server; what the server does not tell is left out.

    Args:
        expected: the server's.
        namespace: the job's.
        facts: the job's, as its own `namespace.json` would have them.
    """
    ours = fields_of(namespace.manifest({**facts, "dtype": namespace.dtype}))
    theirs = expected.fields
    return [
        Difference(name, theirs[name], ours.get(name))
        for name in FIELDS
        if name in theirs and _plain(theirs[name]) != _plain(ours.get(name))
    ]


def check(expected: Expected, namespace: Namespace, facts: Mapping[str, object]) -> None:
    """Make sure that a server will find what a job writes.

    Raises:
        ConfigError: it would not; the message names every field, with both values.
    """
    differences = compare(expected, namespace, facts)
    if not differences:
        return
    lines = [f"{expected.source} and this job do not agree, so nothing was uploaded:"]
    lines += [f"  {difference}" for difference in differences]
    versions = expected.fields.get("vllm"), facts.get("vllm")
    if versions[0] != versions[1]:
        lines.append(f"  (vLLM: server {_shown(versions[0])}, job {_shown(versions[1])})")
    raise ConfigError("\n".join(lines))


async def read_expected(source: str, config: ECConfig) -> Expected:
    """Find out what a server uses.

    Args:
        source: URL of a server, or where a `namespace.json` is.
        config: how to reach buckets.

    Raises:
        ConfigError: that cannot be found out.
    """
    scheme = urlsplit(source).scheme
    try:
        async with asyncio.timeout(SECONDS):
            if scheme in ("http", "https"):
                page = await asyncio.to_thread(_read_page, source)
                return Expected(source=source, fields=_fields_of_page(page))
            if scheme == "s3":
                body = await _read_object(source, config)
            else:
                body = await asyncio.to_thread(_read_file, source)
            return Expected(source=source, fields=fields_of(body))
    except TimeoutError:
        raise ConfigError(f"{source} gave no answer within {SECONDS:.0f} s; {HELP}") from None
    except ConfigError:
        raise
    except (ECS3Error, OSError, HTTPException, ValueError) as error:
        raise ConfigError(f"{source} does not tell its namespace: {error}; {HELP}") from error


def _read_page(url: str) -> str:
    parts = urlsplit(url)
    path = parts.path.rstrip("/").removesuffix("/v1").removesuffix("/metrics")
    page = parts._replace(path=f"{path}/metrics", query="", fragment="").geturl()
    with urllib.request.urlopen(page, timeout=SECONDS) as answer:  # noqa: S310  http(s): checked
        body: bytes = answer.read(MAX_PAGE_BYTES)
    return body.decode("utf-8", "replace")


def _fields_of_page(page: str) -> dict[str, object]:
    found = _SAMPLE.search(page)
    if found is None:
        raise ValueError(f"no metric vllm:ec_s3_{METRIC}; is it a vLLM with this release of ec_s3?")
    fields: dict[str, object] = {}
    for name, escaped in _LABEL.findall(found.group(1)):
        value = _ESCAPED.sub(lambda escape: {"n": "\n"}.get(escape[1], escape[1]), escaped)
        fields[name] = json.loads(value) if name in _SETTINGS else value
    return fields


async def _read_object(url: str, config: ECConfig) -> bytes:
    """An object of a bucket; what the URL does not say of the endpoint is as in `config`."""
    path, _, query = url.partition("?")
    folder, _, name = path.rpartition("/")
    query = query or (config.url or "").partition("?")[2]
    location = f"{folder}?{query}" if query else folder
    store = open_store(config.model_copy(update={"url": location}))
    assert store is not None  # it has a URL
    try:
        found = await store.get(
            name, into=lambda nbytes: memoryview(bytearray(nbytes)), length=MAX_MANIFEST_BYTES
        )
    finally:
        await store.aclose()
    if found is None:
        raise ValueError("there is no such object")
    return bytes(found.body)


def _read_file(source: str) -> bytes:
    return Path(source.removeprefix("file://")).expanduser().read_bytes()


def _plain(value: object) -> object:
    """A value as it is compared: numbers as text, which labels are, and nothing as nothing."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value or None


def _shown(value: object) -> str:
    plain = _plain(value)
    return "nothing" if plain is None else json.dumps(plain, sort_keys=True, ensure_ascii=False)
