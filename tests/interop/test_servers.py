"""Start, stop, crash."""

from __future__ import annotations

import os
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, SSLError

from ec_s3.testing.servers import KINDS, Keys, RealServer, ServerError, running
from ec_s3.testing.servers.certificates import Authority
from ec_s3.testing.servers.fixtures import require

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ec_s3.testing.servers.ceph import Ceph

pytestmark = pytest.mark.interop

_FORGETFUL = ("moto",)
_LISTENING = "0A"  # of /proc/net/tcp

each_kind = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ceph-https"])


@pytest.fixture
def own_server(kind: str, tmp_path: Path) -> Iterator[RealServer]:
    """A server of the test's own."""
    require(kind)
    with running(kind, tmp_path / "server") as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ceph]:
    require("ceph")
    with running("ceph", tmp_path_factory.mktemp("ceph"), session_tokens=True) as server:
        yield server  # type: ignore[misc]  # the kind decides the class


def put(server: RealServer, bucket: str, keys: Keys | None = None) -> None:
    client = server.client(keys)
    try:
        client.put_object(Bucket=bucket, Key="k", Body=b"body")
    finally:
        client.close()


def got(server: RealServer, bucket: str, keys: Keys | None = None) -> bytes:
    client = server.client(keys)
    try:
        body: bytes = client.get_object(Bucket=bucket, Key="k")["Body"].read()
    finally:
        client.close()
    return body


@pytest.mark.smoke
def test_what_was_put_comes_back(real_server: RealServer, real_bucket: str) -> None:
    put(real_server, real_bucket)
    assert got(real_server, real_bucket) == b"body"


@each_kind
def test_two_of_a_kind_run_side_by_side_and_know_nothing_of_each_other(
    own_server: RealServer, tmp_path: Path
) -> None:
    bucket = own_server.new_bucket()
    with running(own_server.kind, tmp_path / "other") as other:
        put(own_server, bucket)
        names = [row["Name"] for row in other.client().list_buckets()["Buckets"]]
    assert bucket not in names
    assert got(own_server, bucket) == b"body"


@each_kind
def test_a_crashed_server_comes_back_on_its_port(own_server: RealServer) -> None:
    bucket, endpoint = own_server.new_bucket(), own_server.endpoint
    put(own_server, bucket)
    own_server.kill()
    with pytest.raises(EndpointConnectionError):
        got(own_server, bucket)
    own_server.start_again()
    assert own_server.endpoint == endpoint
    if own_server.kind in _FORGETFUL:
        bucket = own_server.new_bucket()
        put(own_server, bucket)
    assert got(own_server, bucket) == b"body"


@each_kind
def test_a_paused_server_takes_connections_and_answers_nothing(own_server: RealServer) -> None:
    own_server.pause()
    address = urlsplit(own_server.endpoint)
    with socket.create_connection((address.hostname, address.port), timeout=5) as sock:
        sock.settimeout(0.3)
        sock.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        with pytest.raises(TimeoutError):
            sock.recv(1)
        own_server.resume()
        sock.settimeout(30)
        assert sock.recv(9).startswith(b"HTTP/1.")


@each_kind
def test_it_listens_on_loopback_only(own_server: RealServer) -> None:
    pid = own_server.processes.pid(own_server.front)
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    own = {link.removeprefix("socket:[").rstrip("]") for link in links if "socket:[" in link}
    addresses = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in own:
                addresses.add(fields[1].partition(":")[0])
    assert addresses
    assert all(address.endswith("7F") for address in addresses), "little-endian 127.x.y.z"


@pytest.mark.parametrize("real_server", ["ceph", "seaweedfs"], indirect=True)
def test_https_is_trusted_by_its_own_authority_only(
    real_server: RealServer, real_bucket: str, tmp_path: Path
) -> None:
    secure = real_server.secure()
    assert secure.endpoint.startswith("https://127.0.0.1:")
    put(secure, real_bucket)
    assert got(real_server, real_bucket) == b"body"
    secure.ca_bundle = Authority(tmp_path).bundle
    with pytest.raises(SSLError):
        got(secure, real_bucket)
    assert secure.ca_bundle != real_server.ca_bundle


@pytest.mark.interop(kind="ceph")
def test_a_certificate_is_for_the_hosts_that_it_names(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    made = authority.issue("other", ["DNS:other.example"])
    context = ssl.create_default_context(cafile=str(authority.bundle))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.certificate, made.key)

    def handshake(host: str) -> None:
        here_in, here_out, there_in, there_out = (ssl.MemoryBIO() for _ in range(4))
        client = context.wrap_bio(here_in, here_out, server_hostname=host)
        answering = server.wrap_bio(there_in, there_out, server_side=True)
        for _ in range(4):
            for side, source, target in (
                (client, here_out, there_in),
                (answering, there_out, here_in),
            ):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
                target.write(source.read())

    handshake("other.example")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"127\.0\.0\.1"):
        handshake("127.0.0.1")


@pytest.mark.interop(kind="ceph")
def test_read_only_keys_read_and_a_strangers_do_not(cluster: Ceph) -> None:
    bucket = cluster.new_bucket()
    put(cluster, bucket)
    reader, writer = cluster.add_user("reader", read_only=True), cluster.add_user("writer")
    assert got(cluster, bucket, reader) == b"body"
    put(cluster, bucket, writer)
    for refused in (
        lambda: put(cluster, bucket, reader),
        lambda: got(cluster, bucket, cluster.add_stranger("stranger")),
    ):
        with pytest.raises(ClientError, match="AccessDenied"):
            refused()


@pytest.mark.interop(kind="ceph")
def test_revoked_keys_are_refused_until_they_are_granted_again(cluster: Ceph) -> None:
    bucket = cluster.new_bucket()
    put(cluster, bucket)
    own = Keys(cluster.access_key, cluster.secret_key)
    cluster.revoke(own)
    with pytest.raises(ClientError):
        got(cluster, bucket)
    cluster.grant(own)
    assert got(cluster, bucket) == b"body"


@pytest.mark.interop(kind="ceph")
def test_session_keys_need_their_token(cluster: Ceph) -> None:
    bucket = cluster.new_bucket()
    put(cluster, bucket)
    keys = cluster.session_keys()
    assert got(cluster, bucket, keys) == b"body"
    with pytest.raises(ClientError):
        got(cluster, bucket, Keys(keys.access_key, keys.secret_key))


@pytest.mark.parametrize("real_server", ["ceph"], indirect=True)
def test_without_session_tokens_it_says_so(real_server: Ceph) -> None:
    with pytest.raises(ServerError, match="session_tokens=True"):
        real_server.session_keys()
