"""Presence and Refused: what is believed of a bucket, and for how long."""

from __future__ import annotations

import pytest

from ec_s3.presence import Presence, Refused


@pytest.fixture
def presence() -> Presence:
    return Presence(positive_ttl=60, negative_ttl=5, max_entries=3)


@pytest.mark.parametrize(("present", "seconds"), [(True, 60), (False, 5)])
def test_an_answer_is_believed_for_its_time_only(
    presence: Presence, *, present: bool, seconds: float
) -> None:
    assert presence.get("k", now=0) is None
    presence.set("k", present=present, now=100)
    assert presence.get("k", now=100 + seconds - 0.001) is present
    assert presence.get("k", now=100 + seconds) is None


def test_the_newest_answer_counts(presence: Presence) -> None:
    presence.set("k", present=True, now=0)
    presence.set("k", present=False, now=1)
    assert presence.get("k", now=2) is False
    presence.forget("k")
    presence.forget("k")
    assert presence.get("k", now=2) is None


def test_only_an_absence_is_forgotten_by_those_who_ask_afresh(presence: Presence) -> None:
    presence.set("yes", present=True, now=0)
    presence.set("no", present=False, now=0)
    for key in ("yes", "no", "unknown"):
        presence.forget_absence(key)
    assert presence.get("yes", now=1) is True
    assert presence.get("no", now=1) is None


def test_the_oldest_answers_go_first(presence: Presence) -> None:
    for i in range(3):
        presence.set(f"k{i}", present=True, now=0)
    presence.set("k0", present=True, now=1)
    presence.set("k3", present=True, now=1)
    assert [presence.get(f"k{i}", now=2) for i in range(4)] == [True, None, True, True]
    presence.clear()
    assert presence.get("k0", now=2) is None


def test_no_time_means_no_belief() -> None:
    presence = Presence(positive_ttl=0, negative_ttl=0)
    presence.set("k", present=True, now=5)
    assert presence.get("k", now=5) is None


def test_a_refused_version_is_handed_out_once() -> None:
    refused = Refused()
    assert refused.take("k", now=0) is None
    refused.add("k", "v1")
    assert refused.knows("k")
    assert refused.knows("k", "v1")
    assert not refused.knows("k", "v2")
    assert refused.take("k", now=0) == "v1"
    assert not refused.knows("k")
    assert refused.take("k", now=0) is None


def test_a_key_is_repaired_at_most_once_an_hour() -> None:
    refused = Refused()
    refused.add("k", "v1")
    assert refused.take("k", now=50) == "v1"
    refused.add("k", "v2")
    assert refused.take("k", now=50 + 3599) is None
    assert refused.knows("k", "v2")
    assert refused.take("k", now=50 + 3600) == "v2"


def test_a_key_that_is_fine_again_needs_no_repair() -> None:
    refused = Refused()
    refused.add("k", "v1")
    refused.forget("k")
    refused.forget("k")
    assert refused.take("k", now=0) is None


def test_refusals_are_bounded() -> None:
    refused = Refused(max_entries=2)
    for i in range(3):
        refused.add(f"k{i}", "v")
    assert [refused.knows(f"k{i}") for i in range(3)] == [False, True, True]
    for i in range(3):
        refused.add(f"r{i}", "v")
        assert refused.take(f"r{i}", now=0) == "v"
    assert len(refused._repaired) == 2
