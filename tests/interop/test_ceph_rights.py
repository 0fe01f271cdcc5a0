"""Rights and expiry.

What docs/how-to/ceph.md says of them.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.exceptions import ClientError

from ec_s3.permissions import Role, Scope, bucket_policy, lifecycle, role_policy
from ec_s3.testing.servers import running
from ec_s3.testing.servers.fixtures import require

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ec_s3.testing.servers import Keys
    from ec_s3.testing.servers.ceph import Ceph

pytestmark = [
    pytest.mark.interop,
    pytest.mark.parametrize("real_server", ["ceph"], indirect=True),
]

DAY_SECONDS = 5


def client(server: Ceph, keys: Keys) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=keys.access_key,
        aws_secret_access_key=keys.secret_key,
        region_name="default",
    )


def answer(client: Any, operation: str, **given: object) -> str:
    """S3's code of a refusal; empty where it does what is asked."""
    try:
        getattr(client, operation)(**given)
    except ClientError as error:
        code: str = error.response["Error"]["Code"]
        return code
    return ""


@pytest.fixture
def owner(real_server: Ceph, real_bucket: str) -> Iterator[Any]:
    found = real_server.client()
    found.put_object(Bucket=real_bucket, Key="ec/there", Body=b"1")
    yield found
    found.close()


def test_a_user_that_only_reads_is_told_what_is_absent(
    real_server: Ceph, real_bucket: str, owner: Any
) -> None:
    reader = client(real_server, real_server.add_user("readsonly", read_only=True))
    assert not answer(reader, "get_object", Bucket=real_bucket, Key="ec/there")
    assert answer(reader, "get_object", Bucket=real_bucket, Key="ec/absent") == "NoSuchKey"
    assert (
        answer(reader, "put_object", Bucket=real_bucket, Key="ec/new", Body=b"") == "AccessDenied"
    )


@pytest.mark.parametrize("conditional", [True, False])
def test_a_role_for_another_user_must_not_depend_on_a_prefix(
    real_server: Ceph, real_bucket: str, owner: Any, *, conditional: bool
) -> None:
    name = f"reader-{conditional}".lower()
    policy: Any = role_policy(Role.READER, Scope(bucket=real_bucket, prefix="ec"))
    for statement in policy["Statement"]:
        statement["Principal"] = {"AWS": [f"arn:aws:iam:::user/{name}"]}
        if not conditional:
            statement.pop("Condition", None)
    reader = client(real_server, real_server.add_stranger(name))
    owner.put_bucket_policy(Bucket=real_bucket, Policy=json.dumps(policy))
    assert not answer(reader, "get_object", Bucket=real_bucket, Key="ec/there")
    assert not answer(reader, "list_objects_v2", Bucket=real_bucket, Prefix="ec/")
    absent = answer(reader, "get_object", Bucket=real_bucket, Key="ec/absent")
    assert absent == ("AccessDenied" if conditional else "NoSuchKey")


def test_the_policy_of_the_bucket_is_not_for_ceph(real_bucket: str, owner: Any) -> None:
    statements: Any = bucket_policy(Scope(bucket=real_bucket, prefix="ec"))["Statement"]
    refused = {}
    for statement in statements:
        document = {"Version": "2012-10-17", "Statement": [statement]}
        owner.put_bucket_policy(Bucket=real_bucket, Policy=json.dumps(document))
        put = answer(owner, "put_object", Bucket=real_bucket, Key="ec/new", Body=b"")
        refused[statement["Sid"]] = put
        owner.delete_bucket_policy(Bucket=real_bucket)
    assert refused == {"DenyPlainHttp": "", "DenyOldTls": "", "DenyCustomerKeys": "AccessDenied"}


def test_small_objects_expire_with_the_large_ones(real_server: Ceph, tmp_path: Path) -> None:
    require("ceph")
    with running("ceph", tmp_path, lifecycle_day_seconds=DAY_SECONDS) as server:
        bucket, owner = server.new_bucket(), server.client()
        rules: Any = lifecycle(Scope(bucket=bucket, prefix="ec"), days=1)
        owner.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=rules)
        kept = owner.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"][0]["Filter"]
        assert kept == {"Prefix": "ec/v1/"}  # the size is gone
        for key in ("ec/v1/small", "ec/v1/large", "ec/else"):
            owner.put_object(Bucket=bucket, Key=key, Body=b"1" * (9000 if "large" in key else 1))
        deadline = time.monotonic() + 60
        left = ["ec/v1/small"]
        while left != ["ec/else"]:
            assert time.monotonic() < deadline, left
            left = [one["Key"] for one in owner.list_objects_v2(Bucket=bucket)["Contents"]]
        owner.close()
