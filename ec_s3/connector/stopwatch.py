"""How long the encoder takes, measured between two hooks of a step.

vLLM tells a connector when loads may start and when an output is there; between the two the encoder
runs. On the CPU that is the time of a clock. On CUDA the encoder is only launched then, so two
events on the compute stream are compared, later, by a thread that has waited for the second one.
What else vLLM does between the hooks (moving the inputs to the device) is counted with it.

Started and stopped on the worker's main thread, read on any; never waits.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Stopwatch(Protocol):
    """Runs from its construction to the first `stop`."""

    def stop(self) -> None:
        """End the time; later calls change nothing."""
        ...

    def seconds(self) -> float | None:
        """What was measured, None when nobody can tell; on CUDA once the device is past `stop`."""
        ...


class HostStopwatch:
    """For ranks whose encoder has run when its output is there."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: float | None = None

    def stop(self) -> None:
        """See `Stopwatch.stop`."""
        if self._seconds is None:
            self._seconds = time.perf_counter() - self._started

    def seconds(self) -> float | None:
        """See `Stopwatch.seconds`."""
        return self._seconds


class StreamStopwatch:
    """For ranks whose encoder runs on the current CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._started: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own gap
        self._stopped: torch.cuda.Event | None = None
        self._started.record(self._stream)

    def stop(self) -> None:
        """See `Stopwatch.stop`."""
        if self._stopped is None:
            self._stopped = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own gap
            self._stopped.record(self._stream)

    def seconds(self) -> float | None:
        """See `Stopwatch.seconds`."""
        if self._stopped is None or not self._stopped.query():  # type: ignore[no-untyped-call]  # torch's own gap
            return None
        return float(self._started.elapsed_time(self._stopped)) / 1000


def stopwatch(device: torch.device) -> Stopwatch:
    """A running one for a rank's device."""
    return StreamStopwatch(device) if device.type == "cuda" else HostStopwatch()
