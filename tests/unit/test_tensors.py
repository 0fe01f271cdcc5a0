from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ec_s3.tensors import (
    as_bytes,
    copy_in,
    copy_out,
    dtype_name,
    from_bytes,
    spec_of,
    torch_dtype,
)
from ec_s3.types import DTYPE_BYTES, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable


def make(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bit patterns, NaN payloads included."""
    spec = TensorSpec(dtype, shape)
    noise = torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8)
    return from_bytes(memoryview(noise.numpy().tobytes()), spec)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_table_agrees_with_torch(dtype: str) -> None:
    assert dtype_name(torch_dtype(dtype)) == dtype
    assert torch_dtype(dtype).itemsize == DTYPE_BYTES[dtype]


def test_dtypes_outside_the_table_are_named() -> None:
    with pytest.raises(ValueError, match="complex64"):
        dtype_name(torch.complex64)
    with pytest.raises(ValueError, match="float128"):
        torch_dtype("float128")
    with pytest.raises(ValueError, match="complex64"):
        as_bytes(torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (3, 5), (2, 1, 3, 1, 2, 1, 1, 2)])
def test_every_dtype_and_rank_round_trips_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = make(dtype, shape)
    spec = spec_of(tensor)
    data = as_bytes(tensor)
    assert spec == TensorSpec(dtype, shape)
    assert (data.format, data.ndim, data.nbytes) == ("B", 1, spec.nbytes)
    for back in (from_bytes(bytearray(data), spec), copy_out([data[:1], data[1:]], spec, "cpu")):
        assert (back.dtype, tuple(back.shape)) == (tensor.dtype, shape)
        assert as_bytes(back) == data


def test_nan_payloads_survive() -> None:
    bits = torch.tensor([0x7FC0, 0x7FC1, 0x7F81, -0x3F, -0x7F], dtype=torch.int16)
    tensor = bits.view(torch.bfloat16)
    back = from_bytes(bytes(as_bytes(tensor)), spec_of(tensor))
    assert torch.equal(back.view(torch.int16), bits)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, 1:3],
        lambda t: t[::2],
        lambda t: t[1],
        lambda t: t[:1].expand(3, -1),
    ],
)
def test_views_give_their_own_elements_and_never_the_storage(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    whole = make("bfloat16", (4, 6))
    part = view(whole)
    data = as_bytes(part)
    assert data.nbytes == part.numel() * 2
    back = from_bytes(bytearray(data), spec_of(part))
    assert torch.equal(back.view(torch.int16), part.contiguous().view(torch.int16))


def test_contiguous_tensor_is_not_copied_and_stays_alive() -> None:
    tensor = torch.zeros(8, dtype=torch.uint8)
    data = as_bytes(tensor)
    tensor[3] = 7
    assert data[3] == 7
    del tensor
    gc.collect()
    assert bytes(data) == bytes([0, 0, 0, 7, 0, 0, 0, 0])


def test_tensors_of_inference_and_training_can_be_read() -> None:
    with torch.inference_mode():
        frozen = torch.ones(2, 3)
    trained = torch.ones(2, 3, requires_grad=True)
    assert as_bytes(frozen) == as_bytes(trained)


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, device="meta"), torch.eye(2).to_sparse()], ids=["meta", "sparse"]
)
def test_tensors_without_dense_host_memory_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="dense CPU tensor"):
        as_bytes(tensor)


@pytest.mark.parametrize("pieces", [1, 2])
def test_tensors_without_memory_are_not_copied(pieces: int) -> None:
    memory = memoryview(bytearray(8))
    segments = [memory[8 // pieces * i : 8 // pieces * (i + 1)] for i in range(pieces)]
    with pytest.raises(ValueError, match="dense tensor"):
        copy_in(torch.ones(2, device="meta"), segments)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")  # torch's word on its own prototype
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_have_no_spec(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(ValueError, match="nested"):
        spec_of(nested)


@pytest.mark.parametrize("thing", [None, [1.0], np.ones(2, dtype=np.float32)], ids=type)
def test_what_is_no_tensor_is_said_to_be_none(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"needs a torch\.Tensor, not"):
        spec_of(thing)


@pytest.mark.parametrize("pieces", [1, 2])
def test_elements_negated_without_a_copy_are_read_negated(pieces: int) -> None:
    tensor = torch._neg_view(torch.tensor([1.0, -2.0]))
    memory = memoryview(bytearray(8))
    copy_in(tensor, [memory[8 // pieces * i : 8 // pieces * (i + 1)] for i in range(pieces)])
    expected = torch.tensor([-1.0, 2.0])
    assert bytes(memory) == bytes(as_bytes(tensor)) == bytes(as_bytes(expected))


def test_from_bytes_shares_writable_memory_and_copies_read_only_memory() -> None:
    spec = TensorSpec("uint8", (4,))
    memory = bytearray(4)
    from_bytes(memory, spec)[0] = 9
    assert memory[0] == 9
    constant = bytes(4)
    from_bytes(constant, spec)[0] = 9
    assert constant == bytes(4)


def test_copy_out_shares_nothing() -> None:
    memory = bytearray(b"\x01\x02\x03\x04")
    tensor = copy_out([memoryview(memory)], TensorSpec("uint8", (2, 2)), "cpu")
    memory[0] = 99
    assert tensor.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("pieces", [1, 2])
def test_copies_in_host_memory_start_no_threads(pieces: int) -> None:
    data = torch.arange(8 << 20, dtype=torch.int32)
    memory = memoryview(bytearray(data.nbytes))
    size = data.nbytes // pieces
    segments = [memory[size * i : size * (i + 1)] for i in range(pieces)]
    threads: list[int] = []

    def copy() -> None:  # in a thread of its own: OpenMP has a pool for each
        threads.append(len(list(Path("/proc/self/task").iterdir())))
        copy_in(data, segments)
        back = copy_out(segments, spec_of(data), "cpu")
        threads.append(len(list(Path("/proc/self/task").iterdir())))
        assert as_bytes(back) == as_bytes(data)

    with ThreadPoolExecutor(1) as executor:
        executor.submit(copy).result()
    assert threads[0] == threads[1]


@pytest.mark.parametrize("nbytes", [0, 7, 9])
def test_memory_of_another_size_is_refused(nbytes: int) -> None:
    spec = TensorSpec("float32", (2,))
    with pytest.raises(ValueError, match="8 of"):
        from_bytes(bytearray(nbytes), spec)
    with pytest.raises(ValueError, match="8 bytes"):
        copy_out([memoryview(bytearray(nbytes))], spec, "cpu")


def test_too_many_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="dimensions"):
        spec_of(torch.zeros([1] * 9))
