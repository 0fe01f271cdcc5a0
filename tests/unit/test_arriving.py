"""Bodies that are worked on while they arrive."""

from __future__ import annotations

import asyncio

from ec_s3.arriving import Arriving
from ec_s3.store import Progress

MIB = 1 << 20


def made(nbytes: int) -> Arriving:
    arriving = Arriving(lambda n: memoryview(bytearray(n)))
    assert len(arriving(nbytes)) == nbytes
    return arriving


def test_it_is_told_ever_less_at_a_time_and_no_crumbs() -> None:
    arriving = made(8 * MIB)
    assert isinstance(arriving, Progress)
    stops = [arriving.arrived(0)]
    while stops[-1] < 8 * MIB:
        stops.append(arriving.arrived(stops[-1]))
    assert stops[:4] == [4 * MIB, 6 * MIB, 7 * MIB, 15 * MIB // 2]
    assert len(stops) == 5


async def test_nothing_is_there_before_it_was_told() -> None:
    arriving = made(4 * MIB)
    assert arriving.arrived(0) == 2 * MIB
    waiting = asyncio.create_task(arriving.reaches(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    arriving.arrived(2 * MIB)
    assert await waiting
    assert arriving.have == 2 * MIB


async def test_whoever_waits_for_more_than_comes_is_told_so_at_the_end() -> None:
    arriving = made(4 * MIB)
    waiting = asyncio.create_task(arriving.reaches(4 * MIB))
    arriving.arrived(3 * MIB)
    await asyncio.sleep(0)
    assert not waiting.done()
    arriving.end(0)
    assert not await waiting
