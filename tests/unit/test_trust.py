"""Certificates and bundles that are not to be trusted: the error names the remedy, in time."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

import pytest
from tls_refusals import refused

from ec_s3.errors import ConfigError, RemoteUnavailableError
from ec_s3.testing.conformance import read
from ec_s3.testing.faults import FaultServer
from ec_s3.testing.servers.certificates import Authority
from ec_s3.url import S3Location, S3Options

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ec_s3.s3 import S3Store
    from ec_s3.testing.moto import S3Server
    from ec_s3.testing.servers.certificates import Certificate


pytestmark = pytest.mark.usefixtures("no_pauses")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


def serving(s3_server: S3Server, certificate: Certificate) -> FaultServer:
    """The test's S3 server, over https with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.both)
    return FaultServer(s3_server.url, tls=context)


async def test_a_private_authority_is_trusted_where_it_is_named_and_nowhere_else(
    open_store: Callable[..., S3Store],
    s3_server: S3Server,
    bucket: str,
    authority: Authority,
    tmp_path: Path,
) -> None:
    stranger = Authority(tmp_path / "theirs", "another authority")
    with serving(s3_server, authority.issue()) as server:
        options = S3Options(ca_bundle=str(authority.bundle))
        store = open_store(S3Location(bucket, endpoint=server.url), options)
        await store.put("v1/k", [b"abc"])
        assert await read(store, "v1/k") == b"abc"
        await store.aclose()
        location = S3Location("some-bucket", endpoint=server.url)
        for bundle in (None, str(stranger.bundle)):
            await refused(
                open_store(location, S3Options(ca_bundle=bundle)),
                "no trusted CA has signed the server's certificate; set ca_bundle or AWS_CA_BUNDLE",
            )


async def test_a_certificate_of_another_host_is_refused_with_the_remedy(
    open_store: Callable[..., S3Store], s3_server: S3Server, authority: Authority
) -> None:
    other = authority.issue("other", ["DNS:elsewhere.example", "IP:127.0.0.2"])
    with serving(s3_server, other) as server:
        options = S3Options(ca_bundle=str(authority.bundle))
        for endpoint in (server.url, server.url.replace("127.0.0.1", "localhost")):
            await refused(
                open_store(S3Location("some-bucket", endpoint=endpoint), options),
                "the server's certificate is for another host; use a name in endpoint",
            )


async def test_an_expired_certificate_is_refused_with_the_remedy(
    open_store: Callable[..., S3Store], s3_server: S3Server, authority: Authority
) -> None:
    expired = authority.issue("expired", days=-1)
    with serving(s3_server, expired) as server:
        await refused(
            open_store(
                S3Location("some-bucket", endpoint=server.url),
                S3Options(ca_bundle=str(authority.bundle)),
            ),
            "has expired or is not valid yet; renew it, or set the clock",
        )


async def test_a_server_that_speaks_no_tls_is_no_question_of_trust(
    open_store: Callable[..., S3Store],
) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        await refused(
            open_store(S3Location("some-bucket", endpoint=url)),
            "check that the endpoint",
        )
    finally:
        server.close()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("what", ["absent", "a folder", "no certificate"])
@pytest.mark.parametrize("how", ["ca_bundle", "AWS_CA_BUNDLE"])
async def test_a_bundle_that_cannot_be_used_is_a_setting_to_fix(
    open_store: Callable[..., S3Store],
    what: str,
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "bundle.pem"
    if what == "a folder":
        path.mkdir()
    elif what == "no certificate":
        path.write_text("nothing of use")
    if how == "AWS_CA_BUNDLE":
        monkeypatch.setenv(how, str(path))
    options = S3Options(ca_bundle=str(path) if how == "ca_bundle" else None)
    store = open_store(S3Location("some-bucket", endpoint="https://127.0.0.1:1"), options)
    with pytest.raises(ConfigError, match=rf"{how}.*bundle\.pem.*cannot be used"):
        await store.head("v1/k")
    await store.aclose()


async def test_a_bundle_of_the_environment_does_not_matter_where_there_is_no_tls(
    open_store: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere/bundle.pem")
    store = open_store(S3Location("some-bucket", endpoint="http://127.0.0.1:1"))
    with pytest.raises(RemoteUnavailableError):
        await store.head("v1/k")
    await store.aclose()
