"""The index in the bucket: made by whoever lists the namespace, followed by servers.

Runs on an event loop: in a tool, or (`index_poll`) in a server's background, never on the path of a
request. What lies in the bucket is untrusted: what is no index of the namespace, or cannot be
read, changes nothing, and the index that was read last holds until it is too old or deleted.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import TYPE_CHECKING

from ec_s3.errors import IndexObjectError, InvalidKeyError
from ec_s3.index import MAX_INDEX_BYTES, MAX_ITEMS, Index, pack_index, read_index, tag_of
from ec_s3.keys import INDEX_NAME, KEY_VERSION, parse_key
from ec_s3.polling import Followed, Poll

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.keys import Namespace
    from ec_s3.metrics import Stats
    from ec_s3.presence import Listing
    from ec_s3.signing import Keyring
    from ec_s3.store import Store

POLL_SECONDS = 60.0
READ_SECONDS = 60.0
"""Time limit of one reading, body included."""

_FOLLOWED = Followed(
    name="index",
    max_bytes=MAX_INDEX_BYTES,
    refuses=IndexObjectError,
    taken="loaded",
    refused="refused",
    complaint="the index in the bucket is not used: %s",
    unread="the index cannot be read: %s",
    bug="the index could not be taken in",
)


async def list_tags(
    store: Store, namespace: str, *, on_item: Callable[[int], object] = lambda _: None
) -> array[int]:
    """The tags of all items below a namespace's folder; 4 bytes of memory an item.

    Args:
        store: the bucket.
        namespace: last part of `Namespace.prefix`.
        on_item: called with 1 for each.

    Raises:
        IndexObjectError: more items than an index can hold.
        RemoteError: the store failed.
    """
    tags = array("I")
    async for info in store.list(f"v{KEY_VERSION}/{namespace}/"):
        try:
            tags.append(tag_of(parse_key(info.key).digest))
        except InvalidKeyError:
            continue  # a document of the folder
        on_item(1)
        if len(tags) > MAX_ITEMS:
            raise IndexObjectError(f"{namespace} holds more items than an index: {MAX_ITEMS}")
    return tags


async def write_index(
    store: Store,
    tags: array[int],
    *,
    namespace: Namespace | str,
    made: float,
    keyring: Keyring | None = None,
) -> int:
    """Put an index in the place of the one before; its size in bytes.

    Args:
        store: the bucket.
        tags: of every item that the folder holds.
        namespace: the namespace, or the last part of its `prefix`.
        made: when their listing began, in seconds since the epoch.
        keyring: signs it.

    Raises:
        IndexObjectError: it would be too large to be read.
        RemoteError: the store failed.
    """
    name = namespace if isinstance(namespace, str) else namespace.prefix.rpartition("/")[2]
    parts = pack_index(tags, namespace=name, made=made, keyring=keyring)
    size = sum(map(len, parts))
    if size > MAX_INDEX_BYTES:
        raise IndexObjectError(f"an index of {size} bytes is more than {MAX_INDEX_BYTES}")
    await store.put(f"v{KEY_VERSION}/{name}/{INDEX_NAME}", parts, if_absent=False)
    return size


def index_poll(
    store: Store,
    *,
    namespace: Callable[[], Namespace],
    listing: Listing,
    max_age: float,
    keyring: Keyring | None,
    stats: Stats,
    period: float = POLL_SECONDS,
) -> Poll:
    """Follows the index of the namespace in use.

    Args:
        store: where it lies.
        namespace: says whose; asked before every look.
        listing: takes every index that is new.
        max_age: seconds from its making on that an index is believed.
        keyring: the keys that must have signed it; None takes any.
        stats: counters `index_polls` and `errors`, gauge `index_items`.
        period: seconds between looks, more or less.
    """
    listing.active = True

    async def take(key: str, body: memoryview) -> None:
        name = key.split("/")[1]

        def read() -> Index:
            return read_index(body, namespace=name, now=time.time(), keyring=keyring)

        listing.load(await asyncio.to_thread(read), max_age=max_age)

    return Poll(
        store,
        _FOLLOWED,
        key=lambda: namespace().index_key,
        take=take,
        count=lambda outcome: stats.add("index_polls", outcome=outcome),
        stats=stats,
        period=period,
        timeout=READ_SECONDS,
        lost=listing.drop,
        looked=lambda: stats.set("index_items", listing.items),
    )
