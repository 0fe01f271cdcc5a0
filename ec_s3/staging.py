"""Copies tensors into the host tier, for puts.

Called from any thread; copies in the calling thread, outside every lock. No I/O, no waiting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ec_s3.errors import CapacityError
from ec_s3.fetch import PrivateItem
from ec_s3.tensors import as_bytes, spec_of
from ec_s3.uploads import Upload

if TYPE_CHECKING:
    import torch

    from ec_s3.config import ECConfig
    from ec_s3.keys import Namespace
    from ec_s3.local import LocalTier
    from ec_s3.metrics import Stats
    from ec_s3.types import ItemMeta


class Stager:
    """The host tier's side of a put.

    Attributes:
        uploads: whether items go beyond the host tier; such items are dirty until encoded.
    """

    def __init__(
        self, config: ECConfig, namespace: Namespace, *, tier: LocalTier, stats: Stats
    ) -> None:
        self._config = config
        self._namespace = namespace
        self._tier = tier
        self._stats = stats
        self.uploads = False

    def stage(self, identifier: str, tensor: torch.Tensor, meta: ItemMeta) -> Upload | None:
        """Copy a tensor into the host tier, or into private memory when it is too large for it.

        Returns:
            What to queue for upload, None when there is no room now (counted by reason).

        Raises:
            ValueError: the tensor's dtype is not the namespace's, or it has too many dimensions.
        """
        spec = spec_of(tensor)
        if spec.dtype != self._namespace.dtype:
            raise ValueError(f"tensor is {spec.dtype}, the namespace holds {self._namespace.dtype}")
        if spec.nbytes > self._config.max_item_size:
            self._stats.add("rejected_puts", reason="too_large")
            return None
        key = self._namespace.object_key(identifier)
        if self._tier.contains(key):
            return Upload(key, identifier)
        try:
            reservation = self._tier.reserve(key, spec.nbytes)
        except CapacityError:
            if not self.uploads:
                self._stats.add("rejected_puts", reason="too_large")
                return None
            buffer = memoryview(bytearray(as_bytes(tensor)))
            return Upload(key, identifier, PrivateItem(key, spec, meta, buffer))
        if reservation is None:
            self._stats.add("rejected_puts", reason="no_room")
            return None
        with reservation:
            source, at = as_bytes(tensor), 0
            for segment in reservation.segments():
                segment[:] = source[at : at + len(segment)]
                at += len(segment)
            reservation.commit(spec, meta, dirty=self.uploads).release()
        return Upload(key, identifier)
