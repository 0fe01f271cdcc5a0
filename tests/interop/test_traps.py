"""Traps of S3 clients.

Each was met with a real server; each test fails when what avoids the trap is taken out.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest
import torch
from fronted_server import ITEMS, NAMESPACE, PATIENT, Fronted, fronted, no_waiting, open_engine

from ec_s3.errors import RemoteUnavailableError
from ec_s3.testing.conformance import buffer, keys, read
from ec_s3.testing.faults import Fault
from ec_s3.transport import ATTEMPTS
from ec_s3.types import PutOutcome
from ec_s3.url import S3Location, S3Options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ec_s3.blocking import ECCacheEngine
    from ec_s3.s3 import S3Store
    from ec_s3.testing.moto import S3Server
    from ec_s3.testing.servers import RealServer

__all__ = ["fronted", "no_waiting", "open_engine"]

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("no_waiting")]

ceph = pytest.mark.parametrize("real_server", ["ceph", "ceph-https"], indirect=True)
BODY = os.urandom(300_000)
IMPATIENT = S3Options(connect_timeout=20.0, read_timeout=1.0, total_timeout=60.0)


@pytest.fixture
async def store(open_store: Callable[..., S3Store], fronted: Fronted) -> AsyncIterator[S3Store]:
    store = open_store(fronted.location(), PATIENT)
    yield store
    await store.aclose()


@pytest.fixture
async def filled(store: S3Store, fronted: Fronted) -> S3Store:
    """The store with one object, `k`, and an empty log."""
    assert await store.put("k", [BODY]) is PutOutcome.WRITTEN
    fronted.proxy.clear()
    return store


def tensor(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(256, 256, generator=generator).to(torch.bfloat16)


def save(engine: ECCacheEngine, name: str, item: torch.Tensor) -> None:
    assert engine.put(name, item)
    assert engine.flush(60).complete


def size_of(fronted: Fronted, key: str) -> int:
    client = fronted.client()
    try:
        nbytes: int = client.head_object(Bucket=fronted.bucket, Key=f"p/{key}")["ContentLength"]
    finally:
        client.close()
    return nbytes


# 1. The HTTP client under the SDK sends a PUT again by itself when its answer is lost, so that a
# conditional one is refused because of itself.


@ceph
@pytest.mark.smoke
async def test_a_put_without_an_answer_is_on_the_wire_as_often_as_the_sdk_says(
    filled: S3Store, fronted: Fronted
) -> None:
    fronted.proxy.add(Fault(method="PUT", drop_response=True))
    with pytest.raises(RemoteUnavailableError):
        await filled.put("other", [BODY], if_absent=False)
    assert fronted.proxy.count("PUT") == ATTEMPTS


@ceph
@pytest.mark.smoke
async def test_a_put_that_is_refused_because_of_itself_counts_as_written(
    filled: S3Store, fronted: Fronted
) -> None:
    fronted.proxy.add(Fault(method="PUT", drop_response=True, times=1))
    assert await filled.put("other", [BODY[:7], BODY[7:]]) is PutOutcome.WRITTEN
    assert fronted.proxy.count("PUT") == 2
    assert await read(filled, "other") == BODY


@ceph
async def test_a_put_that_is_refused_because_of_another_does_not(
    filled: S3Store, fronted: Fronted
) -> None:
    fronted.proxy.add(Fault(method="PUT", refuse=True, times=1))
    assert await filled.put("k", [os.urandom(len(BODY))]) is PutOutcome.EXISTS
    assert await read(filled, "k") == BODY


# 2. A body that breaks off is no error of the SDK's own, which repeats none.


@ceph
@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize(
    "cut_at", [0, pytest.param(100_000, marks=pytest.mark.smoke), len(BODY) - 1]
)
async def test_a_body_that_breaks_off_is_continued(
    filled: S3Store, fronted: Fronted, cut_at: int, reset: bool
) -> None:
    fronted.proxy.add(Fault(method="GET", cut_at=cut_at, reset=reset, times=2))
    assert await read(filled, "k") == BODY
    again = fronted.proxy.log[1]
    assert again.header("If-Match")
    assert again.header("Range").endswith(f"-{len(BODY) - 1}")


@ceph
@pytest.mark.usefixtures("filled")
async def test_a_body_that_falls_silent_is_continued(
    open_store: Callable[..., S3Store], fronted: Fronted
) -> None:
    impatient = open_store(fronted.location(), IMPATIENT)
    fronted.proxy.add(Fault(method="GET", stall_at=100_000, times=1))
    assert await read(impatient, "k") == BODY
    assert fronted.proxy.count("GET") >= 2
    await impatient.aclose()


@ceph
async def test_a_body_that_always_breaks_off_is_no_object(
    filled: S3Store, fronted: Fronted
) -> None:
    fronted.proxy.add(Fault(method="GET", cut_at=0))
    with pytest.raises(RemoteUnavailableError):
        await filled.get("k", into=buffer)
    assert 2 <= fronted.proxy.count("GET") <= 10


# 3. Most servers return no checksum, and the SDK then compares none.


@ceph
def test_a_flipped_byte_is_noticed_wherever_it_is_and_the_object_read_again(
    open_engine: Callable[..., ECCacheEngine], fronted: Fronted
) -> None:
    item = tensor()
    save(open_engine(), "a", item)
    nbytes = size_of(fronted, NAMESPACE.object_key("a"))
    for at in (0, 9, 40, 400, nbytes // 2, nbytes - 1):
        fronted.proxy.clear()
        fronted.proxy.add(Fault(method="GET", path=ITEMS, flip_at=at, times=1))
        engine = open_engine()
        got = engine.get("a")
        assert fronted.proxy.count("GET", ITEMS) == 2
        assert got is not None
        assert torch.equal(got, item)
        engine.close(0)


@ceph
def test_a_byte_that_is_flipped_each_time_gives_a_miss(
    open_engine: Callable[..., ECCacheEngine], fronted: Fronted
) -> None:
    item = tensor()
    save(open_engine(), "a", item)
    fronted.proxy.add(Fault(method="GET", path=ITEMS, flip_at=50_000))
    engine = open_engine()
    assert engine.get("a") is None
    assert engine.stats()["misses_corrupt"] == 1


# 4. Over https the SDK sends bodies in chunks with a checksum behind them, unless told otherwise;
# over http it does not, so that a test over http alone finds nothing.


@ceph
@pytest.mark.smoke
async def test_what_is_written_is_framed_as_the_oldest_servers_know_it(
    store: S3Store, fronted: Fronted
) -> None:
    assert await store.put("k", [BODY]) is PutOutcome.WRITTEN
    assert await store.put("empty", [b""], if_absent=False) is PutOutcome.WRITTEN
    assert await read(store, "k") == BODY
    assert (await store.delete(["k", "empty"])).failed == {}
    for request in fronted.proxy.log:
        assert not re.search(
            r"(?i)\n(x-amz-(sdk-)?checksum|x-amz-trailer|transfer-encoding|content-encoding|expect)",
            request.head,
        )


@ceph
async def test_a_large_object_is_written_in_parts_of_that_framing(
    store: S3Store, fronted: Fronted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.s3._MULTIPART_BYTES", 6 << 20)
    monkeypatch.setattr("ec_s3.transfer.PART_BYTES", 5 << 20)
    parts = [memoryview(os.urandom(1 << 20))] * 11
    assert await store.put("large", parts) is PutOutcome.WRITTEN
    sent = [request for request in fronted.proxy.log if request.method in ("PUT", "POST")]
    assert len(sent) == 5
    assert not any(re.search(r"(?i)\nx-amz-(sdk-)?checksum|trailer", r.head) for r in sent)
    assert await read(store, "large") == b"".join(parts)


# 5. Old servers refuse the SDK's batches of deletions, which come without Content-MD5.


@pytest.mark.parametrize(
    "real_server", ["ceph-https", "seaweedfs", "juicefs", "swift"], indirect=True
)
@pytest.mark.smoke
async def test_many_keys_are_deleted_whatever_the_server_thinks_of_batches(
    open_store: Callable[..., S3Store], real_server: RealServer, real_bucket: str
) -> None:
    store = open_store(S3Location(real_bucket, "p", real_server.endpoint), PATIENT)
    names = [f"k/{number}" for number in range(20)]
    for name in names:
        await store.put(name, [b"x"])
    report = await store.delete([*names[:19], "never"])
    assert (report.deleted, report.failed) == ((*names[:19], "never"), {})
    assert await keys(store) == names[19:]
    await store.aclose()


# 6. Told to compute no checksum, the SDK signs a SHA-256 of each body instead: four times the CPU.
# With neither, nothing of the transport covers what is uploaded over http.


@ceph
@pytest.mark.smoke
async def test_no_body_is_hashed_to_be_signed(
    store: S3Store, fronted: Fronted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.s3._MULTIPART_BYTES", 6 << 20)
    monkeypatch.setattr("ec_s3.transfer.PART_BYTES", 5 << 20)
    assert await store.put("k", [BODY]) is PutOutcome.WRITTEN
    assert await store.put("in/parts", [memoryview(BODY)] * 30) is PutOutcome.WRITTEN
    puts = [request for request in fronted.proxy.log if request.method == "PUT"]
    assert len(puts) == 3
    assert {request.header("x-amz-content-sha256") for request in puts} == {"UNSIGNED-PAYLOAD"}


@ceph
def test_a_byte_flipped_on_its_way_into_the_bucket_is_a_miss_and_repaired_by_the_next_save(
    open_engine: Callable[..., ECCacheEngine], fronted: Fronted
) -> None:
    item = tensor()
    fronted.proxy.add(Fault(method="PUT", path=ITEMS, flip_sent_at=50_000, times=1))
    save(open_engine(), "a", item)
    engine = open_engine()
    assert engine.get("a") is None
    assert engine.stats()["misses_corrupt"] == 1
    save(engine, "a", item)
    assert engine.stats()["repaired_objects"] == 1
    got = open_engine().get("a")
    assert got is not None
    assert torch.equal(got, item)


# 7. moto's decorator cannot stand in for a server: the asynchronous SDK awaits what it returns.


@pytest.mark.smoke
@pytest.mark.interop(kind="moto")
async def test_the_embedded_server_serves_the_asynchronous_sdk(
    open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str
) -> None:
    store = open_store(S3Location(bucket, endpoint=s3_server.url), PATIENT)
    assert await store.put("k", [BODY]) is PutOutcome.WRITTEN
    assert await read(store, "k") == BODY
    await store.aclose()
    assert s3_server.count("PUT", bucket) >= 2
