"""Keeps alike log lines apart in time: the first of a cause at once, then one a minute.

For one thread or event loop; no I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

REPEAT_SECONDS = 60.0


class Quiet:
    """Says whether a line is due.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: dict[Hashable, float] = {}
        self._left_out: dict[Hashable, int] = {}

    def due(self, cause: Hashable) -> int | None:
        """How many lines of this cause were left out since the last one; None: leave this one out.

        Causes are few: a class of errors, never a key or a name.
        """
        now = self._clock()
        if now < self._due.get(cause, now):
            self._left_out[cause] = self._left_out.get(cause, 0) + 1
            return None
        self._due[cause] = now + REPEAT_SECONDS
        return self._left_out.pop(cause, 0)
