"""Which rights in a bucket each role needs: one table, and the policies that follow from it.

Owns what the library asks of S3, request by request, and which action allows it. Pure values and
functions, for any thread; no I/O. Never allows an action that no row of the table needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ec_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ec_s3.url import S3Location, S3Options

Document = dict[str, object]
"""A policy, as JSON has it."""

PARTITIONS = ("aws", "aws-cn", "aws-us-gov")
"""Parts of AWS whose resources have names of their own."""

SPARED_BYTES = 4096
"""A lifecycle rule leaves smaller objects alone: a namespace's description and kill switch."""

_DIRECTORY_BUCKET = "--x-s3"
_PATTERN = frozenset("*?$")
_VERSION = "2012-10-17"


class Role(StrEnum):
    """Who uses the bucket."""

    READER = "reader"
    """A server that takes items and keeps none (vLLM's `ec_consumer`)."""

    WRITER = "writer"
    """A server that keeps what it encodes."""

    PREWARM = "prewarm"
    """A job that fills the bucket: `prewarm`, `upload`, `index`."""

    MAINTAINER = "maintainer"
    """An operator: looks, checks, cleans up, deletes, and tells servers what holds."""


_ALL = frozenset(Role)
_WRITING = _ALL - {Role.READER}
_STORING = frozenset({Role.WRITER, Role.PREWARM})
_MAINTAINING = frozenset({Role.MAINTAINER})


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of request.

    Attributes:
        request: S3's name for it.
        actions: what must be allowed for it.
        roles: who makes it.
        purpose: what for.
    """

    request: str
    actions: tuple[str, ...]
    roles: frozenset[Role]
    purpose: str


_READS = ("s3:GetObject", "s3:ListBucket")  # without the second an absent object is answered 403

OPERATIONS = (
    Operation("GetObject", _READS, _ALL, "read items, the kill switch and the index"),
    Operation("HeadObject", _READS, _ALL, "ask whether an item is there"),
    Operation("ListObjectsV2", ("s3:ListBucket",), _ALL, "list what a namespace holds"),
    Operation("PutObject", ("s3:PutObject",), _WRITING, "store items, kill switch and index"),
    Operation("CreateMultipartUpload", ("s3:PutObject",), _STORING, "begin a large item"),
    Operation("UploadPart", ("s3:PutObject",), _STORING, "store a part of a large item"),
    Operation("CompleteMultipartUpload", ("s3:PutObject",), _STORING, "finish a large item"),
    Operation(
        "AbortMultipartUpload",
        ("s3:AbortMultipartUpload",),
        _WRITING,
        "give back the parts of an upload that failed",
    ),
    Operation(
        "ListMultipartUploads",
        ("s3:ListBucketMultipartUploads",),
        _MAINTAINING,
        "find uploads that nobody finished",
    ),
    Operation(
        "ListParts",
        ("s3:ListMultipartUploadParts",),
        _MAINTAINING,
        "tell how much lies in uploads that nobody finished",
    ),
    Operation("DeleteObject", ("s3:DeleteObject",), _MAINTAINING, "delete items"),
)
"""Every request that the library makes; where objects are tagged, `TAGGING` beside it."""

TAGGING = Operation(
    "PutObjectTagging", ("s3:PutObjectTagging",), _WRITING, "tag what is stored (setting tags)"
)
"""Not a request of its own: S3 asks for this right where a stored object brings tags along."""

_ON_BUCKET = frozenset({"s3:ListBucket", "s3:ListBucketMultipartUploads"})
_KEY_ACTIONS = {Role.READER: ("kms:Decrypt",)}
_WRITER_KEY_ACTIONS = ("kms:Decrypt", "kms:GenerateDataKey")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What the rights are about.

    Attributes:
        bucket: its name.
        prefix: as in `S3Location`; empty for the whole bucket.
        partition: one of `PARTITIONS`.
        tagged: whether stored objects bring tags along.
        key: ARN of the KMS key that encrypts them, empty for none.

    Raises:
        ConfigError: a directory bucket, an unknown partition, or a prefix that a policy would
            read as a pattern.
    """

    bucket: str
    prefix: str = ""
    partition: str = "aws"
    tagged: bool = False
    key: str = ""

    def __post_init__(self) -> None:
        if self.bucket.endswith(_DIRECTORY_BUCKET):
            raise ConfigError(
                "url: a directory bucket knows no rights to objects; allow "
                "s3express:CreateSession on it, with s3express:SessionMode for those who only read"
            )
        if self.partition not in PARTITIONS:
            raise ConfigError(f"partition: must be one of {', '.join(PARTITIONS)}")
        if not _PATTERN.isdisjoint(self.prefix):
            raise ConfigError(
                "url: a policy reads *, ? and $ in a prefix as patterns, and would allow more than "
                "the prefix; choose another"
            )

    @classmethod
    def of(cls, location: S3Location, options: S3Options, *, partition: str = "aws") -> Scope:
        """That of the configured store.

        Raises:
            ConfigError: as the constructor, or the key is named by an alias.
        """
        return cls(
            bucket=location.bucket,
            prefix=location.prefix,
            partition=partition,
            tagged=bool(options.tags),
            key=_key_arn(options.sse_kms_key_id or "", partition),
        )

    @property
    def bucket_arn(self) -> str:
        """The bucket, as a policy names it."""
        return f"arn:{self.partition}:s3:::{self.bucket}"

    @property
    def objects_arn(self) -> str:
        """All objects below the prefix, as a policy names them."""
        return f"{self.bucket_arn}/{self.prefix}/*" if self.prefix else f"{self.bucket_arn}/*"


def operations(role: Role, scope: Scope) -> tuple[Operation, ...]:
    """What a role does."""
    found = tuple(operation for operation in OPERATIONS if role in operation.roles)
    return (*found, TAGGING) if scope.tagged and role in TAGGING.roles else found


def purposes(action: str, scope: Scope) -> dict[Role, list[str]]:
    """What each role that has a right needs it for."""
    found: dict[Role, list[str]] = {}
    for role in Role:
        for operation in operations(role, scope):
            if action not in operation.actions:
                continue
            absence = operation.actions == _READS and action != _READS[0]
            purpose = "tell what is absent from what is denied" if absence else operation.purpose
            if purpose not in found.setdefault(role, []):
                found[role].append(purpose)
    return found


def actions(role: Role, scope: Scope) -> tuple[str, ...]:
    """What a role must be allowed, in alphabetical order."""
    return tuple(sorted({action for o in operations(role, scope) for action in o.actions}))


def role_policy(role: Role, scope: Scope) -> Document:
    """The IAM policy of a role."""
    allowed = actions(role, scope)
    listing: Document = _allow("List", [a for a in allowed if a == "s3:ListBucket"], scope)
    if scope.prefix:
        listing["Condition"] = {"StringLike": {"s3:prefix": [f"{scope.prefix}/*"]}}
    statements = [_allow("Objects", [a for a in allowed if a not in _ON_BUCKET], scope), listing]
    uploads = [a for a in allowed if a in _ON_BUCKET and a != "s3:ListBucket"]
    if uploads:  # no condition on a prefix exists for it
        statements.append(_allow("ListUploads", uploads, scope))
    if scope.key:
        suffix = ".cn" if scope.partition == "aws-cn" else ""
        statements.append(
            {
                "Sid": "Key",
                "Effect": "Allow",
                "Action": list(_KEY_ACTIONS.get(role, _WRITER_KEY_ACTIONS)),
                "Resource": scope.key,
                "Condition": {"StringLike": {"kms:ViaService": f"s3.*.amazonaws.com{suffix}"}},
            }
        )
    return {"Version": _VERSION, "Statement": statements}


def bucket_policy(scope: Scope) -> Document:
    """The policy of the bucket: what nobody may do, whatever rights he has."""
    everything = [scope.bucket_arn, f"{scope.bucket_arn}/*"]
    customer_key = "s3:x-amz-server-side-encryption-customer-algorithm"
    statements = [
        _deny("PlainHttp", "s3:*", everything, {"Bool": {"aws:SecureTransport": "false"}}),
        _deny("OldTls", "s3:*", everything, {"NumericLessThan": {"s3:TlsVersion": "1.2"}}),
        _deny(
            "CustomerKeys",
            "s3:PutObject",
            [scope.objects_arn],
            {"Null": {customer_key: "false"}},
        ),
    ]
    return {"Version": _VERSION, "Statement": statements}


def lifecycle(scope: Scope, *, days: int) -> Document:
    """The lifecycle of the bucket: items expire, and so do uploads that nobody finished.

    Args:
        scope: the bucket and the prefix of the items.
        days: age at which an item expires, counted from when it was stored.

    Raises:
        ConfigError: no positive number of days.
    """
    if days < 1:
        raise ConfigError(f"days: {days} is not 1 or more")
    size = {"ObjectSizeGreaterThan": SPARED_BYTES - 1}
    prefix = f"{scope.prefix}/v1/" if scope.prefix else "v1/"
    return {
        "Rules": [
            {
                "ID": "ec-s3-items",
                "Status": "Enabled",
                "Filter": {"And": {"Prefix": prefix, **size}},
                "Expiration": {"Days": days},
            },
            {
                "ID": "ec-s3-unfinished-uploads",
                "Status": "Enabled",
                "Filter": {},
                "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
            },
        ]
    }


def _allow(sid: str, allowed: Sequence[str], scope: Scope) -> Document:
    on_bucket = allowed[0] in _ON_BUCKET
    resource = scope.bucket_arn if on_bucket else scope.objects_arn
    return {"Sid": sid, "Effect": "Allow", "Action": list(allowed), "Resource": resource}


def _deny(sid: str, action: str, resources: list[str], condition: Document) -> Document:
    return {
        "Sid": f"Deny{sid}",
        "Effect": "Deny",
        "Principal": "*",
        "Action": action,
        "Resource": resources,
        "Condition": condition,
    }


def _key_arn(key: str, partition: str) -> str:
    if key.startswith("alias/") or ":alias/" in key:
        raise ConfigError(
            "sse_kms_key_id: names a key by its alias, which a policy cannot; give the key's ARN"
        )
    if not key or key.startswith("arn:"):
        return key
    return f"arn:{partition}:kms:*:*:key/{key}"
