from __future__ import annotations

from ec_s3.doubts import Doubts


def test_a_doubt_lasts_until_it_is_settled() -> None:
    doubts = Doubts()
    assert "k" not in doubts
    doubts.add("k")
    doubts.add("k")
    assert "k" in doubts
    doubts.settle("k")
    doubts.settle("never")
    assert "k" not in doubts


def test_the_oldest_doubts_are_forgotten() -> None:
    doubts = Doubts()
    for number in range(5000):
        doubts.add(f"k/{number}")
    kept = [number for number in range(5000) if f"k/{number}" in doubts]
    assert kept == list(range(5000 - len(kept), 5000))
    assert 0 < len(kept) < 2000
