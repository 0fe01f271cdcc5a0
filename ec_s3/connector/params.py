"""What a client asks for in a request's `ec_transfer_params`.

Pure; runs on the scheduler's thread, once per request. The value comes from the client and has any
shape: nothing in it is trusted, walked through or remembered, and nothing raises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

STORE = "store"
INPUT_DIGEST = "input_digest"
"""Of an item's entry, as a producer published it and a proxy has sent it on."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Params:
    """A client's wishes.

    Attributes:
        store: whether encoder outputs of the request may be kept.
        malformed: something was there that could not be understood; defaults hold.
        entries: all that was there, unchecked.
    """

    store: bool = True
    malformed: bool = False
    entries: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def digest(self, name: str) -> str:
        """Digest of the inputs that an item must have been made of; empty when there is none."""
        entry = self.entries.get(name)
        digest = entry.get(INPUT_DIGEST) if type(entry) is dict else None
        return digest if type(digest) is str and _DIGEST.fullmatch(digest) else ""


def read_params(request: Any) -> Params:
    """The wishes of a request; defaults where it has none, or none that can be understood.

    Other keys are the entries of media items that a producer published. Those of vLLM's own
    connectors have no digest.
    """
    params = getattr(request, "ec_transfer_params", None)
    if params is None:
        return Params()
    entries = params if type(params) is dict else {}
    store = entries.get(STORE, True) if entries is params else None
    if type(store) is bool:
        return Params(store=store, entries=entries)
    return Params(malformed=True, entries=entries)
