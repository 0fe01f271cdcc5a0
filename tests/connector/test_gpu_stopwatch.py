"""Encoder time on a real device; run where one is (`pytest -m gpu`)."""

from __future__ import annotations

import time

import pytest
import torch

from ec_s3.connector.stopwatch import StreamStopwatch, stopwatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_time_is_that_of_the_device_and_nobody_waits_for_it() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    matrix = torch.randn(4096, 4096, device=device)
    _ = matrix @ matrix  # loads what the first product needs
    torch.cuda.synchronize()
    begun = time.perf_counter()
    watch = stopwatch(device)
    assert isinstance(watch, StreamStopwatch)
    for _ in range(200):
        matrix = (matrix @ matrix).clamp(-1, 1)
    watch.stop()
    launched = time.perf_counter() - begun
    early = watch.seconds()
    torch.cuda.synchronize()
    whole = time.perf_counter() - begun
    seconds = watch.seconds()
    assert seconds is not None
    assert early is None or early == seconds
    assert 0 < seconds <= whole
    assert seconds > whole - launched, "what the device did after the launches is in it"
