"""Finding the header of a stored item."""

from __future__ import annotations

import pytest

from ec_s3.errors import FrameTooLargeError, FrameTruncatedError, RemoteChangedError
from ec_s3.keys import Namespace
from ec_s3.lookup import FIRST_BYTES, find_header, header_at
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import ItemMeta, TensorSpec
from ec_s3.wire import encode

SPACE = Namespace(model="org/model", dtype="float32")
KEY = SPACE.object_key("a")
LONG: dict[str, object] = {"modality": "video", "metadata": {"timestamps": [0.123456789] * 4000}}


async def store_with(*, placeholder: dict[str, object] | None = None) -> MemoryStore:
    frame = encode(
        TensorSpec("float32", (4, 8)),
        [memoryview(bytes(128))],
        identifier="a",
        namespace=SPACE.id,
        meta=ItemMeta(placeholder=placeholder or {}),
        created=1.0,
    )
    store = MemoryStore()
    await store.put(KEY, frame.parts)
    return store


@pytest.mark.parametrize("placeholder", [{}, LONG], ids=["short", "long"])
async def test_a_header_of_any_length_is_found_by_key_and_by_identifier(
    placeholder: dict[str, object],
) -> None:
    store = await store_with(placeholder=placeholder)
    header = await header_at(store, KEY)
    assert header is not None
    assert (header.header_bytes > FIRST_BYTES) is bool(placeholder)
    assert header.meta.placeholder == placeholder
    assert await find_header(store, namespace=SPACE.id, identifier="a") == header


async def test_what_is_not_there_is_none() -> None:
    store = MemoryStore()
    assert await header_at(store, KEY) is None
    assert await find_header(store, namespace=SPACE.id, identifier="a") is None


async def test_another_version_than_the_one_that_is_meant_is_refused() -> None:
    store = await store_with()
    info = await store.head(KEY)
    assert info is not None
    assert await header_at(store, KEY, etag=info.etag) is not None
    with pytest.raises(RemoteChangedError):
        await header_at(store, KEY, etag='"another"')


@pytest.mark.parametrize("kept", [0, 10, FIRST_BYTES, FIRST_BYTES + 1])
async def test_a_header_that_is_cut_off_is_refused(kept: int) -> None:
    store = await store_with(placeholder=LONG)
    store.objects[KEY] = store.objects[KEY][:kept]
    with pytest.raises(FrameTruncatedError):
        await header_at(store, KEY)


async def test_an_item_larger_than_wanted_is_refused() -> None:
    store = await store_with()
    with pytest.raises(FrameTooLargeError):
        await header_at(store, KEY, max_tensor_bytes=127)
