"""SingleFlight: shared results, leaving callers, calling off, closing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from stubborn import outlast

from ec_s3.errors import ClosedError
from ec_s3.singleflight import SingleFlight


@dataclass(slots=True)
class Resource:
    """Counts its holders, as a lease does."""

    holders: int = 1

    def share(self) -> Resource:
        assert self.holders > 0, "shared after its end"
        self.holders += 1
        return self

    def drop(self) -> None:
        self.holders -= 1
        assert self.holders >= 0, "dropped twice"


@dataclass(slots=True)
class Work:
    """A call that can be held up and counts its starts."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    resource: Resource = field(default_factory=Resource)
    starts: int = 0
    cancelled: int = 0

    async def __call__(self) -> Resource:
        self.starts += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.resource


def make() -> SingleFlight[Resource]:
    return SingleFlight(Resource.share, Resource.drop)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_call_serves_all_callers_and_each_holds_a_share() -> None:
    flights, work = make(), Work()
    callers = [asyncio.create_task(flights.run("k", work)) for _ in range(5)]
    await settle()
    assert "k" in flights
    assert len(flights) == 1
    work.gate.set()
    assert [await caller for caller in callers] == [work.resource] * 5
    await settle()
    assert work.starts == 1
    assert work.resource.holders == 5
    assert len(flights) == 0


async def test_other_keys_fly_on_their_own() -> None:
    flights, one, two = make(), Work(), Work()
    first = asyncio.create_task(flights.run("1", one))
    two.gate.set()
    assert await flights.run("2", two) is two.resource
    one.gate.set()
    assert await first is one.resource


async def test_a_cancelled_leader_changes_nothing_for_the_others() -> None:
    flights, work = make(), Work()
    leader = asyncio.create_task(flights.run("k", work))
    await settle()
    follower = asyncio.create_task(flights.run("k", work))
    await settle()
    leader.cancel()
    await settle()
    work.gate.set()
    assert await follower is work.resource
    assert leader.cancelled()
    await settle()
    assert work.resource.holders == 1


async def test_when_all_have_left_an_unwanted_call_is_cancelled() -> None:
    flights, work = make(), Work()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await flights.run("k", work)
    assert len(flights) == 0
    await settle()
    assert (work.starts, work.cancelled) == (1, 1)


async def test_a_wanted_call_goes_on_and_its_result_is_given_back() -> None:
    flights, work = make(), Work()
    caller = asyncio.create_task(flights.run("k", work, wanted=True))
    await settle()
    caller.cancel()
    await settle()
    assert work.cancelled == 0
    assert "k" in flights
    work.gate.set()
    await settle()
    assert work.resource.holders == 0
    assert len(flights) == 0


async def test_nobody_joins_a_call_that_is_being_cancelled() -> None:
    flights = make()
    last = asyncio.Event()

    async def slow_to_go() -> Resource:
        try:
            await asyncio.Event().wait()
        finally:
            await last.wait()
        raise AssertionError

    first = asyncio.create_task(flights.run("k", slow_to_go))
    await settle()
    first.cancel()
    await settle()
    work = Work()
    work.gate.set()
    assert await flights.run("k", work) is work.resource
    last.set()
    await settle()
    await flights.close(10)


async def test_an_error_reaches_all_callers_and_is_not_kept() -> None:
    flights = make()
    gate = asyncio.Event()

    async def fail() -> Resource:
        await gate.wait()
        raise ValueError("no")

    callers = [asyncio.create_task(flights.run("k", fail)) for _ in range(3)]
    await settle()
    gate.set()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(result) for result in results] == [ValueError] * 3
    work = Work()
    work.gate.set()
    assert await flights.run("k", work) is work.resource


async def test_a_caller_cancelled_as_the_result_arrives_leaves_no_share_behind() -> None:
    for delay in range(4):
        flights, work = make(), Work()
        caller = asyncio.create_task(flights.run("k", work))
        await settle()
        work.gate.set()
        for _ in range(delay):
            await asyncio.sleep(0)
        caller.cancel()
        (result,) = await asyncio.gather(caller, return_exceptions=True)
        await settle()
        assert work.resource.holders == (1 if isinstance(result, Resource) else 0) or work.cancelled


async def test_calling_off_answers_those_who_wait_and_waits_for_the_landing() -> None:
    answer = Resource()
    flights: SingleFlight[Resource] = SingleFlight(
        Resource.share, Resource.drop, called_off=lambda: answer
    )
    work, other = Work(), Work()
    waiting = asyncio.create_task(flights.run("k", work))
    kept = asyncio.create_task(flights.run("other", other))
    await settle()
    await flights.call_off({"k", "unknown"})
    assert work.cancelled == 1
    assert await waiting is answer
    other.gate.set()
    assert await kept is other.resource


async def test_closing_ends_every_flight_with_a_closed_error() -> None:
    flights, work = make(), Work()
    waiting = asyncio.create_task(flights.run("k", work))
    left = asyncio.create_task(flights.run("l", Work(), wanted=True))
    await settle()
    left.cancel()
    await settle()
    await flights.close(10)
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await flights.run("new", work)
    await flights.close(10)


async def test_closing_does_not_wait_for_a_call_that_will_not_end() -> None:
    flights = make()
    end = asyncio.Event()

    async def stubborn() -> Resource:
        await outlast(end)
        return Resource()

    waiting = asyncio.create_task(flights.run("k", stubborn))
    await settle()
    await flights.close(0.01)
    end.set()
    assert (await waiting).holders == 1
