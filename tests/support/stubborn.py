"""Work that does not end when it is told to, as on a file system that is gone."""

from __future__ import annotations

import asyncio
import contextlib


async def outlast(end: asyncio.Event) -> None:
    """Wait for an event, however often the wait is cancelled."""
    while not end.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await end.wait()
