"""`Doubts`: the keys whose last write failed, so that nobody was told whether it arrived.

Owned by one `S3Store`, on its event loop; bounded, the oldest are forgotten. What is forgotten
costs a body that is sent in vain and then counts as another writer's, never a wrong object.
"""

from __future__ import annotations

_MOST = 1024


class Doubts:
    """A write of one of these keys looks first at what is there."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, key: str) -> None:
        """A write of the key ended without an answer."""
        self._keys[key] = None
        while len(self._keys) > _MOST:
            del self._keys[next(iter(self._keys))]

    def settle(self, key: str) -> None:
        """A write of the key was answered."""
        self._keys.pop(key, None)
