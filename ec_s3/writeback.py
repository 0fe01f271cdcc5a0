"""Copies fetched objects to the disk tier, behind the caller's back and within a byte budget.

Runs on the engine's event loop. What does not fit the budget is not kept (counted): the bucket
still has it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ec_s3.errors import ECS3Error

if TYPE_CHECKING:
    from ec_s3.fetch import Body
    from ec_s3.metrics import Stats
    from ec_s3.store import Store

logger = logging.getLogger(__name__)

MAX_PENDING_BYTES = 256 << 20
"""Stored bytes held for the disk at once: a slow disk must not hold the machine's memory."""


class DiskWriteback:
    """A `fetch.Keeper` that writes to the disk tier."""

    def __init__(self, disk: Store, stats: Stats) -> None:
        self._disk = disk
        self._stats = stats
        self._pending = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def admits(self, nbytes: int) -> bool:
        """Whether the budget has room for an object of this size."""
        if self._pending + nbytes <= MAX_PENDING_BYTES:
            return True
        self._stats.add("disk_writes", outcome="skipped")
        return False

    def take(self, key: str, parts: list[memoryview], body: Body) -> None:
        """Write in the background; the body's buffers are given back afterwards."""
        nbytes = sum(len(part) for part in parts)
        self._pending += nbytes
        task = asyncio.create_task(self._write(key, parts, body, nbytes))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, key: str, parts: list[memoryview], body: Body, nbytes: int) -> None:
        try:
            await self._disk.put(key, parts)
            self._stats.add("disk_writes", outcome="written")
        except ECS3Error as error:
            self._stats.add("disk_writes", outcome="failed")
            logger.debug("the disk tier refuses a write: %s", error)
        finally:
            body.close()
            self._pending -= nbytes

    async def close(self) -> None:
        """Wait for the writes under way; each is bounded by the disk."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        for task in self._tasks:
            task.cancel()
