"""Tells a bucket's operator what the folder of a namespace holds, once per namespace.

Runs on the engine's event loop, after an item was written there. The description is for people and
their tools, and no server depends on it: what goes wrong is logged, and tried again much later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from ec_s3.errors import ECS3Error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ec_s3.gate import Gate
    from ec_s3.store import Store

logger = logging.getLogger(__name__)

PUT_SECONDS = 30.0

AGAIN_SECONDS = 3600.0
"""How long a description counts as being there; somebody may have deleted it with the folder."""


class Manifest:
    """Writes `namespace.json` of the namespace in use.

    Args:
        gate: knows that namespace.
        facts: what identifiers depend on but the namespace does not; JSON.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        gate: Gate,
        facts: Mapping[str, object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gate = gate
        self._facts = facts
        self._clock = clock
        self._described: dict[str, tuple[float, float]] = {}

    async def describe(self, remote: Store, key: str) -> None:
        """An object of this key was written: describe its namespace, if that is the one in use."""
        namespace = self._gate.now.namespace
        if not key.startswith(f"{namespace.prefix}/"):
            return
        # Whoever deletes the folder says that nothing in it counts any more.
        valid_after, now = self._gate.control.valid_after, self._clock()
        known_after, since = self._described.get(namespace.prefix, (-1.0, 0.0))
        if known_after == valid_after and now - since < AGAIN_SECONDS:
            return
        self._described[namespace.prefix] = (valid_after, now)
        try:
            body = namespace.manifest(self._facts)
            async with asyncio.timeout(PUT_SECONDS):
                await remote.put(namespace.manifest_key, [body])
        except (ECS3Error, ValueError, TimeoutError) as error:
            logger.debug("the namespace is not described in the bucket: %s", error)
