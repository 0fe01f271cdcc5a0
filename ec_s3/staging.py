"""Copies tensors into the host tier, for puts, and says which of them go further; and out of it.

`stage` is called from any thread and copies in the calling thread, outside every lock; `admit` is
called on the engine's loop. No I/O, no waiting. Imports torch when a tensor is handled, and so
never in an engine behind a port: that saves its process a second at the start, and 130 MB.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from ec_s3.cancellation import run_to_end
from ec_s3.errors import CapacityError
from ec_s3.fetch import PrivateItem
from ec_s3.policy import Refusal, Sightings, admit_upload
from ec_s3.uploads import Upload
from ec_s3.wire import MAX_IDENTIFIER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    import torch

    from ec_s3.config import ECConfig
    from ec_s3.gate import Epoch, Gate
    from ec_s3.local import Lease, LocalTier
    from ec_s3.metrics import Stats
    from ec_s3.types import ItemMeta, TensorSpec

INLINE_BYTES = 2 << 20
"""Copying so much takes less than handing it to a thread and back."""


async def copied_out(
    executor: Executor, item: Lease | PrivateItem, device: str | torch.device
) -> torch.Tensor:
    """A copy of an item on `device`, made in a thread when it is large or torch not yet there."""
    segments, spec = item.segments(), item.spec
    if spec.nbytes <= INLINE_BYTES and str(device) == "cpu" and "torch" in sys.modules:
        return _copy_out(segments, spec, device)
    return await run_to_end(executor, _copy_out, segments, spec, device)


def _copy_out(
    segments: Sequence[memoryview], spec: TensorSpec, device: str | torch.device
) -> torch.Tensor:
    from ec_s3 import tensors

    return tensors.copy_out(segments, spec, device)


class Stager:
    """The host tier's side of a put.

    Attributes:
        uploads: whether items go beyond the host tier; such items are dirty until encoded.
    """

    def __init__(self, config: ECConfig, gate: Gate, *, tier: LocalTier, stats: Stats) -> None:
        self._config = config
        self._gate = gate
        self._tier = tier
        self._stats = stats
        self.uploads = False
        self._sightings = Sightings()

    def stage(self, identifier: str, tensor: torch.Tensor, meta: ItemMeta) -> Upload | None:
        """Copy a tensor into the host tier, or into private memory when it is too large for it.

        Returns:
            What to queue for upload, None when there is no room now or nothing may be kept
            (counted by reason).

        Raises:
            ValueError: the tensor's dtype is not the namespace's, it has too many dimensions, or
                it is not dense.
        """
        from ec_s3.tensors import spec_of

        spec = spec_of(tensor)
        since = self._gate.now
        namespace = since.namespace
        if spec.dtype != namespace.dtype:
            raise ValueError(f"tensor is {spec.dtype}, the namespace holds {namespace.dtype}")
        key = namespace.object_key(identifier)
        if self._refused(key, since):
            return None
        if self._tier.contains(key):
            return Upload(key, identifier)
        try:
            reservation = self._tier.reserve(key, spec.nbytes)
        except CapacityError:
            return self._stage_private(key, identifier, tensor, spec, meta)
        if reservation is None:
            self._stats.add("rejected_puts", reason="no_room")
            return None
        with reservation:
            self._copy(tensor, reservation.segments())
            if self._refused(key, since):
                return None
            reservation.commit(spec, meta, dirty=self.uploads).release()
        if self._refused(key, since):  # from the last look on; whoever forgets items may be through
            self._tier.discard(key)
            return None
        return Upload(key, identifier)

    def _refused(self, key: str, since: Epoch) -> bool:
        """Whether the item may not be kept, or not any more; counted."""
        refusal = self._gate.refusal(key, since)
        if refusal is not None:
            self._stats.add("rejected_puts", reason=refusal)
        return refusal is not None

    def _stage_private(
        self, key: str, identifier: str, tensor: torch.Tensor, spec: TensorSpec, meta: ItemMeta
    ) -> Upload | None:
        if not self.uploads or spec.nbytes > self._config.max_item_size:
            self._stats.add("rejected_puts", reason="too_large")
            return None
        buffer = np.empty(spec.nbytes, dtype=np.uint8).data
        self._copy(tensor, [buffer])
        return Upload(key, identifier, PrivateItem(key, spec, meta, buffer))

    def admit(self, upload: Upload) -> bool:
        """Whether a staged item may be uploaded (a no is counted).

        One that may not stays in the host tier, as clean: it waits for nothing.
        """
        item = upload.private or self._tier.lookup(upload.key, touch=False)
        if item is None:
            return True  # evicted already; the queue counts it
        config = self._config
        refusal = admit_upload(
            item.spec.nbytes,
            max_item_bytes=config.max_item_size,
            second_sight=config.second_sight,
            seen_before=config.second_sight and self._sightings.seen(upload.key),
        )
        if len(upload.identifier.encode("utf-8", "surrogatepass")) > MAX_IDENTIFIER_BYTES:
            refusal = Refusal.TOO_LARGE  # no header could hold it
        if refusal is not None:
            self._stats.add("rejected_puts", reason=refusal)
            item.mark_clean()
        item.release()
        return refusal is None

    def _copy(self, tensor: torch.Tensor, segments: Sequence[memoryview]) -> None:
        from ec_s3.tensors import copy_in

        started = time.monotonic()
        copy_in(tensor, segments)
        self._stats.observe("save_seconds", time.monotonic() - started, stage="copy")
