"""run_to_end and all_or_cancel: left only when nothing runs any more."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from stubborn import outlast

from ec_s3.cancellation import all_or_cancel, run_to_end
from ec_s3.errors import ClosedError


async def test_a_cancelled_call_is_left_only_when_its_thread_has_ended() -> None:
    entered, leave, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        assert leave.wait(10)
        ended.set()

    with ThreadPoolExecutor(1) as executor:
        task = asyncio.create_task(run_to_end(executor, work))
        await asyncio.get_running_loop().run_in_executor(None, entered.wait, 10)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()


async def test_the_first_failure_is_raised_after_all_have_ended() -> None:
    ended: list[str] = []

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("slow")

    with pytest.raises(ValueError, match="first"):
        await all_or_cancel([fail(), slow()])
    assert ended == ["slow"]


async def test_it_is_left_only_when_all_have_ended_however_often_it_is_cancelled() -> None:
    end = asyncio.Event()

    task = asyncio.create_task(all_or_cancel([outlast(end), outlast(end)]))
    for _ in range(3):
        await asyncio.sleep(0)  # both have begun
    for _ in range(4):
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_executor_that_is_shut_down_is_a_closed_error() -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(ClosedError):
        await run_to_end(executor, print)


async def test_a_call_that_waits_when_its_threads_are_shut_down_says_closed() -> None:
    """Its caller was not cancelled, and must not look so."""
    leave = threading.Event()
    executor = ThreadPoolExecutor(1)
    running = asyncio.create_task(run_to_end(executor, leave.wait, 10))
    waiting = asyncio.create_task(run_to_end(executor, print))
    await asyncio.sleep(0)
    executor.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(ClosedError):
        await waiting
    leave.set()
    assert await running
