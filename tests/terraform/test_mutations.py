"""Each deny statement, lifecycle rule and action is broken once in a copy, and a rule notices."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from terraform_files import RULES, TERRAFORM, Module, actions_are_those_of_the_table

from ec_s3 import permissions
from ec_s3.permissions import OPERATIONS, Operation, Role

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A change of one file: of the text between `after` and the next blank line or block."""

    name: str
    file: str
    old: str
    new: str
    after: str = ""

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        start = text.index(self.after)
        place = text.index(self.old, start)
        path.write_text(text[:place] + self.new + text[place + len(self.old) :])


POLICIES = "modules/policies/main.tf"
EXPRESS = "modules/express/main.tf"
MINIO = "modules/minio/main.tf"
KINDS = ("object_actions", "list_actions", "upload_actions", "tag_actions", "key_actions")


def actions() -> Iterator[Mutant]:
    """Each action of each role taken away, and made a pattern; and one given to a reader."""
    module = Module(TERRAFORM / "modules/policies")
    for kind in KINDS:
        for role, granted in module.local(kind).items():
            line = next(
                line
                for line in (TERRAFORM / POLICIES).read_text().split(f"{kind} = {{")[1].split("\n")
                if re.match(rf"\s+{role}\s", line)
            )
            for action in granted:
                taken = re.sub(rf'"{re.escape(action)}"(, )?', "", line).replace(", ]", "]")
                wider = line.replace(f'"{action}"', f'"{action.partition(":")[0]}:*"')
                after = f"{kind} = {{"
                yield Mutant(f"{kind}-{role}-no-{action}", POLICIES, line, taken, after)
                yield Mutant(f"{kind}-{role}-wider-{action}", POLICIES, line, wider, after)
    reader = '    reader     = ["s3:GetObject"]'
    more = reader.replace("]", ', "s3:PutObject"]')
    yield Mutant("reader-may-write", POLICIES, reader, more, "object_actions")


def denials() -> Iterator[Mutant]:
    """Each deny statement allowed, for nobody, elsewhere, under another condition, and gone."""
    for file, sids in (
        (POLICIES, ("DenyPlainHttp", "DenyOldTls", "DenyCustomerKeys")),
        (EXPRESS, ("DenyPlainHttp", "DenyOldTls")),
    ):
        text = (TERRAFORM / file).read_text()
        for sid in sids:
            after = f'"{sid}"'
            name = f"{file.split('/')[1]}-{sid}"
            end = text.index("    },", text.index(after))
            start = text.rindex("    {\n", 0, text.index(after))
            yield Mutant(f"{name}-gone", file, text[start : end + 7], "")
            yield Mutant(f"{name}-allowed", file, '"Deny"', '"Allow"', after)
            yield Mutant(f"{name}-principal", file, '"*"', '"nobody"', after)
            body = text[start:end]
            condition = next(line for line in body.split("\n") if "Condition" in line)
            value = re.findall(r'"([^"]*)"', condition)[-1]
            other = {"false": "true", "1.2": "1.0"}[value]
            broken = condition.replace(f'"{value}"', f'"{other}"')
            yield Mutant(f"{name}-condition", file, condition, broken, after)
            action = next(line for line in body.split("\n") if "Action" in line)
            narrower = re.sub(r':[^"]*"', ':Nothing"', action)
            yield Mutant(f"{name}-action", file, action, narrower, after)
            resource = next(line for line in body.split("\n") if "Resource" in line)
            elsewhere = re.sub(r"\[.*\]", '["elsewhere"]', resource)
            yield Mutant(f"{name}-resource", file, resource, elsewhere, after)
    yield Mutant(
        "bucket-without-policy", "main.tf", "module.policies.bucket_policy", "local.nothing"
    )
    yield Mutant("express-reader-writes", EXPRESS, '["ReadOnly"]', '["ReadWrite"]')
    yield Mutant(
        "express-rules-cannot-delete", EXPRESS, '"Allow"', '"Deny"', 'Sid       = "Expire"'
    )


def lifecycles() -> Iterator[Mutant]:
    """Each rule switched off, given other numbers, another filter, and gone."""
    for file in ("main.tf", EXPRESS):
        name = "root" if file == "main.tf" else "express"
        text = (TERRAFORM / file).read_text()
        for rule in ("ec-s3-items", "ec-s3-unfinished-uploads"):
            after = f'= "{rule}"'
            start = text.rindex("  rule {\n", 0, text.index(after))
            end = text.index("\n  }\n", start)
            yield Mutant(f"{name}-{rule}-gone", file, text[start : end + 5], "")
            yield Mutant(f"{name}-{rule}-off", file, '"Enabled"', '"Disabled"', after)
        items, uploads = '= "ec-s3-items"', '= "ec-s3-unfinished-uploads"'
        yield Mutant(f"{name}-days", file, "= var.expire_days", "= 3650", items)
        size = re.findall(r"object_size_greater_than = (.*?)(?: #.*)?\n", text)[0]
        yield Mutant(f"{name}-kill-switch-expires", file, size, "0", items)
        prefix = re.findall(r"prefix +=.*", text[text.index(items) :])[0]
        yield Mutant(f"{name}-prefix", file, prefix, 'prefix = "elsewhere/"', items)
        yield Mutant(
            f"{name}-uploads-stay",
            file,
            "days_after_initiation = 1",
            "days_after_initiation = 90",
            uploads,
        )
        yield Mutant(
            f"{name}-uploads-elsewhere", file, "filter {}", 'filter {\n prefix = "x"\n }', uploads
        )
    further = '= "ec-s3-items-${rule.key}"'
    yield Mutant("further-off", "main.tf", '"Enabled"', '"Disabled"', further)
    yield Mutant("further-days", "main.tf", "= rule.value", "= 3650", further)
    yield Mutant("further-prefix", "main.tf", '"${rule.key}/v1/"', '"${rule.key}/"', further)
    yield Mutant("further-none", "main.tf", "for_each = var.further_prefixes", "for_each = {}")
    yield Mutant("spared", "main.tf", "spared_bytes = 4096", "spared_bytes = 1")
    yield Mutant("minio-days", MINIO, '"${var.expire_days}d"', '"3650d"')
    yield Mutant("minio-prefix", MINIO, "module.policies.items_prefix", '"elsewhere/"')


def attachments() -> Iterator[Mutant]:
    """Each policy put in the place of another, or nowhere."""
    of_role, widest = "role_policies[each.key]", 'role_policies["maintainer"]'
    yield Mutant("role-gets-anothers", "iam.tf", of_role, widest)
    yield Mutant("minio-role-gets-anothers", MINIO, of_role, widest)
    yield Mutant(
        "minio-user-gets-anothers", MINIO, "minio_iam_policy.this[each.key]", "x", "policy_name"
    )
    yield Mutant("minio-rule-elsewhere", MINIO, "minio_s3_bucket.this.bucket", '"x"', "ilm_policy")
    text = (TERRAFORM / MINIO).read_text()
    start = text.index('resource "minio_ilm_policy"')
    yield Mutant("minio-rule-gone", MINIO, text[start : text.index("\n}\n", start) + 3], "")
    yield Mutant("endpoint-open", "network.tf", "module.policies.endpoint_policy", "null")
    express = "local.role_statements[each.key]"
    yield Mutant("express-role-gets-anothers", EXPRESS, express, 'local.role_statements["writer"]')
    yield Mutant("express-bucket-open", EXPRESS, "Statement = local.bucket_statements", "x = []")
    trust = "modules/eks-identity/main.tf"
    yield Mutant("pods-get-anothers", trust, "= var.policy_arn", '= "arn:aws:iam::aws:policy/x"')


def privacy() -> Iterator[Mutant]:
    for switch in (
        "block_public_acls",
        "block_public_policy",
        "ignore_public_acls",
        "restrict_public_buckets",
    ):
        yield Mutant(f"{switch}-off", "main.tf", "true", "false", f"  {switch} ")
    yield Mutant("acls", "main.tf", "BucketOwnerEnforced", "ObjectWriter")
    yield Mutant("no-bucket-key", "main.tf", 'var.encryption == "kms"', "false")
    yield Mutant("no-rotation", "kms.tf", "= true", "= false", "enable_key_rotation")
    trust = "modules/eks-identity/main.tf"
    for key in ("eks-cluster-arn", "kubernetes-namespace", "kubernetes-service-account"):
        yield Mutant(f"trust-without-{key}", trust, f"aws:RequestTag/{key}", "aws:RequestTag/x")
    yield Mutant("trust-any-audience", trust, ":aud", ":azp")
    yield Mutant("trust-any-pod", trust, "${var.service_account}", "*", "system:serviceaccount")


MUTANTS = [*actions(), *denials(), *lifecycles(), *attachments(), *privacy()]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("terraform") / "copy"
    shutil.copytree(TERRAFORM, copy, ignore=shutil.ignore_patterns(".terraform*"))
    return copy


def complaints(root: Path) -> list[str]:
    """The rules that do not hold: broken ones, and those that no longer find what they look at."""
    found = []
    for rule in RULES:
        try:
            rule(root)
        except (AssertionError, KeyError, ValueError):
            found.append(rule.__name__)
    return found


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_policy_is_noticed(pristine: Path, mutant: Mutant) -> None:
    path = pristine / mutant.file
    before = path.read_text()
    try:
        mutant.apply(pristine)
        assert path.read_text() != before
        assert complaints(pristine), "nothing noticed"
    finally:
        path.write_text(before)


def test_nothing_is_noticed_where_nothing_is_broken(pristine: Path) -> None:
    assert not complaints(pristine)


@pytest.mark.parametrize(
    ("request_name", "action"), [(o.request, action) for o in OPERATIONS for action in o.actions]
)
def test_a_changed_table_is_noticed(
    monkeypatch: pytest.MonkeyPatch, request_name: str, action: str
) -> None:
    """The library's table says another action, and the modules are not changed with it."""
    changed = [
        Operation(
            o.request, tuple(a if a != action else "s3:Other" for a in o.actions), o.roles, ""
        )
        if o.request == request_name
        else o
        for o in OPERATIONS
    ]
    monkeypatch.setattr("terraform_files.OPERATIONS", changed)
    with pytest.raises(AssertionError):
        actions_are_those_of_the_table(TERRAFORM)


def test_a_role_that_the_modules_do_not_know_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reader_deletes = [
        Operation(o.request, o.actions, frozenset(Role), "") for o in permissions.OPERATIONS
    ]
    monkeypatch.setattr("terraform_files.OPERATIONS", reader_deletes)
    with pytest.raises(AssertionError):
        actions_are_those_of_the_table(TERRAFORM)
