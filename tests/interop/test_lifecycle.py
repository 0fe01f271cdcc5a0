"""Lifecycle rules and policies.

What `ec-s3 policy` and Terraform recommend goes into real buckets, and objects expire under running
engines: Ceph with days of ten seconds.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from botocore.exceptions import ClientError
from typer.testing import CliRunner

from ec_s3.blocking import ECCacheEngine
from ec_s3.cli.app import app
from ec_s3.config import ECConfig
from ec_s3.keys import Namespace
from ec_s3.metrics import Stats
from ec_s3.pages import Slab
from ec_s3.permissions import SPARED_BYTES, Role, Scope, bucket_policy, lifecycle, role_policy
from ec_s3.port import Absent, ThreadPort, Want
from ec_s3.testing.servers import RealServer, running
from ec_s3.testing.servers.fixtures import require
from ec_s3.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ec_s3.testing.servers.ceph import Ceph
    from ec_s3.tickets import Event

pytestmark = pytest.mark.interop

DAY_SECONDS = 10
PREFIX = "team/cache"
SCOPE = Scope(bucket="-", prefix=PREFIX)
NAMESPACE = Namespace(model="org/model")
PATIENCE = 90.0

takes_rules = pytest.mark.parametrize(
    "real_server", ["ceph", "ceph-https", "seaweedfs", "moto"], indirect=True
)


def document(name: str, url: str) -> dict[str, Any]:
    """What the command prints."""
    shown = CliRunner().invoke(app, ["--url", url, "policy", name])
    assert shown.exit_code == 0, shown.output
    made: dict[str, Any] = json.loads(shown.stdout)
    return made


# What is recommended


@takes_rules
@pytest.mark.smoke
def test_the_recommended_rules_are_taken_and_told_again(
    real_server: RealServer, real_bucket: str
) -> None:
    rules = document("lifecycle", real_server.url(real_bucket, PREFIX))
    assert rules == lifecycle(SCOPE, days=30)
    client = real_server.client()
    client.put_bucket_lifecycle_configuration(Bucket=real_bucket, LifecycleConfiguration=rules)
    told = {
        rule["ID"]: rule
        for rule in client.get_bucket_lifecycle_configuration(Bucket=real_bucket)["Rules"]
    }
    client.close()
    items, uploads = told["ec-s3-items"], told["ec-s3-unfinished-uploads"]
    assert items["Expiration"]["Days"] == 30
    assert uploads["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"] == 1
    assert {items["Status"], uploads["Status"]} == {"Enabled"}
    chosen = items["Filter"].get("And", items["Filter"])
    assert chosen["Prefix"] == f"{PREFIX}/v1/"
    if real_server.kind.startswith("ceph"):
        assert "ObjectSizeGreaterThan" not in chosen, "say so in docs/how-to/ceph.md"
    elif real_server.kind == "seaweedfs":
        assert chosen["ObjectSizeGreaterThan"] == SPARED_BYTES - 1


@takes_rules
@pytest.mark.smoke
def test_the_recommended_bucket_policy_is_taken(real_server: RealServer, real_bucket: str) -> None:
    url = real_server.url(real_bucket, PREFIX)
    policy = document("bucket", url)
    assert policy == bucket_policy(Scope(bucket=real_bucket, prefix=PREFIX))
    client = real_server.client()
    client.put_bucket_policy(Bucket=real_bucket, Policy=json.dumps(policy))
    written = allowed(client.put_object, Bucket=real_bucket, Key=f"{PREFIX}/v1/k", Body=b"x")
    client.close()
    if real_server.kind.startswith("ceph"):
        assert not written, "say so in docs/how-to/ceph.md"
    elif real_server.kind == "seaweedfs":
        assert not written, "over plain http"


@pytest.mark.parametrize("real_server", ["ceph", "ceph-https"], indirect=True)
class TestRolesOfStrangers:
    """The document of a role, as a bucket's policy, gives a user without rights just that role."""

    @pytest.mark.parametrize("role", list(Role))
    def test_a_role_may_do_what_it_does_and_nothing_else(
        self, real_server: Ceph, real_bucket: str, role: Role
    ) -> None:
        policy: dict[str, Any] = role_policy(role, Scope(bucket=real_bucket, prefix=PREFIX))
        stranger = real_server.add_stranger(real_bucket)
        for statement in policy["Statement"]:
            statement["Principal"] = {"AWS": [f"arn:aws:iam:::user/{real_bucket}"]}
            statement.pop("Condition", None)  # see docs/how-to/ceph.md
        owner, other = real_server.client(), real_server.client(stranger)
        there = {"Bucket": real_bucket, "Key": f"{PREFIX}/v1/there"}
        owner.put_object(**there, Body=b"x")
        assert not allowed(other.get_object, **there)
        owner.put_bucket_policy(Bucket=real_bucket, Policy=json.dumps(policy))
        assert allowed(other.get_object, **there)
        assert allowed(other.list_objects_v2, Bucket=real_bucket, Prefix=f"{PREFIX}/")
        new = {**there, "Key": f"{PREFIX}/v1/new"}
        assert allowed(other.put_object, **new, Body=b"x") == (role is not Role.READER)
        assert not allowed(other.put_object, Bucket=real_bucket, Key="elsewhere", Body=b"x")
        assert allowed(other.delete_object, **new) == (role is Role.MAINTAINER)
        owner.close()
        other.close()


def allowed(call: Callable[..., Any], **arguments: Any) -> bool:
    try:
        call(**arguments)
    except ClientError as error:
        assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 403  # noqa: PT017  # not the subject
        return False
    return True


# Objects that expire


def tensor(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(256, 256, generator=generator).to(torch.bfloat16)


@dataclass(slots=True)
class Expired:
    """A bucket whose items have expired under engines that knew them.

    Attributes:
        url: of the bucket.
        bucket: its name.
        hot: an engine that has put `hot` itself.
        cold: one that knows from the bucket that `cold` is there, and has not read it.
        listed: a server's engine, which follows an index that names all of them.
        counted: what `listed` has counted.
        uploads: unfinished uploads when everything else was gone.
        kept: keys that the rule is not about.
    """

    url: str
    bucket: str
    hot: ECCacheEngine
    cold: ECCacheEngine
    listed: ThreadPort
    counted: Stats
    uploads: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def short_days(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    require("ceph")
    folder = tmp_path_factory.mktemp("short-days")
    with running("ceph", folder, lifecycle_day_seconds=DAY_SECONDS) as server:
        yield server


@pytest.fixture(scope="module")
def expired(short_days: RealServer) -> Iterator[Expired]:
    """Takes two such days, for all tests together."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in short_days.environment.items():
            patch.setenv(name, value)
        made = _stored(short_days, stack)
        client = short_days.client()
        stack.callback(client.close)
        _expire(client, made)
        yield made


def _stored(server: RealServer, stack: contextlib.ExitStack) -> Expired:
    bucket = server.new_bucket()
    url = server.url(bucket, PREFIX)

    config = ECConfig(
        url=url,
        max_local_cpu_size="16MiB",
        positive_ttl=2.0,
        negative_ttl=0.5,
        connect_timeout=20.0,
        read_timeout=20.0,
        blocking_timeout=60.0,
    )
    hot, cold = (stack.enter_context(ECCacheEngine(config, NAMESPACE)) for _ in range(2))
    assert all(hot.put_many({"hot": tensor(0), "cold": tensor(1), "listed": tensor(2)}).values())
    assert hot.flush(60).complete
    assert cold.contains("cold")
    shown = CliRunner().invoke(app, ["--url", url, "index", NAMESPACE.prefix])
    assert shown.exit_code == 0, shown.output
    slab = Slab.create(16 << 20)
    stack.callback(slab.close)
    listed, counted = ThreadPort(config, NAMESPACE, slab), Stats()
    stack.callback(listed.close, 5.0)
    until(lambda: flat(listed, counted)["index_items"] == 3)
    return Expired(url, bucket, hot, cold, listed, counted)


def flat(port: ThreadPort, counted: Stats) -> dict[str, float]:
    """What a port has counted so far."""
    counted.merge(port.drain_stats())
    return counted.snapshot()


def _expire(client: Any, made: Expired) -> None:
    """Set the recommended rules and wait until nothing that they are about is left."""
    other = {"Bucket": made.bucket, "Key": "team/other/v1/kept"}
    client.put_object(**other, Body=bytes(2 * SPARED_BYTES))
    client.create_multipart_upload(Bucket=made.bucket, Key=f"{PREFIX}/v1/unfinished")
    rules = lifecycle(Scope(bucket=made.bucket, prefix=PREFIX), days=1)
    client.put_bucket_lifecycle_configuration(Bucket=made.bucket, LifecycleConfiguration=rules)

    def found() -> list[str]:
        listing = client.list_objects_v2(Bucket=made.bucket).get("Contents", [])
        return [entry["Key"] for entry in listing]

    def uploads() -> list[str]:
        listing = client.list_multipart_uploads(Bucket=made.bucket).get("Uploads", [])
        return [entry["Key"] for entry in listing]

    until(lambda: not any("/bfloat16/" in key for key in found()) and not uploads())
    made.uploads, made.kept = uploads(), found()


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up, "it did not come to pass"
        time.sleep(0.2)


@pytest.fixture(autouse=True)
def short_days_environment(
    isolated_aws: object, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of the server with short days, for the tests on it."""
    if "expired" in request.fixturenames:
        server: RealServer = request.getfixturevalue("short_days")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)


def faults(counts: dict[str, float]) -> float:
    """What is counted when something is wrong rather than absent."""
    reasons = ("corrupt", "timeout", "denied", "unreachable", "failed", "changed", "throttled")
    errors = sum(count for name, count in counts.items() if name.startswith("errors"))
    return errors + sum(counts[f"misses_{reason}"] for reason in reasons)


@pytest.mark.interop(kind="ceph")
class TestObjectsThatExpire:
    """Under engines that knew them."""

    def test_the_rules_end_items_and_uploads_and_nothing_else(self, expired: Expired) -> None:
        assert expired.uploads == []
        assert expired.kept[-1] == "team/other/v1/kept"

    def test_an_item_in_host_memory_is_served_all_the_same(self, expired: Expired) -> None:
        got = expired.hot.get("hot")
        assert got is not None
        assert torch.equal(got, tensor(0))
        assert faults(expired.hot.stats()) == 0

    def test_an_item_that_was_known_to_be_there_is_absent_after_its_time(
        self, expired: Expired
    ) -> None:
        until(lambda: not expired.cold.contains("cold"))
        assert expired.cold.get("cold") is None
        assert expired.cold.stats()["misses_absent"] == 1
        assert faults(expired.cold.stats()) == 0

    def test_an_item_that_an_index_still_names_is_absent(self, expired: Expired) -> None:
        expired.listed.want(Want(ticket=1, identifier="listed"))
        answers: list[Event] = []

        def answered() -> bool:
            answers.extend(expired.listed.poll())
            return bool(answers)

        until(answered)
        expired.listed.release(1)
        assert answers == [Absent(1, MissReason.ABSENT)]
        counts = flat(expired.listed, expired.counted)
        assert counts["index_answers_absent"] == 0
        assert faults(counts) == 0

    def test_a_new_engine_finds_nothing(self, expired: Expired) -> None:
        config = ECConfig(url=expired.url, max_local_cpu_size="16MiB", blocking_timeout=60.0)
        with ECCacheEngine(config, NAMESPACE) as engine:
            assert engine.get_many(["hot", "cold", "listed"]) == [None] * 3
            assert engine.stats()["misses_absent"] == 3
            assert faults(engine.stats()) == 0

    def test_an_item_can_be_saved_again(self, expired: Expired) -> None:
        config = ECConfig(url=expired.url, max_local_cpu_size="16MiB", blocking_timeout=60.0)
        with ECCacheEngine(config, NAMESPACE) as engine:
            assert engine.get("again") is None
            assert engine.put("again", tensor(3))
            assert engine.flush(60).complete
            assert engine.stats()["uploads_written"] == 1
