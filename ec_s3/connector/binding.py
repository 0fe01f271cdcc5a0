"""Digests of what the encoder is given: they bind a stored tensor to its input.

An identifier may be a client's choice, so it alone cannot say what a tensor was made from. The
digest covers names, dtypes, shapes and bytes of an item's processed inputs, and is the same in
every process that prepares the same item in the same way.

`digest_of` is a pure function. `Binder` runs it on one daemon thread beside vLLM's scheduler, which
only appends to a queue: it never waits for a digest, and hashing and copying leave the GIL to
others. Tensors on other devices than the CPU are never read, as that would stop the device.

Locking: one lock per binder guards its queue and the state of its bindings; under it nothing is
computed and nothing is called.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from blake3 import blake3

from ec_s3.metrics import Stats
from ec_s3.quiet import Quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ec_s3.compress import Buffer

logger = logging.getLogger(__name__)

MAX_WAITING = 256
"""Items that may wait for their digest; their inputs stay in memory until then."""

CLOSE_SECONDS = 2.0
"""How long closing waits for the digest under way."""

UNKNOWN = ""
"""In place of the digest of an item that has none."""

_CONTEXT = b"ec_s3 encoder input 1\n"
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_DEPTH = 32


def digest_of(data: Mapping[str, object]) -> str:
    """BLAKE3 of an item's processed inputs, as 64 hex digits.

    Args:
        data: fields by name; each a value, or something that holds one as its `data`. A value is
            a dense CPU tensor or an array, a number, text, bytes, None, or a list or mapping of
            values. A tuple counts as a list. At least one must not be None: an item without
            inputs is bound to nothing.

    Raises:
        ValueError: a value of another kind or on another device, or no value at all.
    """
    values = {name: _value(field) for name, field in data.items()}
    if all(value is None for value in values.values()):
        raise ValueError("the item has no inputs")
    hasher = blake3(_CONTEXT)
    _feed(hasher.update, values, 0)
    return str(hasher.hexdigest())


def _value(field: object) -> object:
    # Tensors and arrays have an attribute of that name, too, which is something else.
    return field if isinstance(field, torch.Tensor | np.ndarray) else getattr(field, "data", field)


def _feed(feed: Callable[[Buffer], object], value: object, depth: int) -> None:
    """Add a value so that no two add the same bytes: every part's length is fixed or stated."""
    if depth > _MAX_DEPTH:
        raise ValueError("inputs are nested too deeply to be digested")
    match value:
        case torch.Tensor():
            _feed_elements(feed, b"T", str(value.dtype), value.shape, _elements(value))
        case np.ndarray() | np.generic():
            array = np.asarray(value)
            if array.dtype.kind not in "biufc":
                raise ValueError(f"an array of {array.dtype} cannot be digested")
            _feed_elements(feed, b"A", array.dtype.str, array.shape, array)
        case list() | tuple():
            feed(b"L" + _number(len(value)))
            for item in value:
                _feed(feed, item, depth + 1)
        case Mapping():
            feed(b"M" + _number(len(value)))
            for name in sorted(value):
                feed(_scalar(name))
                _feed(feed, value[name], depth + 1)
        case _:
            feed(_scalar(value))


def _elements(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as integers of its elements' size: NumPy does not know all of torch's types."""
    carrier = _CARRIERS.get(tensor.dtype.itemsize)
    dense = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if carrier is None or not dense or tensor.is_quantized or tensor.is_complex():
        raise ValueError(
            f"a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device} cannot be digested"
        )
    array: np.ndarray = tensor.detach().view(carrier).numpy()
    return array


def _feed_elements(
    feed: Callable[[Buffer], object],
    tag: bytes,
    dtype: str,
    shape: Sequence[int],
    array: np.ndarray,
) -> None:
    sizes = b"".join(_number(size) for size in shape)
    feed(tag + _scalar(dtype) + _number(len(shape)) + sizes + _number(array.nbytes))
    # NumPy's copy, where one is needed, runs on this thread alone and without the GIL.
    feed(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _scalar(value: object) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            return b"B\x01" if value else b"B\x00"
        case int():
            tag, body = b"I", str(value).encode()
        case float():
            return b"F" + struct.pack(">d", value)
        case str():
            tag, body = b"S", value.encode("utf-8", "surrogatepass")
        case bytes():
            tag, body = b"Y", value
        case _:
            raise ValueError(f"a {type(value).__name__} cannot be digested")
    return tag + _number(len(body)) + body


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")


class Binding:
    """The digest of one item, now or soon. Any thread."""

    def __init__(self, lock: threading.Condition, digest: str | None) -> None:
        self._lock = lock
        self._digest = digest
        self._callbacks: list[Callable[[str], None]] = []

    @property
    def digest(self) -> str | None:
        """64 hex digits; empty when there is no digest to be had, None while it is computed."""
        return self._digest

    def on_done(self, callback: Callable[[str], None]) -> None:
        """Call back once with the digest: at once when it is known, else from the binder's thread.

        The callback must be short and must not raise.
        """
        with self._lock:
            if self._digest is None:
                self._callbacks.append(callback)
                return
            digest = self._digest
        callback(digest)

    def _end(self, digest: str) -> list[Callable[[str], None]]:
        """Set the digest; who is to be told, by the caller."""
        with self._lock:
            self._digest = digest
            callbacks, self._callbacks = self._callbacks, []
        return callbacks


class Binder:
    """Computes digests on a daemon thread of its own, which starts at construction.

    Args:
        max_waiting: items that may wait; further ones are given no digest.
        stats: counts what cannot be digested, as `unusable_inputs`.
    """

    def __init__(self, stats: Stats | None = None, *, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._stats = stats or Stats()
        self._lock = threading.Condition()
        self._waiting: deque[tuple[Binding, Mapping[str, object]]] = deque()
        self._closed = False
        self._quiet = Quiet(once=True)
        self._thread = threading.Thread(target=self._run, name="ec_s3-binder", daemon=True)
        self._thread.start()

    def bind(self, data: Mapping[str, object] | None) -> Binding:
        """Start digesting an item's processed inputs; never waits.

        Args:
            data: see `digest_of`; must not change from now on. None, of an item without media,
                has no digest.
        """
        with self._lock:
            if data is None or self._closed or len(self._waiting) >= self._max_waiting:
                return Binding(self._lock, UNKNOWN)
            binding = Binding(self._lock, None)
            self._waiting.append((binding, data))
            self._lock.notify()
        return binding

    def close(self) -> None:
        """Give up what is waiting and stop the thread; idempotent."""
        with self._lock:
            self._closed = True
            self._lock.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                binding, data = self._waiting.popleft()
                closed = self._closed
            digest = UNKNOWN if closed else self._digest(data)
            del data  # not to be kept until the next item comes
            for callback in binding._end(digest):  # noqa: SLF001  its other half
                self._guarded(callback, digest)

    def _digest(self, data: Mapping[str, object]) -> str:
        try:
            return digest_of(data)
        except Exception:  # the thread's border: one odd item must not end it
            self._stats.add("unusable_inputs", what="media")
            if self._quiet.due("media") is not None:
                logger.warning(
                    "an item's inputs cannot be digested; it stays unbound", exc_info=True
                )
            return UNKNOWN

    def _guarded(self, callback: Callable[[str], None], digest: str) -> None:
        try:
            callback(digest)
        except Exception:  # the same border
            self._stats.add("errors", where="scheduler")
            if self._quiet.due("callback") is not None:
                logger.exception("a callback of a digest failed")
