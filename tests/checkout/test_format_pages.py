"""What the pages on keys and objects say in tables is what the code has; their code blocks run."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from doc_pages import pages

from ec_s3 import header, keys
from ec_s3.types import DTYPE_BYTES, MAX_RANK

WIRE = pages()["docs/reference/wire-format.md"]
KEYS = pages()["docs/reference/key-scheme.md"]


def named(page: str, heading: str) -> set[str]:
    """What the first columns of the tables below a heading name."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_every_field_of_a_header_is_in_its_table() -> None:
    assert named(WIRE, "Header") - {"0x184D2A5C"} == set(header._FIELDS)


def test_every_part_of_a_namespace_is_in_its_table() -> None:
    assert named(KEYS, "Namespace") == {
        field.name for field in fields(keys.Namespace) if field.init
    }


def test_element_types_are_those_that_are_stored() -> None:
    (row,) = re.findall(r"^\| `dtype` \| (.*) \|$", WIRE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == set(DTYPE_BYTES)


@pytest.mark.parametrize(
    ("text", "page"),
    [
        (f"# Object format, version {header.FORMAT_VERSION}", WIRE),
        (f"`0x{header._SKIPPABLE_MAGIC:X}`", WIRE),
        (" ".join(f"{byte:02X}" for byte in header._MAGIC), WIRE),
        (f"at most {header.MAX_HEADER_BYTES:,}", WIRE),
        (f"The first {header.MAX_HEAD_BYTES:,} bytes", WIRE),
        (f"| {header._PREFIX_BYTES} | *L* | the JSON |", WIRE),
        (f"| {header._PREFIX_BYTES} + *L* | {header.DIGEST_BYTES} |", WIRE),
        (f"at most {header.MAX_IDENTIFIER_BYTES >> 10} KiB", WIRE),
        (f"| `chunk_bytes` | {header.CHUNK_BYTES} |", WIRE),
        (f"up to {MAX_RANK} integers", WIRE),
        (f"at most {header._MAX_TEXT_CHARS:,} characters", WIRE),
        (f"# Key scheme, version {keys.KEY_VERSION}", KEYS),
        (f"at most {keys._SLUG_LENGTH} characters", KEYS),
        (f"/{keys.CONTROL_NAME} ", KEYS),
        (f"/{keys.INDEX_NAME} ", KEYS),
        (f"first {len(keys.Namespace(model='m').fingerprint)} hex digits", KEYS),
    ],
)
def test_numbers_and_names_are_the_codes(text: str, page: str) -> None:
    assert text in page
