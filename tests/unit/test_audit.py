"""The comparison of an encoder's output with what is stored."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from ec_s3.audit import CLOSE_COSINE, MAX_WAITING, Auditor, compare
from ec_s3.keys import Namespace
from ec_s3.local import LocalTier
from ec_s3.metrics import Stats
from ec_s3.pages import PAGE_BYTES, Slab
from ec_s3.tensors import as_bytes, spec_of
from ec_s3.types import ItemMeta, TensorSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ec_s3.audit import Comparison

NAMESPACE = Namespace(model="org/model", dtype="bfloat16")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def output(
    rows: int = 700, *, width: int = 1024, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def against(stored: torch.Tensor, made: torch.Tensor, *, cut: int = 0) -> Comparison:
    """Compare, the second cut into runs of any size."""
    view = as_bytes(made)
    runs = [view[i : i + cut] for i in range(0, len(view), cut)] if cut else [view]
    return compare(spec_of(stored), [as_bytes(stored)], runs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits_are_the_same(dtype: torch.dtype) -> None:
    found = against(output(dtype=dtype), output(dtype=dtype), cut=100_001)
    assert (found.outcome, found.cosine, found.changed) == ("same", 1.0, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_close_and_the_rows_are_counted(dtype: torch.dtype) -> None:
    made = output(dtype=dtype)
    made[10:17, 3] *= 1.02
    found = against(output(dtype=dtype), made, cut=65_536)
    assert found.outcome == "close"
    assert found.cosine is not None
    assert CLOSE_COSINE <= found.cosine < 1
    assert found.changed == pytest.approx(7 / 700)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_of_something_else_is_different(dtype: torch.dtype) -> None:
    made = output(dtype=dtype)
    made[699] = -made[699]
    found = against(output(dtype=dtype), made)
    assert found.outcome == "different"
    assert found.cosine == pytest.approx(-1)


def test_what_is_no_number_or_nothing_is_different_from_what_is() -> None:
    made = output()
    made[5] = torch.nan
    assert against(output(), made).cosine == 0.0
    made = output()
    made[5] = 0
    assert against(output(), made).outcome == "different"


def test_zeros_of_either_sign_are_close() -> None:
    stored, made = torch.zeros(2, 4), torch.zeros(2, 4)
    made[0] = -0.0
    assert against(stored, made).outcome == "close"


def test_elements_of_other_kinds_are_compared_by_their_bits() -> None:
    stored = torch.arange(12, dtype=torch.int8).reshape(3, 4)
    made = stored.clone()
    assert against(stored, made).outcome == "same"
    made[0, 0] = 99
    found = against(stored, made)
    assert (found.outcome, found.cosine) == ("different", None)


def test_empty_tensors_are_the_same() -> None:
    assert compare(TensorSpec("float32", (0, 8)), [], []).outcome == "same"


# -- the auditor -----------------------------------------------------------------------------------


class Rig:
    def __init__(self, slab: Slab, executor: ThreadPoolExecutor) -> None:
        self.executor = executor
        self.tier = LocalTier(slab)
        self.stats = Stats()
        self.auditor = Auditor(self.tier, executor, self.stats)

    def store(self, name: str, tensor: torch.Tensor, meta: ItemMeta | None = None) -> None:
        with self._filled(name, tensor) as reservation:
            reservation.commit(spec_of(tensor), meta or ItemMeta(), dirty=False).release()

    def _filled(self, name: str, tensor: torch.Tensor):  # type: ignore[no-untyped-def]  # a reservation
        reservation = self.tier.reserve(NAMESPACE.object_key(name), tensor.nbytes)
        assert reservation is not None
        data, at = as_bytes(tensor), 0
        for segment in reservation.segments():
            segment[:] = data[at : at + len(segment)]
            at += len(segment)
        return reservation

    def offer(self, name: str, tensor: torch.Tensor, meta: ItemMeta | None = None) -> None:
        self.auditor.offer(
            self._filled(name, tensor), spec_of(tensor), meta or ItemMeta(), identifier=name
        )

    async def audit(self, name: str, tensor: torch.Tensor, meta: ItemMeta | None = None) -> str:
        before = self.stats.snapshot()
        self.offer(name, tensor, meta)
        await self.settled()
        after = self.stats.snapshot()
        (outcome,) = [k for k in after if k.startswith("audits_") and after[k] > before[k]]
        return outcome.removeprefix("audits_")

    async def settled(self) -> None:
        while self.auditor._tasks:
            await asyncio.wait(self.auditor._tasks)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with Slab.create(64 * PAGE_BYTES) as slab, ThreadPoolExecutor(1) as executor:
        slab.populate()
        made = Rig(slab, executor)
        yield made
        await made.auditor.close()
        stats = made.tier.stats()
        assert (stats.leased_bytes, stats.reserved_bytes) == (0, 0), "pages are given back"


async def test_differences_are_counted_and_named_and_change_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    name = "0123456789abcdef" * 4
    rig.store(name, output())
    assert await rig.audit(name, output()) == "same"
    assert caplog.records == []
    assert rig.stats.snapshot()["audit_worst_cosine"] == 1
    near, other = output(), output()
    near[0, 0] += 1
    other[3] = -other[3]
    assert await rig.audit(name, near) == "close"
    assert await rig.audit(name, other) == "different"
    assert await rig.audit(name, other) == "different"
    assert rig.stats.snapshot()["audit_worst_cosine"] == pytest.approx(-1)
    close, different = [r.getMessage() for r in caplog.records]  # one of each kind a minute
    assert "(close)" in close
    assert f"(different): 0123456789ab of {NAMESPACE.id}, 0.1%" in different
    lease = rig.tier.lookup(NAMESPACE.object_key(name))
    assert lease is not None
    assert b"".join(lease.segments()) == bytes(as_bytes(output()))
    lease.release()


async def test_identifiers_that_cannot_be_printed_are_named_by_their_digest(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.store("\0salt\0secret\nline", output())
    await rig.audit("\0salt\0secret\nline", -output())
    assert NAMESPACE.object_key("\0salt\0secret\nline").rpartition("/")[2][:12] in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("cause", ["evicted", "shape", "another input"])
async def test_what_cannot_be_compared_is_skipped(rig: Rig, cause: str) -> None:
    if cause == "shape":
        rig.store("a", output(5))
    elif cause == "another input":
        rig.store("a", output(), ItemMeta(input_digest="ab" * 32))
    assert await rig.audit("a", output(), ItemMeta(input_digest="cd" * 32)) == "skipped"


async def test_what_is_bound_to_no_input_is_compared(rig: Rig) -> None:
    rig.store("a", output())
    assert await rig.audit("a", output(), ItemMeta(input_digest="cd" * 32)) == "same"


async def test_more_than_a_few_at_once_are_skipped(rig: Rig) -> None:
    rig.store("a", output())
    busy = threading.Event()
    rig.executor.submit(busy.wait, 20)
    for _ in range(MAX_WAITING + 3):
        rig.offer("a", output())
    assert rig.stats.snapshot()["audits_skipped"] == 3
    busy.set()
    await rig.settled()
    assert rig.stats.snapshot()["audits_same"] == MAX_WAITING


async def test_an_unexpected_error_is_counted_and_gives_the_pages_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr("ec_s3.audit.compare", broken)
    rig.store("a", output())
    assert await rig.audit("a", output()) == "skipped"
    assert rig.stats.snapshot()["errors_audit"] == 1
    assert "a bug" in caplog.text


async def test_closing_waits_for_a_comparison_and_takes_no_more(rig: Rig) -> None:
    rig.store("a", output())
    busy = threading.Event()
    rig.executor.submit(busy.wait, 20)
    rig.offer("a", output())
    await asyncio.sleep(0)
    closing = asyncio.create_task(rig.auditor.close())
    await asyncio.sleep(0)
    busy.set()
    await closing
    assert await rig.audit("a", output()) == "skipped"
