"""Removes items from every tier, so that nothing that was under way brings them back.

Runs on the engine's event loop. Must not touch other items.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ec_s3.errors import RemoteError
from ec_s3.types import DeleteReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ec_s3.reader import Reader
    from ec_s3.store import Store
    from ec_s3.tiers import Tiers
    from ec_s3.uploads import UploadQueue


async def delete(
    keys: Sequence[str], *, tiers: Tiers, reader: Reader, queue: UploadQueue | None
) -> DeleteReport:
    """Delete keys; absent ones count as deleted. A put of one meanwhile may end either way.

    Raises:
        RemoteError: a store failed as a whole; the others were told all the same.
    """
    stores = (tiers.disk, tiers.remote)
    return await _remove(keys, stores, tiers=tiers, reader=reader, queue=queue)


async def forget(
    keys: Sequence[str], *, tiers: Tiers, reader: Reader, queue: UploadQueue | None
) -> DeleteReport:
    """Delete keys from host memory and disk: somebody else has deleted them from the bucket.

    Raises:
        RemoteError: the disk tier failed as a whole.
    """
    return await _remove(keys, (tiers.disk,), tiers=tiers, reader=reader, queue=queue)


async def _remove(
    keys: Sequence[str],
    stores: Iterable[Store | None],
    *,
    tiers: Tiers,
    reader: Reader,
    queue: UploadQueue | None,
) -> DeleteReport:
    failed: dict[str, str] = {}
    failure: RemoteError | None = None
    async with reader.barred(keys):
        if queue is not None:
            await queue.withdraw(keys, outcome="deleted")
        for key in keys:
            tiers.local.discard(key)
        for store in stores:
            try:
                if store is not None:
                    failed |= (await store.delete(keys)).failed
            except RemoteError as error:
                failure = error
        for key in keys:
            tiers.presence.forget(key)
            tiers.refused.forget(key)
    if failure is not None:
        raise failure
    return DeleteReport(tuple(key for key in keys if key not in failed), failed)
