"""A rank carries out orders, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from ec_s3.connector import worker as worker_module
from ec_s3.connector.messages import LoadOrder, SaveOrder, StepMetadata
from ec_s3.connector.worker import Worker
from ec_s3.pages import Slab
from ec_s3.tensors import spec_of
from ec_s3.types import Extent, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PAGE = 256 << 10
_SCATTERED = (Extent(3 * _PAGE, _PAGE), Extent(0, 2 * _PAGE))


class FakeLink:
    def __init__(self, name: str, *, rank: int, prepare: Callable[[Slab, str], None]) -> None:
        self.name, self.rank, self.prepare = name, rank, prepare
        self.answers: list[tuple[str, int, bool]] = []
        self.closed = False

    def answer(self, kind: str, number: int, *, done: bool) -> None:
        self.answers.append((kind, number, done))

    def redirect(self, name: str) -> None:
        self.name = name

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def slab() -> Iterator[Slab]:
    with Slab.create(8 * _PAGE) as slab:
        slab.populate()
        yield slab


class Rank:
    def __init__(self, slab: Slab, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
        monkeypatch.setattr(worker_module, "RankLink", FakeLink)
        self.slab = slab
        self.worker = Worker("hub", rank=rank, device=torch.device("cpu"))
        self.link = cast("FakeLink", self.worker._link)
        self.link.prepare(slab, "n1")

    def step(self, **orders: Any) -> StepMetadata:
        metadata = StepMetadata("n1", "hub", orders.get("loads", []), orders.get("saves", []))
        self.worker.begin(metadata, saves=True)
        return metadata


@pytest.fixture
def rank(slab: Slab, monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(slab, monkeypatch)


def stored(slab: Slab, spec: TensorSpec) -> bytes:
    runs = b"".join(bytes(slab.view(extent)) for extent in _SCATTERED)
    return runs[: spec.nbytes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_output_is_saved_into_scattered_pages_and_loaded_back(
    rank: Rank, dtype: torch.dtype
) -> None:
    tensor = torch.randn(300, 500).to(dtype)
    spec = spec_of(tensor)
    metadata = rank.step(saves=[SaveOrder(7, "a", spec, _SCATTERED)])
    rank.worker.save(metadata, "a", tensor)
    rank.worker.end()
    assert rank.link.answers == [("saved", 7, True)]
    cache: dict[str, torch.Tensor] = {}
    rank.worker.load(rank.step(loads=[LoadOrder(8, "a", spec, _SCATTERED)]), cache)
    assert torch.equal(cache["a"].view(torch.uint8), tensor.view(torch.uint8))
    assert cache["a"].dtype == dtype
    assert rank.link.answers[1:] == [("loaded", 8, True)]


def test_view_of_a_batch_saves_its_own_bytes_only(rank: Rank) -> None:
    batch = torch.randn(4, 16, 64)
    part = batch[2]
    metadata = rank.step(saves=[SaveOrder(1, "a", spec_of(part), _SCATTERED)])
    rank.worker.save(metadata, "a", part)
    assert stored(rank.slab, spec_of(part)) == part.numpy().tobytes()


def test_strided_and_inference_tensors_are_saved(rank: Rank) -> None:
    with torch.inference_mode():
        tensor = torch.randn(64, 16).T
        metadata = rank.step(saves=[SaveOrder(1, "a", spec_of(tensor), _SCATTERED)])
        rank.worker.save(metadata, "a", tensor)
    assert stored(rank.slab, spec_of(tensor)) == tensor.contiguous().numpy().tobytes()


@pytest.mark.parametrize("wrong", [torch.zeros(3, 8), torch.zeros(4, 8, dtype=torch.float16)])
def test_output_that_is_not_what_was_expected_is_not_saved(rank: Rank, wrong: torch.Tensor) -> None:
    metadata = rank.step(saves=[SaveOrder(1, "a", TensorSpec("float32", (4, 8)), _SCATTERED)])
    rank.worker.save(metadata, "a", wrong)
    rank.worker.end()
    assert rank.link.answers == [("saved", 1, False)]


def test_orders_left_over_are_answered_at_the_end_of_the_step(rank: Rank) -> None:
    rank.step(saves=[SaveOrder(1, "a", TensorSpec("float32", (4, 8)), _SCATTERED)])
    rank.worker.end()
    rank.worker.end()
    assert rank.link.answers == [("saved", 1, False)]


def test_outputs_that_nobody_ordered_are_left_alone(rank: Rank) -> None:
    metadata = rank.step()
    rank.worker.save(metadata, "a", torch.zeros(4, 8))
    rank.worker.end()
    assert rank.link.answers == []


def test_only_the_first_rank_saves_and_every_rank_loads(
    slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Rank(slab, monkeypatch, rank=1)
    spec = TensorSpec("float32", (4, 8))
    metadata = second.step(saves=[SaveOrder(1, "a", spec, _SCATTERED)])
    second.worker.save(metadata, "a", torch.zeros(4, 8))
    second.worker.end()
    assert second.link.answers == []
    cache: dict[str, torch.Tensor] = {}
    second.worker.load(second.step(loads=[LoadOrder(2, "a", spec, _SCATTERED)]), cache)
    assert second.link.answers == [("loaded", 2, True)]


def test_item_that_vllm_has_already_is_answered_and_kept(rank: Rank) -> None:
    mine = torch.ones(4, 8)
    cache = {"a": mine}
    spec = TensorSpec("float32", (4, 8))
    rank.worker.load(rank.step(loads=[LoadOrder(2, "a", spec, _SCATTERED)]), cache)
    assert cache["a"] is mine
    assert [(kind, number) for kind, number, _ in rank.link.answers] == [("loaded", 2)]


def test_orders_that_speak_of_another_slab_are_not_carried_out(rank: Rank) -> None:
    spec = TensorSpec("float32", (4, 8))
    metadata = StepMetadata("other", "elsewhere", [], [SaveOrder(1, "a", spec, _SCATTERED)])
    rank.worker.begin(metadata, saves=True)
    before = bytes(rank.slab.view(Extent(0, 8 * _PAGE)))
    rank.worker.save(metadata, "a", torch.ones(4, 8))
    assert bytes(rank.slab.view(Extent(0, 8 * _PAGE))) == before
    assert rank.link.name == "elsewhere"


def test_closing_lets_go(rank: Rank) -> None:
    rank.worker.close()
    rank.worker.close()
    assert rank.link.closed
    assert rank.slab.closed
