"""What stored items cost and what they save, from a list of prices.

Pure but for reading that list; any thread. Owns the prices' names and the arithmetic, which `cost`
and a prewarm's estimate share. Money is in the list's currency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ec_s3.errors import ConfigError
from ec_s3.sources import parse_yaml

if TYPE_CHECKING:
    from pathlib import Path

GB = 1 << 30
"""Bytes of a GB, as AWS bills it."""

RANGE_BYTES = 8 << 20
"""A fetch takes one GET for each so many stored bytes, see `chunks.RANGE_BYTES`."""

HEAD_ABOVE = 1 << 20
"""A body of more is preceded by a HEAD, see `uploads.HEAD_ABOVE`."""

PART_BYTES = 16 << 20
MULTIPART_ABOVE = 64 << 20
"""A body of more goes up in parts of `PART_BYTES`, see `transfer` and `s3`."""

_TEXTS = ("source", "as_of", "currency")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """A list of prices; `prices.yaml` says what each one means.

    Attributes:
        source: where they are from.
        as_of: when they held.
        currency: what all of them are in.
        storage_gb_month: a GB for a month.
        put_per_1000: 1,000 requests that write or list.
        get_per_1000: 1,000 other requests.
        transfer_gb: a GB from the bucket to a server.
        gpu_hour: an hour of what encodes.
    """

    source: str
    as_of: str
    currency: str
    storage_gb_month: float
    put_per_1000: float
    get_per_1000: float
    transfer_gb: float
    gpu_hour: float

    def month(self, nbytes: float) -> float:
        """What so many stored bytes cost in a month."""
        return nbytes / GB * self.storage_gb_month

    def store(self, nbytes: float) -> float:
        """What it costs to store an object of this size."""
        puts = 1.0
        if nbytes > MULTIPART_ABOVE:
            puts = 2 + math.ceil(nbytes / PART_BYTES)
        heads = 1 if nbytes > HEAD_ABOVE else 0
        return (puts * self.put_per_1000 + heads * self.get_per_1000) / 1000

    def requests(self, nbytes: float) -> float:
        """What the requests cost that fetch an object of this size."""
        return max(1, math.ceil(nbytes / RANGE_BYTES)) * self.get_per_1000 / 1000

    def transfer(self, nbytes: float) -> float:
        """What it costs to bring so many bytes to a server."""
        return nbytes / GB * self.transfer_gb

    def fetch(self, nbytes: float) -> float:
        """What it costs to fetch an object of this size."""
        return self.requests(nbytes) + self.transfer(nbytes)

    def encoding(self, seconds: float) -> float:
        """What so many seconds of the encoder cost."""
        return seconds / 3600 * self.gpu_hour

    def break_even(self, nbytes: float, encode_seconds: float, *, months: float) -> float | None:
        """How often an item must be fetched to pay for its storing and keeping.

        Args:
            nbytes: stored size.
            encode_seconds: what a fetch saves.
            months: how long it is kept.

        Returns:
            None when a fetch costs as much as the encoder, so that it never pays.
        """
        gain = self.encoding(encode_seconds) - self.fetch(nbytes)
        if gain <= 0:
            return None
        return (self.store(nbytes) + months * self.month(nbytes)) / gain


def read_prices(path: Path | None = None) -> Prices:
    """The shipped prices, those of a file in their place where it has them.

    Raises:
        ConfigError: the file cannot be read, or holds anything but prices.
    """
    shipped = Prices(**_load(files("ec_s3").joinpath("prices.yaml").read_text(), "prices.yaml"))
    if path is None:
        return shipped
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prices: {path} cannot be read: {error}") from error
    given = _load(text, str(path))
    own = {"source": str(path), "as_of": "unknown", **given}
    return replace(shipped, **own)


def _load(text: str, name: str) -> dict[str, Any]:  # texts and numbers, by name
    try:
        document: Any = parse_yaml(text) or {}
    except ValueError as error:
        raise ConfigError(f"prices: {name} cannot be read: {error}") from None
    known = [field.name for field in fields(Prices)]
    if not isinstance(document, dict) or not set(document) <= set(known):
        unknown = ", ".join(sorted(set(map(str, document)) - set(known)))[:200]
        raise ConfigError(f"prices: {name} holds {unknown or 'no map'}; known: {', '.join(known)}")
    return {key: _value(name, key, value) for key, value in document.items()}


def _value(name: str, key: str, value: object) -> object:
    if key in _TEXTS:
        return " ".join(str(value).split())
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"prices: {key} in {name} is no number")
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"prices: {key} in {name} is not 0 or more")
    return float(value)
