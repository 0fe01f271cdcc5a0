"""What the scheduler part remembers of requests and items; plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ec_s3.types import MissReason

if TYPE_CHECKING:
    from ec_s3.connector.media import MediaItem
    from ec_s3.types import Extent, TensorSpec


class State(Enum):
    """Where an item stands; see the table in the design."""

    FETCHING = "fetching"
    READY = "ready"
    PRESENT = "present"
    ABSENT = "absent"


@dataclass(slots=True)
class Held:
    """One item that some request or rank holds.

    Attributes:
        ticket: the hold's number at the port.
        asked: bytes that the fetch was to reserve for a save on absence.
        grant: bytes reserved at `extents` to save the item into, 0 for none.
        holders: requests that hold it.
        transfers: loads that not every rank has answered.
    """

    ticket: int
    state: State = State.FETCHING
    reason: MissReason = MissReason.ABSENT
    spec: TensorSpec | None = None
    extents: tuple[Extent, ...] = ()
    asked: int = 0
    grant: int = 0
    holders: set[str] = field(default_factory=set)
    transfers: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Seen:
    """One request, from its first `ensure` to its end.

    Attributes:
        items: its media items.
        end: one past the last placeholder token: decoding needs nothing any more.
        deadline: for items with media, seconds of the scheduler's clock; never extended.
        late: the same for items without media.
        settled: items that never defer it again.
        holds: items that it holds.
        retry: when an absent item without media may be asked for again.
        failed: it has been reported as unavailable.
    """

    items: tuple[MediaItem, ...]
    end: int
    deadline: float
    late: float
    settled: set[str] = field(default_factory=set)
    holds: set[str] = field(default_factory=set)
    retry: dict[str, float] = field(default_factory=dict)
    failed: bool = False

    def find(self, identifier: str) -> MediaItem | None:
        """The item that vLLM means by an identifier, None when that is ambiguous."""
        found = [item for item in self.items if item.identifier == identifier]
        return found[0] if found and len({item.rows for item in found}) == 1 else None


class Verdict(Enum):
    """What one item means for its request in this step."""

    GO = "go"
    WAIT = "wait"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the scheduler part is told about its engine.

    Attributes:
        producer: encodes and saves.
        consumer: loads.
        dtype: element type of the encoder outputs.
        widths: encoder output width by modality, where it was measured.
        window: most tokens that one step can schedule for a request.
        ranks: ranks that answer each load.
        fetch_timeout: seconds that a request with media may wait.
        metadata_timeout: seconds that a request without media may wait.
        max_deferred: requests with media that may wait at once.
    """

    producer: bool
    consumer: bool
    dtype: str
    widths: dict[str, int]
    window: int
    ranks: int
    fetch_timeout: float
    metadata_timeout: float
    max_deferred: int
