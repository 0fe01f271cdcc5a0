from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from ec_s3.credentials import Keeper
from ec_s3.errors import ClosedError, ConfigError, RemoteDeniedError, RemoteTimeoutError
from ec_s3.s3 import S3Store
from ec_s3.testing.conformance import buffer, keys, read
from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.transport import Body
from ec_s3.types import PutOutcome
from ec_s3.url import S3Location, S3Options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from ec_s3.testing.moto import S3Server


def test_a_body_is_read_like_a_file_and_sliced_without_copies() -> None:
    body = Body([b"0123", memoryview(b"456"), bytearray(b"789")])
    assert (len(body), body.seek(0, 2), body.tell()) == (10, 10, 10)
    assert body.seek(0) == 0
    assert (body.read(5), body.read(), body.read()) == (b"01234", b"56789", b"")
    assert [bytes(piece) for piece in body.cut(2, 8)] == [b"23", b"456", b"7"]
    assert list(body.cut(4, 4)) == []
    assert body.read(0) == b""
    assert bool(Body([]))
    assert len(Body([])) == 0
    large = Body([bytes(600_000)])
    assert [piece.nbytes for piece in large.slices()] == [524_288, 75_712]
    assert all(piece.obj is next(large.cut(0, 1)).obj for piece in large.slices())


@pytest.mark.parametrize("prefix", ["p", "/p", "p/", "/p/", "p//q", ""])
async def test_keys_on_the_server_are_clean_for_every_prefix(
    open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str, prefix: str
) -> None:
    store = open_store(S3Location(bucket, prefix, s3_server.url))
    await store.put("v1/k", [b"x"])
    assert await keys(store) == ["v1/k"]
    await store.aclose()
    client = s3_server.client()
    names = [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket)["Contents"]]
    client.close()
    assert names == ["/".join(["p"] * ("p" in prefix) + ["q"] * ("q" in prefix) + ["v1/k"])]


async def test_foreign_keys_are_not_listed(
    open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str
) -> None:
    client = s3_server.client()
    for key in ("p/a/", "p//k", "p/.hidden/k", "p/a b", "other", "p/good"):
        client.put_object(Bucket=bucket, Key=key, Body=b"x")
    client.close()
    store = open_store(S3Location(bucket, "p", s3_server.url))
    assert await keys(store) == ["good"]
    await store.aclose()


async def test_listings_go_on_over_many_pages(
    open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str
) -> None:
    client = s3_server.client()
    names = sorted(f"k/{n}" for n in range(1005))
    for name in names:
        client.put_object(Bucket=bucket, Key=f"p/{name}", Body=b"")
    client.close()
    store = open_store(S3Location(bucket, "p", s3_server.url))
    assert await keys(store, "k/") == names
    report = await store.delete(names[:50])
    assert report.deleted == tuple(names[:50])
    assert await keys(store) == names[50:]
    await store.aclose()


async def test_storage_options_reach_the_object(
    open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str
) -> None:
    options = S3Options(
        sse="aws:kms", sse_kms_key_id="key-1", storage_class="STANDARD_IA", tags={"a": "b c"}
    )
    store = open_store(S3Location(bucket, endpoint=s3_server.url), options)
    await store.put("k", [b"x"])
    await store.aclose()
    client = s3_server.client()
    head = client.head_object(Bucket=bucket, Key="k")
    tags = client.get_object_tagging(Bucket=bucket, Key="k")["TagSet"]
    client.close()
    assert head["ServerSideEncryption"] == "aws:kms"
    assert head["SSEKMSKeyId"] == "key-1"
    assert head["StorageClass"] == "STANDARD_IA"
    assert tags == [{"Key": "a", "Value": "b c"}]


async def test_large_objects_go_up_in_equal_parts(
    open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str
) -> None:
    with FaultServer(s3_server.url) as proxy:
        store = open_store(S3Location(bucket, endpoint=proxy.url))
        block = os.urandom(1 << 20)
        parts = [memoryview(block)] * 70
        assert await store.put("k", parts) is PutOutcome.WRITTEN
        sizes = sorted(request.nbytes for request in proxy.log if "partNumber" in request.path)
        assert sizes == [6 << 20] + [16 << 20] * 4
        result = await store.get("k", into=buffer, start=69 << 20)
        assert result is not None
        assert bytes(result.body) == block
        assert result.info.size == 70 << 20
        assert await store.put("k", parts) is PutOutcome.EXISTS
        await store.aclose()


async def test_a_hundred_stores_leave_nothing_open(
    open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str
) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for _ in range(100):
            store = open_store(S3Location(bucket, endpoint=s3_server.url))
            assert await store.head("k") is None
            await store.aclose()
        del store
        gc.collect()
    async with asyncio.timeout(20):  # the server's ends of the connections come later
        while len(os.listdir("/proc/self/fd")) > descriptors + 5:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)


async def test_closing_ends_running_calls(
    open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str
) -> None:
    with FaultServer(s3_server.url) as proxy:
        proxy.add(Fault(hang=True))
        store = open_store(S3Location(bucket, endpoint=proxy.url))
        calls = [
            asyncio.ensure_future(store.get("k", into=buffer)),
            asyncio.ensure_future(store.put("k", [b"x" * 1_000_000])),
            asyncio.ensure_future(store.head("k")),
        ]
        while len(proxy.log) < 3:  # noqa: ASYNC110  # the log fills on another thread
            await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            await store.aclose()
            results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [ClosedError] * 3


async def test_closing_waits_for_no_call_whose_time_is_up(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.s3._MULTIPART_BYTES", 1 << 20)
    with FaultServer(s3_server.url) as proxy:
        proxy.add(Fault(method="PUT", hang=True))
        proxy.add(Fault(method="DELETE", hang=True))
        store = S3Store(S3Location(bucket, endpoint=proxy.url), S3Options(total_timeout=1.0))
        await store.connect()
        call = asyncio.ensure_future(store.put("k", [bytes(2 << 20)]))
        async with asyncio.timeout(20):
            while not proxy.count("DELETE"):  # noqa: ASYNC110  # the log fills on another thread
                await asyncio.sleep(0.01)
            await store.aclose()
            (result,) = await asyncio.gather(call, return_exceptions=True)
        assert isinstance(result, ClosedError)


async def test_closing_an_unused_store_opens_nothing(open_store: Callable[..., S3Store]) -> None:
    store = open_store(S3Location("bucket", endpoint="http://127.0.0.1:1"))
    await store.aclose()
    with pytest.raises(ClosedError):
        await store.head("k")


class Openings:
    """Counts clients of the SDK, whose building stops at a gate after the session is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = self.left = 0
        self.gate, self.reached = asyncio.Event(), asyncio.Event()
        monkeypatch.setattr("ec_s3.s3.vetted_client", self.wrapped)

    @contextlib.asynccontextmanager
    async def wrapped(self, sdk: Any, _session: object, **_: object) -> AsyncIterator[Any]:
        self.begun += 1
        self.reached.set()
        try:
            await self.gate.wait()
            yield sdk
        finally:
            self.left += 1


async def test_calls_that_give_up_while_the_client_is_built_do_not_build_more(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    openings = Openings(monkeypatch)
    store = S3Store(S3Location(bucket, endpoint=s3_server.url), S3Options(total_timeout=0.05))
    for _ in range(3):
        with pytest.raises(RemoteTimeoutError):
            await store.head("k")
    async with asyncio.timeout(20):
        await openings.reached.wait()
        openings.gate.set()
        await store.connect()
    await store.aclose()
    assert (openings.begun, openings.left) == (1, 1)


async def test_closing_ends_an_opening_and_tells_whoever_waits_for_it(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    openings = Openings(monkeypatch)
    store = S3Store(S3Location(bucket, endpoint=s3_server.url))
    waiting = asyncio.ensure_future(store.connect())
    async with asyncio.timeout(20):
        await openings.reached.wait()
        await store.aclose()
        with pytest.raises(ClosedError):
            await waiting
    assert openings.left == 1


async def test_a_client_that_cannot_be_built_leaves_nothing_open(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = closed = 0

    class Watched(Keeper):
        def ask(self) -> None:
            nonlocal asked
            asked += 1

        async def aclose(self) -> None:
            nonlocal closed
            closed += 1

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no client")

    monkeypatch.setattr("ec_s3.transport.Keeper", Watched)
    monkeypatch.setattr("aiobotocore.session.AioSession.create_client", refuse)
    store = S3Store(S3Location(bucket, endpoint=s3_server.url))
    for _ in range(3):
        with pytest.raises(ConfigError):
            await store.head("k")
    assert asked == closed == 3
    await store.aclose()


def test_loops_may_come_and_go(
    open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str
) -> None:
    store = open_store(S3Location(bucket, endpoint=s3_server.url))

    async def use() -> bytes | None:
        await store.put("k", [b"x"])
        body = await read(store, "k")
        await store.aclose()
        return body

    assert asyncio.run(use()) == b"x"


def test_a_second_live_loop_is_refused_clearly(
    open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str
) -> None:
    store = open_store(S3Location(bucket, endpoint=s3_server.url))
    first = asyncio.new_event_loop()
    assert first.run_until_complete(store.head("k")) is None
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(store.head("k"))
    assert first.run_until_complete(store.head("k")) is None
    first.run_until_complete(store.aclose())
    first.close()


_FORK = """
import asyncio, os, sys, warnings
from ec_s3.s3 import S3Store
from ec_s3.url import S3Location, S3Options
warnings.simplefilter("error")
async def put_and_read(store, key):
    await store.put(key, [key.encode()])
    result = await store.get(key, into=lambda n: memoryview(bytearray(n)))
    assert bytes(result.body) == key.encode()
location, options = S3Location(sys.argv[2], endpoint=sys.argv[1]), S3Options(transport=sys.argv[3])
store = S3Store(location, options)
loop = asyncio.new_event_loop()
loop.run_until_complete(put_and_read(store, "parent"))
pid = os.fork()
if pid == 0:
    async def child():
        await put_and_read(store, "child")
        await store.aclose()
    asyncio.set_event_loop(None)
    asyncio.events._set_running_loop(None)
    asyncio.run(child())
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
loop.run_until_complete(put_and_read(store, "after"))
loop.run_until_complete(store.aclose())
loop.close()
"""


@pytest.mark.parametrize("transport", ["sdk", "direct"])
def test_a_forked_child_builds_a_client_of_its_own(
    s3_server: S3Server, bucket: str, transport: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORK, s3_server.url, bucket, transport],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


async def test_missing_credentials_are_a_denial(
    open_store: Callable[..., S3Store],
    s3_server: S3Server,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = open_store(S3Location(bucket, endpoint=s3_server.url))
    with pytest.raises(RemoteDeniedError, match=r"NoCredentialsError.*AWS chain") as caught:
        await store.put("k", [b"x"])
    assert not caught.value.retryable
    await store.aclose()


async def test_profile_region_and_endpoint_of_the_aws_chain_are_used(
    open_store: Callable[..., S3Store],
    s3_server: S3Server,
    bucket: str,
    isolated_aws: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (isolated_aws / "config").write_text("[profile ops]\nregion = eu-north-1\n")
    (isolated_aws / "credentials").write_text(
        "[ops]\naws_access_key_id = OPSKEY\naws_secret_access_key = x\n"
    )
    with FaultServer(s3_server.url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        store = open_store(S3Location(bucket, profile="ops"))
        assert await store.head("k") is None
        await store.aclose()
        (request,) = proxy.log
    assert "Credential=OPSKEY/" in request.header("Authorization")
    assert "/eu-north-1/s3/" in request.header("Authorization")
    assert request.path == f"/{bucket}/k"


async def test_the_region_defaults_to_us_east_1(
    open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str
) -> None:
    with FaultServer(s3_server.url) as proxy:
        store = open_store(S3Location(bucket, endpoint=proxy.url))
        await store.put("k", [b"x"])
        await store.aclose()
        (request,) = proxy.log
    assert "/us-east-1/s3/" in request.header("Authorization")
    assert request.header("User-Agent").startswith("ec_s3/")


async def test_a_missing_profile_or_ca_file_is_a_setting_to_fix(
    open_store: Callable[..., S3Store], tmp_path: Path
) -> None:
    for location, options in (
        (S3Location("bucket", profile="none"), S3Options()),
        (S3Location("bucket"), S3Options(ca_bundle=str(tmp_path / "none.pem"))),
    ):
        store = open_store(location, options)
        with pytest.raises(ConfigError, match="none"):
            await store.head("k")
        await store.aclose()


async def test_bodies_are_sent_plainly_and_not_hashed(
    open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str
) -> None:
    with FaultServer(s3_server.url) as proxy:
        store = open_store(S3Location(bucket, endpoint=proxy.url))
        await store.put("k", [b"x" * 400_000, b"y"])
        assert await read(store, "k") == b"x" * 400_000 + b"y"
        await store.aclose()
        put = proxy.log[0]
    assert put.header("x-amz-content-sha256") == "UNSIGNED-PAYLOAD"
    assert put.header("Content-Length") == "400001"
    for absent in ("Expect", "Transfer-Encoding", "Content-Encoding", "x-amz-trailer"):
        assert put.header(absent) == ""
    assert "checksum" not in put.head.lower()


async def test_a_redirect_that_the_sdk_follows_in_a_circle_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def circle(**_: object) -> None:
        raise RecursionError

    store = S3Store(S3Location("b", endpoint="http://127.0.0.1:1"))
    monkeypatch.setattr(await store._connection.client(), "head_object", circle)
    with pytest.raises(RemoteDeniedError, match="set region"):
        await store.head("k")
    await store.aclose()
