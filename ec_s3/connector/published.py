"""What an engine tells of a request's media items, so that another can answer without the media.

Two audiences, one content: the placeholder metadata (grid, token counts, timestamps) that lays an
item out in a prompt. It goes into the answer of an engine that encodes (`ec_transfer_params`), for
a proxy that sends the request on, and into the stored object, for whoever knows an identifier
alone. Never a key, a bucket, an endpoint or a credential.

Pure functions over vLLM's objects, duck-typed: nothing of vLLM is imported. They run on the
scheduler's thread.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ec_s3.connector.params import INPUT_DIGEST
from ec_s3.types import PutOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Set

MAX_NUMBERS = 4096
"""Most numbers of one item's metadata: enough for the timestamps of an hour of video."""

_AUDIO_TOKENS = "audio_num_tokens"
_FAILED = ("denied", "failed", "error", "queue_full")


def published(
    features: Iterable[Any],
    shared: Mapping[str, str],
    *,
    placeholder: Callable[[Any], Mapping[str, object]],
) -> dict[str, Any] | None:
    """The `ec_transfer_params` of a finished request, in the shape of vLLM's own connectors.

    An item is left out, and its media with it on the request that follows, unless a consumer can
    do without: the bucket holds it or will, and all its placeholder metadata is known.

    Args:
        features: the request's media items, in order.
        shared: identifiers of items that the bucket holds or will hold, with the digest of what
            they are made of, empty where it is not known: the consumer that is sent the entry
            takes nothing else, whatever lies under the item's name in the bucket.
        placeholder: `placeholder_of` an item.

    Returns:
        By `mm_hash`, `{"item_indices": [...], "modality": ..., "metadata": {...}}` and, where it
        is known, `"input_digest"`; None when there is nothing to tell. An identifier that stands
        for items of different layout is left out.
    """
    found: dict[str, list[tuple[int, Mapping[str, object]]]] = {}
    for index, feature in enumerate(features):
        if feature.identifier in shared:
            entry = dict(placeholder(feature))
            if entry and shared[feature.identifier]:
                entry[INPUT_DIGEST] = shared[feature.identifier]
            found.setdefault(hash_of(feature), []).append((index, entry))
    told = {}
    for name, items in found.items():
        layout = items[0][1]
        if layout and all(other == layout for _, other in items):
            told[name] = {"item_indices": [index for index, _ in items], **layout}
    return told or None


def hash_of(feature: Any) -> str:
    """The name of an item from which every engine makes the identifier: a client's, or a hash.

    The identifier itself may have an adapter's name before it.
    """
    return str(getattr(feature, "mm_hash", None) or feature.identifier)


def placeholder_of(feature: Any, fields: Set[str]) -> dict[str, object]:
    """What is stored with an item's encoder output, for `content_part`.

    Args:
        feature: vLLM's description of the item.
        fields: the placeholder metadata keys of its modality, as the model declares them; none
            for a modality whose media every engine must process itself.

    Returns:
        `{"modality": ..., "metadata": {...}}`, JSON-able and of bounded size; empty when the item
        cannot be laid out without its media.
    """
    metadata = _metadata(feature, fields) if fields else None
    if metadata is None:
        return {}
    return {"modality": str(feature.modality), "metadata": metadata}


def content_part(identifier: str, placeholder: Mapping[str, Any]) -> dict[str, Any] | None:
    """The part of a chat message that stands for an item without its media.

    Args:
        identifier: the item's.
        placeholder: an entry of `published`, or what `placeholder_of` has put into an object.

    Returns:
        None when the placeholder does not say enough.
    """
    modality, metadata = placeholder.get("modality"), placeholder.get("metadata")
    if modality not in ("image", "video", "audio") or not isinstance(metadata, dict):
        return None
    if not metadata:
        return None
    kind = f"{modality}_embeds"
    return {"type": kind, kind: metadata, "uuid": identifier}


def _metadata(feature: Any, fields: Set[str]) -> dict[str, list[Any]] | None:
    """All placeholder metadata of an item, None when some is missing or not of the usual kind."""
    found: dict[str, list[Any]] = {}
    for name in sorted(fields):
        if name == _AUDIO_TOKENS:
            value: Any = int(feature.mm_position.get_num_embeds())
        else:
            element = feature.data.get(name) if feature.data else None
            value = getattr(element, "data", None)
        numbers = _plain(value)
        if numbers is None:
            return None
        found[name] = numbers
    return found or None


def _plain(value: Any) -> list[Any] | None:
    """A number, a tensor or a list of numbers as a list; None for anything else, or too much."""
    if hasattr(value, "numel"):
        value = value.tolist() if value.numel() <= MAX_NUMBERS else None
    if not isinstance(value, list):
        value = [value]
    return value if _numbers(value, MAX_NUMBERS) is not None else None


def _numbers(value: Any, room: int) -> int | None:
    """How many numbers a nested list holds; None when it holds more, or anything else."""
    if isinstance(value, list):
        total = 0
        for inner in value:
            count = _numbers(inner, room - total)
            if count is None:
                return None
            total += count
        return total
    number = type(value) is int or (type(value) is float and math.isfinite(value))
    return 1 if number and room > 0 and abs(value) < 1 << 64 else None


def uploads_work(counted: Mapping[str, Any], *, before: bool) -> bool:
    """Whether saves reach the bucket, as far as an interval's counts tell.

    An item is published while its upload is still ahead; while uploads fail that would only keep
    consumers waiting for it.

    Args:
        counted: what `Stats.drain` gave for the interval.
        before: the answer of the interval before, which holds when nothing was uploaded.
    """
    if counted.get("breaker_open") or any(counted.get(f"uploads|{end}") for end in _FAILED):
        return False
    better = counted.get("breaker_open") == 0
    return before or better or any(counted.get(f"uploads|{end}") for end in PutOutcome)
