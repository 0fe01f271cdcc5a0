"""Which of the items found are encoded all the same, so that the engine can compare.

Belongs to the scheduler part and runs on its thread. Whether an item is audited is drawn when it is
asked for, as the pages that its encoder output needs must be there when vLLM asks for the answer:
where they are not, the answer is what it would have been. Never about an item without media, which
vLLM could not encode.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ec_s3.connector.media import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.connector.holds import Holds
    from ec_s3.connector.media import MediaItem
    from ec_s3.connector.state import Held


class Audits:
    """Draws items, and remembers which ones this step audits.

    Args:
        fraction: share of the items.
        holds: the table of held items.
        draw: a number from 0 up to 1.
    """

    def __init__(
        self, fraction: float, holds: Holds, *, draw: Callable[[], float] = random.random
    ) -> None:
        self._fraction = fraction
        self._holds = holds
        self._draw = draw
        self._taken: set[tuple[str, str]] = set()

    def draws(self, item: MediaItem) -> bool:
        """Whether the item is to be audited if it is found and its output may be kept."""
        if not self._fraction or item.kind is not Kind.MEDIA or not item.persist:
            return False
        return self._draw() < self._fraction

    def takes(self, request_id: str, item: MediaItem, held: Held) -> bool:
        """Whether the item, which is found, is encoded for this request all the same."""
        if not held.audit or item.kind is not Kind.MEDIA or not self._holds.has_grant(item.name):
            return False
        self._taken.add((request_id, item.identifier))
        return True

    def took(self, request_id: str, identifier: str) -> bool:
        """Whether that was said in this step."""
        return (request_id, identifier) in self._taken

    def clear(self) -> None:
        """The step is planned."""
        self._taken.clear()
