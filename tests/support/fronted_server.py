"""A fault proxy in front of a real S3 server, which speaks http or https as the server does."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from ec_s3.blocking import ECCacheEngine
from ec_s3.config import ECConfig
from ec_s3.keys import Namespace
from ec_s3.testing.faults import FaultServer
from ec_s3.testing.servers.certificates import Authority
from ec_s3.url import S3Location, S3Options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ec_s3.testing.servers import RealServer

PREFIX = "p"
NAMESPACE = Namespace(model="org/model")
ITEMS = "/bfloat16/"  # requests for items, not for what describes or controls them


@dataclass(frozen=True, slots=True)
class Fronted:
    """A bucket of a real server, reached through a proxy.

    Attributes:
        server: what is behind it.
        proxy: what is in front of it.
        bucket: a bucket of the test's own.
    """

    server: RealServer
    proxy: FaultServer
    bucket: str

    def location(self, prefix: str = PREFIX) -> S3Location:
        """The bucket, through the proxy."""
        return S3Location(self.bucket, prefix, self.proxy.url, self.server.region)

    def url(self, prefix: str = PREFIX) -> str:
        """The same as a URL."""
        return self.server.url(self.bucket, prefix, endpoint=self.proxy.url)

    def client(self) -> Any:
        """The server's own client, past the proxy; the caller closes it."""
        return self.server.client()

    def open(self, **settings: Any) -> ECCacheEngine:
        """An engine on the bucket, through the proxy, all of whose memory is ready for use."""
        values: dict[str, Any] = {
            "url": self.url(),
            "max_local_cpu_size": "16MiB",
            "connect_timeout": 20.0,
            "read_timeout": 20.0,
            "blocking_timeout": 60.0,
            "metadata_timeout": 60.0,
            **settings,
        }
        engine = ECCacheEngine(ECConfig(**values), NAMESPACE)
        give_up = time.monotonic() + 60
        while (flat := engine.stats())["local_bytes_populated"] < flat["local_bytes_capacity"]:
            assert time.monotonic() < give_up, flat
            time.sleep(0.005)
        return engine


PATIENT = S3Options(connect_timeout=20.0, read_timeout=20.0, total_timeout=60.0)
"""For a busy machine: nothing but what a test provokes runs out of time."""


@pytest.fixture
def fronted(
    real_server: RealServer, real_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fronted]:
    """A proxy of the test's own; its certificate is trusted through the environment."""
    tls = trusted = None
    if real_server.endpoint.startswith("https:"):
        authority = Authority(tmp_path / "proxy")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(authority.issue().both)
        trusted = ssl.create_default_context(cafile=str(real_server.ca_bundle))
    with FaultServer(real_server.endpoint, tls=tls, upstream_tls=trusted) as proxy:
        yield Fronted(real_server, proxy, real_bucket)


@pytest.fixture(params=["sdk", "direct"])
def open_engine(
    request: pytest.FixtureRequest, fronted: Fronted
) -> Iterator[Callable[..., ECCacheEngine]]:
    """Opens engines on the bucket, through the proxy; a test runs with each of the transports."""
    engines: list[ECCacheEngine] = []

    def opened(**settings: Any) -> ECCacheEngine:
        engines.append(fronted.open(s3_transport=request.param, **settings))
        return engines[-1]

    yield opened
    fronted.proxy.clear()
    for engine in engines:
        engine.close(0)


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK waits up to seconds between attempts, and so do uploads; tests need not."""
    monkeypatch.setattr(
        "botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.001
    )
    monkeypatch.setattr("ec_s3.uploads.spread", lambda _: 0.01)
