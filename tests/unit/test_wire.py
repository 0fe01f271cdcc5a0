from __future__ import annotations

import dataclasses
import io
import os
import random
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zstandard

import ec_s3
from ec_s3 import keys
from ec_s3.compress import Layout
from ec_s3.errors import (
    FrameChecksumError,
    FrameMagicError,
    FrameMismatchError,
    FrameTooLargeError,
    FrameTruncatedError,
    FrameVersionError,
)
from ec_s3.keys import Namespace
from ec_s3.types import DTYPE_BYTES, Expectation, ItemMeta, TensorSpec
from ec_s3.wire import (
    CHUNK_BYTES,
    MAX_HEAD_BYTES,
    MAX_IDENTIFIER_BYTES,
    Frame,
    Header,
    decode,
    decode_chunk,
    encode,
    read_header,
)

CAP = 64 << 20
ANY = Expectation()


def content(nbytes: int, seed: int = 0) -> bytes:
    """Half noise, half repetition, in every chunk."""
    generator = random.Random(seed)
    block = generator.randbytes(2_048) + b"\x3f\x80" * 1_024
    return (block * (nbytes // len(block) + 1))[:nbytes]


def pack(
    data: bytes, *, dtype: str = "bfloat16", identifier: str = "item", namespace: str = "m-0/bf16"
) -> Frame:
    spec = TensorSpec(dtype, (len(data) // DTYPE_BYTES[dtype],))
    return encode(
        spec,
        [memoryview(data)],
        identifier=identifier,
        namespace=namespace,
        meta=ItemMeta(encode_seconds=0.25, placeholder={"grid": [1, 2, 3]}),
        created=1_700_000_000.5,
    )


def body(frame: Frame) -> bytes:
    return b"".join(frame.parts)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("shape", [(), (0, 4096), (5, 0), (1,), (7, 9), (1, 2, 1, 3, 1, 2, 1, 2)])
def test_every_dtype_and_rank_round_trips(dtype: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec(dtype, shape)
    data = random.Random(1).randbytes(spec.nbytes)
    frame = encode(
        spec, [memoryview(data)], identifier="i", namespace="n", meta=ItemMeta(), created=0
    )
    header, tensor = decode(body(frame), max_tensor_bytes=CAP)
    assert tensor == data
    assert header == frame.header
    assert header.spec == spec
    assert frame.nbytes == header.object_bytes == len(body(frame))


def test_bf16_nan_payloads_survive() -> None:
    data = b"".join(bits.to_bytes(2, "little") for bits in range(0x7F80, 0x8000))
    assert decode(body(pack(data)), max_tensor_bytes=CAP)[1] == data


def test_header_repeats_everything_a_reader_compares() -> None:
    header = read_header(body(pack(content(100))), max_tensor_bytes=CAP)
    assert (header.identifier, header.namespace) == ("item", "m-0/bf16")
    assert header.meta == ItemMeta(encode_seconds=0.25, placeholder={"grid": [1, 2, 3]})
    assert header.created == 1_700_000_000.5
    assert header.writer == f"ec_s3/{ec_s3.__version__}"


@pytest.mark.parametrize("extra", [-2, 0, 2])
def test_tensors_around_a_chunk_boundary_round_trip_in_any_segments(extra: int) -> None:
    data = content(2 * CHUNK_BYTES + extra)
    view = memoryview(data)
    pages = [view[i : i + 256 * 1024] for i in range(0, len(view), 256 * 1024)]
    odd = [view[:1], view[1 : CHUNK_BYTES + 1], view[:0], view[CHUNK_BYTES + 1 :]]
    spec = TensorSpec("bfloat16", (len(data) // 2,))
    for segments in (pages, odd):
        frame = encode(spec, segments, identifier="i", namespace="n", meta=ItemMeta(), created=1.0)
        assert len(frame.header.chunks) == (3 if extra > 0 else 2)
        assert decode(body(frame), max_tensor_bytes=CAP)[1] == data


def test_chunks_are_decoded_in_any_order_into_any_memory() -> None:
    data = content(2 * CHUNK_BYTES + 500)
    frame = pack(data)
    obj, header = memoryview(body(frame)), frame.header
    target = bytearray(len(data))
    out = memoryview(target)
    assert header.chunk_range(0)[0] == header.header_bytes
    for index in (2, 0, 1):
        offset, stored = header.chunk_range(index)
        start, raw = header.chunk_tensor_range(index)
        cut = start + raw // 3 | 1  # in the middle of an element
        outs = [out[start:cut], out[cut : start + raw]]
        decode_chunk(header, index, obj[offset : offset + stored], outs)
    assert target == data


def test_object_is_a_zstd_file_of_byte_planes() -> None:
    data = content(CHUNK_BYTES + 1_000)
    reader = zstandard.ZstdDecompressor().stream_reader(
        io.BytesIO(body(pack(data))), read_across_frames=True
    )
    pieces = (data[:CHUNK_BYTES], data[CHUNK_BYTES:])
    assert reader.read() == b"".join(piece[0::2] + piece[1::2] for piece in pieces)


def test_bytes_without_any_pattern_are_stored_as_they_are() -> None:
    data = random.Random(3).randbytes(2 * CHUNK_BYTES + 1_000)
    view = memoryview(data)
    pages = [view[:7], view[7 : CHUNK_BYTES + 3], view[CHUNK_BYTES + 3 :]]
    spec = TensorSpec("bfloat16", (len(data) // 2,))
    frame = encode(spec, pages, identifier="i", namespace="n", meta=ItemMeta(), created=1.0)
    assert frame.header.layout is Layout.PLAIN
    assert frame.nbytes < len(data) + 2_000
    assert decode(body(frame), max_tensor_bytes=CAP)[1] == data


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint64])
def test_memory_of_wider_elements_is_taken_by_its_bytes(dtype: type[np.generic]) -> None:
    data = random.Random(4).randbytes(2 * CHUNK_BYTES)
    whole = np.frombuffer(data, dtype=dtype).data
    spec = TensorSpec("bfloat16", (len(data) // 2,))
    pages = [whole[:5], whole[5:]]
    frame = encode(spec, pages, identifier="i", namespace="n", meta=ItemMeta(), created=1.0)
    assert decode(body(frame), max_tensor_bytes=CAP)[1] == data


@pytest.mark.parametrize("patterned", [0, 3])
def test_a_part_with_a_pattern_is_enough_for_byte_planes(patterned: int) -> None:
    parts = [random.Random(part).randbytes(CHUNK_BYTES) for part in range(4)]
    parts[patterned] = content(CHUNK_BYTES)
    frame = pack(b"".join(parts))
    assert frame.header.layout is Layout.SHUFFLE
    assert frame.nbytes < 3.7 * CHUNK_BYTES
    assert decode(body(frame), max_tensor_bytes=CAP)[1] == b"".join(parts)


def test_integers_are_stored_as_they_are() -> None:
    data = content(3_000)
    reader = zstandard.ZstdDecompressor().stream_reader(
        body(pack(data, dtype="int16")), read_across_frames=True
    )
    assert reader.read() == data


@pytest.mark.parametrize(
    "identifier", ["", "../../x", "\x00", "\ud800", "\ud83d\ude00", "é" * 5_000, '"\\', "\x7f"]
)
def test_identifier_is_kept_verbatim(identifier: str) -> None:
    header = read_header(body(pack(b"", identifier=identifier)), max_tensor_bytes=CAP)
    assert header.identifier == identifier
    header.check(identifier=identifier, namespace="m-0/bf16", expect=ANY)


def test_lone_surrogates_are_not_taken_for_the_character_they_would_join_to() -> None:
    header = read_header(body(pack(b"", identifier="\ud83d\ude00")), max_tensor_bytes=CAP)
    with pytest.raises(FrameMismatchError):
        header.check(identifier="\U0001f600", namespace="m-0/bf16", expect=ANY)


def test_longest_identifier_is_stored_and_a_longer_one_refused() -> None:
    longest = "\x01" * MAX_IDENTIFIER_BYTES  # six bytes each in JSON
    assert pack(b"", identifier=longest).header.identifier == longest
    with pytest.raises(ValueError, match="identifier"):
        pack(b"", identifier=longest + "x")


@pytest.mark.parametrize(
    "meta",
    [
        ItemMeta(encode_seconds=float("nan")),
        ItemMeta(encode_seconds=-1.0),
        ItemMeta(placeholder={"x": float("inf")}),
        ItemMeta(placeholder={"x": b"bytes"}),
        ItemMeta(placeholder={"x": "y" * (1 << 20)}),
    ],
    ids=["nan", "negative", "infinite", "bytes", "huge"],
)
def test_metadata_that_no_reader_would_take_is_not_written(meta: ItemMeta) -> None:
    with pytest.raises(ValueError):
        encode(TensorSpec("int8", (0,)), [], identifier="i", namespace="n", meta=meta, created=0.0)


@pytest.mark.parametrize("nbytes", [0, 7, 9])
def test_segments_of_another_size_are_the_callers_fault(nbytes: int) -> None:
    with pytest.raises(ValueError, match="segments"):
        encode(
            TensorSpec("float32", (2,)),
            [memoryview(bytes(nbytes))],
            identifier="i",
            namespace="n",
            meta=ItemMeta(),
            created=0.0,
        )


def header_of(identifier: str = "item", shape: tuple[int, ...] = (3, 4)) -> Header:
    frame = pack(bytes(24), identifier=identifier)
    return dataclasses.replace(frame.header, spec=TensorSpec("bfloat16", shape))


def test_the_object_asked_for_passes_the_check() -> None:
    header_of().check(identifier="item", namespace="m-0/bf16", expect=ANY)
    header_of().check(
        identifier="item", namespace="m-0/bf16", expect=Expectation("bfloat16", rows=3)
    )


@pytest.mark.parametrize(
    ("identifier", "namespace", "expect"),
    [
        ("item ", "m-0/bf16", ANY),
        ("", "m-0/bf16", ANY),
        ("item", "m-1/bf16", ANY),
        ("item", "m-0/bf16", Expectation(dtype="float16")),
        ("item", "m-0/bf16", Expectation(rows=4)),
        ("item", "m-0/bf16", Expectation(rows=2)),
    ],
)
def test_any_other_object_is_a_mismatch(
    identifier: str, namespace: str, expect: Expectation
) -> None:
    with pytest.raises(FrameMismatchError):
        header_of().check(identifier=identifier, namespace=namespace, expect=expect)


def test_scalar_never_has_the_expected_rows() -> None:
    with pytest.raises(FrameMismatchError):
        header_of(shape=()).check(
            identifier="item", namespace="m-0/bf16", expect=Expectation(rows=1)
        )


def test_digest_collision_is_caught_by_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "identifier_digest", lambda _: "ab" * 32)
    namespace = Namespace(model="m")
    assert namespace.object_key("mine") == namespace.object_key("yours")
    stored = body(pack(content(64), identifier="yours", namespace=namespace.id))
    header = read_header(stored, max_tensor_bytes=CAP)
    with pytest.raises(FrameMismatchError, match="identifier"):
        header.check(identifier="mine", namespace=namespace.id, expect=ANY)


def test_any_changed_byte_is_detected() -> None:
    data = content(1_000)
    obj = body(pack(data))
    for offset in range(len(obj)):
        damaged = bytearray(obj)
        damaged[offset] ^= 1 << offset % 8
        with pytest.raises(ec_s3.ECS3Error):
            decode(bytes(damaged), max_tensor_bytes=CAP)


def test_damage_is_found_before_anything_is_decompressed() -> None:
    frame = pack(content(1_000))
    out = bytearray(1_000)
    damaged = bytearray(frame.parts[1])
    damaged[-6] ^= 1
    with pytest.raises(FrameChecksumError, match="digest"):
        decode_chunk(frame.header, 0, damaged, [memoryview(out)])
    assert out == bytes(1_000)


@pytest.mark.parametrize("length", [0, 3, 8, 15, 23, 24, 60])
def test_short_head_is_truncated_not_foreign(length: int) -> None:
    with pytest.raises(FrameTruncatedError):
        read_header(body(pack(content(64)))[:length], max_tensor_bytes=CAP)


def test_object_of_another_length_is_refused() -> None:
    obj = body(pack(content(1_000)))
    for other in (obj[:-1], obj + b"\x00", obj + obj):
        with pytest.raises(FrameTruncatedError):
            decode(other, max_tensor_bytes=CAP)


def test_chunk_of_another_length_or_place_is_refused() -> None:
    frame = pack(content(CHUNK_BYTES, 1) + content(CHUNK_BYTES, 2))
    out = [memoryview(bytearray(CHUNK_BYTES))]
    first = bytes(frame.parts[1])
    with pytest.raises(FrameTruncatedError):
        decode_chunk(frame.header, 0, first + b"x", out)
    with pytest.raises((FrameTruncatedError, FrameChecksumError)):
        decode_chunk(frame.header, 1, first, out)


def test_memory_of_another_size_is_the_callers_fault() -> None:
    frame = pack(content(1_000))
    with pytest.raises(ValueError, match="needs 1000 bytes"):
        decode_chunk(frame.header, 0, frame.parts[1], [memoryview(bytearray(999))])


@pytest.mark.parametrize(
    "junk",
    [
        b"\x28\xb5\x2f\xfd" + bytes(100),
        zstandard.compress(b"another tensor"),
        bytes(200),
        b"<Error><Code>NoSuchKey</Code></Error>" * 5,
        b"\x50" + b"\x2a\x4d\x18" + bytes(100),
    ],
    ids=["zstd magic", "zstd", "zeros", "error page", "skippable"],
)
def test_foreign_bytes_are_no_object(junk: bytes) -> None:
    with pytest.raises(FrameMagicError):
        decode(junk, max_tensor_bytes=CAP)


def test_newer_format_is_reported_as_such() -> None:
    obj = bytearray(body(pack(b"")))
    obj[16] = 2
    with pytest.raises(FrameVersionError, match="version 2"):
        read_header(obj, max_tensor_bytes=CAP)


def test_tensor_above_the_cap_is_refused_before_allocation() -> None:
    obj = body(pack(bytes(8 << 20)))
    tracemalloc.start()
    try:
        with pytest.raises(FrameTooLargeError):
            decode(obj, max_tensor_bytes=(8 << 20) - 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_header_always_fits_the_documented_head() -> None:
    obj = body(pack(bytes(4 << 20), identifier="\x01" * MAX_IDENTIFIER_BYTES))
    header = read_header(obj[:MAX_HEAD_BYTES], max_tensor_bytes=CAP)
    assert header.header_bytes < MAX_HEAD_BYTES
    assert len(header.chunks) == 4


def test_sixteen_threads_encode_and_decode_exactly() -> None:
    start = threading.Barrier(16)

    def work(seed: int) -> None:
        generator = random.Random(seed)
        start.wait(timeout=30)
        for turn in range(60):
            dtype = generator.choice(["bfloat16", "float32", "int8", "float64"])
            data = content(8 * generator.randrange(1, 2_000), seed * 1_000 + turn)
            frame = pack(data, dtype=dtype)
            assert decode(body(frame), max_tensor_bytes=CAP)[1] == data

    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(work, seed) for seed in range(16)]:
            done.result(timeout=60)


def test_importing_the_format_loads_neither_torch_nor_an_sdk() -> None:
    code = (
        "import sys, ec_s3.wire, ec_s3.keys\n"
        "assert not {'torch', 'aiobotocore', 'asyncio', 'vllm'} & set(sys.modules)"
    )
    root = str(Path(ec_s3.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)
