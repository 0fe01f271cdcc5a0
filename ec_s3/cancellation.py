"""Awaiting work that must not be left while it still runs.

Runs on an event loop. A cancellation is not refused here, but it is raised only when nothing that
was started writes to its caller's memory any more.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from ec_s3.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from concurrent.futures import Executor

T = TypeVar("T")


async def run_to_end(executor: Executor, call: Callable[..., T], *args: object) -> T:
    """Run a call on an executor; a cancellation is raised only after the call has ended.

    Whoever cancels may then reuse the memory that the call was working on.

    Raises:
        ClosedError: the executor is shut down.
    """
    try:
        future = asyncio.get_running_loop().run_in_executor(executor, call, *args)
    except RuntimeError as error:  # an executor's word for it
        raise ClosedError(str(error)) from None
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:  # cancelled again: still not safe to leave
                continue
        caller = asyncio.current_task()
        if future.cancelled() and (caller is None or not caller.cancelling()):
            raise ClosedError("shut down before the call began") from None
        raise


async def all_or_cancel(works: Iterable[Awaitable[None]]) -> None:
    """Await all; on the first failure cancel the others, and raise it when all have ended.

    However often it is cancelled: it leaves only when none of them runs any more.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)


async def end_all(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Cancel tasks and wait until all have ended; how they ended is not told.

    However often it is cancelled: it leaves only when none of them runs any more.
    """
    cancelled: asyncio.CancelledError | None = None
    for task in tasks:
        task.cancel()
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as again:
            cancelled = again
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at, lest asyncio complains
    if cancelled is not None:
        raise cancelled
