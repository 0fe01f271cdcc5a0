"""Stager: what a put copies, what it refuses, and what may be uploaded."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from ec_s3.config import ECConfig
from ec_s3.gate import Gate
from ec_s3.keys import Namespace
from ec_s3.local import LocalTier
from ec_s3.metrics import Stats
from ec_s3.pages import PAGE_BYTES, Slab
from ec_s3.staging import Stager
from ec_s3.tensors import copy_out
from ec_s3.types import ItemMeta
from ec_s3.wire import MAX_IDENTIFIER_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

META = ItemMeta(encode_seconds=0.1)
PAGES = 8


class Rig:
    def __init__(self, slab: Slab, **settings: object) -> None:
        self.config = ECConfig(max_item_size=4 * PAGES * PAGE_BYTES)
        self.config = self.config.model_copy(update=settings)
        self.namespace = Namespace(model="m")
        self.tier = LocalTier(slab)
        self.stats = Stats()
        self.gate = Gate(self.namespace)
        self.stager = Stager(self.config, self.gate, tier=self.tier, stats=self.stats)
        self.stager.uploads = True

    def read(self, identifier: str) -> torch.Tensor | None:
        lease = self.tier.lookup(self.namespace.object_key(identifier))
        if lease is None:
            return None
        with lease:
            return copy_out(lease.segments(), lease.spec, "cpu")

    def rejected(self, reason: str) -> float:
        return self.stats.snapshot()[f"rejected_puts_{reason}"]


@pytest.fixture
def slab() -> Iterator[Slab]:
    with Slab.create(PAGES * PAGE_BYTES) as made:
        made.populate()
        yield made


@pytest.fixture
def rig(slab: Slab) -> Rig:
    return Rig(slab)


def pages(count: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = int(count * PAGE_BYTES / 2 / 256)
    return torch.randn(rows, 256, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize(
    "tensor",
    [
        pages(1),
        pages(2.5),
        torch.empty(0, 4096, dtype=torch.bfloat16),
        torch.tensor(3.0, dtype=torch.bfloat16),
        pages(1).t(),
        pages(2)[10:20],
        pages(1).requires_grad_(),
    ],
    ids=["page", "pages", "no rows", "scalar", "transposed", "view", "grad"],
)
def test_the_copy_is_exact_and_does_not_alias(rig: Rig, tensor: torch.Tensor) -> None:
    expected = tensor.detach().clone()
    upload = rig.stager.stage("x", tensor, META)
    assert upload is not None
    assert upload.private is None
    with torch.no_grad():
        tensor.zero_()
    got = rig.read("x")
    assert got is not None
    assert got.shape == expected.shape
    assert torch.equal(got, expected)
    assert rig.stats.snapshot()["save_seconds_copy_count"] == 1


def test_an_item_that_goes_on_is_dirty_until_then(rig: Rig) -> None:
    rig.stager.stage("x", pages(1), META)
    assert rig.tier.stats().dirty_bytes > 0
    rig.tier.clear()
    rig.stager.uploads = False
    rig.stager.stage("y", pages(1), META)
    assert rig.tier.stats().dirty_bytes == 0


def test_an_item_that_is_there_is_not_copied_again(rig: Rig) -> None:
    rig.stager.stage("x", pages(1), META)
    upload = rig.stager.stage("x", pages(1, seed=2), META)
    assert upload is not None
    assert rig.stats.snapshot()["save_seconds_copy_count"] == 1
    got = rig.read("x")
    assert got is not None
    assert torch.equal(got, pages(1))


def test_another_dtype_is_the_callers_fault(rig: Rig) -> None:
    with pytest.raises(ValueError, match=r"float32.*bfloat16"):
        rig.stager.stage("x", torch.ones(2, 2), META)


def test_a_sparse_tensor_leaves_no_reservation(rig: Rig) -> None:
    with pytest.raises(ValueError, match="dense"):
        rig.stager.stage("x", torch.eye(4, dtype=torch.bfloat16).to_sparse(), META)
    assert rig.tier.stats().used_bytes == 0


def test_no_room_now_is_counted(rig: Rig) -> None:
    reservation = rig.tier.reserve("busy", (PAGES - 1) * PAGE_BYTES)
    assert reservation is not None
    assert rig.stager.stage("x", pages(2), META) is None
    assert rig.rejected("no_room") == 1
    reservation.abort()


def test_one_larger_than_the_tier_goes_from_private_memory_and_evicts_nothing(rig: Rig) -> None:
    """LMCache 0.5.6: it evicted everything and was then refused."""
    for i in range(PAGES):
        rig.stager.stage(f"k{i}", pages(1, i), META)
    large = pages(2 * PAGES)
    upload = rig.stager.stage("large", large, META)
    assert upload is not None
    assert upload.private is not None
    assert torch.equal(copy_out(upload.private.segments(), upload.private.spec, "cpu"), large)
    assert all(rig.read(f"k{i}") is not None for i in range(PAGES))
    assert rig.stager.admit(upload)


def test_one_larger_than_the_tier_is_refused_where_nothing_goes_further(rig: Rig) -> None:
    rig.stager.uploads = False
    assert rig.stager.stage("large", pages(2 * PAGES), META) is None
    assert rig.rejected("too_large") == 1


def test_one_above_the_cap_stays_here_and_is_not_uploaded(slab: Slab) -> None:
    rig = Rig(slab, max_item_size=PAGE_BYTES)
    upload = rig.stager.stage("x", pages(2), META)
    assert upload is not None
    assert not rig.stager.admit(upload)
    assert rig.rejected("too_large") == 1
    assert rig.read("x") is not None
    assert rig.tier.stats().dirty_bytes == 0  # waits for nothing
    assert rig.tier.stats().leased_bytes == 0
    assert rig.stager.stage("larger", pages(2 * PAGES), META) is None


def test_second_sight_lets_the_second_put_pass(slab: Slab) -> None:
    rig = Rig(slab, second_sight=True)
    verdicts = []
    for _ in range(3):
        upload = rig.stager.stage("x", pages(1), META)
        assert upload is not None
        verdicts.append(rig.stager.admit(upload))
    assert verdicts == [False, True, True]
    assert rig.rejected("first_sight") == 1
    assert rig.read("x") is not None


def test_without_second_sight_the_first_put_passes(rig: Rig) -> None:
    upload = rig.stager.stage("x", pages(1), META)
    assert upload is not None
    assert rig.stager.admit(upload)
    rig.tier.clear()
    assert rig.stager.admit(upload)  # evicted meanwhile: for the queue to count


def test_an_identifier_that_no_header_can_hold_is_not_uploaded(rig: Rig) -> None:
    upload = rig.stager.stage("x" * (MAX_IDENTIFIER_BYTES + 1), pages(1), META)
    assert upload is not None
    assert not rig.stager.admit(upload)
    assert rig.rejected("too_large") == 1
    longest = rig.stager.stage("x" * MAX_IDENTIFIER_BYTES, pages(1), META)
    assert longest is not None
    assert rig.stager.admit(longest)


def test_many_threads_at_once(rig: Rig) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(20):
                rig.stager.stage(f"{seed % 3}-{i % 4}", pages(0.5, i % 4), META)
                got = rig.read(f"{seed % 3}-{i % 4}")
                assert got is None or torch.equal(got, pages(0.5, i % 4))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert rig.tier.stats().leased_bytes == 0
    assert rig.tier.stats().reserved_bytes == 0
