"""The worker part of the connector: carries out the scheduler part's orders on one rank.

Runs in a vLLM worker, its hooks on the worker's main thread inside a step. It never waits for the
network or another process, never decides anything, and raises only when the device itself fails.
The slab is mapped on the link's own thread, before the scheduler part promises anything.

Locking: `_lock` guards which slab is mapped against a close meanwhile; no step takes it.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ec_s3.connector.asking import RESUME, SUSPEND
from ec_s3.connector.copier import HostCopier, StreamCopier
from ec_s3.connector.link import RankLink
from ec_s3.connector.stopwatch import stopwatch
from ec_s3.quiet import Quiet
from ec_s3.tensors import spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ec_s3.connector.copier import Copier
    from ec_s3.connector.messages import SaveOrder, StepMetadata
    from ec_s3.connector.stopwatch import Stopwatch
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
        self._quiet = Quiet(once=True)
        self._pinned = False
        self._orders: dict[str, SaveOrder] = {}
        self._watch: Stopwatch | None = None
        self._encoded_bytes = 0.0
        self._link = RankLink(address, rank=rank, prepare=self._prepare)

    def _prepare(self, slab: Slab, nonce: str) -> bool:
        """Map the slab for good; the link's thread, outside inference mode.

        Returns:
            Whether the memory is pinned.

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
        return self._pinned

    def _make_copier(self, slab: Slab) -> Copier:
        if self._device.type != "cuda":
            return HostCopier(slab.tensor())
        # Without this, a thread's first CUDA call takes memory on the first device of the host.
        with torch.cuda.device(self._device):
            self._pinned = slab.pin()
            if not self._pinned:
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
            for order in metadata.saves:
                other = self._orders.get(order.identifier)
                if other is not None:  # to be saved from vLLM's cache, but it is encoded again
                    self._link.answer("saved", other.ticket, nonce=self._nonce, done=False)
                self._orders[order.identifier] = order
            encoded = [order.spec.nbytes for order in metadata.saves if not order.cached]
            # What is encoded without being saved is taken to be of average size.
            self._encoded_bytes = sum(encoded) * max(1, metadata.encodes / max(1, len(encoded)))
        self._start_watch()

    def _start_watch(self) -> None:
        """The encoder begins, as far as this step's outputs are wanted."""
        self._watch = stopwatch(self._device) if self._orders else None

    def load(self, metadata: StepMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Put every ordered item into vLLM's encoder cache."""
        copier = self._copier(metadata)
        for order in metadata.loads:
            if copier is None:
                logger.error("an item is to be loaded from memory that this rank has not mapped")
                self._link.answer("loaded", order.transfer, nonce=metadata.nonce, done=False)
                continue
            # What may lie under the name is a leftover that vLLM counts as gone: it was preempted
            # and evicted in the step that loaded it. It need not be what this request waits for.
            done = self._done("loaded", order.transfer, metadata.nonce)
            encoder_cache[order.identifier] = copier.load(order.extents, order.spec, done)
        self._start_watch()

    def save_cached(
        self, metadata: StepMetadata, encoder_cache: Mapping[str, torch.Tensor]
    ) -> None:
        """Save what is not encoded in this step but was in one before, if it is still there."""
        for order in metadata.saves:
            # Not what is encoded anew in this step: that may be another picture of this name.
            wanted = order.cached and self._orders.get(order.identifier) is order
            tensor = encoder_cache.get(order.identifier) if wanted else None
            if tensor is not None:
                self.save(metadata, order.identifier, tensor)

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
            if self._quiet.due() is not None:
                logger.warning(
                    "an encoder output is not saved: it is %s, expected %s", found, order.spec
                )
            return
        del self._orders[identifier]
        done = self._done("saved", order.ticket, metadata.nonce, self._encoding(order))
        copier.save(tensor, order.extents, done)

    def _encoding(self, order: SaveOrder) -> Callable[[], float | None]:
        """The item's share, by its size, of the time that the encoder has run in this step.

        It counts as stopped now: V1 hands over all outputs one after the other when it is done.
        """
        watch, share = self._watch, order.spec.nbytes / max(self._encoded_bytes, 1)
        if watch is None or order.cached:
            return lambda: None
        watch.stop()

        def seconds() -> float | None:
            whole = watch.seconds()
            return None if whole is None else whole * share

        return seconds

    def _done(
        self,
        kind: str,
        number: int,
        nonce: str,
        encoding: Callable[[], float | None] = lambda: None,
    ) -> Callable[[], None]:
        started = time.perf_counter()

        def done() -> None:
            self._link.answer(
                kind,
                number,
                nonce=nonce,
                done=True,
                copy_seconds=time.perf_counter() - started,
                encode_seconds=encoding(),
            )

        return done

    def end(self) -> None:
        """The step is over: what was not saved in it will not be."""
        orders, self._orders = self._orders, {}
        for order in orders.values():
            self._link.answer("saved", order.ticket, nonce=self._nonce, done=False)

    def suspend(self, timeout: float) -> None:
        """Let the engine serve and keep nothing until `resume`; waits until that holds.

        Raises:
            TimeoutError: no answer within `timeout` seconds; it may hold or not.
            ECS3Error: the scheduler part could not do it.
        """
        self._link.ask(SUSPEND, "", timeout=timeout)

    def resume(self, weight_version: str, timeout: float) -> None:
        """Let the engine go on with weights of this name; otherwise as `suspend`."""
        self._link.ask(RESUME, weight_version, timeout=timeout)

    def report_error(self) -> None:
        """Tell the scheduler part of an unexpected exception, which counts it."""
        mapping = self._mapping
        if mapping is not None:
            self._link.answer("failed", 0, nonce=mapping.nonce, done=False)

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
