"""The index object: what goes in comes out, and nothing else is an index."""

from __future__ import annotations

import json
from array import array

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ec_s3.errors import IndexObjectError
from ec_s3.header import digest
from ec_s3.index import MAX_ITEMS, Index, pack_index, read_index, tag_of
from ec_s3.keys import identifier_digest
from ec_s3.signing import parse_keys

NAME = "model-0123456789abcdef"
KEYS = parse_keys("new:" + "ab" * 32 + ",old:" + "cd" * 32)
OLD = parse_keys("old:" + "cd" * 32)
STRANGER = parse_keys("new:" + "ef" * 32)

_tags = st.lists(st.integers(0, (1 << 32) - 1), max_size=50)


def packed(tags: list[int], **more: object) -> bytes:
    fields = {"namespace": NAME, "made": 100.0, **more}
    return b"".join(pack_index(array("I", tags), **fields))  # type: ignore[arg-type]  # as given


def read(body: bytes, **more: object) -> Index:
    fields = {"namespace": NAME, "now": 200.0, "keyring": None, **more}
    return read_index(body, **fields)  # type: ignore[arg-type]  # as given


@given(_tags, _tags)
def test_it_holds_what_was_put_in_and_nothing_else(tags: list[int], others: list[int]) -> None:
    index = read(packed(tags))
    assert len(index) == len(set(tags))
    assert (index.namespace, index.made) == (NAME, 100.0)
    for tag in [*tags, *others]:
        assert (tag in index) == (tag in tags)


def test_an_index_of_the_first_release_is_read() -> None:
    body = bytes.fromhex(GOLDEN)
    index = read(body, keyring=OLD)
    assert [tag in index for tag in (1, 2, 0xFFFFFFFF, 3)] == [True, True, True, False]


GOLDEN = (
    "45435f5333494458da0000007b2276657273696f6e223a20312c20226e616d657370616365223a20226d6f64"
    "656c2d30313233343536373839616263646566222c20226d616465223a203130302e302c20226974656d7322"
    "3a20332c2022646967657374223a202264363036643963363836663938613436376331373037363139386335"
    "35623465222c20226b65795f6964223a20226f6c64222c20226d6163223a2022333562383538316438376365"
    "6264633463373839376232333436623939313964633337623835356362326466323938376333643862313639"
    "3837356566656566227d28b52ffd200c6100000101fd0000ff0000ff0000ff"
)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_index_are_refused(body: bytes) -> None:
    with pytest.raises(IndexObjectError):
        read(body)


@given(st.data())
def test_an_index_with_any_byte_changed_is_refused_or_says_the_same(data: st.DataObject) -> None:
    body = bytearray(packed([1, 2, 3, 1 << 31], keyring=KEYS))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(IndexObjectError):
        read(bytes(body), keyring=KEYS)


def test_an_index_cut_short_anywhere_is_refused() -> None:
    body = packed([1, 2, 3])
    for end in range(len(body)):
        with pytest.raises(IndexObjectError):
            read(body[:end])


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"namespace": "other-0123456789abcdef"}, "namespace"),
        ({"now": -300.1}, "future"),
        ({"keyring": KEYS}, "signed"),
    ],
)
def test_an_index_that_is_not_for_this_reader_is_refused(
    more: dict[str, object], what: str
) -> None:
    body = packed([1], made=0.0)
    assert 1 in read(body, now=-299.0), "a clock may be a little ahead"
    with pytest.raises(IndexObjectError, match=what):
        read(body, **more)


def test_only_an_accepted_key_signs() -> None:
    assert 7 in read(packed([7], keyring=OLD), keyring=KEYS), "an old key is still accepted"
    assert 7 in read(packed([7], keyring=KEYS)), "whoever asks for no signature takes any"
    for keyring in (OLD, STRANGER):
        with pytest.raises(IndexObjectError, match="signed"):
            read(packed([7], keyring=KEYS), keyring=keyring)


def forged(tags: bytes, **changed: object) -> bytes:
    """An index around these bytes, whose digest is right."""
    body = packed([1])
    length = int.from_bytes(body[8:12], "little")
    fields = json.loads(body[12 : 12 + length]) | {"digest": digest(tags).hex()} | changed
    header = json.dumps(fields).encode()
    return body[:8] + len(header).to_bytes(4, "little") + header + tags


def planes(*steps: int) -> bytes:
    raw = np.array(steps, dtype="<u4").view(np.uint8).reshape(-1, 4).T.tobytes()
    return zstandard.compress(raw)


def test_tags_that_are_not_what_the_header_says_are_refused_before_they_take_memory() -> None:
    head = bytes.fromhex("28b52ffd") + b"\xe0" + (1 << 40).to_bytes(8, "little")
    for body in (
        forged(head + b"\x01\x00\x00", items=1),
        forged(planes(1, 2), items=1),
        forged(planes(1), items=MAX_ITEMS + 1),
        forged(planes(1), items=-1),
        forged(planes(1), items=True),
        forged(b"", items=0),
        forged(planes(1)[:-1], items=1),
    ):
        with pytest.raises(IndexObjectError):
            read(body)
    assert 1 in read(forged(planes(1), items=1))


@pytest.mark.parametrize("steps", [(5, 0), (1 << 31, 1 << 31, 7)])
def test_tags_out_of_order_are_refused(steps: tuple[int, ...]) -> None:
    with pytest.raises(IndexObjectError, match="order"):
        read(forged(planes(*steps), items=len(steps)))


@pytest.mark.parametrize("made", [-1, None, "1", True, 1e400])
def test_a_time_that_is_none_is_refused(made: object) -> None:
    with pytest.raises(IndexObjectError):
        read(forged(planes(1), items=1, made=made))


def test_the_tag_of_an_item_is_the_beginning_of_its_digest() -> None:
    name = identifier_digest("item")
    assert f"{tag_of(name):08x}" == name[:8]


def test_a_million_items_take_two_bytes_each_stored_and_four_in_memory() -> None:
    tags = array("I", np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, np.uint32).tobytes())
    parts = pack_index(tags, namespace=NAME, made=1.0)
    assert sum(map(len, parts)) < 2_000_000
    index = read(b"".join(parts))
    assert index._tags.nbytes <= 4_000_000
    assert all(tag in index for tag in tags[:1000])
    chance = sum(tag in index for tag in range(0, 1 << 32, 429_497)) / 10_000
    assert chance < 0.002
