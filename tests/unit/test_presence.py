"""Presence and Refused: what is believed of a bucket, and for how long."""

from __future__ import annotations

from array import array

import pytest

from ec_s3.index import AHEAD_SECONDS, Index, pack_index, read_index, tag_of
from ec_s3.keys import Namespace, identifier_digest
from ec_s3.presence import MAX_WRONG, MIN_OUTCOMES, Listing, Presence, Refused


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


# -- the listing -------------------------------------------------------------------------------

SPACE = Namespace(model="org/model", dtype="uint8")


class Wall:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def listing(wall: Wall) -> Listing:
    listing = Listing(wall_clock=wall, max_entries=50)
    listing.active = True
    return listing


def key(item: str) -> str:
    return SPACE.object_key(item)


def index(*items: str, made: float = 1000.0) -> Index:
    tags = array("I", [tag_of(identifier_digest(item)) for item in items])
    name = SPACE.prefix.rpartition("/")[2]
    body = b"".join(pack_index(tags, namespace=name, made=made))
    return read_index(body, namespace=name, now=made, keyring=None)


def test_nothing_is_called_absent_without_an_index(listing: Listing) -> None:
    assert not listing.lacks(key("a"))
    assert listing.items == 0


def test_what_the_index_lacks_is_absent_until_the_index_is_too_old(
    listing: Listing, wall: Wall
) -> None:
    listing.load(index("a", made=900.0), max_age=200.0)
    assert (listing.lacks(key("a")), listing.lacks(key("b"))) == (False, True)
    assert listing.items == 1
    wall.now = 1099.9
    assert listing.lacks(key("b"))
    wall.now = 1100.0
    assert not listing.lacks(key("b"))
    assert listing.items == 0


def test_another_namespace_is_not_judged_by_it(listing: Listing) -> None:
    listing.load(index("a"), max_age=200.0)
    assert not listing.lacks(Namespace(model="org/other", dtype="uint8").object_key("b"))
    other_dtype = Namespace(model="org/model", dtype="int8")
    assert listing.lacks(other_dtype.object_key("b")), "a folder holds all element types"


def test_what_was_found_or_written_since_is_not_absent(listing: Listing) -> None:
    presence = Presence(positive_ttl=0, negative_ttl=5)
    presence.listing = listing
    presence.set(key("early"), present=True, now=0)
    listing.load(index("a"), max_age=200.0)
    presence.set(key("late"), present=True, now=0)
    presence.set(key("gone"), present=False, now=0)
    presence.clear()
    assert [listing.lacks(key(i)) for i in ("early", "late", "gone")] == [False, False, True]


def test_what_was_known_long_before_the_listing_began_is_in_it(
    listing: Listing, wall: Wall
) -> None:
    listing.add(key("old"))
    wall.now = 1200.0
    listing.add(key("young"))
    listing.load(index("a", made=1000.0 + AHEAD_SECONDS + 1), max_age=1e6)
    assert listing.lacks(key("old")), "it has been deleted since"
    assert not listing.lacks(key("young")), "the clocks may differ"


def test_what_is_remembered_beside_the_index_is_bounded(listing: Listing) -> None:
    listing.load(index(), max_age=200.0)
    for number in range(60):
        listing.add(key(f"{number}"))
        listing.deny(key(f"{number}"))
    assert listing.lacks(key("9"))
    assert not listing.lacks(key("10"))
    assert (len(listing._since), len(listing._denied)) == (50, 50)
    idle = Listing()
    idle.add(key("a"))
    assert not idle._since, "nobody reads an index"


def test_an_index_that_is_wrong_too_often_is_dropped(listing: Listing) -> None:
    listing.load(index(), max_age=200.0)
    outcomes = [n % 9 == 0 for n in range(1, MIN_OUTCOMES + 1)]  # one in nine was there
    for number, existed in enumerate(outcomes):
        assert listing.lacks(key(f"{number}"))
        listing.deny(key(f"{number}"))
        assert listing.learn(key(f"{number}"), existed=existed) is existed
        assert listing.lacks(key("x")) or number == MIN_OUTCOMES - 1
    assert sum(outcomes) <= MAX_WRONG * MIN_OUTCOMES
    assert listing.lacks(key("x"))
    listing.deny(key("y"))
    listing.learn(key("y"), existed=True)
    assert not listing.lacks(key("x"))
    listing.load(index(), max_age=200.0)
    assert listing.lacks(key("x")), "another index has another chance"


def test_puts_of_what_the_index_was_not_asked_about_say_nothing_of_it(listing: Listing) -> None:
    listing.load(index(), max_age=200.0)
    for number in range(2 * MIN_OUTCOMES):
        assert not listing.learn(key(f"{number}"), existed=True)
    assert listing.lacks(key("x"))
