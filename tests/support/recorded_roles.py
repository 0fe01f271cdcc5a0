"""What each role does, recorded: its requests to a bucket behind a proxy that remembers them.

Shared by the tests of the policies that the library prints and of those that Terraform makes.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import torch
from typer.testing import CliRunner

from ec_s3 import ECConfig, EncoderCache, Namespace
from ec_s3.cli.app import app
from ec_s3.indexing import list_tags, write_index
from ec_s3.ingest import ingest
from ec_s3.intake import Source
from ec_s3.lookup import find_header
from ec_s3.permissions import OPERATIONS, Role, Scope, operations
from ec_s3.remote import open_store
from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.warmup import newest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest
    from typer.testing import Result

    from ec_s3.testing.faults import Request
    from ec_s3.testing.moto import S3Server

PREFIX = "team/cache"
SPACE = Namespace(model="org/model", dtype="bfloat16")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


_REQUESTS = {
    ("GET", "list-type"): "ListObjectsV2",
    ("GET", "uploads"): "ListMultipartUploads",
    ("GET", "uploadId"): "ListParts",
    ("GET", ""): "GetObject",
    ("HEAD", ""): "HeadObject",
    ("PUT", "uploadId"): "UploadPart",
    ("PUT", ""): "PutObject",
    ("POST", "uploads"): "CreateMultipartUpload",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("DELETE", ""): "DeleteObject",
}


def named(request: Request) -> tuple[str, str, str]:
    """S3's name of a request, the key that it is about, and the prefix that it lists."""
    parts = urlsplit(request.path)
    query = parse_qs(parts.query, keep_blank_values=True)
    kind = next((q for q in ("list-type", "uploads", "uploadId") if q in query), "")
    key = parts.path.split("/", 2)[2] if parts.path.count("/") > 1 else ""
    return _REQUESTS[request.method, kind], key, query.get("prefix", [""])[0]


def permits(policy: dict[str, Any], action: str, arn: str, prefix: str) -> bool:
    for statement in policy["Statement"]:
        condition = statement.get("Condition", {}).get("StringLike", {}).get("s3:prefix", ["*"])
        if (
            action in statement["Action"]
            and fnmatchcase(arn, statement["Resource"])
            and any(fnmatchcase(prefix, pattern) for pattern in condition)
        ):
            return True
    return False


class Bucket:
    """A bucket behind a proxy that remembers what it was asked for."""

    def __init__(self, server: S3Server, name: str, proxy: FaultServer) -> None:
        self.server = server
        self.name = name
        self.proxy = proxy
        self.url = f"s3://{name}/team/cache?endpoint={proxy.url}"

    def config(self, **given: object) -> ECConfig:
        return ECConfig.from_mapping({"url": self.url, "max_local_cpu_size": 64 << 20, **given})

    async def fill(self) -> None:
        """Something to read, past the proxy."""
        url = f"s3://{self.name}/team/cache?endpoint={self.server.url}"
        config = ECConfig.from_mapping({"url": url})
        store = open_store(config)
        assert store is not None
        small = torch.ones(8, 16, dtype=torch.bfloat16)
        items = [Source(name, small.nbytes, lambda: small) for name in ("there", "doomed")]
        await ingest(store, items, config, SPACE)
        await store.aclose()

    def command(self, *arguments: str) -> None:
        result = run("--url", self.url, *arguments)
        assert result.exit_code == 0, result.output


def large() -> torch.Tensor:
    """Nothing that compresses, so that it goes up in two parts."""
    return torch.randint(-(2**15), 2**15, (3 << 10, 1 << 10), dtype=torch.int16).view(
        torch.bfloat16
    )


def reads(bucket: Bucket) -> None:
    async def work() -> None:
        await bucket.fill()
        async with EncoderCache(bucket.config(), SPACE) as cache:
            assert await cache.get("there") is not None
            assert await cache.get("absent") is None
            assert await cache.contains("doomed")
        store = open_store(bucket.config())
        assert store is not None
        header = await find_header(store, namespace=SPACE.id, identifier="there")
        assert header is not None
        prefix = f"{SPACE.prefix}/{SPACE.dtype}/"
        assert (await newest(store, prefix, nbytes=1 << 20)).objects  # a warm start
        await store.aclose()

    asyncio.run(work())


def writes(bucket: Bucket) -> None:
    reads(bucket)

    async def work() -> None:
        async with EncoderCache(bucket.config(), SPACE) as cache:
            await cache.put("small", torch.ones(8, 16, dtype=torch.bfloat16))
            await cache.put("large", large())
            assert (await cache.flush(60)).complete
            bucket.proxy.add(Fault(method="PUT", path="partNumber=2", status=403, times=1))
            await cache.put("refused", large())
            assert (await cache.flush(60)).complete

    asyncio.run(work())


def prewarms(bucket: Bucket) -> None:
    async def work() -> None:
        await bucket.fill()
        config = bucket.config()
        store = open_store(config)
        assert store is not None
        tensor = large()
        items = [
            Source("there", 256, lambda: tensor),
            Source("large", tensor.nbytes, lambda: tensor),
        ]
        report = await ingest(store, items, config, SPACE)
        assert (report.written, report.present) == (1, 1)
        bucket.proxy.add(Fault(method="PUT", path="partNumber=2", status=403, times=1))
        refused = [Source("refused", tensor.nbytes, lambda: tensor)]
        assert (await ingest(store, refused, config, SPACE)).stopped is not None
        name = SPACE.prefix.rpartition("/")[2]
        await write_index(store, await list_tags(store, name), namespace=SPACE, made=1.0)
        await store.aclose()

    asyncio.run(work())


def maintains(bucket: Bucket) -> None:
    asyncio.run(bucket.fill())
    client = bucket.server.client()
    client.create_multipart_upload(Bucket=bucket.name, Key=f"team/cache/{SPACE.object_key('x')}")
    client.close()
    bucket.command("ls")
    bucket.command("stat", SPACE.object_key("there"))
    bucket.command("verify", SPACE.prefix)
    bucket.command("rm", SPACE.object_key("doomed"), "--yes")
    bucket.command("control", "disable", SPACE.id)
    bucket.command("index", SPACE.id)
    bucket.command("cost")
    bucket.command("gc", "--yes")


def examines(bucket: Bucket) -> None:
    """What `doctor` and `du` ask, which are for a maintainer."""
    asyncio.run(bucket.fill())
    bucket.command("doctor")
    bucket.command("du")


WORK: dict[Role, Callable[[Bucket], None]] = {
    Role.READER: reads,
    Role.WRITER: writes,
    Role.PREWARM: prewarms,
    Role.MAINTAINER: maintains,
}


@contextmanager
def recording(server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr("ec_s3.s3._MULTIPART_BYTES", 1 << 20)
    monkeypatch.setattr("ec_s3.transfer.PART_BYTES", 5 << 20)
    # Now, not after a day: an upload's age is by the server's clock, and none takes so long here.
    monkeypatch.setattr("ec_s3.cli.gc.UPLOAD_SECONDS", -60.0)
    with FaultServer(server.url) as proxy:
        yield Bucket(server, bucket, proxy)


def assert_enough(policy: dict[str, Any], bucket: Bucket) -> set[str]:
    """A policy allows each request that was recorded; returns the actions that they needed."""
    table = {operation.request: operation for operation in OPERATIONS}
    used = set()
    for request in bucket.proxy.log:
        if request.path == "/":
            continue  # whether the endpoint answers, which needs no right
        name, key, prefix = named(request)
        for action in table[name].actions:
            used.add(action)
            on_bucket = action.startswith("s3:ListBucket")  # and not s3:ListMultipartUploadParts
            arn = f"arn:aws:s3:::{bucket.name}" + ("" if on_bucket else f"/{key}")
            asked = prefix or key
            assert permits(policy, action, arn, asked), f"{name}: {action} on {arn} {asked}"
    return used


def assert_exactly(policy: dict[str, Any], role: Role, bucket: Bucket) -> None:
    """A policy allows each request that was recorded, and nothing that none of them needs."""
    made = {named(request)[0] for request in bucket.proxy.log}
    known = {o.request for o in operations(role, Scope(bucket=bucket.name, prefix=PREFIX))}
    assert made <= known, f"{role} makes requests that the table does not know"
    assert made == known, "a row of the table is made by nothing"
    used = assert_enough(policy, bucket)
    allowed = {action for statement in policy["Statement"] for action in statement["Action"]}
    assert used == allowed, "an action is allowed that nothing needs"
