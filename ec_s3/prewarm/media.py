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
import posixpath
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ec_s3.cancellation import run_to_end
from ec_s3.errors import ConfigError
from ec_s3.prewarm.buckets import MAX_MEDIA_BYTES, MediaError, split_uri
from ec_s3.prewarm.manifest import BadEntry, modality_of, parse_entry, read_csv, read_jsonl
from ec_s3.prewarm.shard import Shard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterator, Sequence

    from ec_s3.errors import RemoteError
    from ec_s3.prewarm.buckets import MediaBuckets
    from ec_s3.prewarm.encoding import MediaItem
    from ec_s3.prewarm.manifest import Entry

READS_AT_ONCE = 8
"""Media that are read at a time; of each, a piece is in memory."""

MAX_UNANSWERED = READS_AT_ONCE
"""Objects in a row that buckets did not answer for, before that is no single object's fault."""

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
        self._local = local_path(media)
        self._folder = self._local.parent

    async def open(self) -> int | None:
        """Find out what it is, and how many entries there are; None when only their end will tell.

        Raises:
            ConfigError: there is nothing of that name, it cannot be read, or holds no entry.
            OSError: a folder cannot be listed.
            RemoteError: the bucket with the manifest does not answer.
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
                if error.away is not None:
                    raise error.away from error
                raise ConfigError(f"media={uri!r} cannot be read: {error}") from error
        total, mine = await asyncio.to_thread(self._count)
        if not total:
            raise ConfigError(f"media={self._media!r} names nothing to encode")
        return mine

    async def batches(self, size: int) -> AsyncIterator[list[Entry]]:
        """The entries, so many at a time; after `open`.

        Raises:
            ConfigError: there is nothing below a prefix.
            RemoteError: a bucket cannot be listed.
        """
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

    def place_of(self, uri: str) -> str | Path:
        """Where an entry's media are, `s3://` or a file; what is relative is so to its manifest."""
        if uri.startswith("s3://"):
            return uri
        path = local_path(uri)
        if not self._media.startswith("s3://") or path.is_absolute() or uri.startswith("file://"):
            return self._folder / path
        bucket, key = split_uri(self._media.partition("?")[0])
        return f"s3://{bucket}/{posixpath.normpath(posixpath.join(posixpath.dirname(key), uri))}"

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
        if not number:
            raise ConfigError(f"media={self._media!r} names nothing to encode")


class MediaReader:
    """Brings the media of a batch to this machine."""

    def __init__(self, source: Source, buckets: MediaBuckets) -> None:
        self._source = source
        self._buckets = buckets
        self._unanswered: list[RemoteError] = []  # since an object was read

    async def read(self, entries: Sequence[Entry], scratch: Path) -> list[Media | BadEntry]:
        """One result an entry, in order; what cannot be read is a bad entry.

        Raises:
            RemoteError: the buckets do not answer, whatever they are asked for.
        """
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
                    if error.away is None:
                        self._unanswered.clear()
                    else:
                        self._unanswered.append(error.away)
                if len(self._unanswered) >= MAX_UNANSWERED:
                    return

        await asyncio.gather(*(work() for _ in range(READS_AT_ONCE)))
        if len(self._unanswered) >= MAX_UNANSWERED:
            raise self._unanswered[-1]
        return results

    async def _read(self, item: MediaItem, target: Path) -> Media:
        place = self._source.place_of(item.uri)
        if isinstance(place, Path):
            return Media(item=item, path=place, nbytes=await asyncio.to_thread(_size, place))
        target = target.with_suffix(Path(item.uri).suffix[:16])
        nbytes = await self._buckets.fetch(place, target)
        self._unanswered.clear()
        return Media(item=item, path=target, nbytes=nbytes)


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
    if found.st_size > MAX_MEDIA_BYTES:
        raise MediaError(f"{found.st_size} bytes, and more than {MAX_MEDIA_BYTES} are not read")
    return found.st_size


def local_path(uri: str) -> Path:
    """The file that is meant, by its path or a `file://` URI; a name may begin with `~`, too."""
    return Path(os.path.expanduser(uri.removeprefix("file://")))  # noqa: PTH111  pathlib's raises


def _walk(folder: Path) -> Iterator[Path]:
    """The files of a folder in order, without hidden ones."""

    def refuse(error: OSError) -> None:
        raise error  # or what is below it would be left out in silence

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(parent, name)
