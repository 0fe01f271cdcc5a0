"""What each role does, recorded: its requests to a bucket behind a proxy that remembers them.

Shared by the tests of the policies that the library prints and of those that Terraform makes.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from ec_s3 import ECConfig, EncoderCache, Namespace
from ec_s3.cli.app import app
from ec_s3.indexing import list_tags, write_index
from ec_s3.ingest import ingest
from ec_s3.intake import Source
from ec_s3.lookup import find_header
from ec_s3.permissions import OPERATIONS, Role, Scope, operations
from ec_s3.remote import open_store
from ec_s3.testing.encoder import PlayedEncoder
from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.testing.pictures import make_pictures
from ec_s3.testing.vllm_process import PATIENT
from ec_s3.warmup import newest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest
    from typer.testing import Result

    from ec_s3.prewarm.encoding import EncoderSettings
    from ec_s3.testing.faults import Request
    from ec_s3.testing.moto import S3Server

PREFIX = "team/cache"
SPACE = Namespace(model="org/model", dtype="bfloat16")

NO_REQUESTS = {"policy", "config", "config from-lmcache"}
"""Commands that ask no bucket."""

ELSEWHERE = {"demo"}
"""Commands that bring a bucket of their own."""

COMMANDS: dict[Role, tuple[tuple[str, ...], ...]] = {
    Role.READER: (),
    Role.WRITER: (),
    Role.PREWARM: (
        ("upload", "OUTPUTS", "--model", SPACE.model),
        ("prewarm", "--model", SPACE.model, "--media", "PICTURES"),
        ("index", SPACE.id),
    ),
    Role.MAINTAINER: (
        ("ls",),
        ("stat", SPACE.object_key("there")),
        ("get", SPACE.object_key("there"), "--output", "TENSOR"),
        ("verify", SPACE.prefix),
        ("control", "disable", SPACE.id),
        ("control", "enable", SPACE.id),
        ("control", "invalidate-before", SPACE.id, "now"),
        ("control", "show", SPACE.id),
        ("index", SPACE.id),
        ("cost",),
        ("rm", SPACE.object_key("doomed"), "--yes"),
        ("gc", "--yes"),
    ),
}
"""What each role runs; words in capitals are paths."""

EXAMINATIONS: tuple[tuple[str, ...], ...] = (("doctor",), ("du",), ("bench",))
"""What a maintainer may run as well; some of it is done by other roles' requests."""


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
    ("POST", "delete"): "DeleteObject",  # the right is the same, its keys are in the body
}


def named(request: Request) -> tuple[str, str, str]:
    """S3's name of a request, the key that it is about, and the prefix that it lists."""
    parts = urlsplit(request.path)
    query = parse_qs(parts.query, keep_blank_values=True)
    kind = next((q for q in ("list-type", "uploads", "uploadId", "delete") if q in query), "")
    key = parts.path.split("/", 2)[2] if parts.path.count("/") > 1 else ""
    if kind == "delete":
        key = f"{PREFIX}/doctor/probe"  # nobody else sends it
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
        return ECConfig.from_mapping({**PATIENT, "url": self.url, **given})

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

    def commands(self, lines: tuple[tuple[str, ...], ...]) -> None:
        """Run commands of `ec-s3`, all of which must go well."""
        with tempfile.TemporaryDirectory() as folder:
            paths = {name: str(Path(folder, name)) for name in ("OUTPUTS", "PICTURES", "TENSOR")}
            Path(paths["OUTPUTS"]).mkdir()
            tensors = {f"{9:064x}": torch.ones(8, 16, dtype=torch.bfloat16)}
            save_file(tensors, Path(paths["OUTPUTS"], "one.safetensors"))
            make_pictures(Path(paths["PICTURES"]), 2)
            for line in lines:
                result = run("--url", self.url, *(paths.get(word, word) for word in line))
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
        async with EncoderCache(bucket.config(object_lifetime="30d"), SPACE) as cache:
            assert await cache.get("there") is not None  # an old one: it is written again
            await _until(lambda: any(r.header("if-match") for r in bucket.proxy.log))

    asyncio.run(work())


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.01)


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
    bucket.commands(COMMANDS[Role.PREWARM])


def maintains(bucket: Bucket) -> None:
    asyncio.run(bucket.fill())
    client = bucket.server.client()
    client.create_multipart_upload(Bucket=bucket.name, Key=f"team/cache/{SPACE.object_key('x')}")
    client.close()
    bucket.commands(COMMANDS[Role.MAINTAINER])


def examines(bucket: Bucket) -> None:
    """What is for a maintainer beside the upkeep."""
    asyncio.run(bucket.fill())
    bucket.commands(EXAMINATIONS)


WORK: dict[Role, Callable[[Bucket], None]] = {
    Role.READER: reads,
    Role.WRITER: writes,
    Role.PREWARM: prewarms,
    Role.MAINTAINER: maintains,
}


def _played(settings: EncoderSettings) -> PlayedEncoder:
    facts = {"model_argument": settings.model, "mm_processor_kwargs": None}
    return PlayedEncoder(
        settings.connector, Namespace(model="org/model", dtype="float32"), facts=facts
    )


@contextmanager
def recording(server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr("ec_s3.s3._MULTIPART_BYTES", 1 << 20)
    monkeypatch.setattr("ec_s3.transfer.PART_BYTES", 5 << 20)
    # Now, not after a day: an upload's age is by the server's clock, and none takes so long here.
    monkeypatch.setattr("ec_s3.cli.gc.UPLOAD_SECONDS", -60.0)
    # Every object counts as old, at once.
    monkeypatch.setattr("ec_s3.refresh.OLD_SHARE", 0.0)
    monkeypatch.setattr("ec_s3.refresh.LONGEST_SPREAD", 0.0)
    # Little to move: nothing is measured here.
    monkeypatch.setattr("ec_s3.cli.bench.LARGE_BYTES", 64 << 10)
    monkeypatch.setattr("ec_s3.cli.bench.SMALL_ROUNDS", 2)
    monkeypatch.setattr("ec_s3.cli.bench.SETTLE_SECONDS", 0.0)
    monkeypatch.setattr("ec_s3.cli.prewarm_job.open_encoder", _played)
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
