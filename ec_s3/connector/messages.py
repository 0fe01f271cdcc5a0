"""What the scheduler part tells the worker part with each step. Plain values, picklable.

Nothing of vLLM is imported: `shell` registers `StepMetadata` as one of its metadata classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ec_s3.types import Extent, TensorSpec


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Copy an item from the slab to the device. Every rank answers it once.

    Attributes:
        transfer: number of this load, for the answer.
        identifier: key in vLLM's encoder cache.
        spec: what lies in the slab, and what the tensor will be.
        extents: where it lies.
    """

    transfer: int
    identifier: str
    spec: TensorSpec
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Copy an encoder output into the slab. The first rank answers it once.

    Attributes:
        ticket: the reservation that is filled, for the answer.
        identifier: key in vLLM's encoder cache.
        spec: exactly what the tensor must be, or nothing is copied.
        extents: where to.
        cached: it is not encoded in this step but lies in vLLM's encoder cache, and the bucket has
            lost it.
    """

    ticket: int
    identifier: str
    spec: TensorSpec
    extents: tuple[Extent, ...]
    cached: bool = False


@dataclass(slots=True)
class StepMetadata:
    """One step's orders.

    Attributes:
        nonce: the slab that the orders speak of; a rank that maps another one must not copy.
        address: socket name where that slab is to be had.
        encodes: items that vLLM encodes in this step, whether they are saved or not.
    """

    nonce: str = ""
    address: str = ""
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    encodes: int = 0
