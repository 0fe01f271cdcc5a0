"""A signed, bound object of format 1 as a file: later releases must read it and believe it.

The file is never rewritten; `write` made it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ec_s3.errors import FrameUnsignedError
from ec_s3.signing import parse_keys
from ec_s3.types import ItemMeta, TensorSpec
from ec_s3.wire import decode, encode

FILE = Path(__file__).parent / "v1_signed" / "bound.ecs3"
KEY = "golden:" + "0123456789abcdef" * 4
META = ItemMeta(0.125, {"image_grid_thw": [1, 4, 24], "名": 1e-7}, input_digest="c0ffee00" * 8)
TENSOR = bytes(range(200))
CAP = 1 << 20


def write() -> bytes:
    frame = encode(
        TensorSpec("bfloat16", (4, 25)),
        [memoryview(TENSOR)],
        identifier="картинка \ud800",
        namespace="org-model-0123456789abcdef/bfloat16",
        meta=META,
        created=1_750_000_000.25,
        keyring=parse_keys(KEY),
    )
    return b"".join(frame.parts)


def test_todays_reader_reads_and_believes_it() -> None:
    header, tensor = decode(FILE.read_bytes(), max_tensor_bytes=CAP, keyring=parse_keys(KEY))
    assert (header.meta, header.key_id, bytes(tensor)) == (META, "golden", TENSOR)
    assert header.identifier == "картинка \ud800"
    assert decode(FILE.read_bytes(), max_tensor_bytes=CAP)[0] == header


def test_another_key_of_its_id_does_not_do() -> None:
    with pytest.raises(FrameUnsignedError):
        decode(FILE.read_bytes(), max_tensor_bytes=CAP, keyring=parse_keys("golden:" + "1" * 64))


def test_todays_writer_writes_what_the_first_reader_read() -> None:
    header, _ = decode(write(), max_tensor_bytes=CAP, keyring=parse_keys(KEY))
    golden, _ = decode(FILE.read_bytes(), max_tensor_bytes=CAP, keyring=parse_keys(KEY))
    assert (header.meta, header.key_id, header.spec) == (golden.meta, golden.key_id, golden.spec)
