"""What a manifest says, line by line: JSONL or CSV of `uri[, modality][, uuid][, processor]`.

Pure but for the lines that it is given; holds one line at a time. A line that cannot be used is a
`BadEntry` with its number, and never the end of the others.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, get_args

from ec_s3.errors import ConfigError
from ec_s3.keys import is_request_local
from ec_s3.prewarm.encoding import MediaItem, Modality

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

MAX_LINE_BYTES = 1 << 20
MAX_URI = 4096
MAX_NESTING = 32
"""Of a processor's settings: they travel pickled, which ends at some hundred levels."""

FIELDS = ("uri", "modality", "uuid", "processor")
"""Of an entry; only the first is required."""

MODALITIES: tuple[Modality, ...] = get_args(Modality)

_SUFFIXES: Mapping[Modality, str] = {
    "image": "jpg jpeg jpe png webp gif bmp tif tiff ppm pgm avif heic",
    "video": "mp4 m4v mov mkv webm avi mpg mpeg",
    "audio": "wav mp3 flac ogg oga opus m4a aac",
}
_BY_SUFFIX: Mapping[str, Modality] = {
    f".{suffix}": modality for modality, names in _SUFFIXES.items() for suffix in names.split()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BadEntry:
    """A line that is no entry.

    Attributes:
        line: its number, from 1.
        uri: what it names, empty when it names nothing.
        reason: what is wrong with it.
    """

    line: int
    uri: str
    reason: str


Entry = MediaItem | BadEntry


class _EntryError(ValueError):
    """What is wrong with one entry."""


def modality_of(uri: str) -> Modality | None:
    """What the name's suffix says, None for one that is not known."""
    return _BY_SUFFIX.get(PurePosixPath(uri).suffix.lower())


def parse_entry(fields: Mapping[str, object], *, line: int) -> Entry:
    """Judge one entry's fields; None and the empty text stand for a field that is left out."""
    given = {name: value for name, value in fields.items() if value is not None and value != ""}
    uri = given.get("uri")
    shown = uri[:MAX_URI] if isinstance(uri, str) else ""
    try:
        return _parse(given, line)
    except _EntryError as error:
        return BadEntry(line=line, uri=shown, reason=str(error))


def read_jsonl(lines: BinaryIO) -> Iterator[Entry]:
    """The entries of a JSONL file; empty lines are none."""
    for number, line in _lines(lines):
        if isinstance(line, BadEntry):
            yield line
        elif line.strip():
            try:
                fields = json.loads(line, parse_constant=_refuse, object_pairs_hook=_once)
            except (ValueError, RecursionError) as error:
                yield BadEntry(line=number, uri="", reason=f"no JSON: {error}")
                continue
            if isinstance(fields, dict):
                yield parse_entry(fields, line=number)
            else:
                yield BadEntry(line=number, uri="", reason="no JSON object")


def read_csv(lines: BinaryIO) -> Iterator[Entry]:
    """The entries of a CSV file with a header; a cell of `processor` holds JSON.

    Raises:
        ConfigError: the header lacks `uri`, or names what is no field.
    """
    numbered = _lines(lines)
    try:
        header = [name.strip() for name in next(csv.reader([_text(next(numbered))]))]
    except (StopIteration, csv.Error):
        header = []
    unknown = [name for name in header if name not in FIELDS]
    if "uri" not in header or unknown or len(set(header)) < len(header):
        raise ConfigError(
            f"the manifest's first line {','.join(header)[:200]!r} is no header; columns are "
            f"{', '.join(FIELDS)}, and uri is one of them"
        )
    for number, line in numbered:
        if isinstance(line, BadEntry):
            yield line
        elif line.strip():
            yield _csv_entry(header, line, number)


def _csv_entry(header: list[str], line: str, number: int) -> Entry:
    try:
        cells = next(csv.reader([line], strict=True))
    except csv.Error as error:
        return BadEntry(line=number, uri="", reason=f"no CSV: {error}")
    if len(cells) != len(header):
        reason = f"{len(cells)} cells, and the header names {len(header)}"
        return BadEntry(line=number, uri="", reason=reason)
    fields: dict[str, object] = dict(zip(header, cells, strict=True))
    if fields.get("processor"):
        try:
            fields["processor"] = json.loads(str(fields["processor"]), parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            uri = str(fields["uri"])[:MAX_URI]
            return BadEntry(line=number, uri=uri, reason=f"processor: no JSON: {error}")
    return parse_entry(fields, line=number)


def _parse(given: Mapping[str, object], line: int) -> MediaItem:
    for name in given:
        if name not in FIELDS:
            raise _EntryError(f"unknown field {name[:80]!r}; known: {', '.join(FIELDS)}")
    uri = _parse_uri(given.get("uri"))
    uuid, processor = given.get("uuid"), given.get("processor", {})
    if uuid is not None and not isinstance(uuid, str):
        raise _EntryError("uuid: no text")
    if uuid is not None and not _is_unicode(uuid):
        raise _EntryError("uuid: no valid Unicode")
    if uuid is not None and is_request_local(uuid):
        raise _EntryError("uuid: a name of this form is one request's own, and is never stored")
    if not isinstance(processor, dict):
        raise _EntryError("processor: no JSON object of settings")
    if _is_deeper(processor, MAX_NESTING):
        raise _EntryError(f"processor: settings of more than {MAX_NESTING} levels")
    return MediaItem(
        line=line,
        uri=uri,
        modality=_parse_modality(given.get("modality"), uri),
        uuid=uuid,
        processor=processor,
    )


def _parse_uri(uri: object) -> str:
    if not isinstance(uri, str):
        raise _EntryError("no uri")
    if len(uri) > MAX_URI or any(c < " " or c == "\x7f" for c in uri):
        raise _EntryError(f"uri: longer than {MAX_URI} or with control characters")
    scheme, colon, rest = uri.partition("://")
    if colon and scheme not in ("s3", "file"):
        raise _EntryError(
            f"uri: {scheme[:20]}:// is not read; give a local file or s3://bucket/key"
        )
    if scheme == "s3" and colon and not all(rest.partition("/")[::2]):
        raise _EntryError("uri: names no object; expected s3://bucket/key")
    if scheme == "s3" and colon and not _is_unicode(uri):
        raise _EntryError("uri: no valid Unicode, which keys are")  # a file's name may be any bytes
    return uri


def _is_deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(inner) and (levels == 0 or any(_is_deeper(one, levels - 1) for one in inner))


def _is_unicode(text: str) -> bool:
    """False for halves of surrogate pairs, which JSON can spell, and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_modality(given: object, uri: str) -> Modality:
    if given is None:
        guess = modality_of(uri)
        if guess is None:
            raise _EntryError("modality: not given, and the name has no suffix of a known media")
        return guess
    for modality in MODALITIES:
        if given == modality:
            return modality
    raise _EntryError(f"modality: {str(given)[:40]!r}; known: {', '.join(MODALITIES)}")


def _lines(stream: BinaryIO) -> Iterator[tuple[int, str | BadEntry]]:
    """Numbered lines without their ends; too long ones are skipped, not held."""
    number = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            while raw and not raw.endswith(b"\n"):
                raw = stream.readline(MAX_LINE_BYTES)
            yield number, BadEntry(line=number, uri="", reason="a line of more than 1 MiB")
            continue
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            yield number, BadEntry(line=number, uri="", reason=f"no UTF-8: {error.reason}")
        else:
            yield number, text.rstrip("\r\n")


def _text(numbered: tuple[int, str | BadEntry]) -> str:
    line = numbered[1]
    return "" if isinstance(line, BadEntry) else line


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field is given twice")
    return fields
