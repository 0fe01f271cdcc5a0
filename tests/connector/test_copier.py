"""Copies on streams: what waits for what. Fakes here; `test_gpu_copies` has the real thing."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ec_s3.connector.copier import StreamCopier
from ec_s3.types import Extent, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEVICE = torch.device("cpu")


class Streams:
    """Records what is asked of CUDA; an event is over when the test says so."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.over = threading.Event()
        self.broken = False
        self.devices: list[torch.device] = []  # made current by the reporting thread

    def stream(self, name: str) -> Any:
        streams = self

        class Stream:
            def wait_stream(self, other: Any) -> None:
                streams.log.append(f"{name} waits for {other}")

            def wait_event(self, event: Any) -> None:
                streams.log.append(f"{name} waits for the event")

            def __str__(self) -> str:
                return name

        return Stream()

    def event(self) -> Any:
        streams = self

        class Event:
            def record(self, stream: Any) -> None:
                streams.log.append(f"event on {stream}")

            def synchronize(self) -> None:
                assert threading.current_thread().name == "ec_s3-copies"
                streams.over.wait(10)
                if streams.broken:
                    raise RuntimeError("device error")

        return Event()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    streams = Streams()
    side, compute = streams.stream("side"), streams.stream("compute")

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        streams.log.append(f"enter {stream}")
        yield
        streams.log.append(f"leave {stream}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "Event", streams.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: compute)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "set_device", streams.devices.append)

    def record(_: torch.Tensor, stream: Any) -> None:
        streams.log.append(f"memory in use by {stream}")

    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    yield streams
    streams.over.set()


def test_load_orders_the_compute_stream_behind_the_copy_and_reports_when_it_is_over(
    streams: Streams,
) -> None:
    slab = torch.arange(256, dtype=torch.uint8)
    copier = StreamCopier(slab, _DEVICE)
    done = threading.Event()
    tensor = copier.load((Extent(16, 64),), TensorSpec("float32", (2, 8)), done.set)
    assert torch.equal(tensor.view(-1).view(torch.uint8), slab[16:80])
    assert streams.log == [
        "enter side",
        "event on side",
        "compute waits for the event",
        "leave side",
        "memory in use by compute",
    ]
    assert not done.is_set()
    streams.over.set()
    assert done.wait(10)
    copier.close()


def test_save_runs_behind_the_compute_stream_and_keeps_the_memory_alive(streams: Streams) -> None:
    slab = torch.zeros(256, dtype=torch.uint8)
    copier = StreamCopier(slab, _DEVICE)
    done = threading.Event()
    copier.save(torch.ones(4, 8, dtype=torch.uint8), (Extent(8, 16), Extent(100, 32)), done.set)
    assert slab[8:24].all()
    assert slab[100:116].all()
    assert slab.sum() == 32
    assert streams.log == [
        "side waits for compute",
        "enter side",
        "event on side",
        "leave side",
        "memory in use by side",
    ]
    assert not done.is_set()
    streams.over.set()
    assert done.wait(10)
    copier.close()


def test_copy_whose_event_fails_is_never_reported_as_done(
    streams: Streams, caplog: pytest.LogCaptureFixture
) -> None:
    streams.broken = True
    streams.over.set()
    copier = StreamCopier(torch.zeros(64, dtype=torch.uint8), _DEVICE)
    done = threading.Event()
    copier.save(torch.ones(8, dtype=torch.uint8), (Extent(0, 8),), done.set)
    copier.close()
    assert not done.is_set()
    assert "event failed" in caplog.text


def test_copies_are_reported_in_order_by_a_thread_of_their_own_device(streams: Streams) -> None:
    copier = StreamCopier(torch.zeros(64, dtype=torch.uint8), _DEVICE)
    done: list[int] = []
    ended = threading.Event()
    for number in range(20):
        call = partial(done.append, number)
        copier.save(torch.ones(8, dtype=torch.uint8), (Extent(0, 8),), call)
    copier.save(torch.ones(8, dtype=torch.uint8), (Extent(0, 8),), ended.set)
    assert done == []
    streams.over.set()
    assert ended.wait(10)
    assert done == list(range(20))
    assert streams.devices == [_DEVICE]
    copier.close()


def test_closing_waits_for_copies_under_way(streams: Streams) -> None:
    copier = StreamCopier(torch.zeros(64, dtype=torch.uint8), _DEVICE)
    done = threading.Event()
    copier.save(torch.ones(8, dtype=torch.uint8), (Extent(0, 8),), done.set)
    threading.Timer(0.05, streams.over.set).start()
    copier.close()
    assert done.is_set()
    copier.close()


def test_closing_does_not_wait_for_ever(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ec_s3.connector.copier.CLOSE_SECONDS", 0.05)
    copier = StreamCopier(torch.zeros(64, dtype=torch.uint8), _DEVICE)
    done = threading.Event()
    copier.save(torch.ones(8, dtype=torch.uint8), (Extent(0, 8),), done.set)
    copier.close()
    assert not done.is_set()


def test_loads_are_allocated_on_the_ranks_own_device(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    real = torch.empty

    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append(device)
        return real(shape, dtype=dtype)

    mine = torch.device("cuda", 2)
    copier = StreamCopier(torch.zeros(64, dtype=torch.uint8), mine)
    monkeypatch.setattr(torch, "empty", empty)
    copier.load((Extent(0, 64),), TensorSpec("float32", (2, 8)), lambda: None)
    assert asked == [mine]
    streams.over.set()
    copier.close()
    assert streams.devices == [mine]


def test_view_of_a_batch_and_strided_tensor_are_saved_as_their_own_bytes(
    streams: Streams,
) -> None:
    slab = torch.zeros(256, dtype=torch.uint8)
    copier = StreamCopier(slab, _DEVICE)
    batch = torch.arange(96, dtype=torch.uint8).view(3, 4, 8)
    copier.save(batch[1], (Extent(0, 256),), lambda: None)
    assert torch.equal(slab[:32], batch[1].reshape(-1))
    assert not slab[32:].any()
    copier.save(batch[2].T, (Extent(64, 16), Extent(128, 64)), lambda: None)
    assert torch.equal(torch.cat([slab[64:80], slab[128:144]]), batch[2].T.reshape(-1))
    streams.over.set()
    copier.close()
