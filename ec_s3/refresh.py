"""Writes objects again that are served although they near the end of the bucket's lifetime.

A lifecycle rule of a bucket removes objects by the time of their last writing, however often they
are read. What is read near its end is therefore written once more, with the bytes that are stored,
so that what is in use does not expire.

Runs on the engine's event loop, one object at a time, behind everybody's back; `served` may be
called from any thread. Must never change an object's content, write what does not match its own
digests, or bring back what was deleted: an object is replaced only by itself (If-Match), and only
while nothing forbids it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from typing import TYPE_CHECKING

import numpy as np

from ec_s3.cancellation import run_to_end
from ec_s3.errors import (
    ClosedError,
    FrameChecksumError,
    FrameError,
    FrameTooLargeError,
    FrameTruncatedError,
    RemoteChangedError,
    RemoteError,
)
from ec_s3.header import MAX_HEAD_BYTES, digest, read_header
from ec_s3.types import PutOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Executor

    from ec_s3.gate import Gate
    from ec_s3.header import Header
    from ec_s3.metrics import Stats
    from ec_s3.presence import Refused
    from ec_s3.signing import Keyring
    from ec_s3.store import Store
    from ec_s3.types import ObjectInfo

logger = logging.getLogger(__name__)

OLD_SHARE = 0.8
"""Share of its lifetime after which an object is written again when it is served."""

AGAIN_SHARE = 0.05
"""Share of the lifetime until one is tried again that could not be written."""

SPREAD_SHARE = 0.005
LONGEST_SPREAD = 300.0
"""A fleet that serves an object looks at it at times spread over so much of its lifetime, or so
many seconds at most. The first to look writes it; to the others it is young again."""

MAX_KNOWN = 100_000
"""Objects whose age is remembered; beyond them the one learnt longest ago is forgotten."""

MAX_PENDING = 1000
"""Objects about to be written again; what is served beyond them is looked at another time."""

JOB_SECONDS = 300.0

STOP_SECONDS = 1.0
"""How long what is called off may take to let go when the refresher is closed."""


class Refresher:
    """One engine's.

    Args:
        store: the bucket.
        gate: says what may not be written.
        lifetime: seconds after which the bucket removes an object.
        refused: objects that a reader has refused; those are left alone.
        admit_bytes: seconds to wait before sending that many bytes (the uploads' rate limit).
        executor: threads that check what was read.
        max_tensor_bytes: largest item that is stored.
        keyring: the keys that must have signed an object; None takes any.
        stats: counters `refreshed_objects` and `errors`.
        wall_clock: seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        gate: Gate,
        *,
        lifetime: float,
        refused: Refused,
        admit_bytes: Callable[[int], float],
        executor: Executor,
        max_tensor_bytes: int,
        keyring: Keyring | None,
        stats: Stats,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._gate = gate
        self._lifetime = lifetime
        self._refused = refused
        self._admit_bytes = admit_bytes
        self._executor = executor
        self._max_tensor_bytes = max_tensor_bytes
        self._keyring = keyring
        self._stats = stats
        self._wall_clock = wall_clock
        self._loop = asyncio.get_running_loop()
        self._due: dict[str, float] = {}  # when an object is old, in order of learning
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        self._closed = False

    def learn(self, key: str, modified: float) -> None:
        """The bucket holds an object that was written at this time; 0.0 when that is unknown.

        Of unknown age it counts as old: the first look tells. Call on the loop.
        """
        self._set_due(key, modified + OLD_SHARE * self._lifetime if modified else 0.0)

    def _set_due(self, key: str, due: float) -> None:
        self._due.pop(key, None)
        self._due[key] = due
        while len(self._due) > MAX_KNOWN:
            del self._due[next(iter(self._due))]

    def served(self, key: str) -> None:
        """The item of a key has been handed out, from whichever tier; any thread, never waits."""
        due = self._due.get(key)
        if due is not None and self._wall_clock() >= due and key not in self._tasks:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._offer, key)

    def _offer(self, key: str) -> None:
        if self._closed or key in self._tasks or len(self._tasks) >= MAX_PENDING:
            return
        task = self._loop.create_task(self._try(key))
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def keys(self) -> set[str]:
        """Keys of the objects that are about to be written again."""
        return set(self._tasks)

    async def call_off(self, keys: Iterable[str]) -> None:
        """Leave the objects of these keys alone; returns when none can be written any more."""
        tasks = {self._tasks[key] for key in keys if key in self._tasks}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Write nothing more, or leave behind what does not end; idempotent."""
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self.call_off(self.keys())

    async def _try(self, key: str) -> None:
        try:
            spread = min(LONGEST_SPREAD, SPREAD_SHARE * self._lifetime)
            await asyncio.sleep(spread * random.random())  # noqa: S311  no secret
            async with self._turn, asyncio.timeout(JOB_SECONDS):
                outcome = await self._refresh(key)
        except RemoteChangedError:
            outcome = "changed"
        except (RemoteError, TimeoutError, ClosedError) as error:
            outcome = "failed"
            logger.debug("an old object could not be written again: %s", error)
        except FrameError as error:
            outcome = "refused"
            logger.debug("an old object is not written again: %s", error)
        except Exception:  # the background task's outermost border
            outcome = "failed"
            self._stats.add("errors", where="refresh")
            logger.exception("an old object could not be written again")
        if outcome not in ("written", "young"):
            self._set_due(key, self._wall_clock() + AGAIN_SHARE * self._lifetime)
        self._stats.add("refreshed_objects", outcome=outcome)

    async def _refresh(self, key: str) -> str:
        """Look at an object, and write it again if it is old; what became of it."""
        info = await self._store.head(key)
        if info is None:
            return "changed"
        if info.modified > self._wall_clock() - OLD_SHARE * self._lifetime:
            self.learn(key, info.modified)
            return "young"
        # Without a version or a date, nobody could tell later what is overwritten, or how old.
        if not info.etag or not info.modified or not self._may(key, info):
            return "refused"
        body = await self._read(info)
        if body is None:
            return "changed"
        header = await run_to_end(self._executor, self._checked, body)
        if header.created < self._gate.control.valid_after:
            return "refused"
        await asyncio.sleep(self._admit_bytes(len(body)))
        if not self._may(key, info):
            return "refused"
        # Some stores take a condition and do not keep to it.
        now = await self._store.head(key)
        if now is None or now.etag != info.etag:
            return "changed"
        outcome = await self._store.put(key, [body], if_absent=False, if_match=info.etag)
        if outcome is not PutOutcome.WRITTEN:
            return "changed"
        self.learn(key, self._wall_clock())
        return "written"

    def _may(self, key: str, info: ObjectInfo) -> bool:
        return self._gate.upload_refusal(key) is None and not self._refused.knows(key, info.etag)

    async def _read(self, info: ObjectInfo) -> memoryview | None:
        limit = self._max_tensor_bytes + self._max_tensor_bytes // 8 + MAX_HEAD_BYTES

        def into(nbytes: int) -> memoryview:
            if nbytes > limit:
                raise FrameTooLargeError(f"the object has {nbytes} bytes")
            return np.empty(nbytes, dtype=np.uint8).data

        found = await self._store.get(info.key, into=into, if_match=info.etag)
        return None if found is None else found.body

    def _checked(self, body: memoryview) -> Header:
        """The header of a whole object whose every byte is as its digests say; in a thread.

        Raises:
            FrameError: it is not.
        """
        header = read_header(body, max_tensor_bytes=self._max_tensor_bytes, keyring=self._keyring)
        if header.object_bytes != len(body):
            raise FrameTruncatedError(f"{len(body)} bytes, declared {header.object_bytes}")
        for index, chunk in enumerate(header.chunks):
            start, nbytes = header.chunk_range(index)
            if digest(body[start : start + nbytes]) != chunk.digest:
                raise FrameChecksumError(f"chunk {index} does not match its digest")
        return header
