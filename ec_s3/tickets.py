"""The messages of a port: what a scheduler asks for and what it is told, by ticket.

Plain values. A *ticket* is a number that the scheduler chooses; it stands for one hold on one item:
a fetch under way, then a lease, or a reservation to be filled.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ec_s3.types import Extent, ItemMeta, MissReason, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Bring an item into the slab and lease it to the ticket.

    Attributes:
        ticket: the scheduler's number for this hold.
        identifier: the item.
        save_nbytes: on absence, reserve this many bytes to save the item into; 0 for none.
        probe: only find out whether the bucket holds the item (an encode-only producer).
        fresh: do not believe a remembered "absent".
    """

    ticket: int
    identifier: str
    save_nbytes: int = 0
    probe: bool = False
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """The item lies in the slab, leased to the ticket; `shared`: the bucket is known to hold it."""

    ticket: int
    spec: TensorSpec
    extents: tuple[Extent, ...]
    meta: ItemMeta = field(default_factory=ItemMeta)
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Absent:
    """There is no item; `extents` is the reservation that the want asked for, if it was granted."""

    ticket: int
    reason: MissReason
    extents: tuple[Extent, ...] | None = None


@dataclass(frozen=True, slots=True)
class Present:
    """Answer to a probe: the bucket holds the item. The ticket ends with it."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Granted:
    """Answer to `reserve`: pages to fill, None when there is no room."""

    ticket: int
    extents: tuple[Extent, ...] | None


Event = Ready | Absent | Present | Granted


def outdated(event: Event) -> Event:
    """The event as it is told when the weights have been changed since it was asked for: a no.

    Whatever its ticket stands for is to be released.
    """
    if isinstance(event, Granted):
        return replace(event, extents=None)
    return Absent(event.ticket, MissReason.SUSPENDED)


def unpack_spec(fields: list[Any]) -> TensorSpec:
    """A spec of element type and shape, as JSON carries it."""
    return TensorSpec(fields[0], tuple(fields[1]))


def _extents(fields: list[list[int]] | None) -> tuple[Extent, ...] | None:
    return None if fields is None else tuple(Extent(*pair) for pair in fields)


def _pairs(extents: tuple[Extent, ...] | None) -> list[list[int]] | None:
    return None if extents is None else [[extent.offset, extent.nbytes] for extent in extents]


def pack_event(event: Event) -> dict[str, Any]:
    """The event as JSON carries it."""
    kind = type(event).__name__
    packed: dict[str, Any] = {"kind": kind, "ticket": event.ticket}
    if isinstance(event, Ready):
        packed["spec"] = [event.spec.dtype, list(event.spec.shape)]
        packed["meta"] = asdict(event.meta)
        packed["shared"] = event.shared
    if isinstance(event, Absent):
        packed["reason"] = event.reason.value
    if not isinstance(event, Present):
        packed["extents"] = _pairs(event.extents)
    return packed


def unpack_event(packed: dict[str, Any]) -> Event | None:
    """What `pack_event` was given, None for anything else."""
    ticket = packed.get("ticket", -1)
    extents = _extents(packed.get("extents"))
    match packed["kind"]:
        case "Ready":
            meta = ItemMeta(**packed["meta"])
            spec = unpack_spec(packed["spec"])
            return Ready(ticket, spec, extents or (), meta, packed["shared"])
        case "Absent":
            return Absent(ticket, MissReason(packed["reason"]), extents)
        case "Present":
            return Present(ticket)
        case "Granted":
            return Granted(ticket, extents)
    return None
