"""The engine's half of the audit: compares what an encoder has just made with what is stored.

An audited item was there, but the encoder ran all the same. What it made lies in pages that were
reserved for it; they are compared with the entry of the host tier and given back. Called on the
engine's event loop; the comparison runs on a thread of the encoders, one at a time. Must never
change what is stored or served, and never end up in a step: whatever cannot be compared now is
skipped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ec_s3.cancellation import run_to_end
from ec_s3.keys import parse_key
from ec_s3.quiet import Quiet
from ec_s3.types import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor
    from typing import Any

    from ec_s3.local import Lease, LocalTier, Reservation
    from ec_s3.metrics import Stats
    from ec_s3.types import ItemMeta, TensorSpec

    Array = np.ndarray[Any, np.dtype[Any]]

logger = logging.getLogger(__name__)

CLOSE_COSINE = 0.99
"""Least cosine between two outputs' rows that may come of rounding: kernels add up in another order
when items are encoded in other company. Another model, processor or picture stays far below."""

MAX_WAITING = 4
"""Comparisons under way or waiting, each of which holds its pages."""

_BLOCK_BYTES = 1 << 20
_FLOATS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


@dataclass(frozen=True, slots=True)
class Comparison:
    """How an output differs from what is stored.

    Attributes:
        outcome: `same` bit for bit, `close`, or `different`.
        cosine: the least cosine of a row with its stored counterpart; None where elements are no
            floating-point numbers of a known kind, and 1.0 for what is the same.
        changed: share of the rows with other bits.
    """

    outcome: str
    cosine: float | None = 1.0
    changed: float = 0.0


def compare(
    spec: TensorSpec, stored: Sequence[memoryview], made: Sequence[memoryview]
) -> Comparison:
    """Compare two tensors `[rows, width]` of one spec, each given as runs of bytes in order."""
    rows = spec.shape[0] if spec.shape else 1
    changed, worst = 0, 1.0
    known = spec.dtype in _FLOATS or spec.dtype == "bfloat16"
    width = max(1, spec.nbytes // max(1, rows))
    for mine, theirs in zip(_blocks(stored, width), _blocks(made, width), strict=True):
        differing = (mine != theirs).any(axis=1)
        count = int(differing.sum())
        if count:
            changed += count
            if known:
                pair = (_numbers(part[differing], spec.dtype) for part in (mine, theirs))
                worst = min(worst, _least_cosine(*pair))
    if not changed:
        return Comparison("same")
    share = changed / rows
    if not known:
        return Comparison("different", None, share)
    return Comparison("close" if worst >= CLOSE_COSINE else "different", worst, share)


def _blocks(segments: Sequence[memoryview], width: int) -> Iterator[Array]:
    """The rows' bytes, `[n, width]`, some at a time; rows may lie across segments."""
    step = max(1, _BLOCK_BYTES // width) * width
    left = b""
    for segment in segments:
        at = 0
        while at < len(segment):
            part = segment[at : at + step - len(left)]
            at += len(part)
            joined = b"".join([left, part])
            if len(joined) == step:
                yield np.frombuffer(joined, np.uint8).reshape(-1, width)
                joined = b""
            left = joined
    if left:
        yield np.frombuffer(left, np.uint8).reshape(-1, width)


def _numbers(rows: Array, dtype: str) -> Array:
    """Rows of bytes as numbers, `[n, width]`."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return rows.view(_FLOATS[dtype])


def _least_cosine(mine: Array, theirs: Array) -> float:
    with np.errstate(all="ignore"):
        a, b = mine.astype(np.float64), theirs.astype(np.float64)
        lengths = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
        cosines = (a * b).sum(axis=1) / lengths
    # No number: an infinity, or a row of zeros where the other is not.
    cosines = np.where(np.isfinite(cosines), cosines, 0.0)
    return float(np.where((a == b).all(axis=1), 1.0, cosines).min())


class Auditor:
    """One engine's.

    Args:
        tier: host tier, which holds what is stored.
        executor: threads that compare.
        stats: counters `audits` and `errors`, gauge `audit_worst_cosine`.
    """

    def __init__(self, tier: LocalTier, executor: Executor, stats: Stats) -> None:
        self._tier = tier
        self._executor = executor
        self._stats = stats
        self._worst = 1.0
        stats.set("audit_worst_cosine", self._worst)
        self._quiet = Quiet()
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def offer(
        self, made: Reservation, spec: TensorSpec, meta: ItemMeta, *, identifier: str
    ) -> None:
        """Compare filled pages with what is stored under their key, and give them back.

        Call on the loop.
        """
        stored = None
        if not self._closed and len(self._tasks) < MAX_WAITING:
            stored = self._tier.lookup(made.key, touch=False)
        if stored is None:
            self._skip(made)
            return
        task = asyncio.get_running_loop().create_task(
            self._audit(stored, made, spec, meta, identifier)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _skip(self, made: Reservation) -> None:
        made.abort()
        self._stats.add("audits", outcome="skipped")

    async def _audit(
        self, stored: Lease, made: Reservation, spec: TensorSpec, meta: ItemMeta, identifier: str
    ) -> None:
        found = None
        try:
            if _comparable(stored, spec, meta):
                async with self._turn:
                    found = await run_to_end(
                        self._executor, compare, spec, stored.segments(), made.segments()
                    )
        except Exception:  # the background task's outermost border
            self._stats.add("errors", where="audit")
            logger.exception("an item could not be audited")
        finally:
            stored.release()
            made.abort()
        if found is not None:
            self._report(found, stored.key, identifier)
        self._stats.add("audits", outcome="skipped" if found is None else found.outcome)

    def _report(self, found: Comparison, key: str, identifier: str) -> None:
        if found.cosine is not None:
            self._worst = min(self._worst, found.cosine)
        self._stats.set("audit_worst_cosine", self._worst)
        if found.outcome == "same" or self._quiet.due(found.outcome) is None:
            return
        logger.warning(
            "an audited item is not what the encoder makes of it now (%s): %s of %s, %.1f%% of "
            "its rows, least cosine %s",
            found.outcome,
            _short(identifier, key),
            parse_key(key).namespace,
            100 * found.changed,
            "unknown" if found.cosine is None else f"{found.cosine:.6f}",
        )

    async def close(self) -> None:
        """Compare nothing more, and wait for what is being compared; idempotent."""
        self._closed = True
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _short(identifier: str, key: str) -> str:
    """Twelve characters that name an item: of its key where the identifier is nothing to print."""
    plain = identifier.isascii() and identifier.isprintable()
    return (identifier if plain else parse_key(key).digest)[:12]


def _comparable(stored: Lease, spec: TensorSpec, meta: ItemMeta) -> bool:
    """Whether both were made of the same input, as far as that is known."""
    digests = {stored.meta.input_digest, meta.input_digest} - {""}
    return stored.spec == spec and len(digests) < 2 and spec.dtype in DTYPE_BYTES
