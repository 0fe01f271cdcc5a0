"""ByteBudget: the bound, turns in order, cancelled waiters."""

from __future__ import annotations

import asyncio

from ec_s3.budget import ByteBudget


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_what_fits_is_granted_at_once() -> None:
    budget = ByteBudget(10)
    await budget.acquire(4)
    await budget.acquire(6)
    assert budget.used == 10
    budget.release(4)
    assert budget.used == 6


async def test_what_does_not_fit_waits_and_nobody_overtakes() -> None:
    budget = ByteBudget(10)
    order: list[int] = []

    async def take(nbytes: int) -> None:
        await budget.acquire(nbytes)
        order.append(nbytes)

    await budget.acquire(6)
    tasks = [asyncio.create_task(take(nbytes)) for nbytes in (9, 1)]
    await settle()
    assert order == []  # the small one would fit, but came later
    budget.release(6)
    await asyncio.gather(*tasks)
    assert order == [9, 1]


async def test_one_larger_than_the_budget_goes_alone() -> None:
    budget = ByteBudget(10)
    await budget.acquire(3)
    large = asyncio.create_task(budget.acquire(50))
    await settle()
    assert not large.done()
    budget.release(3)
    await large
    other = asyncio.create_task(budget.acquire(1))
    await settle()
    assert not other.done()
    budget.release(50)
    await other
    assert budget.used == 1


async def test_a_cancelled_waiter_takes_nothing_and_lets_others_pass() -> None:
    budget = ByteBudget(10)
    await budget.acquire(8)
    large = asyncio.create_task(budget.acquire(9))
    small = asyncio.create_task(budget.acquire(2))
    await settle()
    large.cancel()
    await small
    assert large.cancelled() or not await asyncio.gather(large, return_exceptions=True)
    assert budget.used == 10


async def test_a_waiter_cancelled_as_it_is_granted_gives_back() -> None:
    budget = ByteBudget(10)
    await budget.acquire(10)
    waiter = asyncio.create_task(budget.acquire(5))
    await settle()
    budget.release(10)  # granted here
    waiter.cancel()  # and cancelled before it woke up
    await asyncio.gather(waiter, return_exceptions=True)
    assert budget.used == 0


async def test_a_waiter_cancelled_together_with_a_holder_takes_nothing() -> None:
    budget = ByteBudget(10)

    async def use(nbytes: int) -> None:
        await budget.acquire(nbytes)
        try:
            await asyncio.Event().wait()
        finally:
            budget.release(nbytes)

    tasks = [asyncio.create_task(use(nbytes)) for nbytes in (10, 5, 4)]
    await settle()
    for task in tasks[:2]:  # the first gives back before the second wakes up
        task.cancel()
    ended = await asyncio.gather(*tasks[:2], return_exceptions=True)
    assert [type(error) for error in ended] == [asyncio.CancelledError] * 2
    assert budget.used == 4
    tasks[2].cancel()
    await asyncio.gather(tasks[2], return_exceptions=True)
    assert budget.used == 0
