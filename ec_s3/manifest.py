"""Tells a bucket's operator what the folder of a namespace holds, once per namespace.

Runs on the engine's event loop, after an item was written there. What goes wrong is logged and
never tried again: the description is for people, and nothing depends on it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ec_s3.errors import ECS3Error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ec_s3.gate import Gate
    from ec_s3.store import Store

logger = logging.getLogger(__name__)

PUT_SECONDS = 30.0


class Manifest:
    """Writes `namespace.json` of the namespace in use.

    Args:
        gate: knows that namespace.
        facts: what identifiers depend on but the namespace does not; JSON.
    """

    def __init__(self, gate: Gate, facts: Mapping[str, object]) -> None:
        self._gate = gate
        self._facts = facts
        self._described: set[str] = set()

    async def describe(self, remote: Store, key: str) -> None:
        """An object of this key was written: describe its namespace, if that is the one in use."""
        namespace = self._gate.now.namespace
        if namespace.prefix in self._described or not key.startswith(f"{namespace.prefix}/"):
            return
        self._described.add(namespace.prefix)
        try:
            body = namespace.manifest(self._facts)
            async with asyncio.timeout(PUT_SECONDS):
                await remote.put(namespace.manifest_key, [body])
        except (ECS3Error, ValueError, TimeoutError) as error:
            logger.debug("the namespace is not described in the bucket: %s", error)
