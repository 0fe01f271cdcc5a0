"""What is known of a bucket's keys, for a while; pure state, clocks are passed in.

Owned by the engine's loop; bounded in entries, oldest first out. A yes and a no both expire, so
an object deleted behind our back, or written by another server, is noticed within its time.
`Listing.lacks`, `Listing.deny` and `Presence.holds` may be called from any thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from ec_s3.index import AHEAD_SECONDS, tag_of
from ec_s3.keys import KEY_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.index import Index

MAX_WRONG = 0.1
"""Share of the items called absent that may turn out to be there, before an index is not believed
any more: others write more than it is worth."""

MIN_OUTCOMES = 20
"""Uploads of such items before that share means anything."""


class Listing:
    """What a namespace's index says, and which items have become known to be there since.

    An index is stale from its first second on. That is safe: at worst an item that is there is
    encoded again, and the put of it finds that out.

    Args:
        wall_clock: seconds since the epoch.
        max_entries: most items remembered beside the index.

    Attributes:
        active: whether an index is followed; without one there is nothing to remember.
    """

    def __init__(
        self, *, wall_clock: Callable[[], float] = time.time, max_entries: int = 100_000
    ) -> None:
        self.active = False
        self._wall_clock = wall_clock
        self._max = max_entries
        self._index: Index | None = None
        self._folder = ""
        self._until = 0.0
        self._since: dict[int, float] = {}  # tags of items known to be there, and when
        self._denied: dict[int, None] = {}  # tags of items called absent, and not put yet
        self._right = self._wrong = 0  # puts of such: those that were absent, and the others

    def load(self, index: Index, *, max_age: float) -> None:
        """Take in another index, to be believed for `max_age` seconds from its making on."""
        self._index = None  # nothing is answered in between
        self._right = self._wrong = 0
        # What was known before the listing began is in it, whatever the two clocks say.
        old = index.made - AHEAD_SECONDS
        while self._since and next(iter(self._since.values())) < old:
            _trim(self._since, len(self._since) - 1)
        self._folder = f"v{KEY_VERSION}/{index.namespace}/"
        self._until = index.made + max_age
        self._index = index

    def drop(self) -> None:
        """Believe no index any more, until another is loaded."""
        self._index = None

    @property
    def items(self) -> int:
        """Items of the index that is believed, 0 without one."""
        index = self._index
        return len(index) if index is not None and self._wall_clock() < self._until else 0

    def lacks(self, key: str) -> bool:
        """Whether the bucket holds no item of this key, as far as a believed index tells."""
        index = self._index
        if index is None or self._wall_clock() >= self._until or not key.startswith(self._folder):
            return False
        tag = tag_of(key.rpartition("/")[2])
        return tag not in self._since and tag not in index

    def deny(self, key: str) -> None:
        """The item was called absent; its put will tell whether that was right. Any thread."""
        self._denied[tag_of(key.rpartition("/")[2])] = None
        _trim(self._denied, self._max)

    def add(self, key: str) -> None:
        """The bucket holds the item."""
        if self.active:
            tag = tag_of(key.rpartition("/")[2])
            self._since.pop(tag, None)  # the dictionary is in order of time
            self._since[tag] = self._wall_clock()
            _trim(self._since, self._max)

    def learn(self, key: str, *, existed: bool) -> bool:
        """A put of the item has ended; whether it shows that the index was wrong.

        An index that is wrong too often is dropped: look-ups cost less than encoding what others
        have stored.
        """
        tag = tag_of(key.rpartition("/")[2])
        if self._denied.pop(tag, self) is self:
            return False
        self._right, self._wrong = self._right + (not existed), self._wrong + existed
        total = self._right + self._wrong
        if total >= MIN_OUTCOMES and self._wrong > MAX_WRONG * total:
            self.drop()
        return existed


def _trim(entries: dict[int, Any], most: int) -> None:
    while len(entries) > most:
        entries.pop(next(iter(entries)), None)


class Presence:
    """Short-lived answers to "does the bucket hold this key".

    Args:
        positive_ttl: seconds that a yes is believed.
        negative_ttl: seconds that a no is believed.
        max_entries: most keys remembered.

    Attributes:
        listing: what is known from an index.
    """

    def __init__(
        self, *, positive_ttl: float, negative_ttl: float, max_entries: int = 100_000
    ) -> None:
        self._ttl = {True: positive_ttl, False: negative_ttl}
        self._max = max_entries
        self._known: OrderedDict[str, tuple[bool, float]] = OrderedDict()
        self.listing = Listing()

    def get(self, key: str, *, now: float) -> bool | None:
        """The remembered answer, None when unknown or expired."""
        known = self._known.get(key)
        if known is None:
            return None
        present, expires = known
        if now >= expires:
            del self._known[key]
            return None
        return present

    def holds(self, key: str, *, now: float) -> bool:
        """Whether the answer is a yes that has not expired; any thread."""
        present, expires = self._known.get(key, (False, now))
        return present and now < expires

    def set(self, key: str, *, present: bool, now: float) -> None:
        """Remember an answer from the store or from an own write."""
        if present:
            self.listing.add(key)
        self._known[key] = (present, now + self._ttl[present])
        self._known.move_to_end(key)
        while len(self._known) > self._max:
            self._known.popitem(last=False)

    def forget(self, key: str) -> None:
        """Drop what is known of a key."""
        self._known.pop(key, None)

    def forget_absence(self, key: str) -> None:
        """Drop a remembered no; a yes stays."""
        known = self._known.get(key)
        if known is not None and not known[0]:
            del self._known[key]

    def clear(self) -> None:
        """Drop everything."""
        self._known.clear()


class Refused:
    """Objects that a reader refused, by key, so that the next save replaces them.

    Owned by the engine's loop; bounded. Each key is repaired at most once per `interval`
    seconds, so that two writers who disagree cannot replace each other's object for ever.
    """

    def __init__(self, *, interval: float = 3600.0, max_entries: int = 10_000) -> None:
        self._interval = interval
        self._max = max_entries
        self._etags: OrderedDict[str, str] = OrderedDict()
        self._repaired: OrderedDict[str, float] = OrderedDict()

    def add(self, key: str, etag: str) -> None:
        """Remember the version of the object that was refused."""
        self._etags[key] = etag
        self._etags.move_to_end(key)
        self._trim(self._etags)

    def knows(self, key: str, etag: str | None = None) -> bool:
        """Whether an object of this key was refused and not repaired since; this version, if named.

        Args:
            key: object key.
            etag: the version that the store holds now; None for any.
        """
        return key in self._etags and (etag is None or self._etags[key] == etag)

    def forget(self, key: str) -> None:
        """The object is gone, or has been replaced by somebody else."""
        self._etags.pop(key, None)

    def take(self, key: str, *, now: float) -> str | None:
        """The ETag that a save should replace, None when there is nothing to repair now."""
        if (
            key not in self._etags
            or now < self._repaired.get(key, -self._interval) + self._interval
        ):
            return None
        self._repaired[key] = now
        self._repaired.move_to_end(key)
        self._trim(self._repaired)
        return self._etags.pop(key)

    def clear(self) -> None:
        """Drop everything, also what was repaired when."""
        self._etags.clear()
        self._repaired.clear()

    def _trim(self, known: OrderedDict[str, str] | OrderedDict[str, float]) -> None:
        while len(known) > self._max:
            known.popitem(last=False)
