"""What a command is pointed at: a key, the beginning of keys, an identifier, a namespace.

Pure but for the listing, which streams. Trusts no key that a listing shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ec_s3.cli.output import ExitCode, Output
from ec_s3.errors import ConfigError, InvalidKeyError
from ec_s3.keys import KEY_VERSION, identifier_digest, parse_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ec_s3.store import Store
    from ec_s3.types import ObjectInfo

ROOT = f"v{KEY_VERSION}/"
"""How the keys of everything begin that this release stores."""


@dataclass(frozen=True, slots=True)
class Target:
    """A key or the beginning of keys, an identifier in a namespace, or a namespace."""

    text: str = ""
    identifier: str | None = None
    namespace: str | None = None

    @property
    def names_something(self) -> bool:
        """Whether anything was given."""
        return bool(self.text) or self.identifier is not None or self.namespace is not None

    def prefix(self) -> str:
        """Key, or the beginning of keys.

        Raises:
            ConfigError: an identifier without its namespace, two names, or nothing at all.
            InvalidKeyError: the namespace is not of the form that `ls` shows.
        """
        if not self.names_something:
            raise ConfigError("no object named: give a key or prefix, --identifier or --namespace")
        if self.identifier is None:
            if self.namespace is None:
                return self.text
            if self.text:
                raise ConfigError("--namespace stands in place of a key: leave one of them out")
            return namespace_prefix(self.namespace)
        if self.namespace is None or self.text:
            raise ConfigError(
                "--identifier needs --namespace, as `ec-s3 ls` shows it, and no key beside it"
            )
        digest = identifier_digest(self.identifier)
        key = f"{ROOT}{self.namespace.strip('/').removeprefix(ROOT)}/{digest[:2]}/{digest}"
        parse_key(key)
        return key


def namespace_prefix(namespace: str) -> str:
    """How the keys of a namespace begin, which is named with or without its dtype.

    Raises:
        InvalidKeyError: no namespace as `ls` shows it.
    """
    name = namespace.strip("/").removeprefix(ROOT)
    folder, _, dtype = name.partition("/")
    parse_key(f"{ROOT}{folder}/{dtype or 'bfloat16'}/00/{'0' * 64}")
    return f"{ROOT}{name}/"


def namespace_of(key: str) -> str | None:
    """`<slug>-<fingerprint>/<dtype>` of an item's key, None for any other."""
    try:
        return parse_key(key).namespace
    except InvalidKeyError:
        return None


async def matching(store: Store, prefix: str) -> AsyncIterator[ObjectInfo]:
    """The item of exactly this key, else all objects whose key begins with it."""
    if namespace_of(prefix) is not None:
        info = await store.head(prefix)
        if info is not None:
            yield info
        return
    async for info in store.list(prefix):
        yield info


async def items(store: Store, prefix: str) -> AsyncIterator[ObjectInfo]:
    """The same without documents and foreign objects."""
    async for info in matching(store, prefix):
        if namespace_of(info.key) is not None:
            yield info


def absent(out: Output, target: Target) -> ExitCode:
    """Say that nothing has this name."""
    if out.json:
        out.record({"key": target.prefix(), "error": "absent"})
    else:
        out.note(f"no such object: {target.prefix()}")
    return ExitCode.FINDING
