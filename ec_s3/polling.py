"""Follows one small document in a bucket: read again only when it has changed.

Runs on an event loop, in a server's background and never on the path of a request. What the
document is, what is done with it and in which words that is told, is its user's matter
(`control`, `indexing`). An error or a document that cannot be used changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ec_s3.errors import ECS3Error, RemoteError
from ec_s3.quiet import Quiet

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ec_s3.metrics import Stats
    from ec_s3.store import Store

logger = logging.getLogger(__name__)

JITTER = 0.2
"""Share of the period by which a pause may be shorter or longer: a fleet that started together must
not look together for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A kind of document, and what is said about it.

    Attributes:
        name: counted among `errors` as this.
        max_bytes: largest document that is read.
        refuses: what is raised for one that cannot be used.
        taken: outcome of taking in a document.
        refused: outcome of a document that cannot be used.
        complaint: log line for that, of the error.
        unread: log line for one that cannot be read, of the error.
        bug: log line for an unexpected exception.
    """

    name: str
    max_bytes: int
    refuses: type[ECS3Error]
    taken: str
    refused: str
    complaint: str
    unread: str
    bug: str


@dataclass(frozen=True, slots=True)
class Document:
    """What lies in the bucket; no body when it is the version that the caller knows."""

    body: memoryview | None
    etag: str


async def read_document(
    store: Store, key: str, followed: Followed, *, known: str = ""
) -> Document | None:
    """The document as it lies in the bucket, None when there is none.

    Args:
        store: where it lies.
        key: its key.
        followed: what it is.
        known: the version that the caller has, empty for none; it is not read again.

    Raises:
        ECS3Error: `followed.refuses`, as it is too large.
        RemoteError: the store failed.
    """

    def into(nbytes: int) -> memoryview:
        if nbytes > followed.max_bytes:
            what = key.rpartition("/")[2]
            raise followed.refuses(f"{what} has {nbytes} bytes, more than {followed.max_bytes}")
        return memoryview(bytearray(nbytes))

    found = await store.get(key, into=into, if_none_match=known or None)
    if found is None:
        return None
    if known and found.info.etag == known:
        return Document(None, known)
    return Document(found.body, found.info.etag)


class Poll:
    """Follows one document.

    Args:
        store: where it lies.
        followed: what it is.
        key: says which object; asked before every look.
        take: called with the key and the body of each document that is new; what it raises beside
            `followed.refuses` is a bug, after which the document is read again.
        count: counts a look, by its outcome.
        stats: counter `errors`.
        period: seconds between looks, more or less.
        timeout: most seconds that one reading takes.
        lost: called whenever there is no document.
        looked: called after every look.

    Attributes:
        started: set once the first look has ended, whatever it has found.
    """

    def __init__(
        self,
        store: Store,
        followed: Followed,
        *,
        key: Callable[[], str],
        take: Callable[[str, memoryview], Awaitable[None]],
        count: Callable[[str], object],
        stats: Stats,
        period: float,
        timeout: float,
        lost: Callable[[], object] = lambda: None,
        looked: Callable[[], object] = lambda: None,
    ) -> None:
        self._store = store
        self._followed = followed
        self._key = key
        self._take = take
        self._count = count
        self._stats = stats
        self._period = period
        self._timeout = timeout
        self._lost = lost
        self._looked = looked
        self._known = ("", "")  # key and version that were read last
        self._quiet = Quiet(once=True)
        self._hurry = asyncio.Event()
        self.started = asyncio.Event()

    def hurry(self) -> None:
        """Look again at once; call on the loop."""
        self._hurry.set()

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await self.look()
            jitter = JITTER * (2 * random.random() - 1)  # noqa: S311  no secret
            waiting = asyncio.ensure_future(self._hurry.wait())
            try:
                await asyncio.wait({waiting}, timeout=self._period * (1 + jitter))
            finally:
                waiting.cancel()
            self._hurry.clear()

    async def look(self) -> None:
        """Look once whether there is something new, and take it in."""
        said = self._followed
        try:
            outcome = await self._look(self._key())
        except (RemoteError, TimeoutError) as error:
            outcome = "failed"
            logger.debug(said.unread, error)
        except said.refuses as error:
            outcome = said.refused
            if self._quiet.due() is not None:
                logger.warning(said.complaint, error)
        except Exception:  # the background task's outermost border
            outcome = "failed"
            self._known = ("", "")
            self._stats.add("errors", where=said.name)
            logger.exception(said.bug)
        self._count(outcome)
        self._looked()
        self.started.set()

    async def _look(self, key: str) -> str:
        known_key, known = self._known
        async with asyncio.timeout(self._timeout):
            found = await read_document(
                self._store, key, self._followed, known=known if key == known_key else ""
            )
        if found is None:
            self._known = ("", "")
            self._lost()
            return "absent"
        if found.body is None:
            return "unchanged"
        self._known = (key, found.etag)  # one that is refused need not be read twice either
        try:
            await self._take(key, found.body)
        except (RemoteError, TimeoutError) as error:
            raise RuntimeError("taking it in failed") from error  # not reading it: a bug
        self._quiet.over()
        return self._followed.taken
