"""What fetching and encoding cost of late, learnt from the metrics that an engine counts anyway.

Pure state: no I/O, the clock is passed in. Any thread may read `measured`, which is replaced as a
whole, and call `take`: two calls that overlap may lose part of an interval, which is no more than
noise here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ec_s3.policy import Measured

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HALF_LIFE = 60.0
"""Seconds after which an observation counts half."""

LEAST = 0.5
"""Less than this left of all observations of a kind: nothing is known any more."""

_COUNTERS = {
    "encoder_seconds": "encoder_seconds",
    "encoder_bytes": "encoder_bytes",
    "saved_encoder_seconds": "saved_seconds",
    "load_bytes|remote": "load_bytes",
    "hits|local": "hits",
    "hits|disk": "hits",
    "hits|remote": "found",
    "misses|absent": "absent",
    "index_answers|absent": "unasked",
}
_HISTOGRAMS = {
    "load_seconds|remote": "load",
    "fetch_seconds|first_byte": "first_byte",
    "remote_seconds|get": "get",
}


class Estimates:
    """Decaying sums, and the rates that follow from them.

    Attributes:
        measured: what is known now.
    """

    def __init__(self) -> None:
        self._sums = dict.fromkeys([*_COUNTERS.values(), *_HISTOGRAMS.values()], 0.0)
        self._counts = dict.fromkeys(_HISTOGRAMS.values(), 0.0)
        self._at = -math.inf
        self.measured = Measured()

    def take(self, counted: Mapping[str, float | Sequence[Sequence[float]]], *, now: float) -> None:
        """Learn from an interval's increments, as `Stats.drain` gives them."""
        fading = 0.5 ** (max(0.0, now - self._at) / HALF_LIFE) if self._at > -math.inf else 1.0
        self._at = max(self._at, now)
        for kept in (self._sums, self._counts):
            for name in kept:
                kept[name] *= fading
        for series, name in _COUNTERS.items():
            value = counted.get(series, 0.0)
            if isinstance(value, int | float):
                self._sums[name] += value
        for series, name in _HISTOGRAMS.items():
            value = counted.get(series, 0.0)
            if not isinstance(value, int | float):
                counts, sums = value
                self._counts[name] += sum(counts)
                self._sums[name] += sum(sums)
        self.measured = self._measure()

    def _measure(self) -> Measured:
        sums, loads = self._sums, self._counts["load"]
        lookup = self._mean("first_byte")
        if lookup is None:
            lookup = self._mean("get")  # nothing but absences so far
        load = self._mean("load")
        nbytes = sums["load_bytes"] / loads if load is not None else 0.0
        body = 0.0
        if load is not None and lookup is not None and nbytes:
            body = max(0.0, load - lookup) / nbytes
        absent = max(0.0, sums["absent"] - sums["unasked"])
        return Measured(
            encode_per_byte=self._encode_per_byte(nbytes),
            lookup=lookup,
            fetch_per_byte=body,
            # One of either is assumed beside what was seen: two answers are no law.
            present=(sums["found"] + 1) / (sums["found"] + absent + 2),
        )

    def _mean(self, name: str) -> float | None:
        return self._sums[name] / self._counts[name] if self._counts[name] >= LEAST else None

    def _encode_per_byte(self, nbytes: float) -> float | None:
        """Of this engine's encoder; where it saves nothing, of those whose items it was given."""
        sums = self._sums
        if sums["encoder_seconds"] > 0 and sums["encoder_bytes"] >= 1:
            return sums["encoder_seconds"] / sums["encoder_bytes"]
        hits = sums["hits"] + sums["found"]
        if sums["saved_seconds"] > 0 and hits >= LEAST and nbytes:
            return sums["saved_seconds"] / hits / nbytes
        return None
