"""Chat completions with metadata in the place of media: what the proxy sends to whom.

Pure functions on JSON; they know the chat format and `ec_transfer_params`, and nothing of HTTP.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ec_s3.connector.published import content_part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Json = dict[str, Any]

MODALITIES = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}

ABOUT_THE_ANSWER = (
    *("stream_options", "max_completion_tokens", "min_tokens", "response_format"),
    *("tools", "tool_choice", "parallel_tool_calls"),
)
"""What a producer, which answers with one token, need not know, and may refuse without the rest."""


@dataclass(frozen=True)
class Part:
    """Where a media part of a request is, and of which kind."""

    message: int
    index: int
    modality: str
    empty: bool
    uuid: str | None


def media_parts(body: Json) -> list[Part]:
    """The media parts of a chat completion, in order."""
    parts = []
    for number, message in enumerate(body["messages"]):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else []):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in MODALITIES:
                empty = part.get(kind) is None
                parts.append(Part(number, index, MODALITIES[kind], empty, part.get("uuid")))
    return parts


def for_producer(body: Json, parts: Sequence[Part]) -> Json:
    """The request for the producer: the same media in the same order, and no more than needed.

    It names them by their content, whatever the client calls them: under a name that a client
    chose, the bucket could hold another item.
    """
    request = {**copy.deepcopy(body), "stream": False, "n": 1, "max_tokens": 1}
    for name in ABOUT_THE_ANSWER:
        request.pop(name, None)
    for part in reversed(parts):
        content = request["messages"][part.message]["content"]
        if part.empty:
            del content[part.index]
        else:
            content[part.index].pop("uuid", None)
    return request


def match(parts: Sequence[Part], published: Mapping[str, Json]) -> list[Json | None]:
    """What stands for each part that the producer was sent, None where it published nothing.

    The n-th item of a modality in the prompt is its n-th part; that is only sure when all of them
    were published.
    """
    found: list[Json | None] = [None] * len(parts)
    for modality in {part.modality for part in parts}:
        places = [place for place, part in enumerate(parts) if part.modality == modality]
        items = sorted(
            (index, identifier)
            for identifier, entry in published.items()
            if entry.get("modality") == modality
            for index in entry.get("item_indices", ())
        )
        if len(items) == len(places):
            for place, (_, identifier) in zip(places, items, strict=True):
                found[place] = content_part(identifier, published[identifier])
    return found


def for_consumer(
    body: Json,
    parts: Sequence[Part],
    substitutes: Sequence[Json | None],
    published: Mapping[str, Json],
) -> Json | None:
    """The request with substitutes for its media, None when there are none.

    Of one modality vLLM takes either media or metadata: all its parts are replaced, or none. What
    was published goes along, as a consumer finds in it what each item must have been made of.
    """
    pairs = list(zip(parts, substitutes, strict=True))
    kept = {part.modality for part, substitute in pairs if substitute is None}
    replaced = [pair for pair in pairs if pair[0].modality not in kept]
    if not replaced:
        return None
    request = copy.deepcopy(body)
    for part, substitute in replaced:
        request["messages"][part.message]["content"][part.index] = substitute
    if published:
        wishes = body.get("ec_transfer_params") or {}
        request["ec_transfer_params"] = {**wishes, **published}
    return request
