"""Headers whose digest is right and whose content is not: what a hostile writer can make."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from ec_s3.errors import FrameError, FrameHeaderError, FrameTooLargeError
from ec_s3.header import digest, pack_header, read_header
from ec_s3.types import ItemMeta, TensorSpec
from ec_s3.wire import CHUNK_BYTES, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

CAP = 1 << 30


def good() -> tuple[dict[str, Any], bytes]:
    """The JSON of a header, and the one chunk it declares."""
    frame = encode(
        TensorSpec("bfloat16", (2, 50)),
        [memoryview(bytes(range(200)))],
        identifier="item",
        namespace="space",
        meta=ItemMeta(encode_seconds=1.0, placeholder={"a": 1}),
        created=2.0,
    )
    head = bytes(frame.parts[0])
    return json.loads(head[24:-16]), bytes(frame.parts[1])


def read_fields(fields: dict[str, Any]) -> None:
    read_header(pack_header(fields), max_tensor_bytes=CAP)


def read_text(text: str | bytes) -> None:
    """Read a header whose JSON is exactly this text, with all lengths and the digest right."""
    raw = text if isinstance(text, bytes) else text.encode()
    empty = pack_header({})[:24]
    lengths = ((24 - 8 + len(raw) + 16).to_bytes(4, "little"), len(raw).to_bytes(4, "little"))
    head = empty[:4] + lengths[0] + empty[8:20] + lengths[1] + raw
    read_header(head + digest(head), max_tensor_bytes=CAP)


def test_unchanged_header_is_accepted() -> None:
    fields, _ = good()
    read_fields(fields)
    read_text(json.dumps(fields, indent=4))


@pytest.mark.parametrize("name", sorted(good()[0]))
def test_missing_field_is_refused(name: str) -> None:
    fields, _ = good()
    del fields[name]
    with pytest.raises(FrameHeaderError, match="exactly the fields"):
        read_fields(fields)


def test_unknown_field_is_refused() -> None:
    with pytest.raises(FrameHeaderError, match="exactly the fields"):
        read_fields({**good()[0], "surprise": None})


WRONG: dict[str, list[object]] = {
    "identifier": [None, 1, ["x"], "x" * 65_537],
    "namespace": [None, 1, "x" * 1_025],
    "writer": [None, 1, "x" * 1_025],
    "dtype": [None, 1, "complex64", "torch.bfloat16", ["bfloat16"]],
    "shape": [None, 100, "2,50", [2, 50.0], [True, 100], [-2, -50], [1] * 9, [[2, 50]], [2, "50"]],
    "layout": [None, 1, "SHUFFLE", "zip", ["shuffle"]],
    "chunk_bytes": [None, 0, 1 << 19, float(1 << 20), True, "1048576"],
    "created": [None, "2", True, -1.0, 1e13, 10**400],
    "encode_seconds": ["2", True, -1.0, 1e13, [1.0]],
    "placeholder": [None, [], "x", 1],
    "chunks": [None, {}, [], "x", [[1]], [[1, "00" * 16, 0]], [{"stored": 1}]],
    "input_digest": [1, {}, "", "sha256:00", "0" * 63, "0" * 65, "A" * 64, "0" * 63 + "\n"],
    "mac": [False, []],
    "key_id": [0],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_field_of_another_type_or_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(FrameError):
        read_fields({**good()[0], name: value})


@pytest.mark.parametrize("stored", [0, -1, 1.5, True, "80", None, 10**30, 200 + 200])
def test_impossible_stored_size_is_refused(stored: object) -> None:
    fields, _ = good()
    fields["chunks"][0][0] = stored
    with pytest.raises(FrameHeaderError, match="stored size"):
        read_fields(fields)


@pytest.mark.parametrize("text", [None, "", "00" * 15, "00" * 17, "zz" * 16, "é" * 32, 7])
def test_impossible_digest_is_refused(text: object) -> None:
    fields, _ = good()
    fields["chunks"][0][1] = text
    with pytest.raises(FrameHeaderError, match="digest"):
        read_fields(fields)


@pytest.mark.parametrize("count", [0, 2, 1_000])
def test_chunk_table_must_fit_the_tensor(count: int) -> None:
    fields, _ = good()
    with pytest.raises(FrameHeaderError, match="chunk table"):
        read_fields({**fields, "chunks": fields["chunks"] * count})


def test_chunk_table_of_an_empty_tensor_must_be_empty() -> None:
    fields, _ = good()
    with pytest.raises(FrameHeaderError, match="chunk table"):
        read_fields({**fields, "shape": [0, 50]})
    read_fields({**fields, "shape": [0, 50], "chunks": []})


def test_one_byte_elements_have_no_planes() -> None:
    with pytest.raises(FrameHeaderError, match="layout"):
        read_fields({**good()[0], "dtype": "int8", "shape": [200]})


@pytest.mark.parametrize(
    "shape", [[1 << 40], [1 << 20, 1 << 20], [10**30], [0, 1 << 40], [0, 10**30]]
)
def test_huge_shapes_are_refused_without_allocation(shape: list[int]) -> None:
    obj = pack_header({**good()[0], "shape": shape})
    tracemalloc.start()
    try:
        with pytest.raises(FrameTooLargeError):
            decode(obj, max_tensor_bytes=CAP)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_declared_tensor_without_its_bytes_is_refused_without_allocation() -> None:
    fields, _ = good()
    chunks = [[CHUNK_BYTES, "00" * 16]] * 500
    obj = pack_header({**fields, "shape": [500 * CHUNK_BYTES // 2], "chunks": chunks})
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            decode(obj + bytes(1_000), max_tensor_bytes=CAP)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_frame_claiming_a_terabyte_behind_a_right_digest_is_refused() -> None:
    fields, _ = good()
    bomb = b"\x28\xb5\x2f\xfd\xe4" + (1 << 40).to_bytes(8, "little")
    fields["chunks"] = [[len(bomb), digest(bomb).hex()]]
    tracemalloc.start()
    try:
        with pytest.raises(FrameHeaderError, match="announce"):
            decode(pack_header(fields) + bomb, max_tensor_bytes=CAP)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "make",
    [
        lambda data: zstandard.ZstdCompressor(write_content_size=False).compress(data),
        lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data + b"more"),
        lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data) + b"tail",
        lambda data: data,
    ],
    ids=["no size", "longer", "tail", "raw"],
)
def test_chunk_that_is_not_its_frame_behind_a_right_digest_is_refused(
    make: Callable[[bytes], bytes],
) -> None:
    fields, _ = good()
    chunk = make(bytes(range(200)))
    fields["chunks"] = [[len(chunk), digest(chunk).hex()]]
    with pytest.raises(FrameError):
        decode(pack_header(fields) + chunk, max_tensor_bytes=CAP)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{",
        '{"a":1}x',
        b"\xff\xfe",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"created":' + "9" * 10_000 + "}",
    ],
    ids=["empty", "null", "list", "open", "tail", "no utf-8", "deep", "deep too", "long number"],
)
def test_text_that_is_no_header_is_refused(text: str | bytes) -> None:
    with pytest.raises(FrameHeaderError):
        read_text(text)


def test_repeated_names_and_numbers_outside_json_are_refused() -> None:
    text = json.dumps(good()[0])
    with pytest.raises(FrameHeaderError, match="twice"):
        read_text(text.replace('"identifier": "item"', '"identifier": "item", "identifier": "x"'))
    with pytest.raises(FrameHeaderError, match="twice"):
        read_text(text.replace('"a": 1', '"a": 1, "a": 2'))
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        with pytest.raises(FrameHeaderError):
            read_text(text.replace('"created": 2.0', f'"created": {number}'))


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = {"x": value} if level % 2 else [value]
    return {"x": value}


@pytest.mark.parametrize(
    "placeholder",
    [nested(33), nested(600), {"x": [[]] * 40_000}, {str(i): {} for i in range(40_000)}],
    ids=["33 deep", "600 deep", "many lists", "many maps"],
)
def test_metadata_too_deep_or_too_large_to_be_handed_on_is_refused(placeholder: object) -> None:
    with pytest.raises(FrameHeaderError, match="placeholder"):
        read_fields({**good()[0], "placeholder": placeholder})


def test_metadata_of_usual_depth_and_size_is_handed_on_whole() -> None:
    for placeholder in (nested(31), {"x": list(range(30_000))}):
        head = pack_header({**good()[0], "placeholder": placeholder})
        assert read_header(head, max_tensor_bytes=CAP).meta.placeholder == placeholder


def test_metadata_with_a_number_out_of_range_is_refused() -> None:
    text = json.dumps(good()[0]).replace('"a": 1', '"a": -1e999')
    with pytest.raises(FrameHeaderError, match="out of range"):
        read_text(text)


@pytest.mark.parametrize(
    "shape", [[1] * 200_000, [10**4000] * 8, [-(10**4000)], [2, 50, *[0] * 7]], ids=range(4)
)
def test_a_hostile_shape_makes_no_long_message(shape: list[int]) -> None:
    with pytest.raises(FrameError) as caught:
        read_fields({**good()[0], "shape": shape})
    assert len(str(caught.value)) < 2_000


def test_header_longer_than_its_cap_is_refused_by_its_prefix() -> None:
    fields = {**good()[0], "placeholder": {"x": "y" * (1 << 20)}}
    with pytest.raises(FrameHeaderError, match="a header of"):
        read_fields(fields)


def test_lengths_of_frame_and_header_must_agree() -> None:
    head = bytearray(pack_header(good()[0]))
    head[4] += 1
    head[-16:] = digest(bytes(head[:-16]))
    with pytest.raises(FrameHeaderError, match="in a frame of"):
        read_header(head, max_tensor_bytes=CAP)


def test_unsigned_unbound_object_carries_nulls() -> None:
    fields, _ = good()
    assert [fields[name] for name in ("input_digest", "mac", "key_id")] == [None] * 3


def test_reader_without_keys_takes_a_signature_of_any_kind() -> None:
    read_fields({**good()[0], "mac": "ed25519:00", "key_id": "of another scheme"})


def test_input_digest_is_read_back() -> None:
    head = pack_header({**good()[0], "input_digest": "5a" * 32})
    assert read_header(head, max_tensor_bytes=CAP).meta.input_digest == "5a" * 32
    unbound = pack_header(good()[0])
    assert read_header(unbound, max_tensor_bytes=CAP).meta.input_digest == ""
