"""Digests of processed inputs, and the thread that computes them."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import UserDict
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ec_s3.connector.binding import Binder, Binding, digest_of
from ec_s3.metrics import Stats

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SECONDS = 20.0
GOLDEN = "75ec10b3750c59f7d7351065a7a04c68cf09b74511508fc90ec46675bca446dc"


def item(**fields: object) -> UserDict[str, SimpleNamespace]:
    """As vLLM holds one: fields by name, each with its value as `data`."""
    return UserDict({name: SimpleNamespace(data=value) for name, value in fields.items()})


def pixels(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=generator).to(dtype)


class Gate(UserDict[str, object]):
    """An item that is digested only once it is let."""

    def __init__(self) -> None:
        super().__init__(pixel_values=pixels())
        self.entered, self.let = threading.Event(), threading.Event()

    def items(self) -> object:  # type: ignore[override]  # stands in for a slow digest
        self.entered.set()
        assert self.let.wait(SECONDS)
        return super().items()


class Broken(UserDict[str, object]):
    def items(self) -> object:  # type: ignore[override]  # stands in for a failing digest
        raise RuntimeError("an odd item")


@pytest.fixture
def binder() -> Iterator[Binder]:
    binder = Binder(max_waiting=3)
    yield binder
    binder.close()


def result(binding: Binding) -> str:
    done = threading.Event()
    binding.on_done(lambda _: done.set())
    assert done.wait(SECONDS)
    assert binding.digest is not None
    return binding.digest


class TestDigest:
    def test_is_a_fixed_function(self) -> None:
        """A fleet compares digests: they must not change from release to release by accident."""
        data = item(
            pixel_values=torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
            image_grid_thw=torch.tensor([1, 2, 3]),
            rest=[1, -2.5, "\u00fc", None, True, [b"x"]],
        )
        assert digest_of(data) == GOLDEN

    def test_does_not_depend_on_order_of_names_or_layout_in_memory(self) -> None:
        tensor = pixels()
        strided = torch.empty(8, 6, dtype=tensor.dtype).t().copy_(tensor)
        part = torch.stack([tensor + 1, tensor])[1]
        assert not strided.is_contiguous()
        wanted = digest_of(item(a=tensor, b=1))
        assert digest_of(item(b=1, a=strided)) == wanted
        assert digest_of(item(a=part, b=1)) == wanted
        assert digest_of(item(a=tensor.clone().requires_grad_(), b=1)) == wanted

    def test_takes_plain_values_as_well_as_fields(self) -> None:
        assert digest_of({"a": pixels(), "b": np.arange(3)}) == digest_of(
            item(a=pixels(), b=np.arange(3))
        )

    @pytest.mark.parametrize(
        "other",
        [
            item(a=pixels(1)),
            item(b=pixels()),
            item(a=pixels(), b=None),
            item(a=[pixels()]),
            item(a=pixels().view(torch.int16)),
            item(a=pixels().view(torch.float16)),
            item(a=pixels().float()),
            item(a=pixels().reshape(8, 6)),
            item(a=pixels().t()),
            item(a=pixels().reshape(1, 6, 8)),
            item(a=pixels()[:5]),
            item(a=pixels().view(torch.int16).numpy()),
        ],
    )
    def test_tells_apart_names_dtypes_shapes_and_bytes(self, other: Mapping[str, object]) -> None:
        assert digest_of(other) != digest_of(item(a=pixels()))

    def test_tells_apart_what_only_looks_the_same(self) -> None:
        t = torch.tensor
        values: list[object] = [
            [t([1]), t([2])],
            [t([1, 2])],
            t([1, 2]),
            t([[1, 2]]),
            t([[1], [2]]),
            t([1, 2], dtype=torch.int32),
            [1, 2],
            [12],
            [[1], 2],
            [[1, 2]],
            ["1", "2"],
            ["12"],
            ["1", 2],
            "12",
            12,
            12.0,
            b"12",
            1,
            True,
            1.0,
            False,
            0,
            0.0,
            -0.0,
            "",
            b"",
            [],
            [None],
            [None, None],
            [[]],
            {},
            {"x": 1},
            {"x": {}},
            np.arange(3),
            np.arange(3, dtype=np.int32),
            np.float32(1),
            torch.empty(0, 3),
            torch.empty(3, 0),
            torch.tensor(1.0),
            torch.tensor([1.0]),
        ]
        digests = [digest_of(item(a=value)) for value in values]
        assert len(set(digests)) == len(values)

    def test_a_tuple_counts_as_a_list(self) -> None:
        assert digest_of(item(a=(1, (2,)))) == digest_of(item(a=[1, [2]]))

    @pytest.mark.parametrize(
        "dtype",
        [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float16, torch.float64, torch.uint16],
    )
    def test_takes_every_real_dtype(self, dtype: torch.dtype) -> None:
        tensor = torch.ones(4, dtype=torch.uint8).to(dtype)
        assert len(digest_of(item(a=tensor, b=tensor[:0], c=tensor[0]))) == 64

    @pytest.mark.parametrize(
        "value",
        [
            torch.ones(2, device="meta"),
            torch.ones(2).to_sparse(),
            torch.ones(2, dtype=torch.complex64),
            np.array([object()]),
            object(),
            {1, 2},
            {1: 2, "x": 3},
            1j,
        ],
    )
    def test_what_cannot_be_digested_is_an_error(self, value: object) -> None:
        with pytest.raises((ValueError, TypeError)):
            digest_of(item(a=value))

    def test_an_item_without_inputs_is_an_error(self) -> None:
        """Two such items would otherwise be taken for one another."""
        with pytest.raises(ValueError, match="no inputs"):
            digest_of({})
        with pytest.raises(ValueError, match="no inputs"):
            digest_of(item(a=None, b=None))

    def test_depth_is_bounded(self) -> None:
        nested: list[object] = []
        for _ in range(10_000):
            nested = [nested]
        with pytest.raises(ValueError, match="nested too deeply"):
            digest_of(item(a=nested))


_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4)
)
_values = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def kinds(value: object) -> object:
    """The value with its kinds spelt out, as Python takes True for 1 and -0.0 for 0.0."""
    if isinstance(value, list):
        return ("list", [kinds(part) for part in value])
    if isinstance(value, dict):
        return ("dict", [(name, kinds(value[name])) for name in sorted(value)])
    return (type(value).__name__, repr(value))


@settings(deadline=None)
@given(left=_values, right=_values)
def test_digests_are_equal_only_for_equal_values(left: object, right: object) -> None:
    same = digest_of({"a": left, "b": 0}) == digest_of({"a": right, "b": 0})
    assert same == (kinds(left) == kinds(right))


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
def test_lists_of_tensors_differ_wherever_they_are_cut(sizes: list[int], cuts: list[int]) -> None:
    def cut(lengths: list[int]) -> list[torch.Tensor]:
        return list(torch.split(torch.zeros(sum(lengths)), lengths))

    same = digest_of({"a": cut(sizes)}) == digest_of({"a": cut(cuts)})
    assert same == (sizes == cuts)


class TestBinder:
    def test_gives_the_digest_of_the_inputs(self, binder: Binder) -> None:
        assert result(binder.bind(item(a=pixels()))) == digest_of(item(a=pixels()))

    def test_does_not_wait_for_the_digest(self, binder: Binder) -> None:
        gate = Gate()
        binding = binder.bind(gate)
        assert gate.entered.wait(SECONDS)
        assert binding.digest is None
        gate.let.set()
        assert result(binding) == digest_of({"pixel_values": pixels()})

    def test_calls_back_once_whether_it_is_early_or_late(self, binder: Binder) -> None:
        gate, calls, done = Gate(), list[str](), threading.Event()
        binding = binder.bind(gate)
        binding.on_done(calls.append)
        binding.on_done(lambda _: done.set())
        gate.let.set()
        assert done.wait(SECONDS)
        binding.on_done(calls.append)
        assert calls == [binding.digest] * 2

    def test_an_item_without_media_is_unknown_at_once(self, binder: Binder) -> None:
        assert binder.bind(None).digest == ""

    def test_items_beyond_the_bound_are_unknown_at_once(self, binder: Binder) -> None:
        gate = Gate()
        first = binder.bind(gate)
        assert gate.entered.wait(SECONDS)
        waiting = [binder.bind(item(a=n)) for n in range(5)]
        assert [binding.digest for binding in waiting] == [None, None, None, "", ""]
        gate.let.set()
        assert all(result(binding) for binding in [first, *waiting[:3]])
        assert result(binder.bind(item(a=1)))

    def test_an_item_that_cannot_be_digested_is_unknown_counted_and_logged_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        stats = Stats()
        binder = Binder(stats)
        with caplog.at_level(logging.WARNING):
            assert result(binder.bind(Broken(a=1))) == ""
            assert result(binder.bind(item(a=object()))) == ""
            assert result(binder.bind(item(a=1))) == digest_of(item(a=1))
        binder.close()
        assert stats.snapshot()["unusable_inputs_media"] == 2
        assert [record.message for record in caplog.records] == [
            "an item's inputs cannot be digested; it stays unbound"
        ]
        assert "an odd item" in caplog.text

    def test_a_callback_that_fails_does_not_end_it(
        self, binder: Binder, caplog: pytest.LogCaptureFixture
    ) -> None:
        gate = Gate()
        with caplog.at_level(logging.WARNING):
            binder.bind(gate).on_done(list[str]().remove)
            gate.let.set()
            assert result(binder.bind(item(a=1)))
        assert "a callback of a digest failed" in caplog.text

    def test_keeps_no_item_once_it_is_digested(self, binder: Binder) -> None:
        data = item(a=pixels())
        gone = threading.Event()
        weakref.finalize(data, gone.set)
        result(binder.bind(data))
        del data
        result(binder.bind(item(a=1)))  # the frame of the first one is left by now
        assert gone.wait(SECONDS)

    def test_close_gives_up_what_is_waiting_and_ends_the_thread(self) -> None:
        binder, gate = Binder(), Gate()
        running = binder.bind(gate)
        assert gate.entered.wait(SECONDS)
        waiting = binder.bind(item(a=1))
        told: list[str] = []
        waiting.on_done(told.append)
        closing = threading.Thread(target=binder.close)
        closing.start()
        while not binder._closed:
            closing.join(0.01)
        gate.let.set()
        closing.join(SECONDS)
        assert result(running) == digest_of({"pixel_values": pixels()})
        assert (waiting.digest, told) == ("", [""])
        assert not binder._thread.is_alive()
        assert binder.bind(item(a=1)).digest == ""
        binder.close()

    def test_may_be_closed_by_a_callback(self) -> None:
        binder = Binder()
        gate = Gate()
        binder.bind(gate).on_done(lambda _: binder.close())
        gate.let.set()
        binder._thread.join(SECONDS)
        assert not binder._thread.is_alive()
