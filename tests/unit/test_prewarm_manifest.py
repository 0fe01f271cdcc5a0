"""Manifests: what an entry is, and that a bad line is named and ends nothing."""

from __future__ import annotations

import io
import json

import pytest

from ec_s3.errors import ConfigError
from ec_s3.prewarm.encoding import MediaItem
from ec_s3.prewarm.manifest import BadEntry, modality_of, parse_entry, read_csv, read_jsonl
from ec_s3.prewarm.shard import Shard


def jsonl(*rows: object) -> list[MediaItem | BadEntry]:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    return list(read_jsonl(io.BytesIO(text.encode())))


def bad(entry: MediaItem | BadEntry) -> BadEntry:
    assert isinstance(entry, BadEntry), entry
    return entry


def good(entry: MediaItem | BadEntry) -> MediaItem:
    assert isinstance(entry, MediaItem), entry
    return entry


def test_entry_says_all_that_an_entry_can_say() -> None:
    settings = {"max_pixels": 10}
    row = {"uri": "s3://b/a b.bin", "uuid": "u", "modality": "video", "processor": settings}
    (entry,) = jsonl(row)
    assert entry == MediaItem(
        line=1, uri="s3://b/a b.bin", modality="video", uuid="u", processor=settings
    )


@pytest.mark.parametrize(
    ("uri", "modality"), [("a.JPG", "image"), ("x/b.mp4", "video"), ("c.flac", "audio")]
)
def test_modality_is_what_the_name_says_where_the_entry_does_not(uri: str, modality: str) -> None:
    assert good(parse_entry({"uri": uri, "modality": ""}, line=1)).modality == modality


def test_name_without_a_known_suffix_has_no_modality() -> None:
    assert modality_of("notes.txt") is None
    assert modality_of("jpg") is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ('{"uri": "a.png", "uri": "b.png"}', "given twice"),
        ('{"uri": "a.png", "processor": {"x": NaN}}', "no JSON"),
        ({}, "no uri"),
        ({"uri": 5}, "no uri"),
        ({"uri": "a.png\x1b"}, "control characters"),
        ({"uri": "https://host/a.png"}, "https:// is not read"),
        ({"uri": "s3://bucket"}, "names no object"),
        ({"uri": "notes.txt"}, "no suffix"),
        ({"uri": "a.png", "modality": "smell"}, "known: image, video, audio"),
        ({"uri": "a.png", "uuid": 5}, "uuid: no text"),
        ({"uri": "a.png", "uuid": "chatcmpl-1-image-0"}, "never stored"),
        ('{"uri": "s3://b/\\ud800.png"}', "uri: no valid Unicode"),
        ('{"uri": "a.png", "uuid": "\\udfff"}', "uuid: no valid Unicode"),
        ({"uri": "a.png", "processor": [1]}, "no JSON object of settings"),
        ('{"uri": "a.png", "processor": ' + '{"a":' * 600 + "1" + "}" * 601, "32 levels"),
        ({"uri": "a.png", "colour": "red"}, "unknown field 'colour'"),
    ],
)
def test_bad_line_is_named_with_its_reason_and_ends_nothing(row: object, reason: str) -> None:
    first, second, third = jsonl({"uri": "a.png"}, row, {"uri": "b.png"})
    assert good(first).line == 1
    assert bad(second).line == 2
    assert reason in bad(second).reason
    assert good(third).line == 3


def test_empty_lines_and_a_byte_order_mark_are_no_entries() -> None:
    body = b'\xef\xbb\xbf{"uri": "a.png"}\r\n\r\n  \n{"uri": "b.png"}'
    assert [entry.line for entry in read_jsonl(io.BytesIO(body))] == [1, 4]


def test_line_that_is_no_text_is_bad_alone() -> None:
    body = b'{"uri": "a.png"}\n\xff\xfe\n{"uri": "b.png"}\n'
    first, second, third = read_jsonl(io.BytesIO(body))
    assert (good(first).uri, bad(second).line, good(third).uri) == ("a.png", 2, "b.png")


def test_huge_line_is_skipped_without_being_held() -> None:
    body = b'{"uri": "' + b"a" * (3 << 20) + b'.png"}\n{"uri": "b.png"}\n'
    first, second = read_jsonl(io.BytesIO(body))
    assert "1 MiB" in bad(first).reason
    assert (good(second).uri, good(second).line) == ("b.png", 2)


def test_csv_names_its_columns_and_holds_settings_as_json() -> None:
    body = b'uri,uuid,processor\na.png,,"{""max_pixels"": 5}"\nb.png,name,\n'
    first, second = read_csv(io.BytesIO(body))
    assert good(first) == MediaItem(
        line=2, uri="a.png", modality="image", processor={"max_pixels": 5}
    )
    assert (good(second).uuid, good(second).line) == ("name", 3)


@pytest.mark.parametrize(
    ("line", "reason"),
    [("a.png,x,y,z", "4 cells"), ('a.png,,"{"', "no JSON"), ('a.png,,"open', "no CSV")],
)
def test_bad_csv_line_is_named_with_its_reason_and_ends_nothing(line: str, reason: str) -> None:
    body = f"uri,uuid,processor\n{line}\nb.png,,\n".encode()
    first, second = read_csv(io.BytesIO(body))
    assert reason in bad(first).reason
    assert bad(first).line == 2
    assert good(second).line == 3


@pytest.mark.parametrize("header", ["a.png", "uri,colour", "uri,uri", "", "uuid,modality"])
def test_csv_without_a_usable_header_is_refused(header: str) -> None:
    with pytest.raises(ConfigError, match="no header"):
        list(read_csv(io.BytesIO(f"{header}\na.png\n".encode())))


def test_shards_share_every_entry_out_and_none_twice() -> None:
    names = [f"s3://bucket/{number}.jpg" for number in range(1000)]
    shares = [[name for name in names if Shard(index, 3).holds(name)] for index in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(names)
    assert min(map(len, shares)) > 250


def test_share_of_an_entry_is_the_same_in_every_release() -> None:
    names = ("a.png", "b.png", "\u00fc.png", "s3://b/k")
    assert [next(i for i in range(8) if Shard(i, 8).holds(name)) for name in names] == [0, 4, 0, 7]


@pytest.mark.parametrize("text", ["", "1", "1/1", "3/2", "-1/2", "a/b", "0/0"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="shard="):
        Shard.parse(text)


def test_share_reads_as_it_is_written() -> None:
    assert str(Shard.parse(" 3/8 ")) == "3/8"
