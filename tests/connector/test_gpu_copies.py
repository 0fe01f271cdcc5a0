"""Real copies on a real device; run where one is (`pytest -m gpu`)."""

from __future__ import annotations

import threading

import pytest
import torch

from ec_s3.connector.copier import StreamCopier
from ec_s3.pages import Slab
from ec_s3.tensors import spec_of
from ec_s3.types import Extent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
_MIB = 1 << 20


def test_outputs_go_to_the_slab_and_back_unchanged() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with Slab.create(64 * _MIB) as slab:
        slab.populate()
        assert slab.pin()
        copier = StreamCopier(slab.tensor(), device)
        for seed in range(20):
            torch.manual_seed(seed)
            tensor = torch.randn(1024, 3584, device=device) @ torch.randn(3584, 3584, device=device)
            tensor = tensor.to(torch.bfloat16)
            extents = (Extent(32 * _MIB, 4 * _MIB), Extent(0, 4 * _MIB))
            saved, loaded = threading.Event(), threading.Event()
            expected = tensor.clone()
            copier.save(tensor, extents, saved.set)
            spec = spec_of(tensor)
            del tensor
            assert saved.wait(10)
            back = copier.load(extents, spec, loaded.set)
            assert torch.equal(back, expected)
            assert back.device == device
            assert loaded.wait(10)
        copier.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_parts_of_a_batch_and_strided_outputs_keep_their_bytes(dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with Slab.create(16 * _MIB) as slab:
        slab.populate()
        copier = StreamCopier(slab.tensor(), device)
        batch = torch.randn(3, 257, 513, device=device).to(dtype)
        for tensor in (batch[1], batch[2].T):
            saved = threading.Event()
            extents = (Extent(8 * _MIB, _MIB // 4), Extent(0, 2 * _MIB))
            copier.save(tensor, extents, saved.set)
            assert saved.wait(10)
            back = copier.load(extents, spec_of(tensor), lambda: None)
            assert torch.equal(back.view(torch.uint8), tensor.contiguous().view(torch.uint8))
        copier.close()
