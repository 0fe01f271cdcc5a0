"""What the scheduler part needs to know of a request's media items; computed once per request.

Looks at vLLM's request objects, duck-typed: nothing of vLLM is imported. No I/O.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ec_s3.connector.params import STORE, Params, read_params
from ec_s3.connector.published import hash_of, placeholder_of
from ec_s3.keys import bind, is_request_local, looks_like_content_hash
from ec_s3.metrics import Stats
from ec_s3.quiet import Quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

_SHARED_MEMORY = "monotonic_id"
"""A field of what vLLM hands over in place of the inputs with `mm_processor_cache_type="shm"`: an
address that only its workers can read."""


class Kind(Enum):
    """What may be done with an item."""

    MEDIA = "media"
    """The request carries the media: it can be encoded, and its output be saved."""

    METADATA = "metadata"
    """Only placeholder metadata: it must be loaded, or the request fails."""

    UNTOUCHED = "untouched"
    """Never looked up, saved or loaded."""

    REFUSED = "refused"
    """Only placeholder metadata, of an item that may not be looked up: the request fails."""


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
        persist: whether its encoder output may be kept.
        bound_to: without media, digest of the inputs that it must have been made of; empty for any.
        inputs: the processed inputs as vLLM has them, None where they are not to be had.
    """

    name: str
    identifier: str
    kind: Kind
    modality: str
    offset: int
    end: int
    rows: int
    persist: bool = True
    bound_to: str = ""
    inputs: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an engine lets be cached.

    Attributes:
        metadata_fields: the placeholder metadata keys of a modality, as the model declares them.
        tower_adapters: whether identifiers may carry an adapter's name, whose content is unknown.
        salted: whether requests with a cache salt take part.
        client_names: whether outputs under identifiers that clients chose are kept.
    """

    metadata_fields: Callable[[str], set[str]]
    tower_adapters: bool = False
    salted: bool = False
    client_names: bool = False


class Classifier:
    """Decides the kind of each item; one thread.

    Args:
        rules: what may be cached.
        stats: counts requests whose `ec_transfer_params` are not understood.
    """

    def __init__(self, rules: Rules, stats: Stats | None = None) -> None:
        self._rules = rules
        self._stats = stats or Stats()
        self._quiet = Quiet(once=True)

    def items(self, request: Any) -> tuple[MediaItem, ...]:
        """The request's items, in order."""
        salt = getattr(request, "cache_salt", None)
        params = read_params(request)
        if params.malformed:
            self._malformed()
        adapter = self._rules.tower_adapters and getattr(request, "lora_request", None) is not None
        barred = adapter or (bool(salt) and not self._rules.salted)
        return tuple(
            self._item(feature, salt, barred=barred, params=params)
            for feature in request.mm_features
        )

    def needs_loading(self, request: Any, reach: int) -> bool:
        """Whether some item beyond a token position cannot be encoded; looks at nothing else."""
        for feature in request.mm_features:
            position = feature.mm_position
            beyond = int(position.offset) + int(position.length) > reach
            if beyond and position.get_num_embeds() and not self._carried(feature):
                return True
        return False

    def placeholder(self, feature: Any) -> Mapping[str, object]:
        """What lays an item out (grid, counts), JSON-able."""
        return placeholder_of(feature, self._rules.metadata_fields(str(feature.modality)))

    def _malformed(self) -> None:
        self._stats.add("unusable_inputs", what="params")
        if self._quiet.due() is not None:
            logger.warning(
                "a request's ec_transfer_params are not understood: %r wants true or false; "
                "such requests are treated as if they had none",
                STORE,
            )

    def _item(self, feature: Any, salt: str | None, *, barred: bool, params: Params) -> MediaItem:
        position = feature.mm_position
        identifier = str(feature.identifier)
        kind = self._kind(feature, identifier, barred=barred)
        named_by_content = self._rules.client_names or looks_like_content_hash(identifier)
        media = kind is Kind.MEDIA
        return MediaItem(
            name=bind(identifier, salt),
            identifier=identifier,
            kind=kind,
            modality=str(feature.modality),
            offset=int(position.offset),
            end=int(position.offset) + int(position.length),
            rows=int(position.get_num_embeds()),
            persist=media and params.store and named_by_content,
            bound_to="" if media else params.digest(hash_of(feature)),
            inputs=feature.data if media and _SHARED_MEMORY not in feature.data else None,
        )

    def _kind(self, feature: Any, identifier: str, *, barred: bool) -> Kind:
        if not feature.mm_position.get_num_embeds():
            return Kind.UNTOUCHED
        barred = barred or is_request_local(identifier)
        carried = self._carried(feature)
        if not carried:
            return Kind.REFUSED if barred else Kind.METADATA
        embeds = feature.modality == "prompt_embeds" or any(
            name.endswith("_embeds") for name in carried
        )
        return Kind.UNTOUCHED if barred or embeds else Kind.MEDIA

    def _carried(self, feature: Any) -> set[str]:
        """Names of the input fields, beyond placeholder metadata, that the request carries."""
        if not feature.data:
            return set()
        present = {name for name, value in feature.data.items() if value.data is not None}
        return present - self._rules.metadata_fields(str(feature.modality))
