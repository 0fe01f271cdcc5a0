"""Keeps alike log lines apart in time: the first of a cause at once, then one a minute, or none.

For one thread or event loop; no I/O.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

REPEAT_SECONDS = 60.0


class Quiet:
    """Says whether a line is due.

    Args:
        clock: seconds, monotonic.
        once: a cause is not due again before `over`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, once: bool = False) -> None:
        self._clock = clock
        self._once = once
        self._last: dict[Hashable, float] = {}
        self._left_out: dict[Hashable, int] = {}
        self._lasting: set[Hashable] = set()

    def due(self, cause: Hashable = "") -> int | None:
        """How many lines of this cause were left out since the last one; None: leave this one out.

        Causes are few: a class of errors, never a key or a name.
        """
        now = self._clock()
        soon = cause in self._last and now < self._last[cause] + REPEAT_SECONDS
        if soon or cause in self._lasting:
            self._left_out[cause] = self._left_out.get(cause, 0) + 1
            return None
        self._last[cause] = now
        if self._once:
            self._lasting.add(cause)
        return self._left_out.pop(cause, 0)

    def over(self) -> None:
        """All is well again: what goes wrong next is said, a minute after its last line or more."""
        self._lasting.clear()
