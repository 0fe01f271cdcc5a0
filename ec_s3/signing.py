"""The keys that sign object headers, and the check of a signature.

A signature is an HMAC-SHA256 over a header, made with one of a few keys that everybody who may
write or read shares: the first of them signs, all of them are accepted. Pure functions of their
arguments on any thread; no I/O. A key never leaves here but as a MAC: not in an error, not in a
repr.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass, field

from ec_s3.errors import ConfigError

MIN_KEY_BYTES = 32
"""Shortest key: as long as the MAC."""

_CONTEXT = b"ec_s3 object header, format 1\n"
_KEY = re.compile(r"([A-Za-z0-9._-]{1,64}):([0-9A-Fa-f]+)")
_FORM = f"a key is `id:hex`, of at least {MIN_KEY_BYTES} bytes (openssl rand -hex {MIN_KEY_BYTES})"


@dataclass(frozen=True, slots=True)
class SigningKey:
    """One key.

    Attributes:
        id: its name, which signed objects carry in the open.
        secret: the key itself.
    """

    id: str
    secret: bytes = field(repr=False)


class Keyring:
    """The keys of one deployment; immutable, shared between threads.

    Args:
        keys: at least one; the first signs.
    """

    def __init__(self, keys: tuple[SigningKey, ...]) -> None:
        self._keys = {key.id: key.secret for key in keys}
        self._signer = keys[0].id

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self.ids)})"

    @property
    def signer(self) -> str:
        """Id of the key that signs."""
        return self._signer

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of all accepted keys, the signing one first."""
        return tuple(self._keys)

    def sign(self, message: bytes) -> str:
        """The message's MAC by the signing key, in hex."""
        return _mac(self._keys[self._signer], message)

    def accepts(self, message: bytes, *, key_id: str, mac: str) -> bool:
        """Whether `mac` is that of the message by the named key; compared in constant time."""
        secret = self._keys.get(key_id)
        if secret is None or not mac.isascii():
            return False
        return hmac.compare_digest(_mac(secret, message), mac)


def parse_keys(text: str) -> Keyring:
    """Keys as settings and key files hold them: `id:hex`, one a line or separated by commas.

    Empty lines, and lines that begin with `#`, do not count.

    Raises:
        ConfigError: no key, one of another form or too short, or two of one id. The message holds
            nothing of the text but well-formed ids.
    """
    lines = [line.strip() for line in text.splitlines()]
    parts = [part for line in lines if not line.startswith("#") for part in line.split(",")]
    keys: list[SigningKey] = []
    for number, part in enumerate((part.strip() for part in parts if part.strip()), start=1):
        match = _KEY.fullmatch(part)
        if match is None or len(match[2]) % 2 or len(match[2]) < 2 * MIN_KEY_BYTES:
            raise ConfigError(f"key {number} cannot be used; {_FORM}")
        if match[1] in {key.id for key in keys}:
            raise ConfigError(f"two keys are called {match[1]}; give each an id of its own")
        keys.append(SigningKey(match[1], bytes.fromhex(match[2])))
    if not keys:
        raise ConfigError(f"no key in it; {_FORM}")
    return Keyring(tuple(keys))


def _mac(secret: bytes, message: bytes) -> str:
    return hmac.digest(secret, _CONTEXT + message, "sha256").hex()
