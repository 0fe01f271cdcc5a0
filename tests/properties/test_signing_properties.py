from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ec_s3.errors import FrameError, FrameUnsignedError
from ec_s3.header import digest, pack_header, read_header
from ec_s3.signing import parse_keys
from ec_s3.testing.strategies import identifiers, metas, payloads, specs
from ec_s3.types import ItemMeta, TensorSpec
from ec_s3.wire import Frame, Header, decode, encode

CAP = 16 << 20
OURS = parse_keys(f"a:{'1' * 64},b:{'2' * 64}")
THEIRS = parse_keys(f"a:{'3' * 64},c:{'4' * 64}")


def pack(
    spec: TensorSpec, tensor: bytes, identifier: str = "item", meta: ItemMeta | None = None
) -> Frame:
    return encode(
        spec,
        [memoryview(tensor)],
        identifier=identifier,
        namespace="n",
        meta=meta or ItemMeta(0.5, {"grid": [1, 2]}, input_digest="5a" * 32),
        created=1.5,
        keyring=OURS,
    )


def refused_or_equal(head: bytes, header: Header) -> None:
    try:
        found = read_header(head, max_tensor_bytes=CAP, keyring=OURS)
    except FrameError:
        return
    for name in ("identifier", "namespace", "spec", "meta", "layout", "chunks", "created"):
        assert getattr(found, name) == getattr(header, name)
    assert found.key_id == header.key_id


@settings(deadline=None)
@given(data=st.data(), spec=specs(), identifier=identifiers(), meta=metas())
def test_what_is_signed_is_accepted(
    data: st.DataObject, spec: TensorSpec, identifier: str, meta: ItemMeta
) -> None:
    tensor = data.draw(payloads(spec))
    frame = pack(spec, tensor, identifier, meta)
    header, found = decode(b"".join(frame.parts), max_tensor_bytes=CAP, keyring=OURS)
    assert (header, bytes(found)) == (frame.header, tensor)
    assert (header.identifier, header.meta, header.key_id) == (identifier, meta, "a")


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


@settings(deadline=None)
@given(data=st.data(), value=_json)
def test_header_with_other_fields_and_a_right_digest_is_refused_or_equal(
    data: st.DataObject, value: Any
) -> None:
    """Whoever can write to the bucket can compute digests, but no MAC."""
    frame = pack(TensorSpec("uint8", (3,)), b"abc")
    fields = json.loads(bytes(frame.parts[0])[24:-16])
    fields[data.draw(st.sampled_from(sorted(fields)))] = value
    try:
        head = pack_header(fields)
    except ValueError:
        return
    refused_or_equal(head, frame.header)


@settings(deadline=None)
@given(data=st.data())
def test_header_with_other_bytes_and_a_right_digest_is_refused_or_equal(
    data: st.DataObject,
) -> None:
    frame = pack(TensorSpec("uint8", (3,)), b"abc")
    head = bytearray(bytes(frame.parts[0])[:-16])
    places = st.lists(st.tuples(st.integers(0, len(head) - 1), st.integers(1, 255)), min_size=1)
    for place, change in data.draw(places):
        head[place] ^= change
    refused_or_equal(bytes(head) + digest(bytes(head)), frame.header)


@settings(deadline=None)
@given(data=st.data())
def test_header_signed_with_any_other_key_is_refused(data: st.DataObject) -> None:
    frame = pack(TensorSpec("uint8", (3,)), b"abc")
    fields = json.loads(bytes(frame.parts[0])[24:-16])
    head = pack_header(fields, keyring=THEIRS)
    if data.draw(st.booleans()):
        signed = json.loads(head[24:-16])
        head = pack_header({**signed, "key_id": data.draw(st.sampled_from(["b", "c", ""]))})
    try:
        read_header(head, max_tensor_bytes=CAP, keyring=OURS)
    except FrameUnsignedError:
        return
    raise AssertionError("no accepted key has signed it")


@settings(deadline=None)
@given(bodies=st.lists(st.binary(min_size=1, max_size=200), min_size=2, max_size=2, unique=True))
def test_header_on_the_body_of_another_item_is_refused(bodies: list[bytes]) -> None:
    mine, theirs = (
        pack(TensorSpec("uint8", (len(body),)), body, identifier)
        for identifier, body in zip("ab", bodies, strict=True)
    )
    spliced = bytes(mine.parts[0]) + bytes(theirs.parts[1])
    try:
        decode(spliced, max_tensor_bytes=CAP, keyring=OURS)
    except FrameError:
        return
    raise AssertionError("the body is not the header's")
