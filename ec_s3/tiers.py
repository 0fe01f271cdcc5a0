"""The tiers of one engine, and what it remembers of them: for those parts that use all of them.

A plain value; used on the engine's event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ec_s3.local import LocalTier
    from ec_s3.presence import Presence, Refused
    from ec_s3.refresh import Refresher
    from ec_s3.store import Store
    from ec_s3.writeback import DiskWriteback

CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Tiers:
    """What an engine reads from and writes to; None where there is none."""

    local: LocalTier
    disk: Store | None
    remote: Store | None
    writeback: DiskWriteback | None
    presence: Presence
    refused: Refused
    refresher: Refresher | None = None

    @property
    def stores(self) -> tuple[Store, ...]:
        """The stores beyond the host tier."""
        return tuple(store for store in (self.remote, self.disk) if store is not None)

    async def close(self) -> None:
        """End what is still being written, and close the stores, within a second or two."""
        if self.writeback is not None:
            await self.writeback.close(CLOSE_SECONDS / 2)
        closing = [store.aclose() for store in self.stores]
        await asyncio.wait(
            [asyncio.gather(*closing, return_exceptions=True)], timeout=CLOSE_SECONDS
        )
