"""Endpoints that are down.

Engines whose gateway stands still, is killed, or is asked for in the wrong way, until all is well:
usable at once meanwhile, and well again by themselves.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from down_engines import (
    NAMESPACE,
    config,
    equal,
    fill,
    impatient_breaker,
    is_down,
    opened,
    port_is_down,
    port_opened,
    port_recovers,
    recovers,
    tensor,
    until,
    url,
    warnings,
)
from fronted_server import no_waiting

from ec_s3.child import ProcessPort
from ec_s3.engine import EncoderCache
from ec_s3.port import ThreadPort
from ec_s3.testing import port_conformance
from ec_s3.testing.servers import running
from ec_s3.testing.servers.fixtures import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ec_s3.config import ECConfig
    from ec_s3.port import EnginePort
    from ec_s3.testing.servers import RealServer

__all__ = ["impatient_breaker", "no_waiting"]

pytestmark = [
    pytest.mark.interop(kind="ceph"),
    pytest.mark.usefixtures("no_waiting", "impatient_breaker"),
]

transports = pytest.mark.parametrize("transport", ["sdk", "direct"])


@pytest.fixture(scope="module")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A cluster of this module's own, as its gateway is stopped and killed."""
    require("ceph")
    with running("ceph", tmp_path_factory.mktemp("ceph")) as server:
        yield server


@pytest.fixture
def server(ceph: RealServer, monkeypatch: pytest.MonkeyPatch) -> RealServer:
    for name, value in ceph.environment.items():
        monkeypatch.setenv(name, value)
    return ceph


@pytest.fixture
def bucket(server: RealServer) -> str:
    """A bucket of the test's own, made while the gateway is up."""
    return server.new_bucket()


def patient(bucket: str, server: RealServer, transport: str) -> ECConfig:
    """Settings of an engine whose gateway is only slow."""
    return config(
        *(bucket, server.endpoint, transport),
        connect_timeout=10.0,
        read_timeout=10.0,
        blocking_timeout=30.0,
    )


@contextlib.contextmanager
def paused(server: RealServer) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()


@contextlib.contextmanager
def dead(server: RealServer) -> Iterator[None]:
    server.kill()
    try:
        yield
    finally:
        server.start_again()


FAILURES: dict[str, Callable[[RealServer], contextlib.AbstractContextManager[None]]] = {
    "stands still": paused,
    "is killed": dead,
}
failures = pytest.mark.parametrize("failure", FAILURES)


@pytest.mark.smoke
@transports
@failures
async def test_an_engine_that_is_opened_while_the_gateway_is_down_is_usable_and_recovers(
    failure: str,
    transport: str,
    server: RealServer,
    bucket: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await fill(patient(bucket, server, transport), "a")
    async with contextlib.AsyncExitStack() as stack:
        with FAILURES[failure](server):
            settings = config(bucket, server.endpoint, transport)
            cache = await stack.enter_async_context(opened(settings, caplog))
            await is_down(cache)
            assert any("; check that the endpoint is up" in line for line in warnings(caplog))
        await recovers(cache)
    async with EncoderCache(patient(bucket, server, transport), NAMESPACE) as other:
        assert equal(await other.get("mine"), tensor(99))


@transports
@failures
async def test_an_engine_at_work_goes_on_by_itself_after_the_gateway_was_down(
    failure: str, transport: str, server: RealServer, bucket: str
) -> None:
    names = ["a", "b", "c"]
    await fill(patient(bucket, server, transport), *names)
    settings = config(bucket, server.endpoint, transport)
    async with EncoderCache(settings, NAMESPACE) as cache:
        assert equal(await cache.get("b", timeout=30.0), tensor(1))
        with FAILURES[failure](server):

            async def missed_and_down() -> bool:
                assert await cache.get("a") is None
                return bool(cache.stats()["breaker_open"])

            await until(missed_and_down, "the tier is not reported down")
            assert equal(await cache.get("b"), tensor(1)), "from host memory"
            assert await cache.put("mine", tensor(99))
        await recovers(cache)
        assert equal(await cache.get("c", timeout=30.0), tensor(2))


@transports
async def test_a_bucket_that_is_made_later_is_used_from_then_on(
    transport: str, server: RealServer, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    later = f"{bucket}-later"
    async with opened(patient(later, server, transport), caplog) as cache:
        await cache.flush(20.0)
        assert cache.stats()["uploads_denied"] == 1
        said = warnings(caplog)
        assert any("NoSuchBucket" in line and "; check bucket" in line for line in said)
        client = server.client()
        client.create_bucket(Bucket=later)
        client.close()
        await fill(patient(later, server, transport), "a")
        assert equal(await cache.get("a"), tensor(0))
        assert await cache.put("later", tensor(3))
        assert (await cache.flush(20.0)).complete
        assert cache.stats()["uploads_written"] == 1


@transports
@pytest.mark.parametrize("asked", ["http", "https"])
async def test_the_gateway_s_other_port_is_an_endpoint_that_is_down(
    asked: str,
    transport: str,
    server: RealServer,
    bucket: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert server.https_endpoint is not None
    other = server.https_endpoint if asked == "http" else server.endpoint
    endpoint = f"{asked}:{other.partition(':')[2]}"
    async with opened(config(bucket, endpoint, transport), caplog) as cache:
        await is_down(cache)
        assert any("; check " in line for line in warnings(caplog))


OPEN: dict[str, Callable[..., EnginePort]] = {"thread": ThreadPort, "process": ProcessPort}


@pytest.mark.parametrize(
    ("engine", "transport", "failure"),
    [
        ("thread", "direct", "stands still"),
        ("thread", "sdk", "is killed"),
        ("process", "direct", "is killed"),
        ("process", "sdk", "stands still"),
    ],
)
def test_the_connector_s_engine_answers_meanwhile_and_recovers(
    engine: str, transport: str, failure: str, server: RealServer, bucket: str
) -> None:
    port_conformance.put_in_bucket(url(bucket, server.endpoint), "a")
    settings = config(bucket, server.endpoint, transport)

    def open_port() -> EnginePort:
        return OPEN[engine](settings, port_conformance.NAMESPACE, slab)

    port: Any
    with contextlib.ExitStack() as stack, port_conformance.make_slab() as slab:
        with FAILURES[failure](server):
            port = port_opened(open_port, slab, own_process=engine == "process")
            stack.callback(port.close, 0.0)
            port_is_down(port)
        port_recovers(port)
