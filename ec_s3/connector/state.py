"""What the scheduler part remembers of requests and items; plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ec_s3.connector.media import Kind
from ec_s3.types import ItemMeta, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.connector.binding import Binding
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
        meta: what came with the item.
        shared: the bucket is known to hold it.
        audit: it is encoded even if it is found, once the pages for that are there.
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
    meta: ItemMeta = field(default_factory=ItemMeta)
    shared: bool = False
    audit: bool = False
    holders: set[str] = field(default_factory=set)
    transfers: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Seen:
    """One request, from its first `ensure` to its end.

    Attributes:
        items: its media items.
        end: one past the last placeholder token: decoding needs nothing any more.
        deadline: for items with media, seconds of the scheduler's clock; never extended.
        late: the same for items without media, from when they began to wait; None while they
            do not.
        settled: items that never defer it again, unless it is preempted.
        holds: items that it holds.
        bindings: digests of its items' inputs, by the items' offset.
        shared: identifiers that the bucket holds.
        saved: identifiers whose save was planned for it, with the saves' tickets.
        reached: up to which token nothing was needed at the last call.
        waiting_since: when it began to wait; None while it does not.
        outcome: how its wait for an item ended last.
        crowded: how often items without media have found no room beside each other.
        retry_at: when items without media may be asked for again.
        missing: the item without media that is asked for first, and alone, as it was absent.
        failed: it has been reported as unavailable.
        naps_until: when it is looked at again, if nothing is heard of what it holds.
        asked: items whose pages were asked for as it was about to stop waiting.
    """

    items: tuple[MediaItem, ...]
    end: int
    deadline: float
    late: float | None = None
    settled: set[str] = field(default_factory=set)
    holds: set[str] = field(default_factory=set)
    bindings: dict[int, Binding] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    saved: dict[str, int] = field(default_factory=dict)
    reached: int = 0
    waiting_since: float | None = None
    outcome: str = "ready"
    crowded: int = 0
    retry_at: float = 0.0
    missing: str | None = None
    failed: bool = False
    naps_until: float = 0.0
    asked: set[str] = field(default_factory=set)
    _found: dict[str, MediaItem | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for item in self.items:
            other = self._found.setdefault(item.identifier, item)
            if other is None or other.rows != item.rows:
                self._found[item.identifier] = None
            elif item.kind is Kind.METADATA:  # the one that has no other way out
                self._found[item.identifier] = item

    def digest_of(self, identifier: str) -> str:
        """Digest of what an item is made of, empty when it is not known (yet)."""
        item = self._found.get(identifier)
        binding = self.bindings.get(item.offset) if item is not None else None
        return (binding.digest or "") if binding is not None else ""

    def find(self, identifier: str) -> MediaItem | None:
        """The item that vLLM means by an identifier, None when that is ambiguous."""
        return self._found.get(identifier)


TURN_SECONDS = 1.0
"""After how long a request that vLLM does not ask for loses its turn."""


class Turns:
    """Requests that found no room try one after the other, the first to find none first."""

    def __init__(self) -> None:
        self._asked: dict[str, float] = {}

    def join(self, request_id: str, now: float) -> None:
        """The request has found no room; keeps its place if it has one."""
        self._asked[request_id] = now

    def leave(self, request_id: str) -> None:
        """The request waits no more."""
        self._asked.pop(request_id, None)

    def may_try(self, request_id: str, now: float) -> bool:
        """Whether it is the request's turn; always, for one that has not joined."""
        if request_id not in self._asked:
            return True
        self._asked[request_id] = now
        # Whoever vLLM has not asked for lately does not keep the others waiting.
        return request_id == next(i for i, at in self._asked.items() if now - at < TURN_SECONDS)


class Verdict(Enum):
    """What one item means for its request in this step."""

    GO = "go"
    WAIT = "wait"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Phase:
    """Which weights are served; replaced as a whole.

    Attributes:
        epoch: how often the weights have been changed.
        suspended: they are being changed now.
    """

    epoch: int = 0
    suspended: bool = False


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
        min_width: least width of an encoder output: the language model's.
        require_binding: take only what is known to be made of a request's own inputs.
        replay: most tokens of a prefix hit that vLLM may compute again.
        patience: whether a request with media goes on waiting for an item of so many bytes that it
            has waited for so many seconds.
        audit_fraction: share of the items found that are encoded all the same.
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
    min_width: int = 0
    require_binding: bool = False
    replay: int = 0
    patience: Callable[[int, float], bool] = lambda _nbytes, _waited: True
    audit_fraction: float = 0.0
