"""What the scheduler part needs to know of a request's media items; computed once per request.

Pure functions over vLLM's request objects, duck-typed: nothing of vLLM is imported.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from ec_s3.keys import is_request_local

if TYPE_CHECKING:
    from collections.abc import Callable

_SALTED, _PLAIN = "\0salt\0", "\0plain\0"
"""Prefixes of names that carry a request's cache salt, and of those that a client could have
made to look like one."""


class Kind(Enum):
    """What may be done with an item."""

    MEDIA = "media"
    """The request carries the media: it can be encoded, and its output be saved."""

    METADATA = "metadata"
    """Only placeholder metadata: it must be loaded, or the request fails."""

    UNTOUCHED = "untouched"
    """Never looked up, saved or loaded."""


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One media item of one request.

    Attributes:
        name: identity in the cache: the identifier, bound to the request's cache salt if any.
        identifier: key in vLLM's encoder cache.
        kind: what may be done with it.
        modality: `image`, `video`, `audio`, ...
        offset: first placeholder token.
        end: one past the last placeholder token.
        rows: encoder output rows that vLLM expects.
    """

    name: str
    identifier: str
    kind: Kind
    modality: str
    offset: int
    end: int
    rows: int


def bind(identifier: str, cache_salt: str | None) -> str:
    """The name of an identifier under a request's cache salt; injective."""
    if not cache_salt:
        return f"{_PLAIN}{identifier}" if identifier.startswith("\0") else identifier
    digest = hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{_SALTED}{digest}\0{identifier}"


class Classifier:
    """Decides the kind of each item.

    Args:
        metadata_fields: the placeholder metadata keys of a modality, as the model declares them.
        tower_adapters: whether identifiers may carry an adapter's name, whose content is unknown.
    """

    def __init__(self, *, metadata_fields: Callable[[str], set[str]], tower_adapters: bool) -> None:
        self._metadata_fields = metadata_fields
        self._tower_adapters = tower_adapters

    def items(self, request: Any) -> tuple[MediaItem, ...]:
        """The request's items, in order."""
        salt = getattr(request, "cache_salt", None)
        return tuple(self._item(request, feature, salt) for feature in request.mm_features)

    def _item(self, request: Any, feature: Any, salt: str | None) -> MediaItem:
        position = feature.mm_position
        identifier = str(feature.identifier)
        return MediaItem(
            name=bind(identifier, salt),
            identifier=identifier,
            kind=self._kind(request, feature, identifier),
            modality=str(feature.modality),
            offset=int(position.offset),
            end=int(position.offset) + int(position.length),
            rows=int(position.get_num_embeds()),
        )

    def _kind(self, request: Any, feature: Any, identifier: str) -> Kind:
        if not feature.mm_position.get_num_embeds():
            return Kind.UNTOUCHED
        present = _present_fields(feature)
        carried = present - self._metadata_fields(str(feature.modality))
        if not carried:
            return Kind.METADATA
        embeds = feature.modality == "prompt_embeds" or any(
            name.endswith("_embeds") for name in carried
        )
        unsafe = (
            embeds
            or is_request_local(identifier)
            or (self._tower_adapters and getattr(request, "lora_request", None) is not None)
        )
        return Kind.UNTOUCHED if unsafe else Kind.MEDIA


def _present_fields(feature: Any) -> set[str]:
    """Names of the input fields that the request really carries for an item."""
    if not feature.data:
        return set()
    return {name for name, value in feature.data.items() if value.data is not None}
