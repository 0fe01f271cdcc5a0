"""Copies between the slab and a rank's device.

Called on the worker's main thread inside a step. On the CPU a copy is done when the call returns.
On CUDA it runs on a side stream: a load orders the compute stream behind it, a save waits for the
compute stream on the device, never on the host; a thread of its own waits for the copies' events
and reports. The tensors handed over are kept alive by `record_stream`.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Protocol

import torch

from ec_s3.tensors import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ec_s3.types import Extent, TensorSpec

    Done = Callable[[], None]

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0


class Copier(Protocol):
    """How a rank copies."""

    def load(self, extents: Sequence[Extent], spec: TensorSpec, done: Done) -> torch.Tensor:
        """A new tensor on the device that the compute stream may use from now on."""
        ...

    def save(self, tensor: torch.Tensor, extents: Sequence[Extent], done: Done) -> None:
        """Copy a tensor's bytes into the slab; the tensor may be freed as soon as this returns."""
        ...

    def close(self) -> None:
        """Wait for what is under way, a few seconds at most."""
        ...


def _runs(
    slab: torch.Tensor, flat: torch.Tensor, extents: Sequence[Extent]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of slab and tensor bytes, run by run; the last page may be only partly used."""
    at = 0
    for extent in extents:
        nbytes = min(extent.nbytes, flat.numel() - at)
        yield slab[extent.offset : extent.offset + nbytes], flat[at : at + nbytes]
        at += nbytes


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class HostCopier:
    """For ranks whose device is the CPU.

    Args:
        slab: the whole slab as a 1-D uint8 tensor.
    """

    def __init__(self, slab: torch.Tensor) -> None:
        self._slab = slab

    def load(self, extents: Sequence[Extent], spec: TensorSpec, done: Done) -> torch.Tensor:
        """See `Copier.load`."""
        tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        for source, target in _runs(self._slab, _flat(tensor), extents):
            target.copy_(source)
        done()
        return tensor

    def save(self, tensor: torch.Tensor, extents: Sequence[Extent], done: Done) -> None:
        """See `Copier.save`."""
        for target, source in _runs(self._slab, _flat(tensor), extents):
            target.copy_(source)
        done()

    def close(self) -> None:
        """Nothing is ever under way."""


class StreamCopier:
    """For ranks with a CUDA device.

    Args:
        slab: the whole slab as a 1-D uint8 tensor, pinned if possible.
        device: this rank's own device.
    """

    def __init__(self, slab: torch.Tensor, device: torch.device) -> None:
        self._slab = slab
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own gap
        self._events: queue.SimpleQueue[tuple[torch.cuda.Event, Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._report, name="ec_s3-copies", daemon=True)
        self._thread.start()

    def load(self, extents: Sequence[Extent], spec: TensorSpec, done: Done) -> torch.Tensor:
        """See `Copier.load`."""
        compute = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            # Allocated on the side stream, so its memory is not in use by earlier compute work.
            tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=self._device)
            for source, target in _runs(self._slab, _flat(tensor), extents):
                target.copy_(source, non_blocking=True)
            self._finish(done, before=compute)
        tensor.record_stream(compute)
        return tensor

    def save(self, tensor: torch.Tensor, extents: Sequence[Extent], done: Done) -> None:
        """See `Copier.save`."""
        compute = torch.cuda.current_stream(self._device)
        flat = _flat(tensor)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            for target, source in _runs(self._slab, flat, extents):
                target.copy_(source, non_blocking=True)
            self._finish(done)
        flat.record_stream(self._stream)

    def _finish(self, done: Done, *, before: torch.cuda.Stream | None = None) -> None:
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own gap
        event.record(self._stream)
        if before is not None:
            before.wait_event(event)
        self._events.put((event, done))

    def _report(self) -> None:
        # A thread starts on the host's first device, and its first CUDA call takes memory there.
        torch.cuda.set_device(self._device)
        while (entry := self._events.get()) is not None:
            event, done = entry
            try:
                event.synchronize()
            except RuntimeError:
                # The device has failed; without an answer the pages stay held, as they must.
                logger.exception("a copy's event failed")
                continue
            done()

    def close(self) -> None:
        """See `Copier.close`."""
        self._events.put(None)
        self._thread.join(CLOSE_SECONDS)
