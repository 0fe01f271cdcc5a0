"""Tensors as bytes and back: the dtype table's torch side.

Pure functions on any thread. With `pages` the only importer of torch in the core. Must never read
the storage behind a view: the bytes are those of the tensor alone, in row-major order. Bytes in CPU
memory are copied by NumPy, in the calling thread and without the GIL: torch would have a pool of
OpenMP threads for each calling thread, which wait by spinning, for milliseconds after each copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ec_s3.types import DTYPE_BYTES, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ec_s3.compress import Buffer

_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_BY_DTYPE = {dtype: name for name, dtype in _BY_NAME.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in the table.

    Raises:
        ValueError: not in the table.
    """
    name = _BY_DTYPE.get(dtype)
    if name is None:
        raise ValueError(f"{dtype} cannot be stored; known: {', '.join(DTYPE_BYTES)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name in the table.

    Raises:
        ValueError: not in the table.
    """
    dtype = _BY_NAME.get(name)
    if dtype is None:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(DTYPE_BYTES)}")
    return dtype


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Dtype and shape of a tensor on any device.

    Raises:
        ValueError: a dtype or rank that cannot be stored, or a nested tensor, which has no shape.
        TypeError: no tensor at all.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"needs a torch.Tensor, not {type(tensor).__name__}")
    if tensor.is_nested:
        raise ValueError("needs a dense tensor, not a nested one")
    return TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape))


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a CPU tensor, row-major, as a flat view that keeps the tensor alive.

    Shares the tensor's memory when that is contiguous, otherwise a copy's. Not to be written to.

    Raises:
        ValueError: the tensor is not a dense one in CPU memory, or its dtype cannot be stored.
    """
    dtype_name(tensor.dtype)
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ValueError(f"needs a dense CPU tensor, not {tensor.layout} on {tensor.device}")
    return _flat(tensor.detach().resolve_neg().contiguous())


def from_bytes(buffer: Buffer, spec: TensorSpec) -> torch.Tensor:
    """A tensor over the bytes of a buffer, which it keeps alive.

    Shares writable memory; read-only memory is copied, as torch cannot protect it.

    Raises:
        ValueError: the buffer has not the tensor's size.
    """
    view = memoryview(buffer)
    if view.nbytes != spec.nbytes:
        raise ValueError(f"{view.nbytes} bytes are not the {spec.nbytes} of {spec}")
    dtype = torch_dtype(spec.dtype)
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    shared: Buffer = bytearray(view) if view.readonly else view
    return torch.frombuffer(shared, dtype=dtype).reshape(spec.shape)


def copy_out(
    segments: Sequence[memoryview], spec: TensorSpec, device: str | torch.device
) -> torch.Tensor:
    """A new tensor on `device` with the bytes of `segments`, sharing no memory with them.

    Raises:
        ValueError: the segments have not the tensor's size.
    """
    if sum(len(segment) for segment in segments) != spec.nbytes:
        raise ValueError(f"segments do not have the {spec.nbytes} bytes of {spec}")
    if len(segments) == 1 and torch.device(device).type != "cpu":
        return from_bytes(segments[0], spec).to(device, copy=True)
    tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    flat, start = tensor.reshape(-1).view(torch.uint8).numpy(), 0
    for segment in segments:
        flat[start : start + len(segment)] = np.asarray(segment)
        start += len(segment)
    return tensor.to(device)


def copy_in(tensor: torch.Tensor, segments: Sequence[memoryview]) -> None:
    """Copy the elements of a tensor on any device, row-major, into writable memory of its size.

    Raises:
        ValueError: the tensor is not a dense one, its dtype cannot be stored, or the memory has
            another size.
    """
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise ValueError(f"needs a dense tensor, not {tensor.layout} on {tensor.device}")
    if len(segments) == 1 and not (tensor.device.type == "cpu" and tensor.is_contiguous()):
        from_bytes(segments[0], spec_of(tensor)).copy_(tensor.detach())
        return
    flat, start = np.asarray(as_bytes(tensor.detach().cpu())), 0
    if flat.nbytes != sum(len(segment) for segment in segments):
        raise ValueError(f"the memory does not have the {flat.nbytes} bytes of the tensor")
    for segment in segments:
        np.asarray(segment)[:] = flat[start : start + len(segment)]
        start += len(segment)


def _flat(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in place."""
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view
