"""The tensors that are stored: activations, or incompressible noise. Needs NumPy only.

Items of one shape differ in their first row, so that one base in memory serves any number of them
and a tensor of the wrong item is still found out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    Bits = npt.NDArray[np.uint16]

SHAPES = ((256, 3584), (1024, 3584), (4096, 5120), (1024, 14336))
KINDS = ("activations", "noise")


def to_bf16(values: npt.NDArray[np.float32]) -> Bits:
    """Round to bfloat16; returned as its bits."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def make(kind: str, shape: tuple[int, int], *, source: Path | None = None, seed: int = 1) -> Bits:
    """The bits of a bf16 tensor `shape`.

    Args:
        kind: one of `KINDS`.
        shape: rows and channels.
        source: recorded activations, raw little-endian bfloat16, with `ROWSxCHANNELS` in the
            file's name; its rows are tiled in new orders. None makes normal values whose
            channels have scales of a log-normal distribution with sigma 1.
        seed: of the random generator.
    """
    random = np.random.default_rng(seed)
    if kind == "noise":
        return random.integers(0, 1 << 16, shape, dtype=np.uint16)
    if source is None:
        scales = np.exp(random.normal(0, 1, shape[1])).astype(np.float32)
        return to_bf16(random.standard_normal(shape, dtype=np.float32) * scales)
    rows = np.fromfile(source, dtype="<u2").reshape(-1, file_shape(source)[1])
    wanted = -(-shape[0] * shape[1] // rows.size)
    tiles = [rows[random.permutation(len(rows))].reshape(-1) for _ in range(wanted)]
    tiled: Bits = np.concatenate(tiles)[: shape[0] * shape[1]].reshape(shape)
    return tiled


def file_shape(source: Path) -> tuple[int, int]:
    """Rows and channels, from a file's name."""
    found = re.search(r"(\d+)x(\d+)", source.name)
    if found is None:
        raise ValueError(f"{source}: the name must contain ROWSxCHANNELS")
    return int(found[1]), int(found[2])


@dataclass(frozen=True, slots=True)
class Items:
    """The items of one base: `bits(number)` is what item `number` holds."""

    base: Bits

    @property
    def nbytes(self) -> int:
        return self.base.nbytes

    def bits(self, number: int) -> Bits:
        """Item `number`, a copy."""
        made = self.base.copy()
        made[0, :4] = self._stamp(number)
        return made

    def right(self, number: int, got: Bits) -> bool:
        """Whether `got` is item `number`, bit for bit."""
        if got.shape != self.base.shape or not np.array_equal(got[0, :4], self._stamp(number)):
            return False
        rest = np.array_equal(_words(got[1:]), _words(self.base[1:]))
        return rest and np.array_equal(got[0, 4:], self.base[0, 4:])

    @staticmethod
    def _stamp(number: int) -> Bits:
        return np.array([0x3F80, number & 0xFF, 0x3F00 | (number >> 8) & 0xFF, 0x4000], np.uint16)


def _words(bits: Bits) -> npt.NDArray[np.generic]:
    """The same bits in as few numbers as possible: they are compared all the time."""
    flat = bits.reshape(-1)
    return flat.view(np.uint64) if flat.size % 4 == 0 else flat
