"""A catalogue that was put into the bucket ahead of time, with its index: absences cost nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from ec_s3.child import ProcessPort
from ec_s3.indexing import list_tags, write_index
from ec_s3.metrics import Stats
from ec_s3.port import Absent, Ready, ThreadPort
from ec_s3.remote import open_store
from ec_s3.testing.port_conformance import (
    NAMESPACE,
    SPEC,
    config,
    make_slab,
    put_in_bucket,
    read,
    release,
    until,
    want,
)
from ec_s3.testing.traffic import RecordedServer
from ec_s3.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOOK_UPS = 1000


@pytest.fixture(scope="module")
def server() -> Iterator[RecordedServer]:
    with RecordedServer() as recorded:
        yield recorded


async def indexed(url: str) -> None:
    """Write the index of what is in the bucket, as a job does when it ends."""
    store = open_store(config(url))
    assert store is not None
    name = NAMESPACE.prefix.rpartition("/")[2]
    try:
        tags = await list_tags(store, name)
        await write_index(store, tags, namespace=NAMESPACE, made=time.time())
    finally:
        await store.aclose()


@pytest.mark.parametrize("tiers", ["bucket", "disk and bucket"])
@pytest.mark.parametrize("engine", [ThreadPort, ProcessPort])
async def test_a_thousand_look_ups_of_absent_items_send_no_request(
    server: RecordedServer,
    tmp_path: Path,
    engine: type[ThreadPort | ProcessPort],
    tiers: str,
) -> None:
    prefix = f"{engine.__name__}-{tiers.replace(' ', '-')}"
    url = server.location(prefix)
    body = put_in_bucket(url, "catalogue")
    await indexed(url)
    settings = {"local_disk": tmp_path} if tiers != "bucket" else {}
    stats = Stats()

    def counted(name: str) -> float:
        stats.merge(port.drain_stats())
        return stats.snapshot()[name]

    with make_slab() as slab:
        port = engine(config(url, **settings), NAMESPACE, slab)
        try:
            until(lambda: counted("index_items") == 1, "the index is taken in")
            before = len(server.served(prefix))
            for i in range(LOOK_UPS):
                absent = want(port, f"absent-{i}", save=SPEC.nbytes if i % 2 else 0)
                assert isinstance(absent, Absent)
                assert absent.reason is MissReason.ABSENT
                release(port, absent)
            assert server.served(prefix)[before:] == []
            ready = want(port, "catalogue")
            assert isinstance(ready, Ready)
            assert read(slab, ready.extents, SPEC) == body
            release(port, ready)
            assert [r.method for r in server.served(prefix)[before:]] == ["GET"]
            until(lambda: counted("index_answers_absent") == LOOK_UPS, "they are counted")
        finally:
            port.close(5.0)
