"""What is learnt from counters, and how fast it is forgotten."""

from __future__ import annotations

import pytest

from ec_s3.estimates import HALF_LIFE, Estimates
from ec_s3.metric_table import METRICS
from ec_s3.metrics import Stats
from ec_s3.policy import Measured

MB = 1 << 20


def interval(
    *,
    encodes: int = 0,
    hits: int = 0,
    misses: int = 0,
    unasked: int = 0,
    encode: float = 0.1,
    lookup: float = 0.02,
    body: float = 0.01,
) -> Stats:
    """Items of 1 MiB, as an engine counts them."""
    stats = Stats()
    for _ in range(encodes):
        stats.add("encoder_seconds", encode)
        stats.add("encoder_bytes", MB)
    for _ in range(hits):
        stats.add("hits", tier="remote")
        stats.observe("load_seconds", lookup + body, tier="remote")
        stats.observe("fetch_seconds", lookup, phase="first_byte")
        stats.add("load_bytes", MB, tier="remote")
    for _ in range(misses):
        stats.add("misses", reason="absent")
        stats.observe("remote_seconds", lookup, op="get")
    stats.add("misses", unasked, reason="absent")
    stats.add("index_answers", unasked, outcome="absent")
    return stats


def learnt(*intervals: Stats, apart: float = 1.0) -> Measured:
    estimates = Estimates()
    for number, stats in enumerate(intervals):
        estimates.take(stats.drain(), now=number * apart)
    return estimates.measured


def test_nothing_is_known_before_anything_is_counted() -> None:
    assert Estimates().measured == Measured()
    assert learnt(Stats()) == Measured()


def test_costs_are_those_of_the_items_that_moved() -> None:
    measured = learnt(interval(encodes=3, hits=2), interval(encodes=1, hits=1, misses=4))
    assert measured.encode_per_byte == pytest.approx(0.1 / MB)
    assert measured.lookup == pytest.approx(0.02)
    assert measured.fetch_per_byte == pytest.approx(0.01 / MB)
    assert measured.gain(MB) == pytest.approx(measured.present * (0.1 - 0.01) - 0.02)


def test_look_ups_that_find_nothing_tell_how_long_one_takes() -> None:
    measured = learnt(interval(misses=2, lookup=0.05))
    assert measured.lookup == pytest.approx(0.05)
    assert measured.present == pytest.approx(1 / 4)


def test_absences_that_nobody_was_asked_about_do_not_count() -> None:
    assert learnt(interval(unasked=1000)).present == 0.5
    assert learnt(interval(hits=98, unasked=1000)).present == pytest.approx(0.99)


def test_who_encodes_and_saves_nothing_learns_from_the_items_that_he_gets() -> None:
    stats = interval(hits=2)
    stats.add("saved_encoder_seconds", 0.4)
    assert learnt(stats).encode_per_byte == pytest.approx(0.2 / MB)


def test_what_happens_now_outweighs_what_was() -> None:
    then, now = interval(misses=64, encodes=64), interval(hits=16, encodes=1, encode=0.5)
    measured = learnt(then, now, apart=6 * HALF_LIFE)
    assert measured.present > 0.8
    assert measured.encode_per_byte is not None
    assert measured.encode_per_byte * MB == pytest.approx(0.3)


def test_what_was_long_ago_is_forgotten() -> None:
    measured = learnt(interval(hits=8, encodes=8), Stats(), apart=60 * HALF_LIFE)
    assert measured.encode_per_byte is None
    assert measured.lookup is None
    assert measured.present == pytest.approx(0.5)


def test_a_clock_that_stands_still_changes_nothing() -> None:
    estimates = Estimates()
    for _ in range(3):
        estimates.take(interval(hits=1).drain(), now=5.0)
    estimates.take(interval(hits=1).drain(), now=4.0)
    assert estimates.measured.present == pytest.approx(5 / 6)


def test_what_it_reads_is_in_the_table_of_metrics() -> None:
    from ec_s3 import estimates

    for series in [*estimates._COUNTERS, *estimates._HISTOGRAMS]:
        name, *labels = series.split("|")
        assert tuple(labels) in METRICS[name].all_series() or METRICS[name].all_series() == [()]
