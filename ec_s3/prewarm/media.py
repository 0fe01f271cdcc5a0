"""Where a job's entries come from, and how their media come to this machine.

A manifest, a folder, a pattern, one file, or a prefix of a bucket: all are streams of entries, of
which a job holds a batch or two. Runs on one event loop; files are read on threads. Writes nothing
but temporary files, and those into the folder that it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ec_s3.cancellation import run_to_end
from ec_s3.errors import ConfigError
from ec_s3.prewarm.buckets import MediaError, split_uri
from ec_s3.prewarm.manifest import BadEntry, modality_of, parse_entry, read_csv, read_jsonl
from ec_s3.prewarm.shard import Shard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterator, Sequence

    from ec_s3.prewarm.buckets import MediaBuckets
    from ec_s3.prewarm.encoding import MediaItem
    from ec_s3.prewarm.manifest import Entry

READS_AT_ONCE = 8
"""Media that are read at a time; of each, a piece is in memory."""

_READERS = {".jsonl": read_jsonl, ".csv": read_csv}


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """An entry's media on this machine.

    Attributes:
        path: the file.
        nbytes: its size.
    """

    item: MediaItem
    path: Path
    nbytes: int


class Source:
    """The entries of one share of what `--media` names.

    Args:
        media: manifest (`.jsonl`, `.csv`), folder, file, pattern, or `s3://bucket/...`.
        buckets: reads those of them that lie in a bucket.
        scratch: folder for a manifest out of a bucket.
        shard: the share.
    """

    def __init__(
        self, media: str, *, buckets: MediaBuckets, scratch: Path, shard: Shard | None = None
    ) -> None:
        self._media = media
        self._buckets = buckets
        self._scratch = scratch
        self._shard = shard or Shard()
        self._prefix: tuple[str, str] | None = None
        self._local = Path(media.removeprefix("file://")).expanduser()
        self._folder = Path() if media.startswith("s3://") else self._local.parent

    async def open(self) -> int | None:
        """Find out what it is, and how many entries there are; None when only their end will tell.

        Raises:
            ConfigError: there is nothing of that name, it cannot be read, or holds no entry.
            OSError: a folder cannot be listed.
        """
        if self._media.startswith("s3://"):
            uri = self._media.partition("?")[0]
            suffix = Path(uri).suffix.lower()
            if suffix not in _READERS:
                self._prefix = split_uri(uri)
                return None
            self._local = self._scratch / f"manifest{suffix}"
            try:
                await self._buckets.fetch(uri, self._local)
            except MediaError as error:
                raise ConfigError(f"media={uri!r} cannot be read: {error}") from error
        total, mine = await asyncio.to_thread(self._count)
        if not total:
            raise ConfigError(f"media={self._media!r} names nothing to encode")
        return mine

    async def batches(self, size: int) -> AsyncIterator[list[Entry]]:
        """The entries, so many at a time; after `open`."""
        batch: list[Entry] = []
        if self._prefix is not None:
            async for entry in self._listed(*self._prefix):
                batch.append(entry)
                if len(batch) == size:
                    yield batch
                    batch = []
            if batch:
                yield batch
            return
        with contextlib.closing(self._entries()) as found, ThreadPoolExecutor(1) as thread:
            entries = (entry for entry, name in found if self._shard.holds(name))
            # To its end: a file that a thread reads cannot be closed.
            while batch := await run_to_end(thread, lambda: list(islice(entries, size))):
                yield batch

    def path_of(self, uri: str) -> Path:
        """The file that a local entry names; a relative one is relative to its manifest."""
        return self._folder / Path(uri.removeprefix("file://")).expanduser()

    def _count(self) -> tuple[int, int]:
        total = mine = 0
        for _, name in self._entries():
            total += 1
            mine += self._shard.holds(name)
        return total, mine

    def _entries(self) -> Generator[tuple[Entry, str], None, None]:
        """Every entry of something local, and what decides whose share it is."""
        path = self._local
        reader = _READERS.get(path.suffix.lower())
        if path.is_dir():
            for number, file in enumerate(_walk(path), start=1):
                name = str(file.relative_to(path))
                yield parse_entry({"uri": str(file.absolute())}, line=number), name
        elif path.is_file() and reader is not None:
            with path.open("rb") as lines:
                for entry in reader(lines):
                    yield entry, entry.uri or f"line {entry.line}"
        elif path.is_file():
            yield parse_entry({"uri": str(path.absolute())}, line=1), path.name
        elif glob.has_magic(str(path)):
            matches = glob.iglob(str(path), recursive=True)  # noqa: PTH207  it takes any pattern
            for number, match in enumerate(filter(os.path.isfile, matches), start=1):
                yield parse_entry({"uri": str(Path(match).absolute())}, line=number), match
        else:
            raise ConfigError(
                f"media={self._media!r} is no file, folder, pattern or s3:// URL that is there"
            )

    async def _listed(self, bucket: str, prefix: str) -> AsyncIterator[Entry]:
        number = 0
        if prefix and modality_of(prefix) is None and not prefix.endswith("/"):
            prefix += "/"
        async for info in self._buckets.list(bucket, prefix):
            if info.key.endswith("/"):
                continue  # a folder, as consoles make them
            number += 1
            uri = f"s3://{bucket}/{info.key}"
            if self._shard.holds(uri):
                yield parse_entry({"uri": uri}, line=number)


class MediaReader:
    """Brings the media of a batch to this machine."""

    def __init__(self, source: Source, buckets: MediaBuckets) -> None:
        self._source = source
        self._buckets = buckets

    async def read(self, entries: Sequence[Entry], scratch: Path) -> list[Media | BadEntry]:
        """One result an entry, in order; what cannot be read is a bad entry."""
        results: list[Media | BadEntry] = [
            BadEntry(line=entry.line, uri=entry.uri, reason="not read") for entry in entries
        ]
        waiting = iter(enumerate(entries))

        async def work() -> None:
            for at, entry in waiting:
                if isinstance(entry, BadEntry):
                    results[at] = entry
                    continue
                try:
                    results[at] = await self._read(entry, scratch / f"{at}")
                except MediaError as error:
                    results[at] = BadEntry(line=entry.line, uri=entry.uri, reason=str(error))

        await asyncio.gather(*(work() for _ in range(READS_AT_ONCE)))
        return results

    async def _read(self, item: MediaItem, target: Path) -> Media:
        if item.uri.startswith("s3://"):
            target = target.with_suffix(Path(item.uri).suffix[:16])
            nbytes = await self._buckets.fetch(item.uri, target)
            return Media(item=item, path=target, nbytes=nbytes)
        path = self._source.path_of(item.uri)
        return Media(item=item, path=path, nbytes=await asyncio.to_thread(_size, path))


def _size(path: Path) -> int:
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise MediaError(f"cannot be read: {reason}") from error
    if not stat.S_ISREG(found.st_mode):
        raise MediaError("no regular file")
    if not found.st_size:
        raise MediaError("an empty file")
    return found.st_size


def _walk(folder: Path) -> Iterator[Path]:
    """The files of a folder in order, without hidden ones."""

    def refuse(error: OSError) -> None:
        raise error  # or what is below it would be left out in silence

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(parent, name)
