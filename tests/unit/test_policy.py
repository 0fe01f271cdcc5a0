from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_s3.policy import (
    PATIENCE,
    Breaker,
    Measured,
    Policy,
    Refusal,
    Sightings,
    TokenBucket,
    admit_upload,
    should_defer,
    waits,
)


class TestAdmission:
    def test_an_item_up_to_the_cap_is_admitted(self) -> None:
        assert admit_upload(10, max_item_bytes=10, second_sight=False, seen_before=False) is None

    def test_a_larger_one_is_not_however_often_it_comes(self) -> None:
        refusal = admit_upload(11, max_item_bytes=10, second_sight=True, seen_before=True)
        assert refusal is Refusal.TOO_LARGE

    def test_with_second_sight_the_first_put_is_not_uploaded(self) -> None:
        def admit(*, seen_before: bool) -> Refusal | None:
            return admit_upload(1, max_item_bytes=10, second_sight=True, seen_before=seen_before)

        assert admit(seen_before=False) is Refusal.FIRST_SIGHT
        assert admit(seen_before=True) is None

    def test_sightings_are_remembered_up_to_a_capacity(self) -> None:
        sightings = Sightings(capacity=2)
        assert [sightings.seen(key) for key in "aab"] == [False, True, False]
        assert sightings.seen("a")
        sightings.seen("c")  # b is now the oldest, and goes
        assert sightings.seen("a")
        assert not sightings.seen("b")


class TestDeferral:
    def test_a_limited_number_of_requests_with_media_waits(self) -> None:
        assert should_defer(has_media=True, deferred=15, max_deferred=16)
        assert not should_defer(has_media=True, deferred=16, max_deferred=16)

    def test_a_request_without_media_always_waits(self) -> None:
        assert should_defer(has_media=False, deferred=99, max_deferred=16)


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker(threshold=3, first_pause=1.0, longest_pause=8.0)
    for _ in range(3):
        breaker.failure(at)
    return breaker


class TestBreaker:
    def test_opens_after_failures_in_a_row_only(self) -> None:
        breaker = Breaker(threshold=3)
        for _ in range(10):
            breaker.failure(0.0)
            breaker.failure(0.0)
            breaker.success()
        assert breaker.allow(0.0)
        for _ in range(3):
            breaker.failure(0.0)
        assert breaker.is_open
        assert not breaker.allow(0.5)

    def test_lets_one_probe_through_after_the_pause(self) -> None:
        breaker = opened()
        assert not breaker.allow(0.99)
        assert breaker.allow(1.0)
        assert not breaker.allow(1.5)

    def test_one_success_closes_it(self) -> None:
        breaker = opened()
        assert breaker.allow(1.0)
        breaker.success()
        assert not breaker.is_open
        assert breaker.allow(1.0)

    def test_the_pause_doubles_up_to_a_limit_and_starts_anew_after_a_success(self) -> None:
        breaker, now, pauses = opened(), 0.0, []
        for _ in range(6):
            start = now
            while not breaker.allow(now):
                now += 0.25
            pauses.append(now - start)
            breaker.failure(now)
        assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
        breaker.success()
        for _ in range(3):
            breaker.failure(now)
        assert breaker.allow(now + 1.0)

    def test_calls_from_before_the_break_do_not_lengthen_the_pause(self) -> None:
        breaker = opened()
        for _ in range(20):
            breaker.failure(0.5)
        assert breaker.allow(1.0)

    def test_a_probe_that_never_reports_does_not_keep_it_open_for_ever(self) -> None:
        breaker = opened()
        assert breaker.allow(1.0)
        assert breaker.allow(2.0)

    def test_an_endpoint_that_only_runs_into_deadlines_is_left_alone(self) -> None:
        breaker = Breaker(threshold=3, first_pause=1.0)
        for _ in range(3):
            breaker.abandoned()
        assert breaker.is_open
        assert breaker.allow(10.0)
        assert not breaker.allow(10.5)
        breaker.abandoned()
        assert breaker.allow(11.0)
        assert not breaker.allow(12.5)

    def test_an_endpoint_that_has_never_answered_is_left_alone_after_its_first_failure(
        self,
    ) -> None:
        breaker = Breaker(threshold=3, trusted=False)
        breaker.failure(0.0)
        assert breaker.is_open
        assert breaker.allow(1.0)
        breaker.success()
        breaker.failure(2.0)
        assert not breaker.is_open

    def test_a_call_given_up_tells_of_a_strange_endpoint_only_when_it_has_waited(self) -> None:
        breaker = Breaker(threshold=3, trusted=False)
        breaker.abandoned(0.1)
        assert not breaker.is_open
        breaker.abandoned(PATIENCE)
        assert breaker.is_open


class TestTokenBucket:
    def test_one_second_of_the_rate_passes_at_once(self) -> None:
        bucket = TokenBucket(100.0)
        assert bucket.take(100, now=0.0) == 0.0

    def test_what_comes_in_debt_waits_until_the_debt_is_paid(self) -> None:
        bucket = TokenBucket(100.0)
        bucket.take(300, now=0.0)
        assert bucket.take(100, now=0.0) == pytest.approx(2.0)
        assert bucket.take(1, now=1.0) == pytest.approx(2.0)

    def test_the_average_holds_over_time(self) -> None:
        bucket, now, sent = TokenBucket(100.0), 0.0, 0
        while now < 100.0:
            now += bucket.take(70, now=now)
            sent += 70
        assert sent == pytest.approx(100.0 * 100, rel=0.05)

    def test_idle_time_saves_up_one_second_at_most(self) -> None:
        bucket = TokenBucket(100.0)
        bucket.take(100, now=0.0)
        bucket.take(100, now=1000.0)
        assert bucket.take(50, now=1000.0) == 0.0
        assert bucket.take(50, now=1000.0) == pytest.approx(0.5)

    def test_a_clock_that_steps_back_gives_nothing_for_free(self) -> None:
        bucket = TokenBucket(100.0)
        bucket.take(200, now=10.0)
        assert bucket.take(1, now=5.0) == pytest.approx(1.0)
        assert bucket.take(1, now=10.0) == pytest.approx(1.01)


_seconds = st.floats(0, 1e3)
_per_byte = st.floats(1e-12, 1e-3)
_measured = st.builds(
    Measured,
    encode_per_byte=st.none() | _per_byte,
    lookup=st.none() | _seconds,
    fetch_per_byte=_per_byte,
    present=st.floats(0, 1),
)
_nbytes = st.integers(1, 1 << 30)


class TestPatience:
    @given(_measured, _nbytes, _seconds)
    def test_only_latency_depends_on_what_was_measured(
        self, measured: Measured, nbytes: int, waited: float
    ) -> None:
        def answer(policy: Policy) -> bool:
            return waits(policy, measured, nbytes=nbytes, waited=waited)

        assert answer(Policy.ALWAYS)
        assert answer(Policy.THROUGHPUT)
        assert not answer(Policy.NEVER)

    @given(_measured, _nbytes, _seconds)
    def test_latency_waits_until_encoding_and_looking_up_have_been_measured(
        self, measured: Measured, nbytes: int, waited: float
    ) -> None:
        if measured.encode_per_byte is None or measured.lookup is None:
            assert measured.gain(nbytes) is None
            assert waits(Policy.LATENCY, measured, nbytes=nbytes, waited=waited)

    @given(_measured, _nbytes, _seconds, _seconds)
    def test_who_has_stopped_waiting_does_not_begin_again(
        self, measured: Measured, nbytes: int, waited: float, more: float
    ) -> None:
        before = waits(Policy.LATENCY, measured, nbytes=nbytes, waited=waited)
        after = waits(Policy.LATENCY, measured, nbytes=nbytes, waited=waited + more)
        assert before or not after

    @given(_measured, _nbytes, st.floats(0, 1))
    def test_the_likelier_an_item_is_there_the_sooner_it_is_waited_for(
        self, measured: Measured, nbytes: int, more: float
    ) -> None:
        likelier = replace(measured, present=min(1.0, measured.present + more))
        if waits(Policy.LATENCY, measured, nbytes=nbytes, waited=0.0):
            assert waits(Policy.LATENCY, likelier, nbytes=nbytes, waited=0.0)

    @given(_measured, _nbytes)
    def test_it_never_waits_for_what_encoding_beats_even_where_it_is_there(
        self, measured: Measured, nbytes: int
    ) -> None:
        if measured.encode_per_byte is None or measured.lookup is None:
            return
        fetch = measured.lookup + measured.fetch_per_byte * nbytes
        if measured.encode_per_byte * nbytes < fetch * (1 - 1e-9):
            assert not waits(Policy.LATENCY, measured, nbytes=nbytes, waited=0.0)

    def test_no_wait_is_longer_than_an_encode(self) -> None:
        measured = Measured(encode_per_byte=1e-7, lookup=0.02, present=1.0)
        assert waits(Policy.LATENCY, measured, nbytes=1_000_000, waited=0.099)
        assert not waits(Policy.LATENCY, measured, nbytes=1_000_000, waited=0.101)

    def test_only_those_that_weigh_up_use_an_index(self) -> None:
        assert [p for p in Policy if p.uses_index] == [Policy.LATENCY, Policy.THROUGHPUT]
