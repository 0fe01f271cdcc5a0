"""A prewarm job: read, identify, look, encode, a batch at a time.

Runs on one event loop; the encoder is called on one thread of the job's own. Holds two batches of
entries: while one is encoded, the media of the next are read. What is in the bucket is the job's
only memory: killed at any point and started again, it encodes at most one batch anew. One bad
entry never ends it; a bucket that cannot be read, or takes nothing, does.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ec_s3.errors import ConfigError, ECS3Error, RemoteError
from ec_s3.prewarm.encoding import Failed, Identified
from ec_s3.prewarm.manifest import BadEntry
from ec_s3.prewarm.report import Report, Tally
from ec_s3.prewarm.target import Presence, Target, taken

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from ec_s3.prewarm.encoding import Encoder, MediaItem
    from ec_s3.prewarm.media import Media, MediaReader, Source
    from ec_s3.prewarm.pace import Pace
    from ec_s3.prewarm.target import Look

T = TypeVar("T")

MAX_BARREN = 3
"""Batches in a row of which nothing got into the bucket, by no fault of the media."""

REQUESTS_AN_UPLOAD = 2
"""An upload of more than a MiB asks first whether the object is there."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How a job is run.

    Attributes:
        batch_size: entries at a time; what a killed job does twice at most.
        dry_run: encode and write nothing.
        index: write the namespace's index at the end.
    """

    batch_size: int = 32
    dry_run: bool = False
    index: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What a job is told to start, once it needs it.

    Attributes:
        open_encoder: starts the vLLM, on the job's thread; not before the first usable entry.
        open_target: the bucket as the encoder's namespace; raises to stop the job before its
            first upload.
    """

    open_encoder: Callable[[], Encoder]
    open_target: Callable[[Encoder], Awaitable[Target]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Who is told while a job runs.

    Attributes:
        failed: an entry is not in the bucket, and why.
        advance: so many more entries are done.
    """

    failed: Callable[[BadEntry], object]
    advance: Callable[[int], object] = lambda _: None


@dataclass(frozen=True, slots=True)
class _Batch:
    results: Sequence[Media | BadEntry]
    scratch: Path


class Job:
    """One job; run it once.

    Args:
        source: its entries, open.
        reader: reads their media.
        pace: how fast it may ask buckets.
        mode: how it is run.
        hooks: starts what it needs.
        scratch: folder for media that come out of buckets.
        total: entries of the source, None when only their end will tell.

    Attributes:
        total: the same.
    """

    def __init__(
        self,
        source: Source,
        *,
        reader: MediaReader,
        pace: Pace,
        mode: Mode,
        hooks: Hooks,
        scratch: Path,
        total: int | None = None,
    ) -> None:
        self.total = total
        self._source = source
        self._reader = reader
        self._pace = pace
        self._mode = mode
        self._hooks = hooks
        self._scratch = scratch
        self._tally = Tally()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ec_s3-prewarm")
        self._encoder: Encoder | None = None
        self._target: Target | None = None
        self._listeners: Listeners | None = None
        self._counted: set[str] = set()
        self._twins: dict[int, list[MediaItem]] = {}  # of this batch, by the line of the first
        self._barren = 0
        self._stopped = ""
        self._waiting: asyncio.Future[Any] | None = None  # for what nobody needs after a stop

    def stop(self, reason: str) -> None:
        """End after the batch that is encoded, and without an index; on the job's loop."""
        self._stopped = self._stopped or reason
        if self._waiting is not None:
            self._waiting.cancel()

    async def run(self, listeners: Listeners) -> Report:
        """Do all of it.

        Args:
            listeners: hear of its progress.

        Raises:
            ConfigError: the encoder cannot be started, or does not fit.
        """
        self._listeners = listeners
        started = time.monotonic()
        index = None
        unreachable = False
        try:
            await self._do_all()
            if self._target is not None and self._wants_index:
                index = await self._unless_stopped(
                    asyncio.ensure_future(self._target.write_index())
                )
        except ConfigError:
            raise
        except (ECS3Error, OSError) as error:  # the latter of a folder, a manifest, or the disk
            self.stop(str(error))
            unreachable = isinstance(error, RemoteError)
        finally:
            if self._encoder is not None:
                await self._call(self._encoder.close)
            self._thread.shutdown(wait=False)
        return Report(
            tally=self._tally,
            namespace=self._encoder.namespace.id if self._encoder is not None else "",
            seconds=time.monotonic() - started,
            stopped=self._stopped,
            unreachable=unreachable,
            index=index,
            requests=self._pace.requests,
            retries=self._pace.retries,
        )

    @property
    def _wants_index(self) -> bool:
        # Who is told to stop may have seconds left, and a listing takes minutes.
        return self._mode.index and not self._mode.dry_run and not self._stopped

    async def _unless_stopped(self, work: asyncio.Future[T]) -> T | None:
        """What the work comes to; None when the job is told to stop meanwhile."""
        self._waiting = work
        await asyncio.wait({work})
        self._waiting = None
        return None if work.cancelled() else work.result()

    async def _do_all(self) -> None:
        async with contextlib.aclosing(self._read_ahead()) as batches:
            async for batch in batches:
                await self._do(batch)
                if self._stopped:
                    return

    async def _read_ahead(self) -> AsyncGenerator[_Batch, None]:
        """The batches, each read while the one before is encoded."""
        batches = self._read()
        coming = asyncio.ensure_future(anext(batches, None))
        try:
            while (batch := await self._unless_stopped(coming)) is not None:
                coming = asyncio.ensure_future(anext(batches, None))
                yield batch
        finally:
            coming.cancel()
            await asyncio.wait({coming})
            if not coming.cancelled():
                coming.exception()  # it no longer matters
            await batches.aclose()

    async def _read(self) -> AsyncGenerator[_Batch, None]:
        async for entries in self._source.batches(self._mode.batch_size):
            scratch = Path(tempfile.mkdtemp(dir=self._scratch))
            yield _Batch(await self._reader.read(entries, scratch), scratch)

    async def _do(self, batch: _Batch) -> None:
        tally = self._tally
        tally.batches += 1
        tally.entries += len(batch.results)
        media = []
        for result in batch.results:
            if isinstance(result, BadEntry):
                self._fail(result)
                continue
            media.append(result)
            modality = result.item.modality
            tally.modalities[modality] = tally.modalities.get(modality, 0) + 1
            tally.media_bytes += result.nbytes
        try:
            if media:
                await self._encode(self._unique(await self._identify(media)))
            twins = sum(map(len, self._twins.values()))
            tally.duplicates += twins
            self._advance(twins)
        finally:
            await asyncio.to_thread(shutil.rmtree, batch.scratch)

    async def _identify(self, media: Sequence[Media]) -> list[Identified | Failed]:
        if self._encoder is None:
            self._encoder = await self._call(self._hooks.open_encoder)
            self._target = await self._hooks.open_target(self._encoder)
        encoder = self._encoder
        items, paths = [one.item for one in media], [one.path for one in media]
        started = time.monotonic()
        results = await self._call(lambda: encoder.identify(items, paths))
        self._tally.identify_seconds += time.monotonic() - started
        return results

    def _unique(self, results: Sequence[Identified | Failed]) -> list[Identified]:
        """One of each identifier; two media never share one in silence."""
        first: dict[str, Identified] = {}
        self._twins = {}
        for result in results:
            if isinstance(result, Failed):
                self._refuse(result.item.line, result.item.uri, result.reason)
                continue
            other = first.setdefault(result.identifier, result)
            if other is result:
                continue
            if (other.input_digest, other.num_embeds) != (result.input_digest, result.num_embeds):
                reason = taken(result, f"line {other.item.line} has it")
                self._refuse(result.item.line, result.item.uri, reason)
            else:
                self._twins.setdefault(other.item.line, []).append(result.item)
        return list(first.values())

    async def _encode(self, items: Sequence[Identified]) -> None:
        assert self._target is not None
        missing = []
        for item, look in zip(items, await self._target.look(items), strict=True):
            if look.presence is Presence.ABSENT:
                missing.append(item)
            else:
                self._found(item, look)
        if not missing:
            return
        if self._mode.dry_run:
            self._count(missing)
        else:
            await self._upload(missing)

    def _count(self, missing: Sequence[Identified]) -> None:
        """In place of encoding: what was counted before would be in the bucket by now."""
        for item in missing:
            if item.identifier in self._counted:
                self._tally.present += 1
            else:
                self._counted.add(item.identifier)
                self._tally.missing += 1
                self._tally.output_bytes += item.nbytes
        self._advance(len(missing))

    def _found(self, item: Identified, look: Look) -> None:
        tally = self._tally
        if look.presence is Presence.UNUSABLE:
            self._refuse(item.item.line, item.item.uri, look.reason)
            return
        tally.present += 1
        if look.encode_seconds is not None:
            tally.known_seconds += look.encode_seconds
            tally.known_items += 1
        self._advance(1)

    async def _upload(self, items: Sequence[Identified]) -> None:
        assert self._encoder is not None
        encoder = self._encoder
        await self._pace.turn(REQUESTS_AN_UPLOAD * len(items))
        started = time.monotonic()
        try:
            results = await self._call(lambda: encoder.encode(items))
        except ECS3Error as error:
            if isinstance(error, ConfigError) and not self._tally.encoded:
                raise  # it has never started
            lines = ", ".join(str(item.item.line) for item in items)
            raise ECS3Error(f"{error}; it was encoding the entries of lines {lines}") from error
        self._tally.encode_seconds += time.monotonic() - started
        failures = [result for result in results if isinstance(result, Failed)]
        for failure in failures:
            self._refuse(failure.item.line, failure.item.uri, failure.reason)
        done = [result for result in results if isinstance(result, Identified)]
        self._tally.encoded += len(done)
        self._tally.output_bytes += sum(item.nbytes for item in done)
        self._advance(len(done))
        lost = [failure.reason for failure in failures if failure.blameless]
        self._barren = 0 if done else self._barren + bool(lost)  # bad media never end the job
        if self._barren >= MAX_BARREN:
            self.stop(f"{MAX_BARREN} batches in a row failed, the last with: {lost[-1]}")

    def _refuse(self, line: int, uri: str, reason: str) -> None:
        self._fail(BadEntry(line=line, uri=uri, reason=reason))
        for twin in self._twins.pop(line, ()):
            self._fail(BadEntry(line=twin.line, uri=twin.uri, reason=reason))

    def _fail(self, entry: BadEntry) -> None:
        self._tally.failed += 1
        assert self._listeners is not None
        self._listeners.failed(entry)
        self._advance(1)

    def _advance(self, entries: int) -> None:
        assert self._listeners is not None
        self._listeners.advance(entries)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
