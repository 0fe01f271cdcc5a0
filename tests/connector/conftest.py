"""Fixtures of the tests that run a small engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from small_engine import without_vllm

from ec_s3.testing.faults import FaultServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ec_s3.testing.moto import S3Server


@pytest.fixture
def small_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small engines can be started, and their SDK does not wait for seconds between attempts."""
    monkeypatch.setattr(
        "botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.001
    )
    with without_vllm(monkeypatch):
        yield


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultServer]:
    """A bucket's server that can be made to fail."""
    with FaultServer(s3_server.url) as server:
        yield server


@pytest.fixture
def url(proxy: FaultServer, bucket: str) -> str:
    """A bucket behind `proxy`."""
    return f"s3://{bucket}/p?endpoint={proxy.url}&region=us-east-1"
