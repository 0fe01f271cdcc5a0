"""Engines whose endpoint is unreachable, hangs or is no S3 server, until one comes up there."""

from __future__ import annotations

import contextlib
import re
import socket
from functools import partial
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
    url,
    warnings,
)
from endpoints import (
    PAGE,
    WEB_SERVERS,
    answers,
    full_backlog,
    s3_at,
    silent,
    speaks_tls,
    ssh,
    strange,
    taken_port,
)

from ec_s3.child import ProcessPort
from ec_s3.engine import EncoderCache
from ec_s3.errors import ConfigError, RemoteError, RemoteUnavailableError
from ec_s3.port import ThreadPort
from ec_s3.testing import port_conformance
from ec_s3.testing.conformance import buffer
from ec_s3.testing.faults import FaultServer
from ec_s3.testing.servers.certificates import Authority
from ec_s3.types import PutOutcome
from ec_s3.url import S3Location, S3Options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ec_s3.port import EnginePort
    from ec_s3.s3 import S3Store
    from ec_s3.testing.moto import S3Server

    Occupy = Callable[[int], AbstractContextManager[object]]

__all__ = ["impatient_breaker"]

NO_S3 = "no S3 server answers there|an S3 server$"
"""What is said of an endpoint that is none: by its answer, or by what the SDK makes of it."""
NOWHERE = "nosuchhost"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads and the SDK wait up to seconds between attempts; tests need not."""
    monkeypatch.setattr(
        "botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.001
    )
    monkeypatch.setattr("ec_s3.uploads.spread", lambda _: 0.05)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Path:
    return authority.issue().both


# -- what is no S3 server -------------------------------------------------------------------------


@pytest.mark.parametrize("name", WEB_SERVERS)
async def test_no_answer_of_a_web_server_is_taken_for_a_store_s(
    name: str, open_store: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.s3._MULTIPART_BYTES", 1 << 20)
    with contextlib.closing(taken_port()) as held:
        port = held.getsockname()[1]
    with strange(port, answers(WEB_SERVERS[name])):
        store = open_store(
            S3Location("b", "p", f"http://127.0.0.1:{port}"), S3Options(read_timeout=5.0)
        )
        calls: dict[str, Callable[[], Any]] = {
            "head": lambda: store.head("k"),
            "get": lambda: store.get("k", into=buffer),
            "range": lambda: store.get("k", into=buffer, start=5, length=10),
            "put": lambda: store.put("k", [b"x" * 1000]),
            "put of the page": lambda: store.put("k", [PAGE]),
            "plain put": lambda: store.put("k", [b"x"], if_absent=False),
            "put in parts": lambda: store.put("k", [b"x" * (2 << 20)]),
            "list": lambda: listed(store),
        }
        said = {what: await refusal(call) for what, call in calls.items()}
        report = await store.delete(["k"])
        await store.aclose()
    assert {what: text for what, text in said.items() if not re.search(NO_S3, text)} == {}
    assert report.deleted == ()


async def listed(store: S3Store) -> list[object]:
    return [info async for info in store.list()]


async def refusal(call: Callable[[], Any]) -> str:
    """What a call raises, which has to be "unavailable"; or what it answers."""
    try:
        answer = await call()
    except RemoteUnavailableError as error:
        return str(error)
    except RemoteError as error:
        return f"{type(error).__name__}: {error}"
    return f"answered {answer!r}"


async def test_a_store_that_shows_itself_by_nothing_but_its_behaviour_is_asked_once(
    open_store: Callable[..., S3Store],
) -> None:
    objects: dict[str, bytes] = {"/b/there": b"abc"}

    def talk(connection: socket.socket) -> None:
        with connection.makefile("rb") as stream:
            while line := stream.readline():
                method, path, _ = line.decode().split(" ", 2)
                length = 0
                while (header := stream.readline()) != b"\r\n":
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                asked.append((method, path))
                body = stream.read(length)
                if method == "PUT":
                    objects[path] = body
                found = objects.get(path)
                status = b"404 Not Found" if found is None else b"200 OK"
                found = b"" if method == "PUT" else found or b""
                head = b'HTTP/1.1 %b\r\nETag: "e"\r\nContent-Length: %d\r\n\r\n'
                sent = b"" if method == "HEAD" else found
                connection.sendall(head % (status, len(found)) + sent)

    asked: list[tuple[str, str]] = []
    with contextlib.closing(taken_port()) as held:
        port = held.getsockname()[1]
    with strange(port, talk):
        store = open_store(S3Location("b", "", f"http://127.0.0.1:{port}"), S3Options())
        assert await store.head("there") is not None
        assert await store.head("elsewhere") is None
        assert await store.put("k", [b"xyz"]) is PutOutcome.WRITTEN
        found = await store.get("k", into=buffer)
        assert found is not None
        assert bytes(found.body) == b"xyz"
        await store.aclose()
        other = open_store(S3Location("b", "", f"http://127.0.0.1:{port}"), S3Options())
        assert await other.put("k2", [b"xyz"]) is PutOutcome.WRITTEN
        await other.aclose()
    assert sum("introduction" in path for _, path in asked) == 1
    assert asked.count(("GET", "/b/k2")) == 1, "what was written is looked at"


async def test_a_server_that_says_who_it_is_is_asked_nothing_more(
    open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str
) -> None:
    with FaultServer(s3_server.url) as proxy:
        store = open_store(S3Location(bucket, "", proxy.url), S3Options())
        assert await store.head("k") is None
        assert await store.put("k", [b"x"]) is PutOutcome.WRITTEN
        assert await store.head("k") is not None
        await store.aclose()
        assert [request.method for request in proxy.log] == ["HEAD", "PUT", "HEAD"]


async def test_another_server_on_the_same_port_has_to_show_itself_again(
    open_store: Callable[..., S3Store], s3_server: S3Server, bucket: str
) -> None:
    with contextlib.closing(taken_port()) as held:
        port = held.getsockname()[1]
    store = open_store(
        S3Location(bucket, "", f"http://127.0.0.1:{port}"),
        S3Options(connect_timeout=1.0, read_timeout=1.0),
    )
    with s3_at(port, s3_server.url):
        assert await store.put("k", [b"x"]) is PutOutcome.WRITTEN
    with pytest.raises(RemoteError):
        await store.head("k")
    with strange(port, answers(WEB_SERVERS["a yes to everything"])):
        with pytest.raises(RemoteUnavailableError, match=NO_S3):
            await store.head("k")
        with pytest.raises(RemoteUnavailableError, match=NO_S3):
            await store.put("k2", [b"x"])
    await store.aclose()


# -- an engine from its start until the endpoint comes up ------------------------------------------


def states(certificate: Path) -> dict[str, tuple[str, Occupy]]:
    """Scheme to ask with, and what is on the port meanwhile."""
    web: dict[str, tuple[str, Occupy]] = {
        name: ("http", partial(_web_server, answer)) for name, answer in WEB_SERVERS.items()
    }
    page = WEB_SERVERS["a page for everything"]
    return {
        "closed": ("http", _closed),
        "swallows connections": ("http", full_backlog),
        "silent": ("http", lambda port: strange(port, silent)),
        "another protocol": ("http", lambda port: strange(port, ssh)),
        "https asked with http": ("http", lambda port: strange(port, speaks_tls(certificate))),
        "http asked with https": ("https", partial(_web_server, page)),
        **web,
    }


STATES = (
    *("closed", "swallows connections", "silent", "another protocol", "https asked with http"),
    *("http asked with https", "a page for everything", "a yes to everything"),
    *("an empty yes to everything", "nothing found", "a redirect to a login page"),
)


def _web_server(answer: Callable[[str], bytes], port: int) -> AbstractContextManager[object]:
    return strange(port, answers(answer))


@contextlib.contextmanager
def _closed(port: int) -> Iterator[None]:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", port))
        yield


@pytest.mark.usefixtures("impatient_breaker")
@pytest.mark.parametrize("transport", ["sdk", "direct"])
@pytest.mark.parametrize("state", STATES)
async def test_an_engine_is_usable_at_once_and_recovers_when_the_endpoint_comes_up(
    state: str,
    transport: str,
    s3_server: S3Server,
    bucket: str,
    authority: Authority,
    certificate: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await fill(config(bucket, s3_server.url, transport), "a")
    scheme, occupy = states(certificate)[state]
    secure = scheme == "https"
    trusted = {"ca_bundle": str(authority.bundle)} if secure else {}
    with contextlib.closing(taken_port()) as held:
        port = held.getsockname()[1]
    settings = config(bucket, f"{scheme}://127.0.0.1:{port}", transport, **trusted)
    occupied = contextlib.ExitStack()
    occupied.enter_context(occupy(port))
    with occupied:
        async with opened(settings, caplog) as cache:
            await is_down(cache)
            said = warnings(caplog)
            assert sum("left alone until it answers" in line for line in said) <= 1
            assert any("; check " in line for line in said), "the remedy is named"
            assert len(said) <= 3
            occupied.close()
            with s3_at(port, s3_server.url, certificate if secure else None):
                await recovers(cache)
            counted = cache.stats()
    wrong = [name for name in counted if name.startswith(("errors", "corrupt")) and counted[name]]
    assert wrong == []
    async with EncoderCache(config(bucket, s3_server.url, transport), NAMESPACE) as other:
        assert equal(await other.get("mine", timeout=20.0), tensor(99))


@pytest.mark.usefixtures("impatient_breaker")
@pytest.mark.parametrize("transport", ["sdk", "direct"])
async def test_a_name_that_does_not_resolve_is_an_endpoint_that_is_down(
    transport: str,
    s3_server: S3Server,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await fill(config(bucket, s3_server.url, transport), "a")
    known: list[str] = []
    resolve = socket.getaddrinfo

    def resolving(host: str, *args: Any, **more: Any) -> Any:
        if host != NOWHERE:
            return resolve(host, *args, **more)
        if not known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1", *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolving)
    port = s3_server.url.rpartition(":")[2]
    async with opened(config(bucket, f"http://{NOWHERE}:{port}", transport), caplog) as cache:
        await is_down(cache)
        assert any("; check " in line for line in warnings(caplog))
        known.append(NOWHERE)
        await recovers(cache)


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "a..b", "exa mple"])
async def test_a_name_that_cannot_be_one_is_refused_or_down_and_nothing_worse(
    host: str, open_store: Callable[..., S3Store]
) -> None:
    try:
        location = S3Location("b", "", f"http://{host}:9")
    except ConfigError:
        return
    store = open_store(location, S3Options(connect_timeout=1.0))
    with pytest.raises((RemoteError, ConfigError)):
        await store.head("k")
    await store.aclose()


@pytest.mark.usefixtures("impatient_breaker")
@pytest.mark.parametrize("transport", ["sdk", "direct"])
async def test_a_bucket_that_is_made_later_is_used_from_then_on(
    transport: str, s3_server: S3Server, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    later = f"{bucket}-later"
    settings = config(later, s3_server.url, transport, blocking_timeout=20.0)
    async with opened(settings, caplog) as cache:
        await cache.flush(20.0)
        assert cache.stats()["uploads_denied"] == 1
        assert cache.stats()["misses_denied"] == 1
        said = warnings(caplog)
        assert any("NoSuchBucket" in line and "; check bucket" in line for line in said)
        s3_server.create_bucket(later)
        await fill(settings, "a")
        assert equal(await cache.get("a"), tensor(0))
        assert await cache.put("later", tensor(3))
        assert (await cache.flush(20.0)).complete
        assert cache.stats()["uploads_written"] == 1


# -- the connector's engine ------------------------------------------------------------------------


OPEN: dict[str, Callable[..., EnginePort]] = {"thread": ThreadPort, "process": ProcessPort}


@pytest.mark.parametrize(
    ("engine", "transport", "state"),
    [
        ("thread", "sdk", "closed"),
        ("thread", "direct", "silent"),
        ("thread", "direct", "a page for everything"),
        ("process", "direct", "closed"),
        ("process", "sdk", "a page for everything"),
    ],
)
def test_the_connector_s_engine_answers_meanwhile_and_recovers(
    engine: str, transport: str, state: str, s3_server: S3Server, bucket: str, certificate: Path
) -> None:
    port_conformance.put_in_bucket(url(bucket, s3_server.url), "a")
    _, occupy = states(certificate)[state]
    with contextlib.closing(taken_port()) as held:
        number = held.getsockname()[1]
    settings = config(bucket, f"http://127.0.0.1:{number}", transport)
    with contextlib.ExitStack() as stack, port_conformance.make_slab() as slab:
        with occupy(number):
            port = port_opened(
                lambda: OPEN[engine](settings, port_conformance.NAMESPACE, slab),
                slab,
                own_process=engine == "process",
            )
            stack.callback(port.close, 0.0)
            port_is_down(port)
        with s3_at(number, s3_server.url):
            port_recovers(port)
