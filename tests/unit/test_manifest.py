"""A namespace's description comes back where somebody has deleted it with the folder."""

from __future__ import annotations

from ec_s3.control import Control
from ec_s3.gate import Gate
from ec_s3.keys import Namespace
from ec_s3.manifest import AGAIN_SECONDS, Manifest
from ec_s3.testing.memory import MemoryStore

SPACE = Namespace(model="org/model", salt="tenant")
KEY = SPACE.object_key("a")


class Server:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.gate = Gate(SPACE)
        self.now = 0.0
        self.manifest = Manifest(self.gate, {}, clock=lambda: self.now)

    async def write(self) -> bool:
        """Whether the folder is described after the server has written an item."""
        await self.manifest.describe(self.store, KEY)
        return SPACE.manifest_key in self.store.objects


async def test_a_folder_is_described_once() -> None:
    server = Server()
    assert await server.write()
    del server.store.objects[SPACE.manifest_key]
    assert not await server.write(), "a request for each item would cost"


async def test_it_is_described_again_when_all_of_it_was_declared_invalid() -> None:
    server = Server()
    assert await server.write()
    del server.store.objects[SPACE.manifest_key]
    server.gate.apply(Control(valid_after=1.0))
    assert await server.write()


async def test_it_is_described_again_after_a_while() -> None:
    server = Server()
    assert await server.write()
    del server.store.objects[SPACE.manifest_key]
    server.now += AGAIN_SECONDS
    assert await server.write()


async def test_an_item_of_another_namespace_describes_nothing() -> None:
    server = Server()
    await server.manifest.describe(server.store, Namespace(model="org/other").object_key("a"))
    assert not server.store.objects
