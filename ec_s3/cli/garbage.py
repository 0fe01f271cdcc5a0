"""Which namespaces no server will use again, as far as a listing and descriptions tell.

Pure; deletes nothing. A folder that was written to of late is never garbage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from ec_s3.cli.targets import ROOT

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ec_s3.cli.deleting import Spool
    from ec_s3.cli.inventory import Inventory
    from ec_s3.cli.namespaces import Description
    from ec_s3.multiparts import Upload

_TWINS = ("model", "quantization", "adapter", "salt")


class Reason(StrEnum):
    """Why something can go."""

    UNKNOWN = "no description"
    SUPERSEDED = "older weights"
    IDLE = "not written to"
    FORMAT = "old format"
    UPLOAD = "unfinished upload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is garbage.

    Attributes:
        older_than: seconds without a write before a namespace can be.
        idle: seconds without a write after which any namespace is; None for never.
        formats: whether objects are looked into for their format.
    """

    older_than: float
    idle: float | None = None
    formats: bool = False


@dataclass(slots=True)
class Finding:
    """Something that can go.

    Attributes:
        reason: why.
        place: folder below the store's prefix, with its slash; empty for uploads.
        model: whose it is, empty when that is not known.
        objects: how many.
        nbytes: their stored size.
        newest: when the last of them was written, in seconds since the epoch.
        keys: the objects, where they are not all of the place's.
        uploads: those meant by `Reason.UPLOAD`.
    """

    reason: Reason
    place: str = ""
    model: str = ""
    objects: int = 0
    nbytes: int = 0
    newest: float = 0.0
    keys: Spool | None = None
    uploads: list[Upload] = field(default_factory=list)

    def facts(self) -> dict[str, object]:
        """For programs."""
        return {
            "reason": self.reason.value,
            "place": self.place,
            "model": self.model or None,
            "objects": self.objects,
            "bytes": self.nbytes,
            "newest": self.newest,
        }


def judge(
    inventory: Inventory,
    described: Mapping[str, Description],
    rules: Rules,
    *,
    hidden: Collection[str] = (),
) -> list[Finding]:
    """The namespaces that can go, in key order; of `hidden` ones only idleness is known."""
    folders: dict[str, Finding] = {}
    for namespace, part in inventory.folders.items():
        name = namespace.partition("/")[0]
        folder = folders.setdefault(name, Finding(Reason.IDLE, f"{ROOT}{name}/"))
        folder.objects += part.objects
        folder.nbytes += part.nbytes
        folder.newest = max(folder.newest, part.newest)
    latest: dict[tuple[str, ...], float] = {}
    for name, folder in folders.items():
        if name in described:
            twins = _twins(described[name])
            latest[twins] = max(latest.get(twins, 0.0), folder.newest)
    found = []
    for name, folder in folders.items():
        description = described.get(name)
        quiet = inventory.now - folder.newest
        if quiet >= rules.older_than and description is None and name not in hidden:
            folder.reason = Reason.UNKNOWN
        elif (
            quiet >= rules.older_than
            and description is not None
            and folder.newest < latest[_twins(description)]
        ):
            folder.reason = Reason.SUPERSEDED
        elif rules.idle is None or quiet < rules.idle:
            continue
        folder.model = "" if description is None else description.model
        found.append(folder)
    return found


def _twins(description: Description) -> tuple[str, ...]:
    """What namespaces have in common of which only the latest is in use."""
    return tuple(description.text(name) for name in _TWINS)
