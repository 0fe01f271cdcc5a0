"""What the bucket holds already of the items that a job is about to encode.

Reads the beginning of each object, in parallel: an object counts only if a server would take it.
Runs on one event loop; changes nothing but the index, and that only when asked to.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from ec_s3 import control
from ec_s3.errors import ConfigError, ControlError, FrameError, RemoteError
from ec_s3.indexing import list_tags, write_index
from ec_s3.keys import identifier_digest
from ec_s3.lookup import header_at
from ec_s3.types import Expectation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ec_s3.header import Header
    from ec_s3.keys import Namespace
    from ec_s3.prewarm.encoding import Identified
    from ec_s3.prewarm.pace import Pace
    from ec_s3.signing import Keyring
    from ec_s3.store import Store

LOOKS_AT_ONCE = 32


class Presence(Enum):
    """What the bucket says of an item."""

    ABSENT = auto()
    PRESENT = auto()
    UNUSABLE = auto()
    """Something lies in its place that a job can neither use nor replace."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the bucket.

    Attributes:
        reason: why the item is `UNUSABLE`, else empty.
        encode_seconds: what the encoder needed for it once; None when unknown.
    """

    presence: Presence
    reason: str = ""
    encode_seconds: float | None = None


_PRESENT = Look(Presence.PRESENT)


class Target:
    """One namespace of the bucket.

    Args:
        store: the bucket.
        namespace: of the job's encoder.
        pace: how fast the bucket is asked.
        keyring: the keys that must have signed an object; None takes any.
    """

    def __init__(
        self, store: Store, namespace: Namespace, *, pace: Pace, keyring: Keyring | None
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._pace = pace
        self._keyring = keyring
        self._control = control.Control()

    async def open(self) -> None:
        """Read what an operator demands of the namespace.

        Raises:
            ConfigError: the cache is switched off.
            RemoteError: the bucket cannot be read.
        """
        key = self._namespace.control_key
        try:
            # The first request of a job: a wrong endpoint must not take minutes to be found out.
            found = await self._pace.call(lambda: control.load(self._store, key), patient=False)
        except ControlError as error:
            raise ConfigError(f"{key}: {error}; delete it first") from error
        self._control = found or control.Control()
        if not self._control.enabled:
            raise ConfigError(
                f"the cache of {self._namespace.id} is switched off, so nothing would be written; "
                "`ec-s3 control enable` switches it on"
            )

    async def look(self, items: Sequence[Identified]) -> list[Look]:
        """One answer an item, in order.

        Raises:
            RemoteError: the bucket could not be asked.
        """
        looks = [Look(Presence.ABSENT)] * len(items)
        failures: list[RemoteError] = []
        waiting = iter(enumerate(items))

        async def work() -> None:
            for at, item in waiting:
                if failures:
                    return
                try:
                    looks[at] = await self._look(item)
                except RemoteError as error:
                    failures.append(error)

        await asyncio.gather(*(work() for _ in range(min(LOOKS_AT_ONCE, len(items)))))
        if failures:
            raise failures[0]
        return looks

    async def _look(self, item: Identified) -> Look:
        look = await self._look_for(item, item.identifier)
        for other in item.others:
            if look.presence is Presence.PRESENT:
                found = await self._look_for(item, other)
                look = look if found.presence is Presence.PRESENT else found
        return look

    async def _look_for(self, item: Identified, identifier: str) -> Look:
        digest = identifier_digest(identifier)
        if self._control.deletes(digest, now=time.time()):
            return Look(Presence.UNUSABLE, "deleted by an operator, and may not come back yet")
        key = self._namespace.digest_key(digest)
        try:
            header = await self._pace.call(
                lambda: header_at(self._store, key, keyring=self._keyring)
            )
            if header is None:
                return Look(Presence.ABSENT)
            header.check(
                identifier=identifier,
                namespace=self._namespace.id,
                expect=Expectation(dtype=self._namespace.dtype),
            )
        except FrameError as error:
            reason = f"the bucket holds an unusable object in its place ({error}); remove {key}"
            return Look(Presence.UNUSABLE, reason)
        if header.created < self._control.valid_after:
            return Look(Presence.ABSENT)
        return self._judge(item, header) if identifier == item.identifier else _PRESENT

    def _judge(self, item: Identified, header: Header) -> Look:
        bound = header.meta.input_digest
        rows = header.spec.shape[0] if header.spec.shape else 0
        if rows != item.num_embeds:
            what = f"{rows} rows, and this one has {item.num_embeds}"
        elif bound and item.input_digest and bound != item.input_digest:
            what = "another content"
        else:
            return Look(Presence.PRESENT, encode_seconds=header.meta.encode_seconds)
        return Look(Presence.UNUSABLE, taken(item, f"the bucket holds it with {what}"))

    async def write_index(self) -> tuple[int, int]:
        """List the namespace, and write what its servers read; number of items, and its bytes.

        Raises:
            IndexObjectError: it would be too large.
            RemoteError: the bucket failed.
        """
        made = time.time()
        name = self._namespace.prefix.rpartition("/")[2]
        tags = await self._pace.call(lambda: list_tags(self._store, name))
        nbytes = await self._pace.call(
            lambda: write_index(self._store, tags, namespace=name, made=made, keyring=self._keyring)
        )
        return len(tags), nbytes


def taken(item: Identified, what: str) -> str:
    """Why an item cannot have its identifier: other media have it."""
    cause = "uuid" if item.item.uuid is not None else "EXIF ImageID"
    return f"identifier {item.identifier[:12]} is taken: {what}; two media with one {cause}?"
