"""Namespaces and object keys: what makes two tensors interchangeable, and where they lie.

`<prefix>/v1/<slug>-<fingerprint>/<dtype>/<hh>/<digest>`. Pure functions of their arguments, for
any thread and the same in every process and release; must never depend on hash(), on the
environment or on the tensor-parallel layout. A change of any key is a new `KEY_VERSION`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ec_s3.errors import ConfigError, InvalidKeyError
from ec_s3.types import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY_VERSION = 1
"""Version of the key scheme; separate from the version of the object format."""

CONTROL_NAME = "control.json"
"""Last part of a control document's key."""

INDEX_NAME = "index.bin"
"""Last part of an index's key."""

_SLUG_LENGTH = 64
_SLUG = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?"
_KEY = re.compile(
    rf"v{KEY_VERSION}/({_SLUG})-([0-9a-f]{{16}})/({'|'.join(DTYPE_BYTES)})"
    r"/([0-9a-f]{2})/(\4[0-9a-f]{62})"
)
_REQUEST_LOCAL = re.compile(
    r".+-(?:(?:image|audio|video|prompt)(?:_embeds)?|vision_chunk)-[0-9]+", re.DOTALL
)
_CONTENT_HASH = re.compile(r"(?:.+:)?(?:[0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)
_SALT_CONTEXT = b"ec_s3 namespace salt"
_SALTED, _PLAIN = "\0salt\0", "\0plain\0"  # names under a cache salt, and those made to look so


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """The parts of an object key.

    Attributes:
        slug: the model's name as far as it fits into a key; for people only.
        fingerprint: 16 hex digits of the namespace.
        dtype: element type, by torch's name.
        digest: SHA-256 of the identifier in hex.
    """

    slug: str
    fingerprint: str
    dtype: str
    digest: str

    @property
    def namespace(self) -> str:
        """`Namespace.id` of the namespace that the key belongs to."""
        return f"{self.slug}-{self.fingerprint}/{self.dtype}"

    @property
    def control_key(self) -> str:
        """`Namespace.control_key` of that namespace."""
        return f"v{KEY_VERSION}/{self.slug}-{self.fingerprint}/{CONTROL_NAME}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything, beside the identifier, that two interchangeable tensors have in common.

    Attributes:
        model: identity of the model; white space around it and trailing slashes do not count.
        dtype: element type of the encoder's outputs, by torch's name. Part of the path, not of
            the fingerprint.
        revision: revision of the model's repository.
        encoder_config: fingerprint of the encoder's own configuration.
        quantization: how the encoder's weights are quantised.
        weight_version: a name for the weights, changed by whoever changes them in place.
        adapter: fingerprint of the adapter's content.
        hash_scheme: how identifiers are made of content; empty where that is the caller's matter.
        salt: secret that separates deployments; leaves the process only as an HMAC.
        fingerprint: 16 hex digits over all of them but dtype, and over `KEY_VERSION`.
        slug: the model's name as far as it fits into a key; for people only.

    Raises:
        ConfigError: empty model, or a dtype that is not in the table.
    """

    model: str
    dtype: str = "bfloat16"
    revision: str = ""
    encoder_config: str = ""
    quantization: str = ""
    weight_version: str = ""
    adapter: str = ""
    hash_scheme: str = ""
    salt: str = field(default="", repr=False)
    fingerprint: str = field(init=False, repr=False, compare=False)
    slug: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        model = re.sub(r"[\s/]+\Z", "", self.model).lstrip()
        if not model:
            raise ConfigError(
                f"model={self.model!r} (namespace) is empty: all models would share their entries; "
                "set it to the model's name"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"dtype={self.dtype!r} (namespace) is unknown; use one of {', '.join(DTYPE_BYTES)}"
            )
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "fingerprint", fingerprint_of(self._identity()))
        object.__setattr__(self, "slug", _slug(model))

    @property
    def prefix(self) -> str:
        """Folder of the namespace, for all dtypes."""
        return f"v{KEY_VERSION}/{self.slug}-{self.fingerprint}"

    @property
    def id(self) -> str:
        """What an object's header carries to name its namespace and dtype."""
        return f"{self.slug}-{self.fingerprint}/{self.dtype}"

    @property
    def manifest_key(self) -> str:
        """Key of the description that `manifest()` makes."""
        return f"{self.prefix}/namespace.json"

    @property
    def control_key(self) -> str:
        """Key of the channel to running servers."""
        return f"{self.prefix}/{CONTROL_NAME}"

    @property
    def index_key(self) -> str:
        """Key of what tells servers which items the folder holds, see `index`."""
        return f"{self.prefix}/{INDEX_NAME}"

    def object_key(self, identifier: str) -> str:
        """Key of an item: ASCII, under 1,024 bytes whatever the identifier is."""
        return self.digest_key(identifier_digest(identifier))

    def digest_key(self, digest: str) -> str:
        """Key of the item whose identifier has this digest."""
        return f"{self.prefix}/{self.dtype}/{digest[:2]}/{digest}"

    def manifest(self, extra: Mapping[str, object] | None = None) -> bytes:
        """Body of `manifest_key`: JSON for an operator.

        The member `namespace` is exactly what the fingerprint covers. The dtype is not in it, as
        the folder holds all of them.

        Args:
            extra: further facts that identifiers depend on but the namespace does not.

        Raises:
            ValueError: `extra` is no JSON.
        """
        body = {
            "fingerprint": self.fingerprint,
            "namespace": self._identity(),
            "extra": dict(extra or {}),
        }
        try:
            text = json.dumps(body, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
        except TypeError as error:
            raise ValueError(f"extra facts of the manifest are no JSON: {error}") from error
        return text.encode("utf-8", "surrogatepass") + b"\n"

    def _identity(self) -> dict[str, object]:
        scheme = {"hash_scheme": self.hash_scheme} if self.hash_scheme else {}
        return {
            **scheme,
            "adapter": self.adapter,
            "encoder_config": self.encoder_config,
            "key_version": KEY_VERSION,
            "model": self.model,
            "quantization": self.quantization,
            "revision": self.revision,
            "salt": salt_hmac(self.salt),
            "weight_version": self.weight_version,
        }


def fingerprint_of(identity: Mapping[str, object]) -> str:
    """The fingerprint of what a manifest's member `namespace` says, 16 hex digits."""
    return hashlib.sha256(_canonical(identity)).hexdigest()[:16]


def bind(identifier: str, cache_salt: str | None) -> str:
    """The name of an identifier under a request's cache salt; injective."""
    if not cache_salt:
        return f"{_PLAIN}{identifier}" if identifier.startswith("\0") else identifier
    return f"{salted_names(cache_salt)}{identifier}"


def salted_names(cache_salt: str) -> str:
    """How all names under a request's cache salt begin, and no others."""
    return f"{_SALTED}{hashlib.sha256(_utf8(cache_salt)).hexdigest()}\0"


def identifier_digest(identifier: str) -> str:
    """SHA-256 of an identifier in hex; distinct for any two distinct strings."""
    return hashlib.sha256(_utf8(identifier)).hexdigest()


def parse_key(key: str) -> ParsedKey:
    """Take an object key apart.

    Raises:
        InvalidKeyError: not exactly what `Namespace.object_key` writes, in this version.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise InvalidKeyError(f"not an object key of version {KEY_VERSION}: {key[:200]!r}")
    slug, fingerprint, dtype, _, digest = match.groups()
    return ParsedKey(slug, fingerprint, dtype, digest)


def is_request_local(identifier: str) -> bool:
    """Whether vLLM made the identifier up for one request (`<request>-<modality>-<i>`).

    Such identifiers repeat after a restart with other content behind them and must never be
    stored. An identifier of that form that a client chose is not stored either.
    """
    return _REQUEST_LOCAL.fullmatch(identifier) is not None


def looks_like_content_hash(identifier: str) -> bool:
    """Whether an identifier has the form that vLLM gives to the hash of an item's content.

    That is 64 hex digits (BLAKE3, SHA-256) or 128 (SHA-512), after `<adapter>:` where an adapter
    changes the encoder. The form proves nothing: a client can choose such an identifier, and vLLM
    hashes a client's identifier together with processor arguments.
    """
    return _CONTENT_HASH.fullmatch(identifier) is not None


def _utf8(text: str) -> bytes:
    # Lone surrogates pass: any string has bytes, and two strings never have the same ones.
    return text.encode("utf-8", "surrogatepass")


def _canonical(value: Mapping[str, object]) -> bytes:
    # Without ASCII escapes: an escaped pair of lone surrogates would read as one character.
    return _utf8(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False))


def salt_hmac(salt: str) -> str:
    """What a manifest says of a namespace's salt; empty for none."""
    if not salt:
        return ""
    # HMAC pads its key with zero bytes; the digest keeps "s" and "s\0" apart.
    return hmac.new(hashlib.sha256(_utf8(salt)).digest(), _SALT_CONTEXT, "sha256").hexdigest()


def _slug(model: str) -> str:
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-._")
    return text[:_SLUG_LENGTH].rstrip("-._") or "model"
