from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import zstandard

from ec_s3.compress import Layout, compress_bound, compress_chunk, decompress_chunk
from ec_s3.errors import FrameChecksumError, FrameError, FrameHeaderError

BOTH = [(Layout.PLAIN, 1), (Layout.PLAIN, 4)] + [(Layout.SHUFFLE, n) for n in (2, 4, 8)]


def content(nbytes: int, *, seed: int = 0) -> bytes:
    """Half noise, half repetition."""
    return (random.Random(seed).randbytes(nbytes // 2) + b"\x3f\x80" * nbytes)[:nbytes]


def runs(data: bytes | bytearray, *positions: int) -> list[memoryview]:
    edges = [0, *positions, len(data)]
    view = memoryview(data)
    return [view[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize(("layout", "itemsize"), BOTH)
@pytest.mark.parametrize("cut", [(), (8, 64), (1,), (3, 3, 4_001), (0, 8_000)])
def test_chunk_round_trips_however_it_is_cut(
    layout: Layout, itemsize: int, cut: tuple[int, ...]
) -> None:
    data = content(8_000)
    stored = compress_chunk(runs(data, *cut), layout=layout, itemsize=itemsize, level=1)
    back = bytearray(len(data))
    decompress_chunk(
        stored, runs(back, *reversed(cut[:1]), 7_000), layout=layout, itemsize=itemsize
    )
    assert back == data


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_shuffled_frame_holds_the_byte_planes_in_order(itemsize: int) -> None:
    data = content(4_096)
    frame = compress_chunk(runs(data, 33), layout=Layout.SHUFFLE, itemsize=itemsize, level=1)
    planes = b"".join(data[index::itemsize] for index in range(itemsize))
    assert zstandard.decompress(frame) == planes


def test_plain_frame_holds_the_bytes_as_they_are() -> None:
    data = content(4_096)
    frame = compress_chunk(runs(data, 33), layout=Layout.PLAIN, itemsize=1, level=3)
    assert zstandard.decompress(frame) == data


@pytest.mark.parametrize("nbytes", [1, 2, 100, 1_000, 131_071, 131_072, 131_073, 1 << 20])
def test_bytes_that_do_not_shrink_are_stored_raw_within_the_bound(nbytes: int) -> None:
    noise = random.Random(nbytes).randbytes(nbytes)
    frame = compress_chunk(runs(noise), layout=Layout.PLAIN, itemsize=1, level=1)
    assert nbytes < len(frame) <= compress_bound(nbytes)
    assert len(frame) - nbytes < 64


def test_frame_carries_size_and_checksum() -> None:
    for layout in Layout:
        frame = compress_chunk(runs(content(512)), layout=layout, itemsize=2, level=1)
        parameters = zstandard.get_frame_parameters(frame)
        assert parameters.content_size == 512
        assert parameters.has_checksum


@pytest.mark.parametrize("itemsize", [2, 4])
def test_planes_leave_less_of_floats_than_plain_bytes(itemsize: int) -> None:
    words = np.random.default_rng(0).standard_normal(1 << 17, dtype=np.float32).view(np.uint32)
    data = words.tobytes() if itemsize == 4 else (words >> 16).astype(np.uint16).tobytes()
    shuffled, plain = (
        len(compress_chunk(runs(data), layout=layout, itemsize=itemsize, level=1))
        for layout in (Layout.SHUFFLE, Layout.PLAIN)
    )
    assert shuffled < 0.95 * plain


def test_results_do_not_alias_the_recycled_scratch_memory() -> None:
    first = content(4_096, seed=1)
    frame = compress_chunk(runs(first, 1), layout=Layout.SHUFFLE, itemsize=2, level=1)
    out = bytearray(len(first))
    decompress_chunk(frame, runs(out, 1), layout=Layout.SHUFFLE, itemsize=2)
    kept = bytes(frame)
    other = content(4_096, seed=2)
    again = compress_chunk(runs(other, 1), layout=Layout.SHUFFLE, itemsize=2, level=1)
    decompress_chunk(again, runs(bytearray(4_096), 1), layout=Layout.SHUFFLE, itemsize=2)
    assert frame == kept
    assert out == first


def refused(frame: bytes, nbytes: int) -> type[FrameError]:
    with pytest.raises(FrameError) as caught:
        decompress_chunk(frame, runs(bytearray(nbytes)), layout=Layout.PLAIN, itemsize=1)
    return caught.type


def frame_of(data: bytes, *, checksum: bool = True, size: bool = True) -> bytes:
    writer = zstandard.ZstdCompressor(level=1, write_checksum=checksum, write_content_size=size)
    return writer.compress(data)


def test_frame_that_claims_a_terabyte_is_refused_by_its_first_bytes() -> None:
    # Magic, descriptor (8-byte content size, single segment, checksum), 1 TB: 13 bytes.
    bomb = b"\x28\xb5\x2f\xfd" + b"\xe4" + (1 << 40).to_bytes(8, "little")
    assert zstandard.get_frame_parameters(bomb).content_size == 1 << 40
    assert refused(bomb, 100) is FrameHeaderError


def test_frame_of_a_streaming_writer_without_content_size_is_refused() -> None:
    assert refused(frame_of(b"x" * 100, size=False), 100) is FrameHeaderError


def test_frame_of_another_size_is_refused() -> None:
    assert refused(frame_of(b"x" * 100), 101) is FrameHeaderError
    assert refused(frame_of(b"x" * 100), 99) is FrameHeaderError


def test_frame_without_checksum_is_refused() -> None:
    assert refused(frame_of(b"x" * 100, checksum=False), 100) is FrameHeaderError


def test_frame_that_needs_a_dictionary_is_refused() -> None:
    samples: list[bytes | bytearray | memoryview] = [
        random.Random(n).randbytes(64) + b"shared" * 20 for n in range(200)
    ]
    dictionary = zstandard.train_dictionary(1_024, samples)
    writer = zstandard.ZstdCompressor(dict_data=dictionary, write_checksum=True)
    assert refused(writer.compress(samples[0]), len(samples[0])) is FrameHeaderError


def test_skippable_frame_in_place_of_a_chunk_is_refused() -> None:
    skipped = (0x184D2A50).to_bytes(4, "little") + (100).to_bytes(4, "little") + bytes(100)
    assert refused(skipped + frame_of(b"x" * 100), 100) is FrameHeaderError


def test_bytes_after_the_frame_are_refused() -> None:
    assert refused(frame_of(b"x" * 100) + b"tail", 100) is FrameChecksumError
    assert refused(frame_of(b"x" * 100) + frame_of(b"more"), 100) is FrameChecksumError


@pytest.mark.parametrize("junk", [b"", b"\x28\xb5", b"\x00" * 40, b"junk" * 10])
def test_bytes_that_are_no_frame_are_refused(junk: bytes) -> None:
    assert refused(junk, 100) is FrameHeaderError


def test_damaged_checksum_is_noticed() -> None:
    frame = bytearray(frame_of(content(1_000)))
    frame[-1] ^= 1
    assert refused(bytes(frame), 1_000) is FrameChecksumError


def test_frame_with_a_huge_window_is_refused_instead_of_allocated() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, window_log=27, write_checksum=1, write_content_size=1
    )
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    second = writer.compress(b"y" * 100) + writer.flush()
    assert zstandard.get_frame_parameters(second).window_size == 1 << 27
    with pytest.raises(FrameChecksumError, match="too much memory"):
        decompress_chunk(
            frame_of(b"x" * 100) + second, runs(bytearray(100)), layout=Layout.PLAIN, itemsize=1
        )
