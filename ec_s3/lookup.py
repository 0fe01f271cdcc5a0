"""What a stored item says about itself, for whoever knows its key or identifier and not its media.

Reads the beginning of one object; runs on the caller's event loop, beside or without an engine.
Decodes nothing and checks nothing that lies behind the header: whoever loads the item does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ec_s3.errors import FrameError, FrameTruncatedError
from ec_s3.header import MAX_HEAD_BYTES, Header, read_header
from ec_s3.keys import KEY_VERSION, identifier_digest, parse_key
from ec_s3.types import Expectation

if TYPE_CHECKING:
    from ec_s3.signing import Keyring
    from ec_s3.store import Store
    from ec_s3.types import ObjectInfo

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
    header = await header_at(store, key)
    if header is not None:
        header.check(identifier=identifier, namespace=namespace, expect=Expectation())
    return header


async def header_at(
    store: Store,
    key: str,
    *,
    etag: str | None = None,
    max_tensor_bytes: int = MAX_TENSOR_BYTES,
    keyring: Keyring | None = None,
) -> Header | None:
    """The header of the object of a key, None when there is none; not checked against the key.

    Args:
        store: the bucket.
        key: the object's.
        etag: the version that is meant, None for any.
        max_tensor_bytes: items of more are refused.
        keyring: keys of which one must have signed it, None to believe everybody.

    Raises:
        RemoteChangedError: the object has another `etag`.
        RemoteError: the bucket cannot be read.
        FrameError: the object is damaged, too large or not signed.
    """
    length = FIRST_BYTES
    while True:
        found = await store.get(
            key, into=lambda n: memoryview(bytearray(n)), length=length, if_match=etag
        )
        if found is None:
            return None
        try:
            return read_header(found.body, max_tensor_bytes=max_tensor_bytes, keyring=keyring)
        except FrameTruncatedError:
            if length >= min(MAX_HEAD_BYTES, found.info.size):
                raise
            length = MAX_HEAD_BYTES


async def is_stale(store: Store, info: ObjectInfo, *, valid_after: float) -> bool:
    """Whether an object was made before the time from which objects count; see `Control`.

    An object that was stored before it was. One that was stored later may have been made long
    before, and written again as it grew old (`refresh`): only its header tells.

    Args:
        store: the bucket.
        info: what it says of the object.
        valid_after: the time, in seconds since the epoch; 0.0 for none.

    Raises:
        RemoteChangedError: the object has been replaced meanwhile.
        RemoteError: the bucket cannot be read.
    """
    if not valid_after:
        return False
    if 0.0 < info.modified < valid_after:
        return True
    try:
        header = await header_at(store, info.key, etag=info.etag or None)
    except FrameError:
        return False  # whoever reads it refuses it, and says why
    return header is not None and header.created < valid_after
