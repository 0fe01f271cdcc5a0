"""What the roles may do is what the library does: its requests are recorded and compared."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import typer
from recorded_roles import (
    COMMANDS,
    ELSEWHERE,
    EXAMINATIONS,
    NO_REQUESTS,
    PREFIX,
    SPACE,
    WORK,
    Bucket,
    assert_enough,
    assert_exactly,
    examines,
    recording,
    run,
)

from ec_s3 import EncoderCache
from ec_s3.cli.app import app
from ec_s3.errors import ConfigError
from ec_s3.permissions import (
    OPERATIONS,
    Role,
    Scope,
    actions,
    bucket_policy,
    lifecycle,
    role_policy,
)
from ec_s3.url import S3Options, parse_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ec_s3.testing.moto import S3Server

KEY_ARN = "arn:aws:kms:eu-central-1:123456789012:key/0a1b"


def document(*arguments: str) -> dict[str, Any]:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def recorded(s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with recording(s3_server, bucket, monkeypatch) as made:
        yield made


def leaves() -> list[str]:
    """Every command, subcommands by both their names; one that also stands alone by its own."""
    found: list[str] = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]  # a group
        inner = getattr(command, "commands", {})
        if not inner or command.invoke_without_command:
            found.append(name)
        found += [f"{name} {one}" for one in inner]
    return found


def line_is(line: tuple[str, ...], command: str) -> bool:
    return " ".join(line[: command.count(" ") + 1]) == command


class TestLeastPrivilege:
    @pytest.mark.parametrize("role", list(Role))
    def test_a_role_may_do_what_it_does_and_nothing_else(
        self, recorded: Bucket, role: Role
    ) -> None:
        WORK[role](recorded)
        policy: Any = role_policy(role, Scope(bucket=recorded.name, prefix=PREFIX))
        assert_exactly(policy, role, recorded)

    def test_a_maintainer_may_run_the_doctor(self, recorded: Bucket) -> None:
        examines(recorded)
        policy: Any = role_policy(Role.MAINTAINER, Scope(bucket=recorded.name, prefix=PREFIX))
        assert "s3:DeleteObject" in assert_enough(policy, recorded)

    def test_every_command_is_recorded_for_a_role(self) -> None:
        lines = [line for done in COMMANDS.values() for line in done] + [*EXAMINATIONS]
        recorded = {command for line in lines for command in leaves() if line_is(line, command)}
        assert recorded | NO_REQUESTS | ELSEWHERE == set(leaves())

    def test_stored_tags_need_a_right_of_their_own(self, recorded: Bucket) -> None:
        async def work() -> None:
            config = recorded.config(tags="team=ml")
            async with EncoderCache(config, SPACE) as cache:
                await cache.put("small", torch.ones(8, 16, dtype=torch.bfloat16))
                await cache.flush(60)

        asyncio.run(work())
        tagged = [r for r in recorded.proxy.log if r.method == "PUT" and r.header("x-amz-tagging")]
        assert tagged
        config = recorded.config(tags="team=ml")
        scope = Scope.of(parse_url(recorded.url), config.s3_options())  # type: ignore[arg-type]  # s3://
        assert "s3:PutObjectTagging" in actions(Role.WRITER, scope)
        assert "s3:PutObjectTagging" not in actions(Role.READER, scope)

    def test_roles_differ_by_what_they_may_break(self) -> None:
        scope = Scope(bucket="b")
        rights = {role: set(actions(role, scope)) for role in Role}
        assert rights[Role.READER] == {"s3:GetObject", "s3:ListBucket"}
        assert rights[Role.PREWARM] == rights[Role.WRITER]
        assert "s3:DeleteObject" not in rights[Role.WRITER]
        assert rights[Role.WRITER] < rights[Role.MAINTAINER]

    def test_every_operation_has_a_role_and_a_purpose(self) -> None:
        assert all(o.roles and o.purpose and o.actions for o in OPERATIONS)
        assert len({o.request for o in OPERATIONS}) == len(OPERATIONS)


class TestDocuments:
    def test_a_role_is_limited_to_its_prefix(self) -> None:
        policy = document("--url", "s3://b/team/cache", "policy", "writer")
        objects, listing = policy["Statement"]
        assert objects["Resource"] == "arn:aws:s3:::b/team/cache/*"
        assert listing["Resource"] == "arn:aws:s3:::b"
        assert listing["Condition"] == {"StringLike": {"s3:prefix": ["team/cache/*"]}}

    def test_a_url_without_a_prefix_means_the_whole_bucket(self) -> None:
        objects, listing = document("--url", "s3://b", "policy", "reader")["Statement"]
        assert objects["Resource"] == "arn:aws:s3:::b/*"
        assert "Condition" not in listing

    @pytest.mark.parametrize("partition", ["aws-cn", "aws-us-gov"])
    def test_partitions_have_names_of_their_own(self, partition: str) -> None:
        given = ("--url", "s3://b/p", "policy", "--partition", partition)
        for name in ("maintainer", "bucket"):
            text = json.dumps(document(*given, name))
            assert f"arn:{partition}:s3:::b" in text
            assert "arn:aws:" not in text

    def test_a_key_may_be_used_through_s3_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EC_S3_SSE", "aws:kms")
        monkeypatch.setenv("EC_S3_SSE_KMS_KEY_ID", KEY_ARN)
        for role, wanted in {
            "reader": ["kms:Decrypt"],
            "writer": ["kms:Decrypt", "kms:GenerateDataKey"],
        }.items():
            key = document("--url", "s3://b/p", "policy", role)["Statement"][-1]
            assert key["Action"] == wanted
            assert key["Resource"] == KEY_ARN
            assert key["Condition"] == {"StringLike": {"kms:ViaService": "s3.*.amazonaws.com"}}

    def test_a_key_by_alias_is_refused_with_a_remedy(self) -> None:
        options = S3Options(sse="aws:kms", sse_kms_key_id="alias/cache")
        with pytest.raises(ConfigError, match="ARN"):
            Scope.of(parse_url("s3://b"), options)  # type: ignore[arg-type]  # s3://
        options = S3Options(sse="aws:kms", sse_kms_key_id="0a1b")
        scope = Scope.of(parse_url("s3://b"), options)  # type: ignore[arg-type]  # s3://
        assert scope.key == "arn:aws:kms:*:*:key/0a1b"

    def test_the_bucket_refuses_plain_http_old_tls_and_customers_keys(self) -> None:
        statements: Any = bucket_policy(Scope(bucket="b", prefix="p"))["Statement"]
        assert all(one["Effect"] == "Deny" and one["Principal"] == "*" for one in statements)
        conditions = [one["Condition"] for one in statements]
        assert {"Bool": {"aws:SecureTransport": "false"}} in conditions
        assert {"NumericLessThan": {"s3:TlsVersion": "1.2"}} in conditions
        customer = "s3:x-amz-server-side-encryption-customer-algorithm"
        assert {"Null": {customer: "false"}} in conditions

    def test_items_expire_and_the_kill_switch_does_not(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        items, uploads = document(
            "--url", "s3://b/p", "policy", "lifecycle", "--expire-days", "14"
        )["Rules"]
        assert items["Expiration"] == {"Days": 14}
        monkeypatch.setenv("EC_S3_OBJECT_LIFETIME", "7d")
        configured = document("--url", "s3://b/p", "policy", "lifecycle")["Rules"]
        assert configured[0]["Expiration"] == {"Days": 7}
        assert items["Filter"]["And"]["Prefix"] == "p/v1/"
        assert items["Filter"]["And"]["ObjectSizeGreaterThan"] >= 1000
        assert uploads["Filter"] == {}
        assert uploads["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
        with pytest.raises(ConfigError, match="days"):
            lifecycle(Scope(bucket="b"), days=0)

    def test_servers_take_the_documents(self, s3_server: S3Server, bucket: str) -> None:
        scope = Scope(bucket=bucket, prefix="p")
        client = s3_server.client()
        client.put_bucket_policy(Bucket=bucket, Policy=json.dumps(bucket_policy(scope)))
        rules: Any = lifecycle(scope, days=30)
        client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=rules)
        found = client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
        assert len(found) == 2
        client.close()


class TestCommand:
    def test_without_a_document_a_table_says_who_needs_what(self) -> None:
        result = run("--url", "s3://b/p", "policy")
        assert result.exit_code == 0
        assert "s3:DeleteObject" in result.stdout
        assert "maintainer" in result.stdout

    def test_programs_get_all_documents_at_once(self) -> None:
        found = document("--json", "--url", "s3://b/p", "policy")
        names = {"reader", "writer", "prewarm", "maintainer", "bucket", "lifecycle"}
        assert found.keys() == names
        assert found["reader"] == document("--url", "s3://b/p", "policy", "reader")
        assert run("--json", "--url", "s3://b/p", "policy", "reader").stdout.count("\n") == 1

    @pytest.mark.parametrize(
        "arguments",
        [
            ["policy", "reader"],
            ["--url", "file:///tmp/x", "policy", "reader"],
            ["--url", "s3://b/p", "policy", "owner"],
            ["--url", "s3://b/p", "policy", "reader", "--partition", "moon"],
            ["--url", "s3://b/p", "policy", "lifecycle", "--expire-days", "0"],
            ["--url", "s3://b--use1-az4--x-s3/p", "policy", "reader"],
            ["--url", "s3://bucket/team*", "policy", "reader"],
        ],
    )
    def test_what_has_no_such_rights_is_wrong_usage(self, arguments: list[str]) -> None:
        assert run(*arguments).exit_code == 2
