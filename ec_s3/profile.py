"""What object stores do with the parts of S3 that they differ in, and what each gap costs here.

Owns the list of capabilities, the profiles of known servers (`profiles.yaml`, data and no code
paths) and what one store has shown so far. No I/O but reading that file. A profile never decides
whether anything is correct: items carry digests of their own, writers of one key write the same
item, and a store writes an object whole or not at all. So an ignored condition costs requests,
never an item, and nobody has to ask for it before he writes.

Threads: values are frozen. `Capabilities` is written by the event loop of its store alone; each
change replaces its profile, so any thread may look at it at any time.
"""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping


class Support(StrEnum):
    """What a store does with a request that uses a capability."""

    HONOURED = "honoured"
    IGNORED = "ignored"
    """Accepted, and nothing or something else comes of it."""

    REFUSED = "refused"
    UNKNOWN = "unknown"
    """Not asked, or the answer says nothing: denied, or none in time."""


@dataclass(frozen=True, slots=True)
class Capability:
    """Something that stores differ in.

    Attributes:
        name: as in profiles and in `--json`.
        means: what is asked of the store.
        ignored: what it costs here when that is ignored; empty for nothing.
        refused: what it costs here when that is refused; empty for nothing.
        free: why a gap without a cost has none.
        setting: the only setting with which a gap costs anything, empty for none.
        asked: whether `doctor` asks; it sends no key that the library would never send.
    """

    name: str
    means: str
    _: KW_ONLY
    ignored: str = ""
    refused: str = ""
    free: str = ""
    setting: str = ""
    asked: bool = True

    def cost(self, support: Support) -> str:
        """What this support costs, empty for nothing."""
        if support is Support.IGNORED:
            return self.ignored
        return self.refused if support is Support.REFUSED else ""


_TWICE = "hosts that encode one item at the same moment may each upload it; it stays whole"
_LOST_CONTROL = "of two `ec-s3 control` commands at the same moment one may be lost"
_WHOLE_POLL = "each poll of the kill switch reads its whole document, a few hundred bytes"
_NO_RANGES = "headers and large items cannot be read: the store is of no use"
_LONG_NAMES = "items of models with long names cannot be stored; shorten the prefix"
_OTHER_STYLE = "one style is enough; `addressing` in the url chooses"
_NO_CHECKSUMS = "items carry digests of their own, and no checksum is sent or asked for"
_OWN_KEYS = "no key of ec_s3 looks like that"
_ONE_BY_ONE = "objects are deleted one by one, sixteen at a time"

CAPABILITIES = (
    Capability(
        "conditional_put",
        "PUT with If-None-Match: *",
        ignored=_TWICE,
        refused=f"a HEAD before each PUT; {_TWICE}",
    ),
    Capability(
        "conditional_replace",
        "PUT with If-Match",
        ignored=_LOST_CONTROL,
        refused=f"a HEAD before each replacement; {_LOST_CONTROL}",
    ),
    Capability(
        "conditional_complete",
        "completing an upload in parts with If-None-Match: *",
        ignored=f"above 64 MiB {_TWICE}",
        refused=f"above 64 MiB a HEAD before each upload; {_TWICE}",
    ),
    Capability(
        "conditional_get",
        "GET with If-None-Match, answered 304",
        ignored=_WHOLE_POLL,
        refused=_WHOLE_POLL,
    ),
    Capability(
        "checksum_header",
        "PUT with x-amz-checksum-crc32, compared with the body",
        free=_NO_CHECKSUMS,
    ),
    Capability(
        "checksum_trailer",
        "PUT with a checksum behind the body (aws-chunked)",
        free=_NO_CHECKSUMS,
    ),
    Capability(
        "unknown_length",
        "PUT without Content-Length; S3 answers 411",
        free="every request tells its length",
    ),
    Capability("delete_batch", "DeleteObjects without Content-MD5", free=_ONE_BY_ONE),
    Capability("delete_batch_md5", "DeleteObjects with Content-MD5", free=_ONE_BY_ONE),
    Capability(
        "multipart",
        "upload in parts",
        ignored="items above 64 MiB cannot be stored",
        refused="items above 64 MiB go up in one request, which starts over when it breaks off",
    ),
    Capability(
        "small_parts",
        "parts of less than 5 MiB before the last; S3 refuses them",
        free="parts have 16 MiB",
    ),
    Capability("range", "GET of a range", ignored=_NO_RANGES, refused=_NO_RANGES),
    Capability(
        "range_checksum",
        "GET of a range with checksums, without that of the whole object",
        free=_NO_CHECKSUMS,
    ),
    Capability(
        "tagging",
        "PUT with x-amz-tagging",
        ignored="the tags of the setting `tags` are lost",
        refused="with the setting `tags` nothing can be stored",
        setting="tags",
    ),
    Capability("own_keys", "the longest keys that ec_s3 makes", refused=_LONG_NAMES),
    Capability("long_segments", "a key of 900 bytes without `/`", free=_OWN_KEYS, asked=False),
    Capability("empty_segments", "a key with `//` in it", free=_OWN_KEYS, asked=False),
    Capability("key_as_folder", "objects `p` and `p/q` together", free=_OWN_KEYS, asked=False),
    Capability("path_style", "addressing as endpoint/bucket", free=_OTHER_STYLE),
    Capability("virtual_host", "addressing as bucket.endpoint", free=_OTHER_STYLE),
)
"""All of them, in the order in which they are shown."""

BY_NAME: Mapping[str, Capability] = MappingProxyType({c.name: c for c in CAPABILITIES})


def condition_of(condition: Mapping[str, object], *, in_parts: bool) -> str:
    """The capability that a write with the SDK's parameters for a condition uses, empty for none.

    Args:
        condition: `IfMatch`, `IfNoneMatch` or neither.
        in_parts: whether the body goes up in parts.
    """
    if not condition:
        return ""
    if in_parts:
        return "conditional_complete"
    return "conditional_replace" if "IfMatch" in condition else "conditional_put"


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of one capability.

    Attributes:
        support: what the store does.
        detail: what it answered, or why nothing is known; empty when there is nothing to say.
    """

    support: Support
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownProfile:
    """What a server that people run is known to do.

    Attributes:
        name: short, for programs.
        title: for people, with the versions that it is about.
        source: `measured` against the server itself, or `documentation` of who makes or runs it.
        version: what was measured, or when the documentation was read.
        link: where it is from, where a capability names no place of its own.
        supports: by capability; one that is left out is not known.
        places: by capability, where it is said or what was seen.
        headers: what its answers carry: header in lower case to a pattern.
        endpoint: a pattern of its host names, empty for none.
        kind: the server in `ec_s3.testing.servers` that it is measured on, empty for none.
        note: what else to know.
    """

    name: str
    title: str
    source: str
    version: str
    link: str = ""
    supports: Mapping[str, Support]
    places: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    endpoint: str = ""
    kind: str = ""
    note: str = ""

    def resembles(self, headers: Mapping[str, str], host: str) -> bool:
        """Whether a server looks like this one from outside: a hint, many hide or pretend."""
        if self.endpoint and re.search(self.endpoint, host):
            return True
        return bool(self.headers) and all(
            re.search(pattern, headers.get(name, "")) for name, pattern in self.headers.items()
        )

    def differences(self, seen: Mapping[str, Seen]) -> dict[str, tuple[Support, Support]]:
        """Where a store does something else: capability to what is known and what was seen."""
        return {
            name: (known, seen[name].support)
            for name, known in self.supports.items()
            if name in seen
            and Support.UNKNOWN
            not in (
                known,
                seen[name].support,
            )
            and seen[name].support is not known
        }


@cache
def known_profiles() -> tuple[KnownProfile, ...]:
    """The profiles of `profiles.yaml`."""
    text = files("ec_s3").joinpath("profiles.yaml").read_text(encoding="utf-8")
    return tuple(_known(name, entry) for name, entry in yaml.safe_load(text).items())


def _known(name: str, entry: dict[str, Any]) -> KnownProfile:
    supports = {key: Support(value) for key, value in entry.pop("supports").items()}
    if unknown := supports.keys() - BY_NAME.keys():
        raise ValueError(f"{name}: no such capability: {', '.join(sorted(unknown))}")
    return KnownProfile(name=name, supports=MappingProxyType(supports), **entry)


def nearest(headers: Mapping[str, str], host: str, seen: Mapping[str, Seen]) -> KnownProfile | None:
    """The known server that a store looks like, of several the one that does most alike."""
    likely = [known for known in known_profiles() if known.resembles(headers, host)]
    return min(likely, key=lambda known: len(known.differences(seen)), default=None)


class Capabilities:
    """What one store has shown in the answers to its own traffic; see the module for threads.

    Nothing is asked for this: a store learns that something is refused when it is refused, and
    that it is honoured when a condition has failed. An ignored condition looks like success.
    """

    def __init__(self) -> None:
        self._seen: Mapping[str, Support] = MappingProxyType({})

    def __getitem__(self, name: str) -> Support:
        return self._seen.get(name, Support.UNKNOWN)

    def refuses(self, name: str) -> bool:
        """Whether the store has refused it before."""
        return self[name] is Support.REFUSED

    def learn(self, name: str, support: Support) -> bool:
        """Remember what an answer showed; whether that is news."""
        if self[name] is support:
            return False
        self._seen = MappingProxyType({**self._seen, BY_NAME[name].name: support})
        return True

    def snapshot(self) -> Mapping[str, Support]:
        """What is known by now; a later change is not seen in it."""
        return self._seen
