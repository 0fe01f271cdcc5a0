"""Bodies that are worked on while they arrive."""

from __future__ import annotations

import asyncio

import pytest

from ec_s3.arriving import Arriving
from ec_s3.store import Progress
from ec_s3.types import ObjectInfo

MIB = 1 << 20


def made(nbytes: int) -> Arriving:
    arriving = Arriving(lambda n: memoryview(bytearray(n)))
    arriving.answered(ObjectInfo("k", 9 * MIB, "e"))
    assert len(arriving(nbytes)) == nbytes
    return arriving


def test_it_says_of_which_object_a_body_is_before_the_body_is_there() -> None:
    arriving = Arriving(lambda n: memoryview(bytearray(n)))
    assert isinstance(arriving, Progress)
    assert (arriving.etag, arriving.size) == ("", 0)
    arriving.answered(ObjectInfo("k", 9 * MIB, "e"))
    assert (arriving.etag, arriving.size, arriving.have) == ("e", 9 * MIB, 0)


async def test_nothing_is_there_before_it_was_told() -> None:
    arriving = made(4 * MIB)
    waiting = asyncio.create_task(arriving.reaches(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    arriving.arrived(2 * MIB)
    assert await waiting
    assert arriving.have == 2 * MIB


async def test_each_who_waits_is_woken_when_his_bytes_are_there() -> None:
    arriving = made(4 * MIB)
    late, soon = (asyncio.create_task(arriving.reaches(n * MIB)) for n in (3, 1))
    await asyncio.sleep(0)
    for told in (0, MIB - 1):
        arriving.arrived(told)
        await asyncio.sleep(0)
        assert not soon.done()
    arriving.arrived(MIB)
    assert await soon
    assert not late.done()
    arriving.arrived(3 * MIB)
    assert await late


async def test_whoever_waits_for_more_than_comes_is_told_so_at_the_end() -> None:
    arriving = made(4 * MIB)
    waiting = asyncio.create_task(arriving.reaches(4 * MIB + 1))
    arriving.arrived(3 * MIB)
    await asyncio.sleep(0)
    assert not waiting.done()
    arriving.end()
    assert not await waiting
    assert await arriving.reaches(4 * MIB)


async def test_whoever_waits_for_a_body_that_fails_hears_why() -> None:
    arriving = made(4 * MIB)
    waiting = asyncio.create_task(arriving.reaches(4 * MIB))
    await asyncio.sleep(0)
    arriving.end(ConnectionError("gone"))
    with pytest.raises(ConnectionError, match="gone"):
        await waiting
    with pytest.raises(ConnectionError, match="gone"):
        await arriving.reaches(1)
