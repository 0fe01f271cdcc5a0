"""TLS.

Whom both transports trust: a private authority by setting, environment and profile, and nobody
else. `tests/unit/test_trust.py` has the certificates that Ceph cannot be given.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from tls_refusals import refused
from typer.testing import CliRunner

from ec_s3.blocking import ECCacheEngine
from ec_s3.cli.app import app
from ec_s3.config import ECConfig
from ec_s3.errors import RemoteUnavailableError
from ec_s3.keys import Namespace
from ec_s3.testing.conformance import buffer, keys, read
from ec_s3.testing.servers.certificates import Authority
from ec_s3.url import S3Location, S3Options

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ec_s3.s3 import S3Store
    from ec_s3.testing.servers import RealServer

pytestmark = [
    pytest.mark.interop,
    pytest.mark.usefixtures("no_pauses"),
    pytest.mark.parametrize("real_server", ["ceph-https"], indirect=True),
]
LARGE = 65 << 20  # goes up in parts


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("theirs"), "another authority")


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("ca_bundle", marks=pytest.mark.smoke),
        *("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "profile"),
    ],
)
async def test_a_private_authority_is_trusted_by_setting_environment_and_profile(
    open_store: Callable[..., S3Store],
    real_server: RealServer,
    real_bucket: str,
    how: str,
    isolated_aws: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = str(real_server.ca_bundle)
    monkeypatch.delenv("AWS_CA_BUNDLE")
    options = S3Options(ca_bundle=bundle if how == "ca_bundle" else None)
    if how == "profile":
        (isolated_aws / "config").write_text(f"[default]\nca_bundle = {bundle}\n")
    elif how != "ca_bundle":
        monkeypatch.setenv(how, bundle)
    store = open_store(S3Location(real_bucket, endpoint=real_server.endpoint), options)
    await store.put("v1/k", [b"x"])
    assert await read(store, "v1/k") == b"x"
    assert await keys(store) == ["v1/k"]
    await store.aclose()


async def test_large_objects_go_in_and_out_over_tls(
    open_store: Callable[..., S3Store], real_server: RealServer, real_bucket: str
) -> None:
    store = open_store(S3Location(real_bucket, endpoint=real_server.endpoint))
    body = bytes(range(256)) * (LARGE >> 8)
    await store.put("v1/large", [body])
    result = await store.get("v1/large", into=buffer)
    assert result is not None
    assert result.body == body
    await store.aclose()


@pytest.mark.parametrize("trusted", ["nobody but the machine's", "another authority"])
async def test_a_server_of_an_unknown_authority_is_refused_with_the_remedy(
    open_store: Callable[..., S3Store],
    real_server: RealServer,
    trusted: str,
    stranger: Authority,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE")
    bundle = str(stranger.bundle) if trusted == "another authority" else None
    location = S3Location("some-bucket", endpoint=real_server.endpoint)
    await refused(
        open_store(location, S3Options(ca_bundle=bundle)),
        "no trusted CA has signed the server's certificate; set ca_bundle or AWS_CA_BUNDLE",
    )


async def test_a_plain_request_to_the_tls_port_fails_in_time(
    open_store: Callable[..., S3Store], real_server: RealServer
) -> None:
    endpoint = real_server.endpoint.replace("https://", "http://")
    store = open_store(S3Location("some-bucket", endpoint=endpoint))
    async with asyncio.timeout(60):
        with pytest.raises(RemoteUnavailableError, match="check"):
            await store.head("v1/k")
    await store.aclose()


@pytest.mark.parametrize("transport", ["sdk", "direct"])
def test_an_engine_without_verification_works_and_warns_once(
    real_server: RealServer,
    real_bucket: str,
    transport: Literal["sdk", "direct"],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE")
    config = ECConfig(url=real_server.url(real_bucket), s3_transport=transport, verify=False)
    tensor = torch.arange(32, dtype=torch.bfloat16).reshape(4, 8)
    with ECCacheEngine(config, Namespace(model="org/model", dtype="bfloat16")) as cache:
        assert cache.put("item", tensor)
        assert cache.flush(timeout=60)
        for number in range(20):
            assert cache.get(f"absent-{number}") is None
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "are not checked: verify is off" in warnings[0]
    assert real_server.endpoint in warnings[0]


@pytest.mark.parametrize("transport", ["sdk", "direct"])
def test_an_engine_serves_without_a_server_that_it_cannot_trust(
    real_server: RealServer,
    transport: Literal["sdk", "direct"],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE")
    config = ECConfig(url=real_server.url("some-bucket"), s3_transport=transport)
    tensor = torch.arange(32, dtype=torch.bfloat16).reshape(4, 8)
    with ECCacheEngine(config, Namespace(model="org/model", dtype="bfloat16")) as cache:
        assert cache.put("item", tensor)
        found = cache.get("item")
        assert found is not None
        assert torch.equal(found, tensor)
        assert cache.get("absent") is None
        cache.close(timeout=0.1)
    assert "no trusted CA has signed the server's certificate" in caplog.text


@pytest.mark.parametrize("how", ["ca_bundle", "AWS_CA_BUNDLE", "profile"])
def test_the_doctor_trusts_whom_the_store_trusts(
    real_server: RealServer,
    real_bucket: str,
    how: str,
    isolated_aws: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = str(real_server.ca_bundle)
    arguments = ["--url", real_server.url(real_bucket), "doctor"]
    if how != "AWS_CA_BUNDLE":
        monkeypatch.delenv("AWS_CA_BUNDLE")
        told = CliRunner().invoke(app, arguments)
        assert told.exit_code == 1
        assert "CERTIFICATE_VERIFY_FAILED" in told.output
        assert "ca_bundle" in told.output
    if how == "profile":
        (isolated_aws / "config").write_text(f"[default]\nca_bundle = {bundle}\n")
    elif how == "ca_bundle":
        monkeypatch.setenv("EC_S3_CA_BUNDLE", bundle)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
