"""The index in the bucket: made by whoever lists the namespace, followed by servers.

Runs on an event loop: `build` in a tool, `IndexPoll` in a server's background, never on the path of
a request. What lies in the bucket is untrusted: what is no index of the namespace, or cannot be
read, changes nothing, and the index that was read last holds until it is too old or deleted.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from array import array
from typing import TYPE_CHECKING

from ec_s3.errors import IndexObjectError, InvalidKeyError, RemoteError
from ec_s3.index import MAX_INDEX_BYTES, MAX_ITEMS, Index, pack_index, read_index, tag_of
from ec_s3.keys import INDEX_NAME, KEY_VERSION, parse_key
from ec_s3.quiet import Quiet

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.keys import Namespace
    from ec_s3.metrics import Stats
    from ec_s3.presence import Listing
    from ec_s3.signing import Keyring
    from ec_s3.store import Store

logger = logging.getLogger(__name__)

POLL_SECONDS = 60.0
POLL_JITTER = 0.2
READ_SECONDS = 60.0
"""Time limit of one look, body included."""


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


class IndexPoll:
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

    def __init__(
        self,
        store: Store,
        *,
        namespace: Callable[[], Namespace],
        listing: Listing,
        max_age: float,
        keyring: Keyring | None,
        stats: Stats,
        period: float = POLL_SECONDS,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._listing = listing
        self._max_age = max_age
        self._keyring = keyring
        self._stats = stats
        self._period = period
        self._known = ("", "")  # key and version that were read last
        self._quiet = Quiet(once=True)
        listing.active = True

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await self.look()
            # A fleet that started together must not look together for ever.
            jitter = POLL_JITTER * (2 * random.random() - 1)  # noqa: S311  no secret
            await asyncio.sleep(self._period * (1 + jitter))

    async def look(self) -> None:
        """Look once whether there is another index, and take it in."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                outcome = await self._look(self._namespace())
        except IndexObjectError as error:
            outcome = "refused"
            if self._quiet.due() is not None:
                logger.warning("the index in the bucket is not used: %s", error)
        except (RemoteError, TimeoutError) as error:
            outcome = "failed"
            logger.debug("the index cannot be read: %s", error)
        except Exception:  # the background task's outermost border
            outcome = "failed"
            self._stats.add("errors", where="index")
            logger.exception("the index could not be taken in")
        self._stats.add("index_polls", outcome=outcome)
        self._stats.set("index_items", self._listing.items)

    async def _look(self, namespace: Namespace) -> str:
        key = namespace.index_key
        known_key, known = self._known
        etag = known if key == known_key else ""
        found = await self._store.get(key, into=_buffer, if_none_match=etag or None)
        if found is None:
            self._known = ("", "")
            self._listing.drop()
            return "absent"
        if etag and found.info.etag == etag:
            return "unchanged"
        self._known = (key, found.info.etag)  # a refused one need not be read twice either
        name = namespace.prefix.rpartition("/")[2]
        self._listing.load(await self._read(found.body, name), max_age=self._max_age)
        self._quiet.over()
        return "loaded"

    async def _read(self, body: memoryview, name: str) -> Index:
        def read() -> Index:
            return read_index(body, namespace=name, now=time.time(), keyring=self._keyring)

        return await asyncio.to_thread(read)


def _buffer(nbytes: int) -> memoryview:
    if nbytes > MAX_INDEX_BYTES:
        raise IndexObjectError(f"{nbytes} bytes, more than {MAX_INDEX_BYTES}")
    return memoryview(bytearray(nbytes))
