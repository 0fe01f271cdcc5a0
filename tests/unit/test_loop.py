"""LoopThread: results, deadlines, closing, forks."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from typing import TYPE_CHECKING

import pytest

from ec_s3.errors import ClosedError, RemoteTimeoutError
from ec_s3.loop import LoopThread

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread("test-loop")
    yield made
    made.close()


async def _forever() -> None:
    await asyncio.Event().wait()


def test_a_result_comes_back(loop: LoopThread) -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert loop.run(work(), timeout=10) == 7


def test_an_error_comes_back_as_it_is(loop: LoopThread) -> None:
    error = RemoteTimeoutError("slow", operation="get", key="k")

    async def work() -> None:
        raise error

    with pytest.raises(RemoteTimeoutError) as caught:  # and not a bare TimeoutError
        loop.run(work(), timeout=10)
    assert caught.value is error


def test_work_is_cancelled_when_the_time_is_up(loop: LoopThread) -> None:
    cancelled = threading.Event()

    async def work() -> None:
        try:
            await _forever()
        finally:
            cancelled.set()

    with pytest.raises(TimeoutError):
        loop.run(work(), timeout=0.02)
    assert cancelled.wait(10)


def test_a_result_that_comes_too_late_is_given_back(loop: LoopThread) -> None:
    dropped: list[str] = []
    done = threading.Event()

    async def work() -> str:
        try:
            await _forever()
        except asyncio.CancelledError:
            return "lease"
        return "unreachable"

    def drop(result: str) -> None:
        dropped.append(result)
        done.set()

    with pytest.raises(TimeoutError):
        loop.run(work(), timeout=0.02, drop=drop)
    assert done.wait(10)
    assert dropped == ["lease"]


def test_no_result_is_lost_between_caller_and_loop(loop: LoopThread) -> None:
    made: list[int] = []
    taken: list[int] = []
    dropped: list[int] = []

    async def work(i: int) -> int:
        await asyncio.sleep(0.0005)
        made.append(i)
        return i

    for i in range(200):
        try:
            taken.append(loop.run(work(i), timeout=0.0006, drop=dropped.append))
        except TimeoutError:
            continue

    async def nothing() -> None:
        await asyncio.sleep(0.01)

    loop.run(nothing(), timeout=10)
    assert sorted(taken + dropped) == sorted(made)


def test_closing_ends_those_who_wait(loop: LoopThread) -> None:
    started = threading.Event()
    errors: list[BaseException] = []

    async def work() -> None:
        started.set()
        await _forever()

    def call() -> None:
        try:
            loop.run(work(), timeout=30)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert started.wait(10)
    loop.close()
    thread.join(10)
    assert [type(error) for error in errors] == [ClosedError]


def test_nothing_runs_after_close(loop: LoopThread) -> None:
    loop.close()
    loop.close()
    with pytest.raises(ClosedError):
        loop.run(_forever(), timeout=1)
    with pytest.raises(ClosedError):
        loop.post(print)
    with pytest.raises(ClosedError):
        loop.check()
    assert loop.loop.is_closed()
    assert "test-loop" not in {thread.name for thread in threading.enumerate()}


def test_close_does_not_wait_for_work_that_will_not_end(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.loop.STOP_SECONDS", 0.05)
    release = threading.Event()
    started = threading.Event()

    async def stubborn() -> None:
        started.set()
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    with pytest.raises(TimeoutError):
        loop.run(stubborn(), timeout=0.01)
    assert started.wait(10)
    loop.post(loop.loop.call_later, 0.2, release.set)
    loop.close(timeout=10)
    assert not loop._thread.is_alive()
    release.set()
    gc.collect()  # asyncio complains of the task here, and not in the middle of another test


def test_a_call_from_the_loops_own_thread_is_refused(loop: LoopThread) -> None:
    async def work() -> str:
        with pytest.raises(RuntimeError, match="own thread"):
            loop.run(_forever(), timeout=1)
        return "refused"

    assert loop.run(work(), timeout=10) == "refused"


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")  # on purpose
def test_a_forked_child_gets_a_clear_error(loop: LoopThread) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        verdict = b"wrong"
        try:
            loop.run(_forever(), timeout=1)
        except ClosedError as error:
            verdict = b"before the fork" if "before the fork" in str(error) else b"other"
        loop.close()
        os.write(writing, verdict)
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 100) == b"before the fork"
    os.close(reading)
    os.waitpid(pid, 0)

    async def work() -> str:
        return "unharmed"

    assert loop.run(work(), timeout=10) == "unharmed"
