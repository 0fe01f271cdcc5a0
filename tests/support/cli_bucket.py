"""Stores for tests of the commands: a folder with a few items, and listings without end."""

from __future__ import annotations

import asyncio
import json
import os
import tracemalloc
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from typer.testing import CliRunner

from ec_s3.cli.app import app
from ec_s3.directory import DirectoryStore
from ec_s3.keys import Namespace
from ec_s3.tensors import as_bytes, spec_of
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import ItemMeta, ObjectInfo
from ec_s3.wire import encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from typer.testing import Result

SPACE = Namespace(model="org/model", dtype="bfloat16")
OTHER = Namespace(model="org/other", dtype="float16")

MILLION = 1_000_000
LAST = 50_000
"""Objects at the end of a listing of a million for which memory is traced."""

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def item(
    identifier: str, space: Namespace = SPACE, *, created: float = 1_700_000_000.0
) -> tuple[str, bytes, torch.Tensor]:
    """Key, object and tensor of an item."""
    tensor = torch.randn(8, 16).to(_DTYPES[space.dtype])
    frame = encode(
        spec_of(tensor),
        [as_bytes(tensor)],
        identifier=identifier,
        namespace=space.id,
        meta=ItemMeta(encode_seconds=0.25, placeholder={"grid": [1, 2]}),
        created=created,
    )
    return space.object_key(identifier), b"".join(bytes(part) for part in frame.parts), tensor


class Bucket:
    """A folder as the store, and the command that looks into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, torch.Tensor] = {}

    def put(self, key: str, body: bytes, *, age: float = 0.0) -> None:
        """Write an object, so many seconds ago."""

        async def write() -> None:
            store = DirectoryStore(self.folder)
            await store.put(key, [body], if_absent=False)
            await store.aclose()

        asyncio.run(write())
        path = self.folder / key
        moment = path.stat().st_mtime - age
        os.utime(path, (moment, moment))

    def add(
        self,
        identifier: str,
        space: Namespace = SPACE,
        *,
        age: float = 0.0,
        created: float = 1_700_000_000.0,
    ) -> str:
        """Store an item; its key."""
        key, body, tensor = item(identifier, space, created=created)
        self.put(key, body, age=age)
        self.tensors[key] = tensor
        return key

    def describe(self, space: Namespace) -> None:
        """Store the namespace's manifest."""
        self.put(space.manifest_key, space.manifest())

    def stored(self) -> list[str]:
        """Keys of everything but control documents."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(
            str(path.relative_to(self.folder)) for path in paths if path.name != "control.json"
        )

    def files(self) -> list[str]:
        """The last parts of these keys."""
        return sorted(key.rpartition("/")[2] for key in self.stored())

    def run(self, *arguments: str, typed: str | None = None) -> Result:
        """Run the command on the folder."""
        return CliRunner().invoke(app, ["--url", f"file://{self.folder}", *arguments], input=typed)

    def records(self, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
        """What the command says to programs."""
        result = self.run("--json", *arguments)
        assert result.exit_code == code, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]


class Listing(MemoryStore):
    """A store that lists any number of items, of which it has none; their keys repeat.

    Args:
        count: how many it lists.
        folders: in how many namespaces.
        distinct: how many different ones in each.
        trace_at: how many are listed, over all listings, before `tracemalloc` starts: what memory
            grows by for each item shows in the last ones too, and tracing all takes minutes.

    Attributes:
        listed: items that were asked for so far.
        spaces: the namespaces.
    """

    def __init__(
        self, count: int, *, folders: int = 4, distinct: int = 1000, trace_at: int = -1
    ) -> None:
        super().__init__()
        self._trace_at = trace_at
        self.listed = 0
        self.spaces = [Namespace(model=f"org/model-{n}") for n in range(folders)]
        self._each = count // folders
        self._infos = {
            f"{space.prefix}/": [
                ObjectInfo(space.object_key(f"{number}"), 1000, '"1"', 1.7e9)
                for number in range(min(distinct, self._each))
            ]
            for space in self.spaces
        }

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for place, infos in self._infos.items():
            if place.startswith(prefix) or prefix.startswith(place):
                for info in islice(cycle(infos), self._each):
                    if self.listed == self._trace_at:
                        tracemalloc.start()
                    self.listed += 1
                    yield info


def traced_peak() -> int:
    """Most bytes allocated since the tracing began, and still in use at one time; ends it."""
    assert tracemalloc.is_tracing()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


class Refusing(MemoryStore):
    """A store that refuses to delete some keys, for so many times.

    Attributes:
        refusals: how often each key is refused.
        batches: the sizes of all batches.
    """

    def __init__(self, refusals: dict[str, int]) -> None:
        super().__init__()
        self.refusals = refusals
        self.batches: list[int] = []

    async def delete(self, keys: Sequence[str]) -> Any:
        self.batches.append(len(keys))
        report = await super().delete([key for key in keys if not self.refusals.get(key)])
        failed = {key: "503 SlowDown" for key in keys if self.refusals.get(key)}
        for key in failed:
            self.refusals[key] -= 1
        return type(report)(report.deleted, failed)
