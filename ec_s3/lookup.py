"""What a stored item says about itself, for whoever knows its identifier and not its media.

Reads the beginning of one object; runs on the caller's event loop, beside or without an engine.
Decodes nothing and checks nothing that lies behind the header: whoever loads the item does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ec_s3.errors import FrameTruncatedError
from ec_s3.header import MAX_HEAD_BYTES, Header, read_header
from ec_s3.keys import KEY_VERSION, identifier_digest, parse_key
from ec_s3.types import Expectation

if TYPE_CHECKING:
    from ec_s3.store import Store

FIRST_BYTES = 16 << 10
"""Enough for the header of an item of a few hundred MiB."""

MAX_TENSOR_BYTES = 1 << 40


async def find_header(store: Store, *, namespace: str, identifier: str) -> Header | None:
    """The header of a stored item, None when the bucket does not hold the item.

    Args:
        store: the bucket.
        namespace: `<slug>-<fingerprint>/<dtype>`, as engines log it and `ec-s3 ls` shows it.
        identifier: the item's, as the producer published it.

    Raises:
        InvalidKeyError: `namespace` has another form.
        RemoteError: the bucket cannot be read.
        FrameError: the object is damaged, or another item's.
    """
    digest = identifier_digest(identifier)
    key = f"v{KEY_VERSION}/{namespace}/{digest[:2]}/{digest}"
    parse_key(key)
    header = None
    for length in (FIRST_BYTES, MAX_HEAD_BYTES):
        found = await store.get(key, into=lambda n: memoryview(bytearray(n)), length=length)
        if found is None:
            return None
        try:
            header = read_header(found.body, max_tensor_bytes=MAX_TENSOR_BYTES)
            break
        except FrameTruncatedError:
            if length == MAX_HEAD_BYTES or len(found.body) >= found.info.size:
                raise
    assert header is not None  # the last attempt has returned one or raised
    header.check(identifier=identifier, namespace=namespace, expect=Expectation())
    return header
