"""Adds up what a listing shows, by namespace and age, in memory that does not grow with objects.

Runs on the command's event loop, once per object: what it does there is kept small. Trusts no key:
what is no item of ours is counted as foreign, documents excepted.
"""

from __future__ import annotations

import re
import time
from bisect import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ec_s3.cli.namespaces import MANIFEST_NAME
from ec_s3.cli.targets import ROOT, namespace_of
from ec_s3.keys import CONTROL_NAME, INDEX_NAME

if TYPE_CHECKING:
    from ec_s3.cli.output import Output
    from ec_s3.store import Store
    from ec_s3.types import ObjectInfo

DAY = 86400.0
AGES = (1, 7, 30, 90)
"""Bounds between groups of ages, in days; the last group is older than all of them."""

SAMPLE = 64
"""Items of each folder that are kept: the first in key order, and as keys are hashes, at random."""

_BOUNDS = [DAY * days for days in AGES]
_TAIL = re.compile(r"/([0-9a-f]{2})/\1[0-9a-f]{62}")
_TAIL_LENGTH = 68
_DOCUMENTS = (MANIFEST_NAME, CONTROL_NAME, INDEX_NAME)
_STEP = 1000


@dataclass(slots=True)
class Folder:
    """The items of one namespace and dtype.

    Attributes:
        objects: how many.
        nbytes: their stored size.
        oldest: when the first of them was written, in seconds since the epoch.
        newest: when the last was.
        age_objects: how many in each group of `AGES`.
        age_bytes: their stored size.
        sample: some of them.
    """

    objects: int = 0
    nbytes: int = 0
    oldest: float = float("inf")
    newest: float = 0.0
    age_objects: list[int] = field(default_factory=lambda: [0] * (len(AGES) + 1))
    age_bytes: list[int] = field(default_factory=lambda: [0] * (len(AGES) + 1))
    sample: list[ObjectInfo] = field(default_factory=list)


@dataclass(slots=True)
class Inventory:
    """What a listing showed.

    Attributes:
        folders: by `Namespace.id`, in key order.
        foreign: objects that are neither items nor documents.
        documented: folders (`<slug>-<fingerprint>`) that hold a description, whatever it says.
        now: when the listing began, in seconds since the epoch.
    """

    now: float
    folders: dict[str, Folder] = field(default_factory=dict)
    foreign: int = 0
    documented: set[str] = field(default_factory=set)
    _places: dict[str, Folder] = field(default_factory=dict)

    def add(self, info: ObjectInfo) -> None:
        """Count one object in."""
        key = info.key
        place = key[:-_TAIL_LENGTH]
        folder = self._places.get(place)
        if folder is None or _TAIL.fullmatch(key, len(place)) is None:
            folder = self._open(key, place)
            if folder is None:
                return
        modified = info.modified or self.now  # unknown must never pass for old
        size = info.size
        folder.objects += 1
        folder.nbytes += size
        if modified < folder.oldest:
            folder.oldest = modified
        if modified > folder.newest:
            folder.newest = modified
        group = bisect(_BOUNDS, self.now - modified)
        folder.age_objects[group] += 1
        folder.age_bytes[group] += size
        if folder.objects <= SAMPLE:
            folder.sample.append(info)

    def _open(self, key: str, place: str) -> Folder | None:
        namespace = namespace_of(key)
        if namespace is None:
            self.foreign += not is_document(key)
            folder, _, name = key.removeprefix(ROOT).partition("/")
            if name == MANIFEST_NAME:
                self.documented.add(folder)
            return None
        opened = self.folders.setdefault(namespace, Folder())
        self._places[place] = opened
        return opened


def is_document(key: str) -> bool:
    """Whether a key is of one of a namespace's documents."""
    folder, _, name = key.removeprefix(ROOT).partition("/")
    return bool(folder) and name in _DOCUMENTS


async def survey(store: Store, out: Output, prefix: str = ROOT) -> Inventory:
    """Add up all objects below a prefix."""
    inventory = Inventory(time.time())
    add = inventory.add
    seen = 0
    with out.progress("listing") as advance:
        async for info in store.list(prefix):
            add(info)
            seen += 1
            if not seen % _STEP:  # the bar costs more than the object
                advance(_STEP)
    return inventory
