"""What the folders of namespaces say about themselves in their `namespace.json`.

Coroutines on the command's event loop. A description is believed only where it has the folder's
fingerprint; any other, and what is none, counts as not there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ec_s3.cli.crew import each, patiently
from ec_s3.cli.targets import ROOT
from ec_s3.errors import FrameTooLargeError
from ec_s3.keys import fingerprint_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from ec_s3.store import Store

MANIFEST_NAME = "namespace.json"
MAX_MANIFEST_BYTES = 1 << 20
_AT_ONCE = 32
_SHOWN = ("revision", "weight_version", "quantization", "adapter")


@dataclass(frozen=True, slots=True)
class Description:
    """A namespace in words: the fields of `keys.Namespace`, the salt as its HMAC."""

    fields: Mapping[str, object] = field(repr=False)

    @property
    def model(self) -> str:
        """Identity of the model."""
        return self.text("model")

    def text(self, name: str) -> str:
        """One of the fields; empty when it is not there."""
        return str(self.fields.get(name, ""))

    def details(self) -> dict[str, str]:
        """What tells namespaces of one model apart for a person."""
        return {name: self.text(name) for name in _SHOWN}


async def describe(store: Store, folder: str) -> Description | None:
    """The description of a folder (`<slug>-<fingerprint>`), None without one that can be believed.

    Raises:
        RemoteError: the store failed.
    """

    def into(nbytes: int) -> memoryview:
        if nbytes > MAX_MANIFEST_BYTES:
            raise FrameTooLargeError(f"{MANIFEST_NAME} has {nbytes} bytes")
        return memoryview(bytearray(nbytes))

    try:
        found = await patiently(lambda: store.get(f"{ROOT}{folder}/{MANIFEST_NAME}", into=into))
    except FrameTooLargeError:
        return None
    return None if found is None else _parse(bytes(found.body), folder)


async def withheld(store: Store, folders: Iterable[str]) -> list[str]:
    """Those of folders with a description whose description may not be read.

    A store's refusal to show an object looks like its absence, which a listing contradicts.

    Raises:
        RemoteError: the store failed.
    """

    def into(nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    hidden = []
    for folder in sorted(folders):
        key = f"{ROOT}{folder}/{MANIFEST_NAME}"
        if await patiently(lambda key=key: store.get(key, into=into, length=1)) is None:  # type: ignore[misc]  # mypy infers no lambda with a default
            hidden.append(folder)
    return hidden


async def describe_all(store: Store, folders: Iterable[str]) -> dict[str, Description]:
    """The descriptions of those folders that have one, by folder."""
    found: dict[str, Description] = {}

    async def read(folder: str) -> None:
        description = await describe(store, folder)
        if description is not None:
            found[folder] = description

    async def names() -> AsyncIterator[str]:
        for folder in sorted(set(folders)):
            yield folder

    await each(names(), read, at_once=_AT_ONCE)
    return found


def _parse(body: bytes, folder: str) -> Description | None:
    try:
        document = json.loads(body.decode("utf-8", "surrogatepass"))
        identity = document.get("namespace") if isinstance(document, dict) else None
        if not isinstance(identity, dict) or not folder.endswith(f"-{fingerprint_of(identity)}"):
            return None
    except (ValueError, RecursionError):
        return None
    return Description(identity)
