"""Recycled byte buffers for bodies on their way from or to a store.

A fresh buffer of 8-32 MB is zeroed and page-faulted each time, which costs more than filling it.
The pool is called from any thread; it never blocks and never limits what is lent, only what is kept
idle. A body belongs to one task.

Locking: one lock guards the idle buffers; buffers are made and dropped outside it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable

_SMALLEST = 64 << 10


class BufferPool:
    """Buffers by size class, four classes per power of two: a buffer wastes a quarter at most.

    Args:
        max_bytes: most that is kept idle; the class that was unused for longest goes first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, list[bytearray]] = OrderedDict()
        self._idle_bytes = 0

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for reuse."""
        return self._idle_bytes

    def take(self, nbytes: int) -> memoryview:
        """A writable view of exactly `nbytes`, with arbitrary content; return it with `give`."""
        size = _class_bytes(nbytes)
        with self._lock:
            buffer = self._pop(size)
        if buffer is None:
            buffer = bytearray(size)
        return memoryview(buffer)[:nbytes]

    def give(self, view: memoryview) -> None:
        """Take back what `take` returned, and release the view.

        A buffer that someone still holds a part of is not reused.

        Raises:
            ValueError: no view of this pool's making, or given back before.
        """
        buffer = view.obj
        if not isinstance(buffer, bytearray) or len(buffer) != _class_bytes(len(buffer)):
            raise ValueError("this view is not from a BufferPool")
        try:
            view.release()
            buffer.append(buffer.pop())  # refused as long as any other view exists; no copy
        except BufferError:
            return
        with self._lock:
            dropped = self._push(buffer)
        del dropped  # unmapped here, outside the lock

    def _pop(self, size: int) -> bytearray | None:
        buffers = self._idle.get(size)
        if not buffers:
            return None
        self._idle.move_to_end(size)
        self._idle_bytes -= size
        return buffers.pop()

    def _push(self, buffer: bytearray) -> list[bytearray]:
        """Keep a buffer; returns what is not kept in exchange."""
        size = len(buffer)
        if size > self._max_bytes:
            return [buffer]
        self._idle.setdefault(size, []).append(buffer)
        self._idle.move_to_end(size)
        self._idle_bytes += size
        dropped = []
        while self._idle_bytes > self._max_bytes:
            oldest, buffers = next(iter(self._idle.items()))
            if buffers:
                dropped.append(buffers.pop())
                self._idle_bytes -= oldest
            else:
                del self._idle[oldest]
        return dropped


def _class_bytes(nbytes: int) -> int:
    """Size of the smallest class that holds `nbytes`."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    quarter = 1 << (nbytes - 1).bit_length() - 3
    return -(-nbytes // quarter) * quarter


@dataclass(slots=True)
class Body:
    """The stored bytes of one object, in pooled buffers, while they are needed."""

    pool: BufferPool
    lent: list[memoryview] = field(default_factory=list)
    parts: list[memoryview] = field(default_factory=list)

    def take(self, nbytes: int) -> memoryview:
        """A buffer of that size, owned until given back."""
        view = self.pool.take(nbytes)
        self.lent.append(view)
        return self.part(view[:])

    def part(self, view: memoryview) -> memoryview:
        """Remember a view of a buffer of this body: released before its buffer is given back.

        The pool cannot use a buffer again that anybody still has a view of.
        """
        self.parts.append(view)
        return view

    def give_back(self, view: memoryview) -> None:
        """Return the buffer behind a view early, and release what was made a part of it."""
        owner = view.obj
        ended = [part for part in self.parts if part.obj is owner]
        self.parts = [part for part in self.parts if part.obj is not owner]
        _release(ended)
        for lent in [lent for lent in self.lent if lent.obj is owner]:
            self.lent.remove(lent)
            self.pool.give(lent)

    def hand_over(self) -> Body:
        """A new owner of all buffers; this one owns none any more."""
        heir = Body(self.pool, self.lent, self.parts)
        self.lent, self.parts = [], []
        return heir

    def close(self) -> None:
        """Give every buffer back; idempotent."""
        _release(self.parts)
        self.parts = []
        while self.lent:
            self.pool.give(self.lent.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _release(views: Iterable[memoryview]) -> None:
    for view in views:
        with contextlib.suppress(BufferError):  # the traceback of a failure may hold on to it
            view.release()
