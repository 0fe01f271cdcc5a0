"""S3 Express: a directory bucket is spoken to through sessions, and lists whole folders only.

No server at hand knows such buckets. moto keeps the objects, and what stands in front of it behaves
as AWS documents: it opens sessions, refuses requests without one, lists in no order, and takes no
prefix that does not end with a slash.
"""

from __future__ import annotations

import asyncio
import secrets
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from ec_s3.cli.app import app
from ec_s3.config import ECConfig
from ec_s3.engine import EncoderCache
from ec_s3.keys import Namespace
from ec_s3.remote import open_store
from ec_s3.testing.moto import S3Server
from ec_s3.testing.vllm_process import PATIENT
from ec_s3.url import S3Location

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET = "cache--use1-az4--x-s3"
SPACE = Namespace(model="org/model", dtype="bfloat16")
S3 = "http://s3.amazonaws.com/doc/2006-03-01/"
SESSION = f"""<?xml version="1.0" encoding="UTF-8"?>
<CreateSessionResult xmlns="{S3}"><Credentials><SessionToken>a-token</SessionToken>
<SecretAccessKey>a-secret</SecretAccessKey><AccessKeyId>OFTHESESSION</AccessKeyId>
<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>"""


class DirectoryBucket:
    """A server with one such bucket.

    Attributes:
        sessions: how many were opened.
        refused: requests that AWS would not have answered, by what is wrong with them.
    """

    def __init__(self, server: S3Server) -> None:
        prefix = secrets.token_hex(4)  # embedded servers of one process share what they hold
        self.url = f"s3://{BUCKET}/{prefix}?endpoint={server.url}&region=us-east-1"
        self.sessions = 0
        self.refused: list[str] = []
        self._inner = server._wsgi.app
        server._wsgi.app = self._answer

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        signed = environ.get("HTTP_AUTHORIZATION", "")
        if "session" in query:
            self.sessions += 1
            assert "/s3express/aws4_request" in signed
            start_response("200 OK", [("Content-Type", "application/xml")])
            return [SESSION.encode()]
        fault = self._fault(environ, query, signed)
        if fault:
            self.refused.append(fault)
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b""]
        if "list-type" not in query:
            return self._inner(environ, start_response)
        answer: list[Any] = []
        body = _reversed(b"".join(self._inner(environ, lambda *given: answer.extend(given[:2]))))
        kept = [(name, value) for name, value in answer[1] if name.lower() != "content-length"]
        start_response(answer[0], [*kept, ("Content-Length", str(len(body)))])
        return [body]

    def _fault(self, environ: dict[str, Any], query: dict[str, list[str]], signed: str) -> str:
        if environ["PATH_INFO"] == "/":
            return ""  # whether the endpoint answers at all
        if environ.get("HTTP_X_AMZ_S3SESSION_TOKEN") != "a-token" or "OFTHESESSION" not in signed:
            return "no session"
        prefix = query.get("prefix", [""])[0]
        if prefix and not prefix.endswith("/"):
            return f"lists {prefix}"
        return "starts a list amid it" if "start-after" in query else ""


def _reversed(body: bytes) -> bytes:
    """A page of a listing, backwards."""
    ElementTree.register_namespace("", S3)
    page = ElementTree.fromstring(body)
    entries = page.findall(f"{{{S3}}}Contents")
    for entry in entries:
        page.remove(entry)
    page.extend(reversed(entries))
    return ElementTree.tostring(page)


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[DirectoryBucket]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with S3Server() as server:
        made = urllib.request.Request(f"{server.url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(made, timeout=30).close()  # the SDK would ask for a session first
        yield DirectoryBucket(server)


def config(directory: DirectoryBucket, **given: object) -> ECConfig:
    return ECConfig.from_mapping({**PATIENT, "url": directory.url, **given})


@pytest.mark.parametrize("transport", ["sdk", "direct"])
def test_items_are_kept_and_found_through_one_session(
    directory: DirectoryBucket, transport: str
) -> None:
    async def work() -> None:
        tensor = torch.ones(8, 16, dtype=torch.bfloat16)
        async with EncoderCache(config(directory, s3_transport=transport), SPACE) as cache:
            for name in "abcdefgh":
                await cache.put(name, tensor)
            assert (await cache.flush(60)).complete
        assert directory.sessions == 1
        async with EncoderCache(config(directory, s3_transport=transport), SPACE) as cache:
            found = await asyncio.gather(*(cache.get(name) for name in "abcdefgh"))
        assert all(one is not None and torch.equal(one, tensor) for one in found)

    asyncio.run(work())
    assert directory.sessions == 2
    assert not directory.refused


def test_large_items_go_up_and_come_down_in_parts(
    directory: DirectoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.s3._MULTIPART_BYTES", 1 << 20)
    monkeypatch.setattr("ec_s3.transfer.PART_BYTES", 5 << 20)
    bits = torch.randint(-(2**15), 2**15, (3 << 10, 1 << 10), dtype=torch.int16)

    async def work() -> None:
        async with EncoderCache(config(directory), SPACE) as cache:
            await cache.put("large", bits.view(torch.bfloat16))
            assert (await cache.flush(60)).complete
        async with EncoderCache(config(directory), SPACE) as cache:
            found = await cache.get("large")
        assert found is not None
        assert torch.equal(found.view(torch.int16), bits)

    asyncio.run(work())
    assert not directory.refused


def test_a_listing_is_of_what_begins_so_and_of_nothing_else(directory: DirectoryBucket) -> None:
    keys = [SPACE.object_key(name) for name in ("a", "b", "c")]

    async def work() -> set[str]:
        store = open_store(config(directory))
        assert store is not None
        for key in keys:
            await store.put(key, [b"x"])
        found = {info.key async for info in store.list(keys[0][:-3])}
        await store.aclose()
        return found

    assert asyncio.run(work()) == {keys[0]}
    assert not directory.refused


@pytest.mark.parametrize(
    "command",
    [
        ["doctor"],
        ["ls"],
        ["ls", SPACE.prefix],
        ["du"],
        ["verify", SPACE.prefix],
        ["index", SPACE.id],
        ["control", "disable", SPACE.id],
        ["gc"],
        ["rm", SPACE.prefix, "--yes"],
    ],
    ids=" ".join,
)
def test_commands_work_on_it(directory: DirectoryBucket, command: list[str]) -> None:
    async def fill() -> None:
        async with EncoderCache(config(directory), SPACE) as cache:
            await cache.put("a", torch.ones(8, 16, dtype=torch.bfloat16))
            assert (await cache.flush(60)).complete

    asyncio.run(fill())
    result = CliRunner().invoke(app, ["--url", directory.url, *command])
    assert result.exit_code == 0, result.output
    assert not directory.refused


@pytest.mark.parametrize(
    ("bucket", "prefix", "listed"),
    [
        (BUCKET, "v1/a", "ec/v1/"),
        (BUCKET, "v1/a/", "ec/v1/a/"),
        (BUCKET, "", "ec/"),
        ("bucket", "v1/a", "ec/v1/a"),
    ],
)
def test_folders_are_listed_where_nothing_less_can_be(
    bucket: str, prefix: str, listed: str
) -> None:
    assert S3Location(bucket, "ec").listed_prefix(prefix) == listed
