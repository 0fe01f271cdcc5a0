"""Counts what ranks report: how long their copies and the encoder took, and whether they pinned.

Called on the hub's thread with every answer, which it passes on; quick, never raises for what a
rank says.

Locking: none; only the hub's thread calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.connector.link import Answer
    from ec_s3.metrics import Stats


class RankReports:
    """Feeds `pinned`, `encode_seconds`, and the copies in `fetch_seconds` and `save_seconds`.

    Args:
        world: number of ranks.
        stats: where to count.
        then: gets every answer once it is counted.
    """

    def __init__(self, world: int, stats: Stats, *, then: Callable[[Answer], None]) -> None:
        self._world = world
        self._stats = stats
        self._then = then
        self._pinned: set[int] = set()
        stats.set("pinned", 0)

    def take(self, answer: Answer) -> None:
        """Count one answer and pass it on; an order not carried out has taken no time."""
        if answer.kind == "mapped":
            if answer.pinned:
                self._pinned.add(answer.rank)
            self._stats.set("pinned", float(len(self._pinned) == self._world))
        elif answer.kind == "failed":
            self._stats.add("errors", where="worker")
        elif answer.done:
            self._took(answer)
        self._then(answer)

    def _took(self, answer: Answer) -> None:
        if answer.copy_seconds is not None and answer.kind == "loaded":
            self._stats.observe("fetch_seconds", answer.copy_seconds, phase="copy")
        elif answer.copy_seconds is not None:
            self._stats.observe("save_seconds", answer.copy_seconds, stage="copy")
        if answer.encode_seconds is not None:
            self._stats.observe("encode_seconds", answer.encode_seconds)
