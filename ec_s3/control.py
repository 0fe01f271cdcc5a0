"""control.json: what an operator tells the running servers of a namespace.

Owns the document, its checks, how a server polls it, and the edit that changes it.
Runs on an event loop, in a server's background or in a tool, and never on the path of a request.
Whatever lies in the bucket is untrusted: what is no document changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ec_s3.errors import CapacityError, ControlError, RemoteChangedError
from ec_s3.polling import Document, Followed, Poll, read_document
from ec_s3.types import PutOutcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from ec_s3.metrics import Stats
    from ec_s3.store import Store

CONTROL_VERSION = 1
MAX_CONTROL_BYTES = 1 << 20
MAX_DELETED = 10_000
"""Deleted items that one document can name; they make up nearly all of its size."""

POLL_SECONDS = 30.0
POLL_TIMEOUT = 10.0
"""Time limit of one poll: with the longest pause before it, a change is known within 46 s."""

_EDIT_ATTEMPTS = 10
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LATEST = 1e11  # seconds: beyond it lie milliseconds, given by mistake


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The document; what it leaves out is not restricted.

    Attributes:
        enabled: False switches every server of the namespace off.
        valid_after: objects made before this time do not count; seconds since the epoch.
        deleted: digests of deleted identifiers, and until when they may not come back.

    Raises:
        CapacityError: more than `MAX_DELETED` deleted items.
    """

    enabled: bool = True
    valid_after: float = 0.0
    deleted: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.deleted) > MAX_DELETED:
            raise CapacityError(
                f"{len(self.deleted)} deleted items do not fit, {MAX_DELETED} do; wait for some to "
                "expire, or declare all older objects invalid"
            )

    def deletes(self, digest: str, *, now: float) -> bool:
        """Whether the item of this digest may not be served or stored now."""
        return now < self.deleted.get(digest, 0.0)

    def with_deleted(self, digests: Iterable[str], *, until: float, now: float) -> Control:
        """The same with further deleted items, and without those that have expired."""
        kept = {digest: expiry for digest, expiry in self.deleted.items() if now < expiry}
        added = {digest: max(until, kept.get(digest, 0.0)) for digest in digests}
        return replace(self, deleted=kept | added)

    def pack(self) -> bytes:
        """The document's bytes."""
        document = {
            "version": CONTROL_VERSION,
            "enabled": self.enabled,
            "valid_after": self.valid_after,
            "deleted": dict(self.deleted),
        }
        return json.dumps(document, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def parse_control(body: bytes) -> Control:
    """Read a document.

    Raises:
        ControlError: it is none of this version, to the letter.
    """
    try:
        document = json.loads(body, parse_constant=_refuse, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ControlError(f"control.json is no JSON: {error}") from None
    if type(document) is not dict:
        raise ControlError("control.json is no object")
    if document.get("version") != CONTROL_VERSION:
        raise ControlError(f"control.json is not of version {CONTROL_VERSION}")
    unknown = document.keys() - {"version", "enabled", "valid_after", "deleted"}
    if unknown:
        raise ControlError(f"control.json has unknown fields: {sorted(unknown)}"[:300])
    enabled, deleted = document.get("enabled", True), document.get("deleted", {})
    if type(enabled) is not bool:
        raise ControlError("control.json: 'enabled' is not true or false")
    if type(deleted) is not dict or not all(map(_DIGEST.fullmatch, deleted)):
        raise ControlError("control.json: 'deleted' does not map digests to times")
    try:
        return Control(
            enabled=enabled,
            valid_after=_time(document.get("valid_after", 0.0)),
            deleted={digest: _time(expiry) for digest, expiry in deleted.items()},
        )
    except CapacityError as error:
        raise ControlError(f"control.json: {error}") from None


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a field is there twice")
    return document


def _time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ControlError("control.json: a time is not in seconds since the epoch")
    if not 0 <= value < _LATEST or not math.isfinite(value):
        raise ControlError("control.json: a time is not in seconds since the epoch")
    return float(value)


_FOLLOWED = Followed(
    name="control",
    max_bytes=MAX_CONTROL_BYTES,
    refuses=ControlError,
    taken="changed",
    refused="malformed",
    complaint="%s; what was said last holds",
    unread="control.json cannot be read: %s",
    bug="control.json could not be obeyed",
)


async def load(store: Store, key: str) -> Control | None:
    """The document of a namespace, None when there is none.

    Raises:
        ControlError: what lies there is no document.
        RemoteError: the store failed.
    """
    stored = await read_document(store, key, _FOLLOWED)
    return None if stored is None else _parsed(stored)


def _parsed(stored: Document) -> Control:
    return parse_control(bytes(stored.body or b""))


async def edit(
    store: Store, key: str, change: Callable[[Control], Control], *, again: bool = False
) -> Control:
    """Change the document, so that of two who do it at once neither is lost; the new one.

    Args:
        store: where it lies.
        key: `Namespace.control_key`.
        change: makes the new document of the present one; called again when somebody else was
            quicker.
        again: write one that stays as it is, too: lifecycle rules count from the last writing.

    Raises:
        ControlError: what lies there is no document; delete it first.
        RemoteChangedError: others were quicker every time.
        RemoteError: the store failed.
    """
    for attempt in range(_EDIT_ATTEMPTS):
        await asyncio.sleep(random.random() * 0.05 * 2**attempt if attempt else 0)  # noqa: S311  no secret
        stored = await read_document(store, key, _FOLLOWED)
        present = Control() if stored is None else _parsed(stored)
        wanted = change(present)
        if stored is not None and wanted == present and not again:
            return present
        if stored is None:
            outcome = await store.put(key, [wanted.pack()])
        else:
            # A store that names no versions can only be overwritten.
            match = stored.etag or None
            outcome = await store.put(key, [wanted.pack()], if_match=match, if_absent=False)
        if outcome is PutOutcome.WRITTEN:
            return wanted
    raise RemoteChangedError("put failed: others change it all the time", operation="put", key=key)


def control_poll(
    store: Store,
    *,
    key: Callable[[], str],
    obey: Callable[[Control], Awaitable[None]],
    stats: Stats,
    period: float = POLL_SECONDS,
) -> Poll:
    """Follows the document of a namespace.

    An error, an absent or a malformed document changes nothing: what was said last holds.

    Args:
        store: where it lies.
        key: says which document; asked before every look.
        obey: called with each document that is new.
        stats: counters `control_polls` and `errors`.
        period: seconds between looks, more or less.
    """

    async def take(_: str, body: memoryview) -> None:
        await obey(parse_control(bytes(body)))

    return Poll(
        store,
        _FOLLOWED,
        key=key,
        take=take,
        count=lambda outcome: stats.add("control_polls", outcome=outcome),
        stats=stats,
        period=period,
        timeout=POLL_TIMEOUT,
    )
