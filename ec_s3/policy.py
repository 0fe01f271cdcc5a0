"""Decisions from numbers: admit an upload, defer a request, leave an endpoint alone.

Pure: no I/O, no clock of its own (callers pass `now`, seconds of any monotonic clock), no locks.
Each object belongs to one thread or event loop; the functions may be called from anywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum


class Refusal(StrEnum):
    """Why an item is not uploaded. The names are label values of the metrics."""

    TOO_LARGE = "too_large"
    FIRST_SIGHT = "first_sight"


def admit_upload(
    nbytes: int, *, max_item_bytes: int, second_sight: bool, seen_before: bool
) -> Refusal | None:
    """Whether an item goes to the store; None means yes.

    Args:
        nbytes: size of the tensor.
        max_item_bytes: largest tensor that is stored.
        second_sight: upload only what comes back.
        seen_before: whether the item has been put before.
    """
    if nbytes > max_item_bytes:
        return Refusal.TOO_LARGE
    if second_sight and not seen_before:
        return Refusal.FIRST_SIGHT
    return None


def should_defer(*, has_media: bool, deferred: int, max_deferred: int) -> bool:
    """Whether one more request may wait for a fetch.

    A request without media has nothing to fall back on, so it always waits.
    """
    return not has_media or deferred < max_deferred


class Policy(StrEnum):
    """Whether a request that carries its media waits for the bucket, or is encoded at once."""

    LATENCY = "latency"
    """Wait only where that is expected to save time."""

    THROUGHPUT = "throughput"
    """Wait wherever a look-up may spare an encode."""

    ALWAYS = "always"
    """The same, and never take an index's word for an absence."""

    NEVER = "never"
    """Do not wait; what comes in time for a later request is used."""

    @property
    def uses_index(self) -> bool:
        """Whether an item that the index lacks counts as absent."""
        return self in (Policy.LATENCY, Policy.THROUGHPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of late; None: not yet.

    Attributes:
        encode_per_byte: seconds of the encoder per byte of its output.
        lookup: seconds until the bucket says whether it has an item.
        fetch_per_byte: further seconds per byte of an item that it has.
        present: share of the items asked for that it had.
    """

    encode_per_byte: float | None = None
    lookup: float | None = None
    fetch_per_byte: float = 0.0
    present: float = 0.5

    def gain(self, nbytes: int) -> float | None:
        """Seconds that a request can expect to save by waiting for an item, None if unknown."""
        if self.encode_per_byte is None or self.lookup is None:
            return None
        saved = (self.encode_per_byte - self.fetch_per_byte) * nbytes
        return self.present * saved - self.lookup


def waits(policy: Policy, measured: Measured, *, nbytes: int, waited: float) -> bool:
    """Whether a request with media goes on waiting for an item that is on its way.

    Under `latency` it waits no longer than the encoder would take: whatever the bucket does then
    costs at most one encode. Until anything is measured it waits as under `always`.

    Args:
        policy: the operator's choice.
        measured: of this engine and its bucket.
        nbytes: size of the item's tensor.
        waited: seconds so far.
    """
    if policy is not Policy.LATENCY:
        return policy is not Policy.NEVER
    gain = measured.gain(nbytes)
    if gain is None or measured.encode_per_byte is None:
        return True
    return gain > 0 and waited < measured.encode_per_byte * nbytes


class Sightings:
    """Remembers the last keys seen, at most `capacity` of them."""

    def __init__(self, capacity: int = 100_000) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[str, None] = OrderedDict()

    def seen(self, key: str) -> bool:
        """Whether the key was seen before; it has been from now on."""
        known = key in self._keys
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)
        return known


PATIENCE = 1.0
"""Seconds after which a call that was given up tells of an endpoint that has never answered."""


class Breaker:
    """Leaves an endpoint alone after failures in a row, then probes it ever less often.

    Closed until `threshold` failures in a row; then open, with one call let through as a probe
    after a pause that doubles from `first_pause` to `longest_pause` with each failed probe. One
    success closes it. A probe that never reports back is followed by another after the pause.

    Args:
        threshold: failures in a row that open it.
        first_pause: seconds to the first probe.
        longest_pause: seconds between probes, at most.
        trusted: whether the endpoint is known to answer; until then its very first failure opens
            it.
    """

    def __init__(
        self,
        *,
        threshold: int = 5,
        first_pause: float = 1.0,
        longest_pause: float = 30.0,
        trusted: bool = True,
    ) -> None:
        self._threshold = threshold
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._trusted = trusted
        self._failures = 0
        self._pause = first_pause
        self._probe_at = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether calls are refused, probes apart."""
        return self._failures >= self._threshold

    def allow(self, now: float) -> bool:
        """Whether a call may be tried; when open, a yes is the probe."""
        if not self.is_open:
            return True
        if now < self._probe_at:
            return False
        self._probing = True
        self._probe_at = now + self._pause
        return True

    def success(self) -> None:
        """The endpoint answered, whatever it said."""
        self._trusted = True
        self._failures = 0
        self._pause = self._first_pause
        self._probing = False

    def failure(self, now: float) -> None:
        """The endpoint could not be reached, or did not answer in time."""
        self._distrust()
        if self._unanswered():
            self._probe_at = now + self._pause

    def abandoned(self, waited: float = 0.0) -> None:
        """A call ended unanswered because its caller stopped waiting, after so many seconds.

        Counts as a failure: an endpoint that only ever runs into deadlines is no help. The next
        call is then the probe, as the caller's patience says nothing about when to try again.
        """
        if waited >= PATIENCE:
            self._distrust()
        self._unanswered()

    def _distrust(self) -> None:
        if not self._trusted:
            self._failures = max(self._failures, self._threshold - 1)

    def _unanswered(self) -> bool:
        """Count it; whether the time of the next probe is to be set."""
        if not self.is_open:
            self._failures += 1
            return self.is_open
        if not self._probing:
            return False  # a call from before the break; only probes lengthen the pause
        self._probing = False
        self._pause = min(self._pause * 2, self._longest_pause)
        return True


class TokenBucket:
    """Spreads bytes over time: `rate` bytes a second, up to one second's worth at once.

    Amounts larger than that are let through too and put the bucket in debt, so that any item
    can pass and the average holds.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._level = rate
        self._at: float | None = None

    def take(self, nbytes: int, *, now: float) -> float:
        """Take bytes at once and return how long to wait before using them, in seconds."""
        if self._at is not None and now > self._at:
            self._level = min(self._rate, self._level + (now - self._at) * self._rate)
        self._at = now if self._at is None else max(now, self._at)
        wait = max(0.0, -self._level / self._rate)
        self._level -= nbytes
        return wait


class Probing:
    """Whether to ask a store for an item before sending it; learns from what it said of others.

    A question is lost time where nothing is there yet, and spares a whole body where it is. So it
    is asked until `limit` items in a row were absent, then only for each `limit`-th, and for all
    again once one is found.
    """

    def __init__(self, limit: int = 16) -> None:
        self._limit = limit
        self._absent = 0
        self._passed = 0

    def wanted(self) -> bool:
        """Whether to ask for the next item."""
        if self.useful:
            return True
        self._passed = (self._passed + 1) % self._limit
        return self._passed == 0

    @property
    def useful(self) -> bool:
        """Whether one of the last items was there, or little is known yet."""
        return self._absent < self._limit

    def learn(self, *, present: bool) -> None:
        """The store had an item, or lacked it."""
        self._absent = 0 if present else self._absent + 1
