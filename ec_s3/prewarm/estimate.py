"""What a prewarm would take, from what a dry run has counted. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ec_s3.prewarm.report import Tally
    from ec_s3.prices import Prices

ASSUMED_ENCODE_SECONDS = 0.1
"""For an item, where the bucket holds none that tells: an image takes 10 to 400 ms of a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What holds a job back beside its encoder; None where nothing does.

    Attributes:
        requests: a second.
        upload_bytes: a second.
    """

    requests: float | None = None
    upload_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Time and money for the items that are missing.

    Attributes:
        seconds: of the whole job, of which this run has spent those for identifying once.
        encode_seconds: of the encoder alone.
        assumed: whether the encoder's time is `ASSUMED_ENCODE_SECONDS` an item.
        encoding: what the encoder costs.
        requests: what the uploads cost.
        storage_month: what keeping them costs a month, uncompressed.
        currency: of these.
    """

    seconds: float
    encode_seconds: float
    assumed: bool
    encoding: float
    requests: float
    storage_month: float
    currency: str

    def record(self) -> dict[str, object]:
        """The estimate as JSON."""
        return {
            "estimated_seconds": round(self.seconds, 3),
            "estimated_encode_seconds": round(self.encode_seconds, 3),
            "encode_seconds_assumed": self.assumed,
            "cost_encoding": round(self.encoding, 6),
            "cost_requests": round(self.requests, 6),
            "cost_storage_month": round(self.storage_month, 6),
            "currency": self.currency,
        }


def estimate(tally: Tally, *, prices: Prices, limits: Limits, requests_an_item: int) -> Estimate:
    """What the missing items of a dry run would take.

    Args:
        tally: the dry run's.
        prices: what things cost.
        limits: what the job is held to.
        requests_an_item: requests that an upload makes.
    """
    assumed = not tally.known_items
    an_item = ASSUMED_ENCODE_SECONDS if assumed else tally.known_seconds / tally.known_items
    encoding = tally.missing * an_item
    busy = encoding + tally.identify_seconds
    uploading = tally.output_bytes / limits.upload_bytes if limits.upload_bytes else 0.0
    asking = tally.missing * requests_an_item / limits.requests if limits.requests else 0.0
    each = tally.output_bytes / tally.missing if tally.missing else 0.0
    return Estimate(
        seconds=max(busy, uploading, asking),
        encode_seconds=encoding,
        assumed=assumed,
        encoding=prices.encoding(encoding),
        requests=tally.missing * prices.store(each),
        storage_month=prices.month(tally.output_bytes),
        currency=prices.currency,
    )
