"""A body while it arrives: how far it is, for those who can use its beginning already.

Lives on the event loop, and belongs to one read; codec threads may look at `have`. It never says
that bytes are there before they are, and what it has said stays true.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.types import ObjectInfo


class Arriving:
    """A `store.Progress`: gets the buffer for a body, and follows it.

    Args:
        take: makes the buffer.

    Attributes:
        view: the buffer; empty until the answer's head is there.
        info: the object; None until the answer's head is there.
        have: how many of the body's bytes are there, from the first on.
        ended: whether no more will come.
        failure: why it ended too early, None when it did not.
        began: when the answer's head came, on the monotonic clock.
    """

    def __init__(self, take: Callable[[int], memoryview]) -> None:
        self._take = take
        self._news = asyncio.Event()
        self._wanted = sys.maxsize  # least that anybody waits for
        self.view = memoryview(b"")
        self.info: ObjectInfo | None = None
        self.have = 0
        self.ended = False
        self.failure: BaseException | None = None
        self.began = time.monotonic()

    def answered(self, info: ObjectInfo) -> None:
        """See `store.Progress.answered`."""
        self.info = info
        self.began = time.monotonic()

    @property
    def etag(self) -> str:
        """Version of the object, empty when unknown."""
        return self.info.etag if self.info is not None else ""

    @property
    def size(self) -> int:
        """Bytes of the whole object, 0 until known."""
        return self.info.size if self.info is not None else 0

    def __call__(self, nbytes: int) -> memoryview:
        """See `store.Store.get`."""
        self.view = self._take(nbytes)
        return self.view

    def arrived(self, nbytes: int) -> None:
        """See `store.Progress.arrived`."""
        self.have = nbytes
        if nbytes >= self._wanted:
            self._wake()

    def end(self, failure: BaseException | None = None) -> None:
        """No more will come; without a failure, all is there."""
        if failure is None:
            self.have = len(self.view)
        self.ended, self.failure = True, failure
        self._wake()

    async def reaches(self, nbytes: int) -> bool:
        """Wait until so many bytes are there; False when the body ends before.

        Raises:
            BaseException: what the read has failed with.
        """
        while self.have < nbytes and not self.ended:
            self._wanted = min(self._wanted, nbytes)
            self._news.clear()
            await self._news.wait()
        if self.failure is not None:
            raise self.failure
        return self.have >= nbytes

    def _wake(self) -> None:
        self._wanted = sys.maxsize
        self._news.set()
