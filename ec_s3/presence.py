"""What is known of a bucket's keys for a short while; pure state, the clock is passed in.

Owned by the engine's loop; bounded in entries, oldest first out. A yes and a no both expire, so
an object deleted behind our back, or written by another server, is noticed within its time.
"""

from __future__ import annotations

from collections import OrderedDict


class Presence:
    """Short-lived answers to "does the bucket hold this key".

    Args:
        positive_ttl: seconds that a yes is believed.
        negative_ttl: seconds that a no is believed.
        max_entries: most keys remembered.
    """

    def __init__(
        self, *, positive_ttl: float, negative_ttl: float, max_entries: int = 100_000
    ) -> None:
        self._ttl = {True: positive_ttl, False: negative_ttl}
        self._max = max_entries
        self._known: OrderedDict[str, tuple[bool, float]] = OrderedDict()

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
