"""Deletes many objects: several batches at once, with pauses where the store refuses.

Coroutines on the command's event loop; keys wait in a temporary file, so that a million of them
cost no memory. Must never delete a key that was not set aside for it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from ec_s3.cli.crew import ATTEMPTS, each, pause
from ec_s3.cli.namespaces import MANIFEST_NAME
from ec_s3.cli.output import counted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from ec_s3.cli.output import Output
    from ec_s3.store import Store

_BATCH = 250
_BATCHES_AT_ONCE = 4


class Spool:
    """Keys set aside in a temporary file; a context manager, read after it was written.

    Attributes:
        count: how many.
        nbytes: stored size of their objects.
        descriptions: those of them that say what the others are; given back last.
    """

    def __init__(self) -> None:
        self.count = 0
        self.nbytes = 0
        self.descriptions: list[str] = []
        self._file = tempfile.TemporaryFile("w+", encoding="ascii", newline="\n")  # noqa: SIM115  closed by __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def add(self, key: str, size: int) -> None:
        """Set a key aside; keys are printable ASCII, so a line holds one."""
        if key.endswith(f"/{MANIFEST_NAME}"):
            self.descriptions.append(key)
        else:
            self._file.write(f"{key}\n")
        self.count += 1
        self.nbytes += size

    def __iter__(self) -> Iterator[str]:
        yield from self.described()
        yield from self.descriptions

    def described(self) -> Iterator[str]:
        """All but the descriptions."""
        self._file.seek(0)
        for line in self._file:
            yield line[:-1]


@dataclass(slots=True)
class Deletion:
    """What became of keys.

    Attributes:
        deleted: how many are gone.
        failed: why others are not, by key.
        untried: how many were left alone, because the store refused whole batches.
    """

    deleted: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    untried: int = 0

    @property
    def complete(self) -> bool:
        """Whether all are gone."""
        return not self.failed and not self.untried

    def report(self, out: Output) -> None:
        """Name what is left; for people."""
        for key, reason in self.failed.items():
            out.line(f"{key}: {reason}", style="red")
        if self.untried:
            out.note(f"{self.untried:,} more were not tried: the store refuses")


async def delete_keys(
    store: Store, keys: Iterable[str], *, advance: Callable[[int], None]
) -> Deletion:
    """Delete keys; what fails is tried again after pauses, and a store that refuses all is left.

    Args:
        store: where they lie.
        keys: which.
        advance: told of every batch.

    Raises:
        RemoteError: the store failed as a whole.
    """
    result = Deletion()
    refused = False

    async def work(batch: Sequence[str]) -> None:
        nonlocal refused
        if refused:
            result.untried += len(batch)
            return
        failed = await _delete(store, batch)
        refused = refused or len(failed) == len(batch)
        result.failed |= failed
        result.deleted += len(batch) - len(failed)
        advance(len(batch))

    await each(_batches(keys), work, at_once=_BATCHES_AT_ONCE)
    return result


async def delete_shown(store: Store, out: Output, spool: Spool) -> Deletion:
    """`delete_keys` with a bar; whoever breaks it off is told how far it came.

    A folder keeps its description while anything else is left: by that a tenant's are found again.
    """
    done = 0

    def count(number: int) -> None:
        nonlocal done
        done += number
        advance(number)

    with out.progress("deleting", spool.count) as advance:
        try:
            result = await delete_keys(store, spool.described(), advance=count)
            if not result.complete:
                result.failed |= dict.fromkeys(spool.descriptions, "kept: not all else is gone")
                return result
            last = await delete_keys(store, spool.descriptions, advance=count)
        except BaseException:
            total = counted(spool.count, "object")
            out.note(f"broken off: at least {done:,} of {total} gone; run it again for the rest")
            raise
    return Deletion(result.deleted + last.deleted, last.failed, last.untried)


async def _delete(store: Store, batch: Sequence[str]) -> dict[str, str]:
    """Why keys of a batch could not be deleted, at the last attempt."""
    failed = dict((await store.delete(batch)).failed)
    for attempt in range(1, ATTEMPTS):
        if not failed:
            break
        await pause(attempt)
        failed = dict((await store.delete(list(failed))).failed)
    return failed


async def _batches(keys: Iterable[str]) -> AsyncIterator[list[str]]:
    batch: list[str] = []
    for key in keys:
        batch.append(key)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
