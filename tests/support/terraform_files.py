"""The Terraform modules as Python sees them: parsed files, and rules that hold for all of them.

Rules take the folder to look at, so that a test can break a copy of it and see them fail.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hcl2

from ec_s3.permissions import OPERATIONS, SPARED_BYTES, TAGGING, Role, Scope, bucket_policy
from ec_s3.permissions import lifecycle as lifecycle_document

if TYPE_CHECKING:
    from collections.abc import Iterator

TERRAFORM = Path(__file__).parents[2] / "terraform"
MODULES = (".", "modules/policies", "modules/eks-identity", "modules/express", "modules/minio")
EXAMPLES = tuple(f"examples/{name}" for name in ("minimal", "eks", "express", "minio", "complete"))

_QUOTED = re.compile(r'"(.*)"', re.DOTALL)
_REFERENCE = re.compile(r"\$\{([^}]*)\}")


# -- reading ---------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Without the parser's quotes, comments and marks."""
    if isinstance(value, dict):
        return {
            _plain(key): _plain(inner) for key, inner in value.items() if not key.startswith("__")
        }
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, str) and (found := _QUOTED.fullmatch(value)):
        return found[1].replace('\\"', '"')
    return value


@cache
def _parsed(text: str) -> dict[str, Any]:
    found: dict[str, Any] = _plain(hcl2.loads(text))
    return found


def parsed(file: Path) -> dict[str, Any]:
    """What a file says; shared between callers, so nobody changes it."""
    return _parsed(file.read_text())


@dataclass(frozen=True)
class Module:
    """The files of one folder, taken together."""

    folder: Path

    def entries(self, kind: str) -> list[Any]:
        files = sorted(self.folder.glob("*.tf"))
        assert files, f"{self.folder} holds no module"
        return [entry for file in files for entry in parsed(file).get(kind, [])]

    def named(self, kind: str) -> dict[str, dict[str, Any]]:
        """Blocks with one label: variable, output, module."""
        return {name: body for entry in self.entries(kind) for name, body in entry.items()}

    def resources(self, kind: str = "resource") -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Type, name and body."""
        for entry in self.entries(kind):
            for form, instances in entry.items():
                for name, body in instances.items():
                    yield form, name, body

    def resource(self, form: str) -> dict[str, Any]:
        found = [body for kind, _, body in self.resources() if kind == form]
        assert len(found) == 1, f"{self.folder}: {len(found)} of {form}"
        return found[0]

    def local(self, name: str) -> Any:
        found = [entry[name] for entry in self.entries("locals") if name in entry]
        assert len(found) == 1, f"{self.folder}: {len(found)} locals {name}"
        return found[0]


def rendered(value: Any, names: dict[str, str]) -> Any:
    """A literal with its references replaced; what no name stands for is an error."""
    if isinstance(value, dict):
        return {key: rendered(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [rendered(inner, names) for inner in value]
    if isinstance(value, str):
        return _REFERENCE.sub(lambda found: names[found[1]], value)
    return value


# -- rules -----------------------------------------------------------------------------------


def actions_are_those_of_the_table(root: Path) -> None:
    """Each role's actions, by kind, against the library's own table."""
    policies = Module(root / "modules/policies")
    granted = {
        role: {
            *policies.local("object_actions")[role],
            *policies.local("list_actions")[role],
            *policies.local("upload_actions")[role],
        }
        for role in Role
    }
    needed = {
        role: {action for o in OPERATIONS if role in o.roles for action in o.actions}
        for role in Role
    }
    assert granted == needed
    tagging = {role: set(policies.local("tag_actions")[role]) for role in Role}
    assert tagging == {r: set(TAGGING.actions if r in TAGGING.roles else ()) for r in Role}
    for name in ("object_actions", "list_actions", "upload_actions", "tag_actions", "key_actions"):
        table = policies.local(name)
        assert set(table) == set(Role), f"{name} forgets a role, or invents one"
        for role, actions in table.items():
            assert actions == sorted(set(actions)), f"{name}.{role} is out of order"
    on_bucket = {"s3:ListBucket", "s3:ListBucketMultipartUploads"}
    for role in Role:
        assert not on_bucket & set(policies.local("object_actions")[role])
        assert set(policies.local("list_actions")[role]) <= {"s3:ListBucket"}
        writes = role is not Role.READER
        expected = ["kms:Decrypt", "kms:GenerateDataKey"] if writes else ["kms:Decrypt"]
        assert policies.local("key_actions")[role] == expected


def the_bucket_denies_what_the_library_says(root: Path) -> None:
    """The bucket's policy, rendered, is that of `ec-s3 policy bucket`."""
    policies = Module(root / "modules/policies")
    names = {"var.bucket": "b", "var.partition": "aws"}
    names["local.bucket_arn"] = rendered(policies.local("bucket_arn"), names)
    statements = rendered(policies.local("deny_statements"), names)
    assert statements == bucket_policy(Scope(bucket="b"))["Statement"]
    assert Module(root).resource("aws_s3_bucket_policy")["policy"] == (
        "${module.policies.bucket_policy}"
    )


def a_directory_bucket_denies_plain_http_and_old_tls(root: Path) -> None:
    express = Module(root / "modules/express")
    http, tls, expire = express.local("bucket_statements")
    for statement in (http, tls):
        assert (statement["Effect"], statement["Principal"]) == ("Deny", "*")
        assert statement["Action"] == "s3express:*"
        assert statement["Resource"] == ["${local.arn}"]
    assert http["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert tls["Condition"] == {"NumericLessThan": {"s3express:TlsVersion": "1.2"}}
    assert expire["Effect"] == "Allow"
    assert expire["Principal"] == {"Service": "lifecycle.s3.amazonaws.com"}
    assert express.local("session_modes") == {
        role: ["ReadOnly"] if role is Role.READER else ["ReadWrite"] for role in Role
    }


def items_expire_and_unfinished_uploads_go(root: Path) -> None:
    """The lifecycle of both kinds of buckets is that of `ec-s3 policy lifecycle`."""
    wanted: Any = lifecycle_document(Scope(bucket="b"), days=1)["Rules"]
    for folder, size in (
        (root, "${local.spared_bytes - 1}"),
        (root / "modules/express", SPARED_BYTES - 1),
    ):
        module = Module(folder)
        configuration = module.resource("aws_s3_bucket_lifecycle_configuration")
        items, uploads = configuration["rule"]
        assert [items["id"], uploads["id"]] == [rule["ID"] for rule in wanted]
        assert [items["status"], uploads["status"]] == [rule["Status"] for rule in wanted]
        (limits,) = items["filter"][0]["and"]
        assert limits["object_size_greater_than"] == size
        assert limits["prefix"].endswith(("items_prefix}", "}v1/"))
        assert items["expiration"] == [{"days": "${var.expire_days}"}]
        days = wanted[1]["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"]
        assert uploads["filter"] == [{}], "a prefix would leave parts of uploads elsewhere"
        assert uploads["abort_incomplete_multipart_upload"] == [{"days_after_initiation": days}]
    assert Module(root).local("spared_bytes") == SPARED_BYTES
    further = Module(root).resource("aws_s3_bucket_lifecycle_configuration")["dynamic"]
    (content,) = further[0]["rule"]["content"]
    assert further[0]["rule"]["for_each"] == "${var.further_prefixes}"
    assert content["status"] == "Enabled"
    assert content["expiration"] == [{"days": "${rule.value}"}]
    assert content["filter"][0]["and"] == [
        {"prefix": "${rule.key}/v1/", "object_size_greater_than": "${local.spared_bytes - 1}"}
    ]
    assert Module(root / "modules/minio").resource("minio_ilm_policy")["rule"] == [
        {
            "id": "ec-s3-items",
            "expiration": "${var.expire_days}d",
            "filter": "${module.policies.items_prefix}",
        }
    ]


def the_bucket_is_private_and_encrypted(root: Path) -> None:
    module = Module(root)
    block = module.resource("aws_s3_bucket_public_access_block")
    switches = ("block_public_acls", "block_public_policy", "ignore_public_acls")
    assert all(block[name] is True for name in (*switches, "restrict_public_buckets"))
    (owner,) = module.resource("aws_s3_bucket_ownership_controls")["rule"]
    assert owner == {"object_ownership": "BucketOwnerEnforced"}
    (rule,) = module.resource("aws_s3_bucket_server_side_encryption_configuration")["rule"]
    assert rule["bucket_key_enabled"] == '${var.encryption == "kms"}'
    assert module.resource("aws_kms_key")["enable_key_rotation"] is True
    # Destroyed after the bucket, so not at all where the bucket stays.
    assert module.resource("aws_s3_bucket")["depends_on"] == ["${aws_kms_key.this}"]
    forms = {form for form, _, _ in module.resources()}
    assert not forms & {"aws_s3_bucket_acl", "aws_s3_bucket_versioning"}
    waits = module.resource("aws_s3_bucket_policy")["depends_on"]
    assert "${aws_s3_bucket_public_access_block.this}" in waits


def inputs_are_typed_described_and_checked(root: Path) -> None:
    for folder in MODULES:
        variables = Module(root / folder).named("variable")
        for name, body in variables.items():
            where = f"{folder}: variable {name}"
            assert body.get("description", "").endswith((".", ")")), f"{where} is not described"
            assert body.get("type", "any") != "any", f"{where} has no type"
            absent = "default" in body and body["default"] is None
            absent = absent or body.get("default") == "null"
            assert body.get("nullable") is False or absent, f"{where} takes null"
            for check in body.get("validation", []):
                text = check["error_message"]
                assert text.startswith(f"{name}: "), f"{where}: the message does not name it"
                assert text.endswith("."), where
                assert len(re.split(r"[;(,]| must | needs? ", text)) > 1, f"{where}: no remedy"
        for name, body in Module(root / folder).named("output").items():
            assert body.get("description"), f"{folder}: output {name} is not described"
    for folder in EXAMPLES:
        example = Module(root / folder)
        assert not example.named("variable"), f"{folder} is no example, but a module"
        assert (root / folder / "README.md").is_file()
        for name, body in example.named("output").items():
            assert body.get("description"), f"{folder}: output {name} is not described"


def modules_take_and_give_the_same(root: Path) -> None:
    """Express and MinIO are changed to by changing the source."""
    shared_inputs = {"bucket_name", "prefix", "expire_days", "force_destroy", "roles", "tags"}
    shared_outputs = {
        "bucket_name",
        "bucket_arn",
        "cache_url",
        "environment",
        "policy_arns",
        "policy_documents",
    }
    for folder in (".", "modules/express", "modules/minio"):
        module = Module(root / folder)
        assert shared_inputs <= module.named("variable").keys(), folder
        assert shared_outputs <= module.named("output").keys(), folder


def what_can_be_tagged_is(root: Path) -> None:
    taggable = {
        "aws_s3_bucket",
        "aws_kms_key",
        "aws_iam_policy",
        "aws_iam_role",
        "aws_vpc_endpoint",
        "aws_cloudwatch_metric_alarm",
        "aws_eks_pod_identity_association",
        "minio_iam_user",
    }
    for folder in MODULES:
        for form, name, body in Module(root / folder).resources():
            assert name == "this", f"{folder}: {form}.{name}; a module's only one is called this"
            if form in taggable:
                assert "var.tags" in body.get("tags", ""), f"{folder}: {form} has no tags"


def roles_are_trusted_to_one_service_account(root: Path) -> None:
    trust = Module(root / "modules/eks-identity").local("trust")
    assert trust["pod_identity"]["Action"] == ["sts:AssumeRole", "sts:TagSession"]
    assert trust["pod_identity"]["Principal"] == {"Service": "pods.eks.amazonaws.com"}
    assert trust["pod_identity"]["Condition"] == {
        "StringEquals": {
            "aws:RequestTag/eks-cluster-arn": "${var.cluster_arn}",
            "aws:RequestTag/kubernetes-namespace": "${var.namespace}",
            "aws:RequestTag/kubernetes-service-account": "${var.service_account}",
        }
    }
    assert trust["irsa"]["Action"] == ["sts:AssumeRoleWithWebIdentity"]
    assert trust["irsa"]["Condition"] == {
        "StringEquals": {
            "${local.issuer}:aud": "sts.amazonaws.com",
            "${local.issuer}:sub": (
                "system:serviceaccount:${var.namespace}:${var.service_account}"
            ),
        }
    }


def policies_are_where_they_belong(root: Path) -> None:
    """Each role gets its own policy, the endpoint its own, and MinIO's rule has its bucket."""
    for folder, form in ((".", "aws_iam_policy"), ("modules/minio", "minio_iam_policy")):
        policy = Module(root / folder).resource(form)
        assert policy["policy"] == "${module.policies.role_policies[each.key]}"
        assert policy["for_each"] == "${var.roles}"
    endpoint = Module(root).resource("aws_vpc_endpoint")
    assert endpoint["policy"] == "${module.policies.endpoint_policy}"
    express = Module(root / "modules/express")
    document = express.resource("aws_iam_policy")["policy"]
    assert "Statement = local.role_statements[each.key]" in re.sub(r'["$]', "", document)
    bucket = express.resource("aws_s3_bucket_policy")["policy"]
    assert "Statement = local.bucket_statements" in re.sub(r'["$]', "", bucket)
    attachment = Module(root / "modules/eks-identity").resource("aws_iam_role_policy_attachment")
    assert attachment["policy_arn"] == "${var.policy_arn}"
    user = Module(root / "modules/minio").resource("minio_iam_user_policy_attachment")
    assert user["policy_name"] == "${minio_iam_policy.this[each.key].name}"
    assert user["user_name"] == "${minio_iam_user.this[each.key].name}"
    rule = Module(root / "modules/minio").resource("minio_ilm_policy")
    assert rule["bucket"] == "${minio_s3_bucket.this.bucket}"


_META = {"count", "for_each", "depends_on", "dynamic", "provider", "lifecycle"}
_FREE = {"tags", "dimensions"}  # maps whose keys are the user's


def names_are_known(root: Path, schema: dict[str, list[str]]) -> None:
    """Every argument and block of a resource is one that the provider's newest schema has."""

    def walk(body: dict[str, Any], known: set[str], where: str) -> None:
        for name, value in body.items():
            if name == "dynamic":
                for entry in value:
                    for block, inner in entry.items():
                        assert block in known, f"{where}: unknown block {block}"
                        for content in inner["content"]:
                            walk(content, known, f"{where}.{block}")
                continue
            assert name in known or name in _META, f"{where}: unknown name {name}"
            for inner in value if isinstance(value, list) and name not in _FREE else ():
                if isinstance(inner, dict):
                    walk(inner, known, f"{where}.{name}")

    for folder in (*MODULES, *EXAMPLES):
        for kind, prefix in (("resource", ""), ("data", "data.")):
            for form, name, body in Module(root / folder).resources(kind):
                where = f"{folder}: {prefix}{form}.{name}"
                assert prefix + form in schema, f"{where}: unknown type"
                walk(body, set(schema[prefix + form]), where)


def newest_names() -> dict[str, list[str]]:
    """Types that the modules use, with the names that the newest providers know for them."""
    text = (Path(__file__).parents[1] / "terraform/provider_names.json").read_text()
    found: dict[str, list[str]] = json.loads(text)["types"]
    return found


RULES = (
    actions_are_those_of_the_table,
    the_bucket_denies_what_the_library_says,
    a_directory_bucket_denies_plain_http_and_old_tls,
    items_expire_and_unfinished_uploads_go,
    the_bucket_is_private_and_encrypted,
    inputs_are_typed_described_and_checked,
    modules_take_and_give_the_same,
    what_can_be_tagged_is,
    roles_are_trusted_to_one_service_account,
    policies_are_where_they_belong,
)
"""Those that need no schema; each raises AssertionError where it does not hold."""
