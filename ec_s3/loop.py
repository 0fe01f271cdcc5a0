"""One daemon thread that runs one event loop, for synchronous callers.

Any thread may call `run` and `post` except the loop's own. A forked child must not use the
parent's loop: it gets a `ClosedError`. The thread never keeps the interpreter alive.

Locking: none; `asyncio` hands work over, and `_closed` only ever turns true.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from typing import TYPE_CHECKING, TypeVar

from ec_s3.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class LoopThread:
    """An event loop on a daemon thread, started at construction."""

    def __init__(self, name: str = "ec_s3-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._closed = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError("the event loop belongs to the process before the fork; open anew")
        if self._closed or self.loop.is_closed():
            raise ClosedError("the event loop thread is closed")
        if threading.current_thread() is self._thread:
            raise RuntimeError("a synchronous call from the loop's own thread would never return")

    def run(self, work: Coroutine[object, object, T], *, timeout: float | None) -> T:
        """Run a coroutine on the loop and wait for its result.

        Args:
            work: the coroutine; cancelled when the time is up.
            timeout: seconds to wait, None only for work that bounds itself.

        Raises:
            TimeoutError: the time is up.
            ClosedError: closed, or called in a forked child.
        """
        try:
            self._check()
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TimeoutError(f"no result within {timeout} s") from None

    def post(self, call: Callable[..., object], *args: object) -> None:
        """Queue a plain call on the loop and return at once; callable from any thread."""
        if self._closed or os.getpid() != self._pid:
            raise ClosedError("the event loop thread is closed")
        self.loop.call_soon_threadsafe(call, *args)

    def close(self, *, timeout: float = 5.0) -> None:
        """Cancel what still runs and end the thread; idempotent, bounded by `timeout` seconds."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.loop.call_soon_threadsafe(self._stop)
        self._thread.join(timeout)

    def _stop(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.create_task(self._stop_after(tasks))

    async def _stop_after(self, tasks: set[asyncio.Task[object]]) -> None:
        if tasks:
            await asyncio.wait(tasks, timeout=2.0)
        self.loop.stop()
