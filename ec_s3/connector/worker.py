"""The worker part of the connector: carries out the scheduler part's orders on one rank.

Runs in a vLLM worker, its hooks on the worker's main thread inside a step. It never waits for the
network or another process, never decides anything, and raises only when the device itself fails.
The slab is mapped on the link's own thread, before the scheduler part promises anything.

Locking: `_lock` guards which slab is mapped against a close meanwhile; no step takes it.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ec_s3.connector.copier import HostCopier, StreamCopier
from ec_s3.connector.link import RankLink
from ec_s3.tensors import spec_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.connector.copier import Copier
    from ec_s3.connector.messages import SaveOrder, StepMetadata
    from ec_s3.pages import Slab

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A slab that this rank can copy from and to, and what does it."""

    nonce: str
    slab: Slab
    copier: Copier

    def close(self) -> None:
        self.copier.close()
        self.slab.close()


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
        self._lock = threading.Lock()
        self._mapping: _Mapping | None = None
        self._preparing: Slab | None = None
        self._closed = False
        self._nonce = ""
        self._warned = False
        self._orders: dict[str, SaveOrder] = {}
        self._link = RankLink(address, rank=rank, prepare=self._prepare)

    def _prepare(self, slab: Slab, nonce: str) -> None:
        """Map the slab for good; the link's thread, outside inference mode.

        Raises:
            ClosedError: the worker was closed meanwhile.
        """
        with self._lock:
            if self._closed:
                slab.close()
            self._preparing = slab
        try:
            slab.populate()
            mapping = _Mapping(nonce, slab, self._make_copier(slab))
        except BaseException:
            slab.close()
            raise
        with self._lock:
            self._preparing = None
            unwanted = mapping if self._closed else self._mapping
            self._mapping = None if self._closed else mapping
        if unwanted is not None:
            unwanted.close()

    def _make_copier(self, slab: Slab) -> Copier:
        if self._device.type != "cuda":
            return HostCopier(slab.tensor())
        # Without this, a thread's first CUDA call takes memory on the first device of the host.
        with torch.cuda.device(self._device):
            if not slab.pin():
                logger.warning("host memory is not pinned: copies to the device will be slower")
            return StreamCopier(slab.tensor(), self._device)

    def _copier(self, metadata: StepMetadata) -> Copier | None:
        """The copier of the slab that this step's orders speak of."""
        mapping = self._mapping
        if mapping is not None and mapping.nonce == metadata.nonce:
            return mapping.copier
        if metadata.address:
            self._link.redirect(metadata.address)
        return None

    def begin(self, metadata: StepMetadata, *, saves: bool) -> None:
        """A step starts: remember what is to be saved in it."""
        self.end()  # a step that failed may have had no end
        self._copier(metadata)
        self._nonce = metadata.nonce
        if saves and self._rank == 0:
            self._orders = {order.identifier: order for order in metadata.saves}

    def load(self, metadata: StepMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Put every ordered item into vLLM's encoder cache."""
        copier = self._copier(metadata)
        for order in metadata.loads:
            if order.identifier not in encoder_cache and copier is not None:
                done = self._done("loaded", order.transfer, metadata.nonce)
                encoder_cache[order.identifier] = copier.load(order.extents, order.spec, done)
                continue
            if copier is None:
                logger.error("an item is to be loaded from memory that this rank has not mapped")
            self._link.answer("loaded", order.transfer, nonce=metadata.nonce, done=False)

    def save(self, metadata: StepMetadata, identifier: str, tensor: torch.Tensor) -> None:
        """Copy an encoder output into the slab, if that was ordered and it is what was expected.

        An order that is not carried out is answered at the end of the step. One whose copy fails
        half-way is never answered, as the device may still write to its pages.
        """
        order = self._orders.get(identifier)
        copier = self._copier(metadata)
        if order is None or copier is None:
            return
        found = spec_of(tensor)
        if found != order.spec:
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            logger.log(
                level, "an encoder output is not saved: it is %s, expected %s", found, order.spec
            )
            return
        del self._orders[identifier]
        copier.save(tensor, order.extents, self._done("saved", order.ticket, metadata.nonce))

    def _done(self, kind: str, number: int, nonce: str) -> Callable[[], None]:
        return lambda: self._link.answer(kind, number, nonce=nonce, done=True)

    def end(self) -> None:
        """The step is over: what was not saved in it will not be."""
        orders, self._orders = self._orders, {}
        for order in orders.values():
            self._link.answer("saved", order.ticket, nonce=self._nonce, done=False)

    def close(self) -> None:
        """Finish the copies, hang up and let go of the slab; idempotent."""
        with self._lock:
            self._closed = True
            mapping, self._mapping = self._mapping, None
            preparing = self._preparing
        if mapping is not None:
            mapping.copier.close()
        if preparing is not None:
            preparing.close()  # ends the populating
        self._link.close()
        if mapping is not None:
            mapping.slab.close()
