"""The worker part of the connector: carries out the scheduler part's orders on one rank.

Runs in a vLLM worker, its hooks on the worker's main thread inside a step. It never waits for the
network or another process, never decides anything, and raises only when the device itself fails.
The slab is mapped on the link's own thread, before the scheduler part promises anything.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ec_s3.connector.copier import HostCopier, StreamCopier
from ec_s3.connector.link import RankLink
from ec_s3.tensors import spec_of

if TYPE_CHECKING:
    import torch

    from ec_s3.connector.copier import Copier
    from ec_s3.connector.messages import LoadOrder, SaveOrder, StepMetadata
    from ec_s3.pages import Slab

logger = logging.getLogger(__name__)


class Worker:
    """One rank.

    Args:
        address: where the scheduler part listens.
        rank: number of this rank within its engine; rank 0 saves.
        device: this rank's own device.
    """

    def __init__(self, address: str, *, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._mapped: tuple[str, Slab, Copier] | None = None
        self._orders: dict[str, SaveOrder] = {}
        self._link = RankLink(address, rank=rank, prepare=self._prepare)

    def _prepare(self, slab: Slab, nonce: str) -> None:
        """Map the slab for good; the link's thread, outside inference mode."""
        previous = self._mapped
        slab.populate()
        copier: Copier
        if self._device.type == "cuda":
            if not slab.pin():
                logger.warning("host memory is not pinned: copies to the device will be slower")
            copier = StreamCopier(slab.tensor(), self._device)
        else:
            copier = HostCopier(slab.tensor())
        self._mapped = (nonce, slab, copier)
        if previous is not None:
            previous[2].close()
            previous[1].close()

    def _copier(self, metadata: StepMetadata) -> Copier | None:
        """The copier of the slab that this step's orders speak of."""
        mapped = self._mapped
        if mapped is not None and mapped[0] == metadata.nonce:
            return mapped[2]
        if metadata.address:
            self._link.redirect(metadata.address)
        return None

    def begin(self, metadata: StepMetadata, *, saves: bool) -> None:
        """A step starts: remember what is to be saved in it."""
        self._orders = {}
        if self._copier(metadata) is None:
            return
        for order in metadata.saves:
            if saves and self._rank == 0:
                self._orders[order.identifier] = order

    def load(self, metadata: StepMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Put every ordered item into vLLM's encoder cache."""
        copier = self._copier(metadata)
        for order in metadata.loads:
            if order.identifier in encoder_cache or copier is None:
                self._link.answer("loaded", order.transfer, done=False)
            else:
                encoder_cache[order.identifier] = self._load(copier, order)

    def _load(self, copier: Copier, order: LoadOrder) -> torch.Tensor:
        def done() -> None:
            self._link.answer("loaded", order.transfer, done=True)

        return copier.load(order.extents, order.spec, done)

    def save(self, metadata: StepMetadata, identifier: str, tensor: torch.Tensor) -> None:
        """Copy an encoder output into the slab, if that was ordered and it is what was expected."""
        order = self._orders.pop(identifier, None)
        copier = self._copier(metadata)
        if order is None or copier is None:
            return
        if spec_of(tensor) != order.spec:
            logger.warning(
                "an encoder output is not saved: it is %s, expected %s",
                spec_of(tensor),
                order.spec,
            )
            self._link.answer("saved", order.ticket, done=False)
            return

        def done() -> None:
            self._link.answer("saved", order.ticket, done=True)

        copier.save(tensor, order.extents, done)

    def end(self) -> None:
        """The step is over: what was not saved in it will not be."""
        for order in self._orders.values():
            self._link.answer("saved", order.ticket, done=False)
        self._orders = {}

    def close(self) -> None:
        """Hang up and let go of the slab; idempotent."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped[2].close()
        self._link.close()
        if mapped is not None:
            mapped[1].close()
