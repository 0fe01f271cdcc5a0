from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ec_s3.errors import FrameError
from ec_s3.testing.strategies import cuts, identifiers, metas, payloads, specs
from ec_s3.types import ItemMeta, TensorSpec
from ec_s3.wire import CHUNK_BYTES, Frame, decode, decode_chunk, encode, read_header

if TYPE_CHECKING:
    from collections.abc import Sequence

CAP = 16 << 20


def pack(spec: TensorSpec, segments: Sequence[memoryview], identifier: str = "item") -> Frame:
    return encode(
        spec, segments, identifier=identifier, namespace="n", meta=ItemMeta(), created=1.0
    )


def refused_or_equal(obj: bytes, tensor: bytes) -> None:
    """Whatever was done to an object: no wrong tensor, and no error but our own."""
    try:
        _, found = decode(obj, max_tensor_bytes=CAP)
    except FrameError:
        return
    assert found == tensor


def two_chunks(seed: int) -> tuple[Frame, bytes]:
    data = seed.to_bytes(4, "little") * (CHUNK_BYTES // 4) + bytes([seed % 256]) * 4_000
    return pack(TensorSpec("float16", (len(data) // 2,)), [memoryview(data)]), data


@settings(deadline=None)
@given(data=st.data(), spec=specs(), identifier=identifiers(), meta=metas())
def test_what_is_encoded_comes_back(
    data: st.DataObject, spec: TensorSpec, identifier: str, meta: ItemMeta
) -> None:
    tensor = data.draw(payloads(spec))
    frame = encode(
        spec,
        data.draw(cuts(tensor)),
        identifier=identifier,
        namespace="n",
        meta=meta,
        created=1.5,
        level=data.draw(st.sampled_from([-3, 1, 3])),
    )
    header, found = decode(b"".join(frame.parts), max_tensor_bytes=CAP)
    assert found == tensor
    assert header == frame.header
    assert (header.spec, header.identifier, header.meta) == (spec, identifier, meta)


@settings(deadline=None)
@given(data=st.data(), spec=specs())
def test_chunks_decode_into_memory_cut_anywhere(data: st.DataObject, spec: TensorSpec) -> None:
    assume(spec.nbytes > 0)
    tensor = data.draw(payloads(spec))
    frame = pack(spec, [memoryview(tensor)])
    target = bytearray(len(tensor))
    out = memoryview(target)
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, len(tensor)), max_size=4))), len(tensor)]
    outs = [out[a:b] for a, b in itertools.pairwise(edges)]
    decode_chunk(frame.header, 0, frame.parts[1], outs)
    assert target == tensor


@settings(deadline=None)
@given(data=st.data(), spec=specs())
def test_damaged_objects_are_refused_or_equal(data: st.DataObject, spec: TensorSpec) -> None:
    tensor = data.draw(payloads(spec))
    obj = bytearray(b"".join(pack(spec, [memoryview(tensor)]).parts))
    places = st.lists(st.tuples(st.integers(0, len(obj) - 1), st.integers(1, 255)), min_size=1)
    for place, change in data.draw(places):
        obj[place] ^= change
    refused_or_equal(bytes(obj), tensor)


@settings(deadline=None)
@given(data=st.data(), spec=specs())
def test_shortened_extended_and_spliced_objects_are_refused_or_equal(
    data: st.DataObject, spec: TensorSpec
) -> None:
    tensor = data.draw(payloads(spec))
    obj = b"".join(pack(spec, [memoryview(tensor)]).parts)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(obj))] * 2)))
    inserted = data.draw(st.binary(max_size=40))
    refused_or_equal(obj[:start], tensor)
    refused_or_equal(obj[:start] + obj[stop:], tensor)
    refused_or_equal(obj[:start] + inserted + obj[start:], tensor)
    refused_or_equal(obj + inserted, tensor)


@settings(deadline=None, max_examples=15)
@given(seeds=st.lists(st.integers(0, 1 << 31), min_size=2, max_size=2, unique=True))
def test_swapped_chunks_and_headers_are_refused_or_equal(seeds: list[int]) -> None:
    (left, left_data), (right, right_data) = (two_chunks(seed) for seed in seeds)
    head, first, second = (bytes(part) for part in left.parts)
    other_head, other_first, other_second = (bytes(part) for part in right.parts)
    refused_or_equal(head + second + first, left_data)
    refused_or_equal(head + other_first + second, left_data)
    refused_or_equal(head + first + other_second, left_data)
    refused_or_equal(other_head + first + second, right_data)


@settings(deadline=None)
@given(junk=st.binary(max_size=300), keep=st.integers(0, 40))
def test_arbitrary_bytes_raise_nothing_but_frame_errors(junk: bytes, keep: int) -> None:
    start = b"".join(pack(TensorSpec("int8", (3,)), [memoryview(b"abc")]).parts)[:keep]
    for obj in (junk, start + junk):
        try:
            read_header(obj, max_tensor_bytes=CAP)
        except FrameError:
            continue
        raise AssertionError("no header can come of this")
