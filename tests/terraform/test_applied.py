"""A bucket that Terraform made serves the library, with Terraform's outputs as configuration."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from xml.etree import ElementTree

import boto3
import pytest
import torch
from botocore.exceptions import ClientError
from recorded_roles import SPACE, run
from terraform_runs import Workspace, remember_lifecycles

from ec_s3 import ECConfig, EncoderCache
from ec_s3.permissions import Role, Scope, bucket_policy, lifecycle, role_policy
from ec_s3.testing.moto import S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.terraform, pytest.mark.timeout(600)]  # a lifecycle rule takes a minute

HERE = Path(__file__).parent


class Applied:
    """What Terraform made, and the server that has it."""

    def __init__(self, server: S3Server, outputs: dict[str, Any], rules: bytes) -> None:
        self.server = server
        self.cache = outputs["cache"]
        self.role_arn = outputs["role_arn"]
        self.rules = ElementTree.fromstring(rules)

    def client(self, service: Any) -> Any:
        return boto3.client(
            service,
            endpoint_url=self.server.url,
            region_name="eu-west-1",
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )


@pytest.fixture(scope="module")
def applied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Applied]:
    """Applied, found unchanged by a second plan, and destroyed again in the end."""
    workspace = Workspace(tmp_path_factory.mktemp("applied"))
    shutil.copytree(HERE / "applied", workspace.folder / "applied")
    workspace.init("applied")
    with S3Server() as server:
        lifecycles = remember_lifecycles(server)
        outputs = workspace.apply("applied", server=server.url)
        made = Applied(server, outputs, lifecycles["/encoder-cache"])
        given = ("-input=false", "-no-color", f"-var=server={server.url}")
        workspace.run("applied", "plan", "-detailed-exitcode", *given)  # 2 where it would change
        yield made
        workspace.run("applied", "destroy", "-auto-approve", *given)
        client = made.client("s3")
        assert client.list_buckets()["Buckets"] == []
        client.close()


@pytest.fixture
def opened(applied: Applied) -> Iterator[Applied]:
    """Without the bucket's policy: moto denies whatever a condition says, TLS or not."""
    client = applied.client("s3")
    policy = client.get_bucket_policy(Bucket="encoder-cache")["Policy"]
    client.delete_bucket_policy(Bucket="encoder-cache")
    yield applied
    client.put_bucket_policy(Bucket="encoder-cache", Policy=policy)
    client.close()


def test_a_bucket_that_may_not_be_destroyed_keeps_its_key(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    shutil.copytree(HERE / "applied", tmp_path / "applied")
    main = tmp_path / "applied/main.tf"
    main.write_text(re.sub(r"(force_destroy +)= true", r"\1= false", main.read_text()))
    workspace.init("applied")
    with S3Server() as server:
        given = ("-auto-approve", "-input=false", "-no-color", f"-var=server={server.url}")
        parts = ("aws_s3_bucket", "aws_s3_bucket_server_side_encryption_configuration")
        targets = [f"-target=module.cache.{part}.this" for part in parts]
        workspace.run("applied", "apply", *given, *targets)
        made = Applied(server, {"cache": {}, "role_arn": ""}, b"<none/>")
        s3, kms = made.client("s3"), made.client("kms")
        s3.put_object(Bucket="encoder-cache", Key="item", Body=b"x")
        assert "BucketNotEmpty" in workspace.fails("applied", "destroy", *given)
        (key,) = kms.list_keys()["Keys"]
        assert kms.describe_key(KeyId=key["KeyId"])["KeyMetadata"]["KeyState"] == "Enabled"
        s3.delete_object(Bucket="encoder-cache", Key="item")
        workspace.run("applied", "destroy", *given)  # the servers of one process share their state
        for client in (s3, kms):
            client.close()


def test_the_bucket_refuses_plain_http(applied: Applied) -> None:
    client = applied.client("s3")
    with pytest.raises(ClientError, match=r"403|Forbidden|AccessDenied"):
        client.put_object(Bucket="encoder-cache", Key="team/cache/v1/x", Body=b"")
    client.close()


async def test_the_library_runs_on_the_bucket(
    opened: Applied, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", opened.server.url)
    for name, value in opened.cache["environment"]["writer"].items():
        monkeypatch.setenv(name, value)
    config = ECConfig(max_local_cpu_size=64 << 20)
    assert config.object_lifetime == 14 * 86400
    tensor = torch.ones(8, 16, dtype=torch.bfloat16)
    async with EncoderCache(config, SPACE) as cache:
        await cache.put("picture", tensor)
        assert (await cache.flush(60)).complete
    monkeypatch.delenv("EC_S3_OBJECT_LIFETIME")
    monkeypatch.setenv("EC_S3_URL", opened.cache["environment"]["reader"]["EC_S3_URL"])
    async with EncoderCache(ECConfig(max_local_cpu_size=64 << 20), SPACE) as cache:
        found = await cache.get("picture")
        assert found is not None
        assert torch.equal(found, tensor)
    client = opened.client("s3")
    listed = client.list_objects_v2(Bucket="encoder-cache", Prefix="team/cache/v1/")["Contents"]
    head = client.head_object(Bucket="encoder-cache", Key=listed[0]["Key"])
    assert head["ServerSideEncryption"] == "aws:kms"  # by the bucket's default
    client.close()


def test_the_doctor_finds_nothing_wrong(opened: Applied, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", opened.server.url)
    monkeypatch.setenv("EC_S3_URL", opened.cache["cache_url"])
    result = run("doctor")
    assert result.exit_code == 0, result.output


def test_what_was_made_is_what_the_library_says(applied: Applied) -> None:
    scope = Scope(
        bucket="encoder-cache", prefix="team/cache", tagged=True, key=applied.cache["kms_key_arn"]
    )
    s3, iam = applied.client("s3"), applied.client("iam")
    policy = json.loads(s3.get_bucket_policy(Bucket=scope.bucket)["Policy"])
    assert policy == bucket_policy(Scope(bucket=scope.bucket))
    for role in Role:
        arn = applied.cache["policy_arns"][role]
        document = iam.get_policy_version(PolicyArn=arn, VersionId="v1")["PolicyVersion"]
        assert document["Document"] == role_policy(role, scope)
    public = s3.get_public_access_block(Bucket=scope.bucket)["PublicAccessBlockConfiguration"]
    assert all(public.values())
    (rule,) = s3.get_bucket_encryption(Bucket=scope.bucket)["ServerSideEncryptionConfiguration"][
        "Rules"
    ]
    assert rule["BucketKeyEnabled"]
    assert rule["ApplyServerSideEncryptionByDefault"]["KMSMasterKeyID"] == scope.key
    (owner,) = s3.get_bucket_ownership_controls(Bucket=scope.bucket)["OwnershipControls"]["Rules"]
    assert owner["ObjectOwnership"] == "BucketOwnerEnforced"
    s3.close()
    iam.close()


def test_the_lifecycle_that_was_sent_is_what_the_library_says(applied: Applied) -> None:
    space = "{http://s3.amazonaws.com/doc/2006-03-01/}"

    def text(rule: ElementTree.Element, path: str) -> str | None:
        return rule.findtext("/".join(space + part for part in path.split("/")))

    wanted: Any = lifecycle(Scope(bucket="encoder-cache", prefix="team/cache"), days=14)["Rules"]
    items, other, uploads = applied.rules.findall(f"{space}Rule")
    for rule, prefix, days in ((items, "team/cache/v1/", 14), (other, "other/v1/", 7)):
        assert text(rule, "Status") == "Enabled"
        assert text(rule, "Filter/And/Prefix") == prefix
        size = text(rule, "Filter/And/ObjectSizeGreaterThan")
        assert size == str(wanted[0]["Filter"]["And"]["ObjectSizeGreaterThan"])
        assert text(rule, "Expiration/Days") == str(days)
    assert text(uploads, "Status") == "Enabled"
    assert not text(uploads, "Filter/Prefix")  # said, and empty: the whole bucket
    assert uploads.find(f"{space}Filter/{space}And") is None
    assert text(uploads, "AbortIncompleteMultipartUpload/DaysAfterInitiation") == "1"


def test_a_role_is_trusted_to_its_service_account(applied: Applied) -> None:
    iam = applied.client("iam")
    role = iam.get_role(RoleName="encoder-cache-server")["Role"]
    assert role["Arn"] == applied.role_arn
    document = role["AssumeRolePolicyDocument"]
    (statement,) = (document if isinstance(document, dict) else json.loads(unquote(document)))[
        "Statement"
    ]
    assert statement["Action"] == ["sts:AssumeRoleWithWebIdentity"]
    attached = iam.list_attached_role_policies(RoleName="encoder-cache-server")["AttachedPolicies"]
    assert [one["PolicyArn"] for one in attached] == [applied.cache["policy_arns"]["writer"]]
    iam.close()
