"""Shared fixtures: no test sees the machine's AWS settings, and one S3 server serves them all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

pytest.register_assert_rewrite("ec_s3.testing.conformance")

from ec_s3.testing.moto import bucket, s3_server  # noqa: E402  # after the registration

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ec_s3.s3 import S3Store
    from ec_s3.url import S3Location

__all__ = ["bucket", "s3_server"]


@pytest.fixture(autouse=True)
def isolated_aws(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fake keys and empty AWS configuration; returns the folder of the configuration files."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "BOTO_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    folder = tmp_path_factory.mktemp("aws")
    for name in ("config", "credentials"):
        (folder / name).touch()
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "credentials"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return folder


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK waits up to seconds between attempts; tests need not."""
    monkeypatch.setattr(
        "botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.001
    )


@pytest.fixture(params=["sdk", "direct"])
def open_store(request: pytest.FixtureRequest) -> Callable[..., S3Store]:
    """Opens a store like `S3Store`; a test that uses it runs with each of the transports."""
    from dataclasses import replace

    from ec_s3.s3 import S3Store  # the SDK takes a third of a second to import
    from ec_s3.url import S3Options

    def opened(location: S3Location, options: S3Options | None = None) -> S3Store:
        return S3Store(location, replace(options or S3Options(), transport=request.param))

    return opened
