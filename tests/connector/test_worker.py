"""A rank carries out orders, and nothing else."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from ec_s3.connector import worker as worker_module
from ec_s3.connector.copier import HostCopier
from ec_s3.connector.messages import LoadOrder, SaveOrder, StepMetadata
from ec_s3.connector.worker import Worker
from ec_s3.errors import ClosedError
from ec_s3.pages import Slab
from ec_s3.tensors import spec_of
from ec_s3.types import Extent, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PAGE = 256 << 10
_SCATTERED = (Extent(3 * _PAGE, _PAGE), Extent(0, 2 * _PAGE))


class FakeLink:
    def __init__(self, name: str, *, rank: int, prepare: Callable[[Slab, str], object]) -> None:
        self.name, self.rank, self.prepare = name, rank, prepare
        self.answers: list[tuple[str, int, bool]] = []
        self.nonces: list[str] = []
        self.seconds: list[dict[str, float | None]] = []
        self.closed = False

    def answer(
        self, kind: str, number: int, *, nonce: str, done: bool, **seconds: float | None
    ) -> None:
        self.answers.append((kind, number, done))
        self.seconds.append(seconds)
        self.nonces.append(nonce)

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


def test_item_in_vllms_cache_is_saved_before_anything_is_encoded(rank: Rank) -> None:
    tensor = torch.randn(4, 8)
    spec = spec_of(tensor)
    metadata = rank.step(
        saves=[
            SaveOrder(1, "a", spec, _SCATTERED, cached=True),
            SaveOrder(2, "gone", spec, _SCATTERED, cached=True),
            SaveOrder(3, "b", spec, _SCATTERED),
        ]
    )
    rank.worker.save_cached(metadata, {"a": tensor, "b": torch.zeros(4, 8)})
    assert rank.link.answers == [("saved", 1, True)], "the leftover under `b` is encoded anew"
    assert stored(rank.slab, spec) == tensor.numpy().tobytes()
    rank.worker.end()
    assert sorted(rank.link.answers[1:]) == [("saved", 2, False), ("saved", 3, False)]


def test_item_that_is_saved_from_the_cache_and_encoded_in_one_step_is_answered_twice(
    rank: Rank,
) -> None:
    tensor = torch.randn(4, 8)
    spec = spec_of(tensor)
    metadata = rank.step(
        saves=[
            SaveOrder(1, "a", spec, _SCATTERED, cached=True),
            SaveOrder(2, "a", spec, (Extent(4 * _PAGE, _PAGE),)),
        ]
    )
    rank.worker.save_cached(metadata, {})
    rank.worker.save(metadata, "a", tensor)
    rank.worker.end()
    assert rank.link.answers == [("saved", 1, False), ("saved", 2, True)]


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


def test_leftover_that_vllm_counts_as_gone_is_replaced_by_what_was_promised(rank: Rank) -> None:
    leftover = torch.ones(3, 8)
    cache = {"a": leftover}
    spec = TensorSpec("float32", (4, 8))
    rank.worker.load(rank.step(loads=[LoadOrder(2, "a", spec, _SCATTERED)]), cache)
    assert cache["a"].shape == (4, 8), "three rows in the place of four end the engine"
    assert bool((leftover == 1).all()), "whoever still reads it does not see it change"
    assert rank.link.answers == [("loaded", 2, True)]


def test_orders_that_speak_of_another_slab_are_not_carried_out_but_answered(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    spec = TensorSpec("float32", (4, 8))
    orders = [LoadOrder(2, "b", spec, _SCATTERED)], [SaveOrder(1, "a", spec, _SCATTERED)]
    metadata = StepMetadata("other", "elsewhere", *orders)
    rank.worker.begin(metadata, saves=True)
    before = bytes(rank.slab.view(Extent(0, 8 * _PAGE)))
    cache: dict[str, torch.Tensor] = {}
    rank.worker.load(metadata, cache)
    rank.worker.save(metadata, "a", torch.ones(4, 8))
    rank.worker.end()
    assert cache == {}
    assert bytes(rank.slab.view(Extent(0, 8 * _PAGE))) == before
    assert rank.link.name == "elsewhere"
    assert rank.link.answers == [("loaded", 2, False), ("saved", 1, False)]
    assert rank.link.nonces == ["other", "other"]
    assert "not mapped" in caplog.text


def test_steps_without_orders_and_address_change_nothing(rank: Rank) -> None:
    rank.worker.begin(StepMetadata(), saves=True)
    rank.worker.load(StepMetadata(), {})
    rank.worker.end()
    assert (rank.link.name, rank.link.answers) == ("hub", [])


def test_step_that_had_no_end_is_answered_by_the_next(rank: Rank) -> None:
    spec = TensorSpec("float32", (4, 8))
    rank.step(saves=[SaveOrder(1, "a", spec, _SCATTERED)])
    rank.step(saves=[SaveOrder(2, "a", spec, _SCATTERED)])
    assert rank.link.answers == [("saved", 1, False)]
    rank.worker.end()
    assert rank.link.answers[1:] == [("saved", 2, False)]


def test_consumer_that_only_loads_ignores_saves(rank: Rank) -> None:
    spec = TensorSpec("float32", (4, 8))
    metadata = StepMetadata("n1", "hub", [], [SaveOrder(1, "a", spec, _SCATTERED)])
    rank.worker.begin(metadata, saves=False)
    rank.worker.save(metadata, "a", torch.ones(4, 8))
    rank.worker.end()
    assert rank.link.answers == []


def test_output_of_a_kind_that_cannot_be_stored_is_answered(rank: Rank) -> None:
    metadata = rank.step(saves=[SaveOrder(1, "a", TensorSpec("float32", (4, 8)), _SCATTERED)])
    with pytest.raises(ValueError, match="complex64"):
        rank.worker.save(metadata, "a", torch.ones(4, 8, dtype=torch.complex64))
    rank.worker.end()
    assert rank.link.answers == [("saved", 1, False)]


def test_copy_that_fails_half_way_is_never_answered(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The device may still write to the pages: they must not be handed to anybody else.
    def broken(*_: Any) -> None:
        raise RuntimeError("device error")

    metadata = rank.step(saves=[SaveOrder(1, "a", TensorSpec("float32", (4, 8)), _SCATTERED)])
    monkeypatch.setattr(HostCopier, "save", broken)
    with pytest.raises(RuntimeError, match="device error"):
        rank.worker.save(metadata, "a", torch.ones(4, 8))
    rank.worker.end()
    assert rank.link.answers == []


def test_wrong_outputs_are_warned_of_once(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    for ticket in (1, 2, 3):
        spec = TensorSpec("float32", (4, 8))
        metadata = rank.step(saves=[SaveOrder(ticket, "a", spec, _SCATTERED)])
        rank.worker.save(metadata, "a", torch.zeros(3, 8))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (65536, 3), (2, 3, 5)])
def test_tensors_of_any_size_go_through(rank: Rank, shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape)
    spec = spec_of(tensor)
    metadata = rank.step(saves=[SaveOrder(1, "a", spec, _SCATTERED)])
    rank.worker.save(metadata, "a", tensor)
    cache: dict[str, torch.Tensor] = {}
    rank.worker.load(rank.step(loads=[LoadOrder(2, "a", spec, _SCATTERED)]), cache)
    assert torch.equal(cache["a"], tensor)
    assert rank.link.answers == [("saved", 1, True), ("loaded", 2, True)]


def test_bytes_behind_the_tensor_are_left_alone(rank: Rank) -> None:
    rank.slab.tensor().fill_(7)
    tensor = torch.zeros(_PAGE + 5, dtype=torch.uint8)
    metadata = rank.step(saves=[SaveOrder(1, "a", spec_of(tensor), _SCATTERED)])
    rank.worker.save(metadata, "a", tensor)
    view = rank.slab.view
    assert not any(view(Extent(3 * _PAGE, _PAGE)))
    assert not any(view(Extent(0, 5)))
    assert set(view(Extent(5, 3 * _PAGE - 5))) == {7}


def test_loaded_tensor_owns_its_memory(rank: Rank) -> None:
    spec = TensorSpec("uint8", (16,))
    cache: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        rank.worker.load(rank.step(loads=[LoadOrder(1, "a", spec, _SCATTERED)]), cache)
    rank.slab.tensor().fill_(9)
    assert not cache["a"].any()
    assert cache["a"].untyped_storage().nbytes() == 16


def test_second_copy_of_one_order_is_skipped(rank: Rank) -> None:
    tensor = torch.ones(4, 8)
    metadata = rank.step(saves=[SaveOrder(1, "a", spec_of(tensor), _SCATTERED)])
    rank.worker.save(metadata, "a", tensor)
    rank.worker.save(metadata, "a", tensor * 2)
    rank.worker.end()
    assert rank.link.answers == [("saved", 1, True)]
    assert stored(rank.slab, spec_of(tensor)) == tensor.numpy().tobytes()


def test_new_slab_replaces_the_old_one(rank: Rank) -> None:
    with Slab.create(8 * _PAGE) as other:
        rank.link.prepare(other, "n2")
        assert rank.slab.closed
        spec = TensorSpec("uint8", (4,))
        metadata = StepMetadata("n2", "hub", [], [SaveOrder(1, "a", spec, _SCATTERED)])
        rank.worker.begin(metadata, saves=True)
        rank.worker.save(metadata, "a", torch.ones(4, dtype=torch.uint8))
        assert rank.link.answers == [("saved", 1, True)]
        rank.worker.close()


def test_closing_lets_go(rank: Rank) -> None:
    rank.worker.close()
    rank.worker.close()
    assert rank.link.closed
    assert rank.slab.closed


def test_slab_that_comes_after_the_end_is_let_go(rank: Rank) -> None:
    rank.worker.close()
    with Slab.create(_PAGE) as late:
        with pytest.raises(ClosedError):
            rank.link.prepare(late, "n2")
        assert late.closed


def test_closing_ends_the_populating(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    populating = threading.Event()

    def populate(slab: Slab) -> None:
        populating.set()
        give_up = time.monotonic() + 10
        while not slab.closed and time.monotonic() < give_up:
            time.sleep(0.005)

    monkeypatch.setattr(Slab, "populate", populate)
    errors: list[BaseException] = []

    def prepare(slab: Slab) -> None:
        try:
            rank.link.prepare(slab, "n2")
        except ClosedError as error:
            errors.append(error)

    with Slab.create(_PAGE) as slab:
        thread = threading.Thread(target=prepare, args=(slab,))
        thread.start()
        assert populating.wait(10)
        rank.worker.close()
        thread.join(10)
        assert slab.closed
    assert len(errors) == 1


class Devices:
    """Stands in for CUDA: remembers for which device things were done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, pinned: bool) -> None:
        self.current = torch.device("cuda", 0)
        self.pinned_on: list[torch.device] = []
        self.copiers: list[tuple[torch.Tensor, torch.device]] = []
        devices = self

        @contextlib.contextmanager
        def device(one: torch.device) -> Iterator[None]:
            before, devices.current = devices.current, one
            yield
            devices.current = before

        def pin(_: Slab) -> bool:
            devices.pinned_on.append(devices.current)
            return pinned

        class Copier(HostCopier):
            def __init__(self, slab: torch.Tensor, one: torch.device) -> None:
                super().__init__(slab)
                devices.copiers.append((slab, one))

        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(Slab, "pin", pin)
        monkeypatch.setattr(worker_module, "StreamCopier", Copier)


@pytest.mark.parametrize("pinned", [True, False])
def test_every_rank_pins_and_copies_on_its_own_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pinned: bool
) -> None:
    devices = Devices(monkeypatch, pinned=pinned)
    monkeypatch.setattr(worker_module, "RankLink", FakeLink)
    mine = torch.device("cuda", 2)
    worker = Worker("hub", rank=1, device=mine)
    with Slab.create(_PAGE) as slab:
        cast("FakeLink", worker._link).prepare(slab, "n1")
        assert devices.pinned_on == [mine]
        assert [device for _, device in devices.copiers] == [mine]
        assert ("slower" in caplog.text) is not pinned
        worker.close()


def test_output_in_vllms_cache_is_not_saved_in_the_place_of_one_that_is_encoded_anew(
    rank: Rank,
) -> None:
    """A client may give another picture the name: each is bound to inputs of its own."""
    before, after = torch.zeros(4, 8), torch.ones(4, 8)
    spec = spec_of(after)
    elsewhere = (Extent(5 * _PAGE, _PAGE),)
    orders = [
        SaveOrder(1, "a", spec, elsewhere, cached=True),
        SaveOrder(2, "a", spec, _SCATTERED),
    ]
    metadata = rank.step(saves=orders)
    rank.worker.save_cached(metadata, {"a": before})
    rank.worker.save(metadata, "a", after)
    rank.worker.end()
    assert rank.link.answers == [("saved", 1, False), ("saved", 2, True)]
    assert stored(rank.slab, spec) == after.numpy().tobytes()
