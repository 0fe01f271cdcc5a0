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
    from collections.abc import Iterable

    from ec_s3.buffers import Body
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
        self._tasks: dict[asyncio.Task[None], str] = {}

    def admit(self, nbytes: int) -> bool:
        """Take room for an object of this size out of the budget, if there is any."""
        if self._pending + nbytes > MAX_PENDING_BYTES:
            self._stats.add("disk_writes", outcome="skipped")
            return False
        self._pending += nbytes
        return True

    def withdraw(self, nbytes: int) -> None:
        """Give admitted room back: the object was not fetched after all."""
        self._pending -= nbytes

    def take(self, key: str, parts: list[memoryview], body: Body, *, nbytes: int) -> None:
        """Write in the background; the body's buffers are given back afterwards."""
        task = asyncio.create_task(self._write(key, parts))
        self._tasks[task] = key

        def end(_: asyncio.Task[None]) -> None:  # also of a task that never got to run
            body.close()
            self._pending -= nbytes
            del self._tasks[task]

        task.add_done_callback(end)

    async def _write(self, key: str, parts: list[memoryview]) -> None:
        try:
            await self._disk.put(key, parts)
            self._stats.add("disk_writes", outcome="written")
        except ECS3Error as error:
            self._stats.add("disk_writes", outcome="failed")
            logger.debug("the disk tier refuses a write: %s", error)

    def keys(self) -> set[str]:
        """Keys that are being written."""
        return set(self._tasks.values())

    async def call_off(self, keys: Iterable[str]) -> None:
        """End the writes of these keys and wait for their end."""
        wanted = set(keys)
        await self._cancel({task for task, key in self._tasks.items() if key in wanted}, None)

    async def close(self, timeout: float) -> None:
        """Wait for the writes under way at most `timeout` seconds, then end them."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout)
        await self._cancel(set(self._tasks), timeout)

    async def _cancel(self, tasks: set[asyncio.Task[None]], timeout: float | None) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
