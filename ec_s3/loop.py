"""One daemon thread that runs one event loop, for synchronous callers.

Any thread may call `run` and `post` except the loop's own. A forked child must not use the
parent's loop: it gets a `ClosedError`. The thread never keeps the interpreter alive.

Locking: none; `asyncio` hands work over, `_closed` only ever turns true, and a future's own state
decides whether the caller or the loop owns a result.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from ec_s3.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

STOP_SECONDS = 2.0
"""How long cancelled work may take to end when the loop is closed."""


def waitable(timeout: float) -> float:
    """The same, or the longest that a thread can wait, which is centuries."""
    return min(timeout, threading.TIMEOUT_MAX)


class _Call(Generic[T]):
    """One coroutine on its way to the loop, and its result on the way back."""

    def __init__(
        self, work: Coroutine[object, object, T], drop: Callable[[T], object] | None
    ) -> None:
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._work = work
        self._drop = drop
        self._task: asyncio.Task[T] | None = None

    def start(self, loop: asyncio.AbstractEventLoop, *, closed: bool) -> None:
        """On the loop: begin, unless nobody waits any more or nothing may begin."""
        if closed or self.outcome.cancelled():
            self._work.close()
            if self.outcome.set_running_or_notify_cancel():
                self.outcome.set_exception(ClosedError("the event loop thread is closed"))
            return
        self._task = loop.create_task(self._work)
        self._task.add_done_callback(self._land)

    def _land(self, task: asyncio.Task[T]) -> None:
        error: BaseException | None = None
        if task.cancelled():
            error = ClosedError("the event loop thread was closed")
        elif (raised := task.exception()) is not None:
            error = raised
        if self.outcome.set_running_or_notify_cancel():
            if error is None:
                self.outcome.set_result(task.result())
            else:
                self.outcome.set_exception(error)
        elif error is None and self._drop is not None:
            self._drop(task.result())

    def abandon(self) -> None:
        """On the loop: nobody waits any more."""
        if self._task is not None:
            self._task.cancel()


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

    def check_process(self) -> None:
        """Refuse a forked child, where any lock may be held for ever.

        Raises:
            ClosedError: this is a forked child.
        """
        if os.getpid() != self._pid:
            raise ClosedError("the event loop belongs to the process before the fork; open anew")

    def check(self) -> None:
        """Raise unless the loop may be used here.

        Raises:
            ClosedError: closed, or this is a forked child.
        """
        self.check_process()
        if self._closed:
            raise ClosedError("the event loop thread is closed")

    def run(
        self,
        work: Coroutine[object, object, T],
        *,
        timeout: float | None,
        drop: Callable[[T], object] | None = None,
    ) -> T:
        """Run a coroutine on the loop and wait for its result.

        Args:
            work: the coroutine; cancelled when the time is up.
            timeout: seconds to wait, None only for work that bounds itself.
            drop: gives back, on the loop, a result that came after the caller had left.

        Raises:
            TimeoutError: the time is up.
            ClosedError: closed meanwhile or before, or called in a forked child.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a synchronous call from the loop's own thread never returns")
        call = _Call(work, drop)
        try:
            self.post(lambda: call.start(self.loop, closed=self._closed))
        except ClosedError:
            work.close()
            raise
        try:
            concurrent.futures.wait([call.outcome], None if timeout is None else waitable(timeout))
        finally:
            late = call.outcome.cancel()  # False: the result came, perhaps just now
            if late:
                self._try_post(call.abandon)
        if late:
            raise TimeoutError(f"no result within {timeout} s")
        return call.outcome.result()

    def post(self, call: Callable[..., object], *args: object) -> None:
        """Queue a plain call on the loop and return at once; callable from any thread.

        Raises:
            ClosedError: closed, or called in a forked child.
        """
        self.check()
        if not self._try_post(call, *args):
            raise ClosedError("the event loop thread is closed")

    def _try_post(self, call: Callable[..., object], *args: object) -> bool:
        try:
            self.loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # asyncio's word for a closed loop
            return False
        return True

    def close(self, *, timeout: float = 5.0) -> None:
        """Cancel what still runs and end the thread; idempotent, bounded by `timeout` seconds."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._try_post(self._stop)
        self._thread.join(timeout)

    def _stop(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.create_task(self._stop_after(tasks))

    async def _stop_after(self, tasks: set[asyncio.Task[object]]) -> None:
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS)
        self.loop.stop()
