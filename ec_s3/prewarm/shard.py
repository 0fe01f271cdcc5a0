"""Which share of a manifest this machine does: a pure function of an entry's text.

The same on every machine and in every release, so that shards that start on their own leave nothing
out and do nothing twice.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Self

from ec_s3.errors import ConfigError

_SHARD = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Shard:
    """Share `index` of `count`, counted from 0.

    Raises:
        ConfigError: there is no such share.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigError(
                f"shard={self.index}/{self.count} is none; the shares of n are 0/n to n-1/n"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `i/n`.

        Raises:
            ConfigError: another form, or no such share.
        """
        match = _SHARD.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"shard={text!r} is no share; write i/n, for example 0/8")
        return cls(int(match[1]), int(match[2]))

    def holds(self, text: str) -> bool:
        """Whether an entry of this text belongs to the share."""
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8]) % self.count == self.index

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"
