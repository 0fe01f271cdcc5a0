"""How fast a job asks, and that it slows down when a bucket wants that."""

from __future__ import annotations

import pytest

from ec_s3.errors import RemoteDeniedError, RemoteThrottledError, RemoteUnavailableError
from ec_s3.prewarm.pace import Pace


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


class Bucket:
    """Answers with these errors first."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.asked = 0

    async def __call__(self) -> str:
        self.asked += 1
        if self._errors:
            raise self._errors.pop(0)
        return "answer"


def throttled() -> RemoteThrottledError:
    return RemoteThrottledError("slow down", operation="get")


async def test_requests_keep_their_rate() -> None:
    clock = Clock()
    pace = Pace(10, clock=clock, sleep=clock.sleep)
    for _ in range(60):
        await pace.turn()
    assert clock.now == pytest.approx(5.0, abs=0.2)  # the first second's worth goes at once
    assert pace.requests == 60


async def test_bucket_that_throttles_is_asked_again_ever_later() -> None:
    clock = Clock()
    pace = Pace(clock=clock, sleep=clock.sleep)
    bucket = Bucket(*(throttled() for _ in range(6)))
    assert await pace.call(bucket) == "answer"
    assert (bucket.asked, pace.retries) == (7, 6)
    assert len(clock.pauses) == 6
    assert clock.pauses[-1] > 4 * clock.pauses[0]
    assert clock.now > 3.0


async def test_all_requests_wait_while_the_bucket_wants_a_rest() -> None:
    clock = Clock()
    pace = Pace(clock=clock, sleep=clock.sleep)
    bucket = Bucket(throttled())
    await pace.call(bucket)
    pace._slower()
    before = clock.now
    await pace.turn()
    assert clock.now > before


async def test_an_answer_ends_the_slow_pace() -> None:
    clock = Clock()
    pace = Pace(clock=clock, sleep=clock.sleep)
    await pace.call(Bucket(*(throttled() for _ in range(5))))
    clock.pauses.clear()
    await pace.call(Bucket(throttled()))
    assert max(clock.pauses) <= 0.2


async def test_bucket_that_fails_for_too_long_is_given_up() -> None:
    clock = Clock()
    pace = Pace(clock=clock, sleep=clock.sleep, retry_seconds=60)
    with pytest.raises(RemoteThrottledError):
        await pace.call(Bucket(*(throttled() for _ in range(1000))))
    assert 60 <= clock.now < 90


async def test_denial_is_not_asked_twice() -> None:
    bucket = Bucket(RemoteDeniedError("no", operation="get"))
    with pytest.raises(RemoteDeniedError):
        await Pace().call(bucket)
    assert bucket.asked == 1


async def test_without_patience_only_a_slower_pace_is_waited_for() -> None:
    clock = Clock()
    pace = Pace(clock=clock, sleep=clock.sleep)
    assert await pace.call(Bucket(throttled()), patient=False) == "answer"
    with pytest.raises(RemoteUnavailableError):
        await pace.call(Bucket(RemoteUnavailableError("no", operation="get")), patient=False)


async def test_wait_for_a_turn_does_not_use_up_the_patience_with_the_bucket() -> None:
    clock = Clock()
    pace = Pace(0.01, clock=clock, sleep=clock.sleep, retry_seconds=60)
    await pace.turn()
    bucket = Bucket(throttled())
    assert await pace.call(bucket) == "answer"
    assert (bucket.asked, pace.retries) == (2, 1)
