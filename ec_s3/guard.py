"""A store behind a limit, a breaker and counters; itself a `Store`.

Runs on the engine's event loop. Every request of the engine to a bucket passes here, so this is
where requests are counted, where an unreachable endpoint is given rest, and where the number of
requests in flight (and with it the memory of their buffers) is bounded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, TypeVar

from ec_s3.errors import RemoteError, RemoteTimeoutError, RemoteUnavailableError
from ec_s3.quiet import Quiet
from ec_s3.types import PutOutcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    from ec_s3.metrics import Stats
    from ec_s3.policy import Breaker
    from ec_s3.store import Buffer, GetResult, Store
    from ec_s3.types import DeleteReport, ObjectInfo

T = TypeVar("T")


CONNECT_SECONDS = 10.0

CALL_SECONDS = 120.0
"""Most that one call of a store may take in the background, whatever limits the store has."""

_REMEDY = "check that the endpoint is up, reachable and an S3 server"

logger = logging.getLogger(__name__)


async def connect_all(stores: Iterable[Store]) -> None:
    """Spare the first fetch what can be done now; a store that is down now may come back.

    Raises:
        ConfigError: the settings of one cannot be used here.
    """
    for store in stores:
        connecting = asyncio.ensure_future(store.connect())
        try:
            await asyncio.wait({connecting}, timeout=CONNECT_SECONDS)
            if connecting.done():
                connecting.result()
            else:
                logger.warning("a store is not ready yet: no answer in time")
        except (RemoteError, TimeoutError) as error:
            logger.warning("a store is not ready yet: %s", str(error) or "no answer in time")
        finally:  # left behind, if it does not end: a dead file system lets go of nothing
            connecting.cancel()
            connecting.add_done_callback(lambda task: task.cancelled() or task.exception())


async def bounded(operation: str, key: str, call: Awaitable[T]) -> T:
    """The result of a call of a store that nobody waits for.

    Raises:
        RemoteError: the store failed, or did not return within `CALL_SECONDS`.
    """
    try:
        async with asyncio.timeout(CALL_SECONDS):
            return await call
    except RemoteError:
        raise
    except TimeoutError:
        message = f"{operation} did not return within {CALL_SECONDS:.0f} s"
        raise RemoteTimeoutError(message, operation=operation, key=key) from None


def _is_no_answer(error: RemoteError) -> bool:
    return isinstance(error, RemoteTimeoutError | RemoteUnavailableError)


class GuardedStore:
    """Wraps the bucket's store.

    Args:
        store: what is guarded.
        breaker: pure state machine that says whether to try at all.
        stats: counters `remote_requests`, `remote_seconds`, `breaker_open`.
        max_reads: GET and HEAD requests in flight.
        clock: seconds, monotonic.

    Attributes:
        on_seen: told of every object that was found or written: its key, and when it was written,
            in seconds since the epoch, 0.0 when unknown.
    """

    def __init__(
        self,
        store: Store,
        *,
        breaker: Breaker,
        stats: Stats,
        max_reads: int,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._breaker = breaker
        self._stats = stats
        self._reads = asyncio.Semaphore(max_reads)
        self._clock = clock
        self._last_failure = "no failure yet"
        self._quiet = Quiet(clock)
        self._was_open = False
        self.on_seen: Callable[[str, float], object] = lambda _key, _modified: None

    async def _call(self, operation: str, key: str, call: Callable[[], Awaitable[T]]) -> T:
        if not self._breaker.allow(self._clock()):
            self._stats.add("remote_requests", op=operation, outcome="rested")
            raise RemoteUnavailableError(
                f"the endpoint is left alone for a moment, as it failed: {self._last_failure}",
                operation=operation,
                key=key,
            )
        started = self._clock()
        try:
            result = await call()
        except RemoteError as error:
            self._count(operation, error.reason, started)
            self._complain(error)
            if _is_no_answer(error):
                self._last_failure = str(error)
                self._breaker.failure(self._clock())
            else:
                self._breaker.success()
            raise
        except asyncio.CancelledError:
            # Nobody waits any more; a slow endpoint cancelled by deadlines is a failing one.
            self._count(operation, "cancelled", started)
            silence = f"no answer to a {operation} within its caller's deadline"
            self._last_failure = f"{silence}; {_REMEDY}"
            self._breaker.abandoned(self._clock() - started)
            raise
        else:
            self._count(operation, "absent" if result is None else "ok", started)
            self._breaker.success()
            return result
        finally:
            self._note_breaker()

    def _complain(self, error: RemoteError) -> None:
        """Log a failed request, sparingly; errors carry no secret."""
        about = "" if _is_no_answer(error) else error.operation  # silence is the same for all
        more = self._quiet.due((about, error.reason))
        if more is not None:
            alike = f" ({more} more like it since the last such line)" if more else ""
            logger.warning("a request to the bucket failed: %s%s", error, alike)

    def _note_breaker(self) -> None:
        is_open = self._breaker.is_open
        self._stats.set("breaker_open", float(is_open))
        if is_open and not self._was_open:
            logger.warning("the bucket is left alone until it answers: %s", self._last_failure)
        elif self._was_open and not is_open:
            logger.warning("the bucket answers again")
        self._was_open = is_open

    def _count(self, operation: str, outcome: str, started: float) -> None:
        self._stats.add("remote_requests", op=operation, outcome=outcome)
        self._stats.observe("remote_seconds", self._clock() - started, op=operation)

    async def get(
        self,
        key: str,
        *,
        into: Callable[[int], memoryview],
        start: int = 0,
        length: int | None = None,
        if_match: str | None = None,
        if_none_match: str | None = None,
    ) -> GetResult | None:
        """See `Store.get`."""
        async with self._reads:
            found = await self._call(
                "get",
                key,
                lambda: self._store.get(
                    key,
                    into=into,
                    start=start,
                    length=length,
                    if_match=if_match,
                    if_none_match=if_none_match,
                ),
            )
        if found is not None:
            self.on_seen(key, found.info.modified)
        return found

    async def put(
        self,
        key: str,
        parts: Sequence[Buffer],
        *,
        if_absent: bool = True,
        if_match: str | None = None,
    ) -> PutOutcome:
        """See `Store.put`."""
        outcome = await self._call(
            "put",
            key,
            lambda: self._store.put(key, parts, if_absent=if_absent, if_match=if_match),
        )
        if outcome is not PutOutcome.CHANGED:
            self.on_seen(key, time.time() if outcome is PutOutcome.WRITTEN else 0.0)
        return outcome

    async def head(self, key: str) -> ObjectInfo | None:
        """See `Store.head`."""
        async with self._reads:
            info = await self._call("head", key, lambda: self._store.head(key))
        if info is not None:
            self.on_seen(key, info.modified)
        return info

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """See `Store.list`; not guarded, as only tools and the warm start list."""
        return self._store.list(prefix)

    async def delete(self, keys: Sequence[str]) -> DeleteReport:
        """See `Store.delete`."""
        return await self._call("delete", keys[0] if keys else "", lambda: self._store.delete(keys))

    async def connect(self) -> None:
        """See `Store.connect`; no request, so neither guarded nor counted."""
        await self._store.connect()

    async def aclose(self) -> None:
        """See `Store.aclose`."""
        await self._store.aclose()
