"""What Terraform makes of the policies: the library's own documents, enough for its requests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from recorded_roles import PREFIX, WORK, Bucket, assert_enough, assert_exactly, examines, recording
from terraform_runs import Workspace

from ec_s3.permissions import Role, Scope, bucket_policy, lifecycle, role_policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ec_s3.testing.moto import S3Server

pytestmark = pytest.mark.terraform

KEY = "arn:aws:kms:eu-west-1:123456789012:key/0a1b"
SCOPES = (
    Scope(bucket="encoder-cache"),
    Scope(bucket="encoder-cache", prefix="team/cache"),
    Scope(bucket="encoder-cache", prefix="ec", tagged=True, key=KEY),
    Scope(bucket="encoder-cache", prefix="ec", partition="aws-cn", key=KEY),
)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("policies"))
    made.init("terraform/modules/policies")
    return made


def rendered(workspace: Workspace, scope: Scope) -> dict[str, Any]:
    return workspace.apply(
        "terraform/modules/policies",
        bucket=scope.bucket,
        prefix=scope.prefix,
        partition=scope.partition,
        tagged=scope.tagged,
        key_arn=scope.key,
    )


@pytest.mark.parametrize("scope", SCOPES, ids=lambda s: f"{s.prefix or 'bucket'}-{s.partition}")
def test_documents_are_those_of_the_command(policies: Workspace, scope: Scope) -> None:
    made = rendered(policies, scope)
    assert made["role_policies"].keys() == set(Role)
    for role in Role:
        assert json.loads(made["role_policies"][role]) == role_policy(role, scope)
    whole = Scope(bucket=scope.bucket, partition=scope.partition)
    assert json.loads(made["bucket_policy"]) == bucket_policy(whole)
    items: Any = lifecycle(scope, days=1)
    assert made["items_prefix"] == items["Rules"][0]["Filter"]["And"]["Prefix"]


@pytest.fixture
def recorded(s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with recording(s3_server, bucket, monkeypatch) as made:
        yield made


@pytest.mark.parametrize("role", list(Role))
def test_a_role_may_do_what_it_does_and_nothing_else(
    policies: Workspace, recorded: Bucket, role: Role
) -> None:
    made = rendered(policies, Scope(bucket=recorded.name, prefix=PREFIX))
    WORK[role](recorded)
    assert_exactly(json.loads(made["role_policies"][role]), role, recorded)


def test_a_maintainer_may_run_the_doctor(policies: Workspace, recorded: Bucket) -> None:
    made = rendered(policies, Scope(bucket=recorded.name, prefix=PREFIX))
    examines(recorded)
    assert_enough(json.loads(made["role_policies"][Role.MAINTAINER]), recorded)
