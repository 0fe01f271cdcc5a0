"""Where a store is: `s3://bucket/prefix?...` or `file:///directory`, and what its keys look like.

Owns parsing and normalising of locations and the S3 options; pure, runs anywhere. It never opens
anything, and never puts a value from a URL that could be a secret into a message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ec_s3.errors import ConfigError, InvalidKeyError

if TYPE_CHECKING:
    from collections.abc import Mapping

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_SEGMENT = r"[A-Za-z0-9_=-][A-Za-z0-9_=.-]{0,254}"  # what every server, policy and disk takes
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")
_HOST = re.compile(r"(?i)((?!-)[a-z0-9-]{1,63}(?<!-)\.)*(?!-)[a-z0-9-]{1,63}(?<!-)\.?")
_SECRET = re.compile(r"(?i)secret|token|passw|credential|signature|access|auth|pwd")
_ACCESS_KEY = re.compile(r"(AKIA|ASIA)[A-Z0-9]{16}")
_ADDRESSING = ("auto", "path", "virtual")
_TRANSPORTS = ("sdk", "direct")
_SSE = ("AES256", "aws:kms", "aws:kms:dsse")
_ALIASES = {"endpoint_override": "endpoint", "use_path_style": "addressing"}
_PARAMETERS = ("endpoint", "region", "addressing", "profile")
_TRUTH = {"true": "path", "1": "path", "yes": "path", "false": "virtual", "0": "virtual"}
_CREDENTIALS = "credentials come from the AWS chain (environment, profile, role), never from a URL"


@dataclass(frozen=True, slots=True)
class S3Location:
    """A prefix of a bucket, and how to reach it.

    Attributes:
        bucket: bucket name.
        prefix: normalised to `a/b`: no leading, trailing or double slash; empty for the bucket.
        endpoint: `http(s)://host[:port]` of an S3-compatible server, empty for AWS or `AWS_*`.
        region: empty for the AWS chain's, `us-east-1` when that has none.
        addressing: `auto`, `path` (`host/bucket`) or `virtual` (`bucket.host`).
        profile: AWS profile, empty for the chain's.

    Raises:
        ConfigError: a part that cannot be used.
    """

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    addressing: str = "auto"
    profile: str = ""

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise ConfigError("url: no valid bucket name; expected s3://bucket/prefix")
        if self.addressing not in _ADDRESSING:
            raise ConfigError(f"url: addressing must be one of {', '.join(_ADDRESSING)}")
        object.__setattr__(self, "prefix", _prefix(self.prefix))
        object.__setattr__(self, "endpoint", _endpoint(self.endpoint))

    @property
    def style(self) -> str:
        """Addressing as the SDK takes it: `auto` becomes `path` where a host name would fail."""
        if self.addressing != "auto":
            return self.addressing
        return "path" if self.endpoint or "." in self.bucket else "auto"

    @property
    def has_sessions(self) -> bool:
        """Whether this is a directory bucket (S3 Express): it opens sessions, and lists folders."""
        return self.bucket.endswith("--x-s3")

    def object_key(self, key: str) -> str:
        """The full key in the bucket of a key below the prefix."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def listed_prefix(self, prefix: str) -> str:
        """What to list in the bucket to find what begins so.

        A directory bucket lists no less than a folder, whose other keys the caller leaves out.
        """
        begin = self.object_key(prefix)
        return begin[: begin.rfind("/") + 1] if self.has_sessions else begin

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"


@dataclass(frozen=True, slots=True)
class DirectoryLocation:
    """A folder of the local file system."""

    path: str

    def __post_init__(self) -> None:
        if not PurePosixPath(self.path).is_absolute() or "\0" in self.path:
            raise ConfigError("url: file:// needs an absolute path, as in file:///var/cache/ec")

    def __str__(self) -> str:
        return f"file://{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """How to talk to an S3 store; everything but where it is and who we are.

    Attributes:
        ca_bundle: PEM file with the server's CA; None leaves it to `AWS_CA_BUNDLE` and the system.
        verify: check the server's certificate; False has to be asked for and warns.
        sse: server-side encryption of new objects: `AES256`, `aws:kms` or `aws:kms:dsse`.
        sse_kms_key_id: KMS key, for the last two.
        storage_class: storage class of new objects.
        tags: tags of new objects.
        connect_timeout: seconds to connect.
        read_timeout: longest silence in seconds while waiting for the server.
        total_timeout: seconds for a whole call with its retries; one more such span is granted
            for each further 64 MiB of a body.
        max_connections: connections kept to the endpoint.
        transport: `sdk`, or `direct` for the library's own HTTP client on the busiest requests.

    Raises:
        ConfigError: a value that cannot be used.
    """

    ca_bundle: str | None = None
    verify: bool = True
    sse: str | None = None
    sse_kms_key_id: str | None = field(default=None, repr=False)
    storage_class: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict, repr=False)
    connect_timeout: float = 2.0
    read_timeout: float = 10.0
    total_timeout: float = 30.0
    max_connections: int = 64
    transport: str = "sdk"

    def __post_init__(self) -> None:
        if self.transport not in _TRANSPORTS:
            raise ConfigError(f"s3_transport: must be one of {', '.join(_TRANSPORTS)}")
        if self.sse is not None and self.sse not in _SSE:
            raise ConfigError(f"sse: must be one of {', '.join(_SSE)}")
        if self.sse_kms_key_id and not (self.sse or "").startswith("aws:kms"):
            raise ConfigError("sse_kms_key_id: needs sse=aws:kms")
        if self.ca_bundle and not self.verify:
            raise ConfigError("ca_bundle: has no effect with verify=False; drop one of the two")
        for name in ("connect_timeout", "read_timeout", "total_timeout", "max_connections"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)!r} must be above 0")


def parse_url(url: str) -> S3Location | DirectoryLocation:
    """Parse the URL of a store.

    Raises:
        ConfigError: not a store's URL, an unknown parameter, or anything like a credential in it
            (whose value is not repeated).
    """
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise ConfigError("url: not a URL; expected s3://bucket/prefix or file:///dir") from exc
    if "@" in parts.netloc:
        raise ConfigError(f"url: contains a user or password; {_CREDENTIALS}")
    if _ACCESS_KEY.search(url):
        raise ConfigError(f"url: contains an access key; {_CREDENTIALS}")
    if parts.fragment:
        raise ConfigError("url: contains '#'; write it as %23")
    if parts.scheme == "s3":
        return _parse_s3(parts)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or parts.query:
            raise ConfigError("url: file:// takes a path only, as in file:///var/cache/ec")
        return DirectoryLocation(unquote(parts.path))
    raise ConfigError("url: unknown scheme; expected s3://bucket/prefix or file:///dir")


def check_key(key: str) -> str:
    """Return an object key unchanged when a store accepts it.

    A key is segments with slashes between them, below 1,024 bytes. A segment is 1 to 255 letters,
    digits and `_ = . -`: some servers keep keys as file names, others stumble over what a URL or a
    signature escapes. None starts with a dot: those belong to the store (temporary files, `..`).

    Raises:
        InvalidKeyError: anything else.
    """
    if not is_key(key):
        raise InvalidKeyError(f"not an object key: {key[:80]!r}")
    return key


def is_key(key: str) -> bool:
    """Whether a store accepts this key; others in a listing are foreign."""
    return len(key) < 1024 and _KEY.fullmatch(key) is not None


def _parse_s3(parts: SplitResult) -> S3Location:
    values: dict[str, str] = {}
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as exc:
        raise ConfigError("url: the part behind '?' is not name=value&...") from exc
    for given, value in pairs:
        name = _ALIASES.get(given, given)
        if name not in _PARAMETERS:
            _refuse(given)
        if name in values:
            raise ConfigError(f"url: parameter {name} is given twice")
        if given == "use_path_style":
            if value.lower() not in _TRUTH:
                raise ConfigError("url: use_path_style must be true or false")
            value = _TRUTH[value.lower()]
        values[name] = value
    return S3Location(parts.netloc, unquote(parts.path), **values)


def _refuse(name: str) -> None:
    if _SECRET.search(name):
        raise ConfigError(f"url: looks like a credential in a parameter; {_CREDENTIALS}")
    known = ", ".join((*_PARAMETERS, *_ALIASES))
    shown = name if re.fullmatch(r"[a-z_-]{1,30}", name) else "(not shown)"
    raise ConfigError(f"url: unknown parameter {shown}; known: {known}")


def _prefix(prefix: str) -> str:
    clean = "/".join(segment for segment in prefix.split("/") if segment)
    if clean and (not is_key(clean) or len(clean) > 512):
        raise ConfigError(
            "url: prefix must be letters, digits and _ = . - between slashes, at most 255 bytes "
            "there and 512 in all, no segment starting with '.'"
        )
    return clean


def _endpoint(endpoint: str) -> str:
    if not endpoint:
        return ""
    try:
        parts = urlsplit(endpoint)
        host, _ = parts.hostname, parts.port  # reading the port checks it
    except ValueError as exc:
        raise ConfigError("url: endpoint is not a URL; expected http(s)://host[:port]") from exc
    if "@" in parts.netloc:
        raise ConfigError(f"url: endpoint contains a user or password; {_CREDENTIALS}")
    bad_host = not _HOST.fullmatch(host or "") and not re.fullmatch(r"[0-9a-f:.]+", host or "")
    if parts.scheme not in ("http", "https") or bad_host or parts.query or parts.fragment:
        raise ConfigError("url: endpoint must be http(s)://host[:port]")
    return endpoint.rstrip("/")
