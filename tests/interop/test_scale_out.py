"""A fleet on one bucket.

Four engines and two upload jobs, each a process of its own behind a proxy of its own that counts.
They share half of their items. One engine is killed amid an upload in parts, and the server is
killed and started again; nobody else may end, no hit may be wrong, and the bucket gets each item
about once.
"""

from __future__ import annotations

import asyncio
import collections
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fleet
import pytest
from fleet import CountingProxy, Report, Sent, content, names

from ec_s3.cli import gc as module
from ec_s3.cli.garbage import Rules
from ec_s3.cli.gc import gc
from ec_s3.cli.output import Output
from ec_s3.multiparts import Multiparts
from ec_s3.s3 import S3Store
from ec_s3.tensors import as_bytes
from ec_s3.testing.faults import Fault
from ec_s3.testing.servers import running
from ec_s3.testing.servers.fixtures import require
from ec_s3.url import S3Options, parse_url
from ec_s3.wire import decode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ec_s3.testing.servers import RealServer

pytestmark = [
    pytest.mark.interop(kind="ceph"),
    pytest.mark.timeout(900),  # eight processes start, on whatever machine this is
]

ENGINES, UPLOADS = 4, 2
KILLED = 0
"""The engine that is killed."""
BODIES_PER_OBJECT = 1.05
"""Two processes that make an item at the same time both send it; that happens while it is new."""
BODIES_WHILE_NEW = 1.2
"""In a few seconds all items are new."""
GROWTH_BYTES = 400 << 20
"""Most memory that a process may gain after its first seconds: its upload queue and its buffers."""
_SECONDS = 120.0
_ITEM = re.compile(r"/bfloat16/[0-9a-f]{2}/([0-9a-f]{64})")
_PROGRAM = Path(fleet.__file__)


@pytest.fixture
def ceph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealServer]:
    """A server of the test's own, as it is killed."""
    require("ceph")
    with running("ceph", tmp_path / "ceph") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@dataclass(slots=True)
class Member:
    """A process and the proxy between it and the bucket."""

    role: str
    process: subprocess.Popen[str]
    proxy: CountingProxy
    report: Report | None = None

    def end(self) -> None:
        """Tell it to stop, and take its report."""
        out, _ = self.process.communicate(timeout=_SECONDS)
        ended = self.process.returncode
        assert ended == 0, f"{self.role} ended with {ended}"
        self.report = Report(**json.loads(out.splitlines()[-1]))


@dataclass(slots=True)
class Fleet:
    """All members; a context manager that leaves none of them behind."""

    server: RealServer
    bucket: str
    folder: Path
    members: list[Member] = field(default_factory=list)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.process.kill()
            member.process.communicate()
            member.proxy.__exit__(None, None, None)

    def add(self, role: str, *, count: int, transport: str) -> None:
        """Start a member."""
        number = len(self.members)
        proxy = CountingProxy(self.server.endpoint)
        proxy.__enter__()
        settings = {
            "url": self.server.url(self.bucket, "fleet", endpoint=proxy.url),
            "s3_transport": transport,
            "max_local_cpu_size": 32 << 20,
            "upload_queue_size": 128 << 20,
        }
        work = json.dumps({"settings": settings, "names": names(number, count=count)})
        log = (self.folder / f"{number}-{role}.log").open("w")
        with log:
            process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), role, work],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.members.append(Member(role, process, proxy))

    def await_ready(self) -> None:
        """Wait until every member is at work."""
        for member in self.members:
            assert member.process.stdout is not None
            assert member.process.stdout.readline() == "ready\n"

    def kill_amid_upload(self) -> None:
        """Kill an engine while the second part of an upload is on its way."""
        victim = self.members[KILLED]
        fault = Fault(method="PUT", path="partNumber=2", hang=True, times=1)
        victim.proxy.add(fault)
        give_up = time.monotonic() + _SECONDS
        while not fault.met:
            assert time.monotonic() < give_up, "no upload in parts began"
            assert victim.process.poll() is None
            time.sleep(0.01)
        victim.process.kill()
        victim.process.communicate()

    @property
    def survivors(self) -> list[Member]:
        """Everybody but the killed one."""
        return [member for number, member in enumerate(self.members) if number != KILLED]

    def run(self, seconds: float) -> None:
        """Let them work for so long, with a kill and a restart in between."""
        begin = time.monotonic()
        time.sleep(seconds * 0.3)  # their work, not something that is waited for
        self.kill_amid_upload()
        time.sleep(max(0.0, begin + seconds * 0.6 - time.monotonic()))
        self.server.kill()
        time.sleep(1.0)  # an outage that everybody meets
        self.server.start_again()
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        for member in self.survivors:
            assert member.process.poll() is None, f"{member.role} has ended by itself"
        for member in self.survivors:
            assert member.process.stdin is not None
            member.process.stdin.close()
            member.process.stdin = None  # for `communicate`, which would flush it
        for member in self.survivors:
            member.end()


@dataclass(slots=True)
class Bodies:
    """Bodies of items that were sent to the server, from the proxies' logs.

    Attributes:
        sent: by digest, all that the server has answered.
        lost: those that it has not: sent while it was down, or cut off by its end.
    """

    sent: collections.Counter[str] = field(default_factory=collections.Counter)
    lost: int = 0

    def count(self, requests: list[Sent]) -> None:
        """Add a proxy's; an upload in parts counts once, with its second part."""
        for request in requests:
            found = _ITEM.search(request.path)
            whole = "partNumber=" not in request.path or "partNumber=2" in request.path
            if request.method != "PUT" or found is None or not whole:
                continue
            if 200 <= request.status < 500:
                self.sent[found[1]] += 1
            else:
                self.lost += 1


def check_objects(server: RealServer, bucket: str) -> int:
    """Every object is whole, and what its name says; how many there are."""
    client = server.client()
    number = 0
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for entry in page.get("Contents", ()):
            if _ITEM.search(entry["Key"]) is None:
                continue
            body = client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
            header, tensor = decode(body, max_tensor_bytes=1 << 30)
            assert fleet.SPACE.object_key(header.identifier) in entry["Key"]
            assert tensor == as_bytes(content(header.identifier)), header.identifier
            number += 1
    client.close()
    return number


def check_uploads(server: RealServer, bucket: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """After `gc` no upload in parts is left; how many it found."""
    client = server.client()
    left = len(client.list_multipart_uploads(Bucket=bucket).get("Uploads", ()))
    monkeypatch.setattr(module, "UPLOAD_SECONDS", -60.0)  # nobody writes any more

    async def collect() -> None:
        location: Any = parse_url(server.url(bucket, "fleet"))
        store, multiparts = S3Store(location), Multiparts(location, S3Options())
        rules = Rules(older_than=86400.0)
        await gc(store, Output(json=True), rules, multiparts=multiparts, yes=True)
        await multiparts.aclose()
        await store.aclose()

    asyncio.run(collect())
    assert not client.list_multipart_uploads(Bucket=bucket).get("Uploads")
    client.close()
    return left


def summary(fleet: Fleet, bodies: Bodies, objects: int, left: int) -> str:
    """What happened, for people."""
    reports = [member.report for member in fleet.members if member.report is not None]
    seconds = sorted(second for report in reports for second in report.seconds)
    lookups, hits = (sum(getattr(r, name) for r in reports) for name in ("lookups", "hits"))
    requests = sum(len(member.proxy.sent) for member in fleet.members)
    growth = max(report.rss[1] - report.rss[0] for report in reports) >> 20
    return (
        f"{lookups} look-ups, {hits} hits, {lookups - hits} misses; p50 "
        f"{1000 * seconds[len(seconds) // 2]:.1f} ms, p99 "
        f"{1000 * seconds[len(seconds) * 99 // 100]:.1f} ms; {requests} requests; {objects} "
        f"objects, {bodies.sent.total()} bodies ({bodies.sent.total() / objects:.3f} per object), "
        f"{bodies.lost} more without an answer; {left} uploads in parts left behind; most memory "
        f"{max(report.rss[1] for report in reports) >> 20} MiB, grown by {growth} MiB"
    )


@pytest.mark.parametrize(
    ("seconds", "count", "bodies_per_object"),
    [
        pytest.param(10.0, 200, BODIES_WHILE_NEW, marks=pytest.mark.smoke, id="10-seconds"),
        pytest.param(120.0, 800, BODIES_PER_OBJECT, id="2-minutes"),
    ],
)
def test_a_fleet_shares_a_bucket_through_a_kill_and_a_restart(
    seconds: float,
    count: int,
    bodies_per_object: float,
    ceph: RealServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bucket, bodies = ceph.new_bucket(), Bodies()
    with Fleet(ceph, bucket, tmp_path) as members:
        for number in range(ENGINES):
            members.add("engine", count=count, transport=("sdk", "direct")[number % 2])
        for number in range(UPLOADS):
            members.add("upload", count=count, transport=("sdk", "direct")[number % 2])
        members.await_ready()
        members.run(seconds)
        for member in members.members:
            bodies.count(member.proxy.sent)
        objects = check_objects(ceph, bucket)
        left = check_uploads(ceph, bucket, monkeypatch)
        with capsys.disabled():
            sys.stdout.write(f"\n{summary(members, bodies, objects, left)}\n")
    assert left >= 1, "the killed engine had begun one"
    for member in members.survivors:
        report = member.report
        assert report is not None
        assert report.wrong == []
        assert report.complete
        assert report.rss[1] - report.rss[0] < GROWTH_BYTES
        assert report.hits or member.role == "upload"
    again = [digest for digest, times in bodies.sent.items() if times > 1]
    assert bodies.sent.total() <= bodies_per_object * objects, f"sent again: {len(again)}"
