"""Real vLLM in child processes, against one embedded S3 server, for the whole test session."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ec_s3.testing.faults import FaultServer
from ec_s3.testing.lab import Lab
from ec_s3.testing.traffic import RecordedServer

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from ec_s3.testing.vllm_server import VLLMServer

_SECONDS = 600
"""Limit of one test: several starts of vLLM, of up to a minute and a half each."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(_SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the last vLLM processes said when a test fails."""
    report = yield
    lab = getattr(item, "funcargs", {}).get("lab")
    if report.failed and isinstance(lab, Lab):
        report.sections.append(("vLLM processes", lab.log_tails()))
    return report


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The bench; skipped where vLLM is not installed, unless REQUIRE_VLLM forbids that."""
    if find_spec("vllm") is None:
        if os.environ.get("REQUIRE_VLLM"):
            pytest.fail("vLLM is not installed, and REQUIRE_VLLM is set; run `make setup`")
        pytest.skip("vLLM is not installed")
    with RecordedServer() as server, Lab(server, tmp_path_factory.mktemp("lab")) as bench:
        yield bench


@pytest.fixture(scope="session")
def bucket_faults(lab: Lab) -> Iterator[FaultServer]:
    """A proxy between the HTTP servers and the bucket, without faults at first."""
    with FaultServer(lab.server.url) as faults:
        yield faults


@pytest.fixture(scope="session")
def split(lab: Lab, bucket_faults: FaultServer) -> dict[str, VLLMServer]:
    """An `ec_producer` and an `ec_consumer` server, by role, on the prefix `http` of the bucket."""
    servers = {
        role: lab.serve(
            prefix="http",
            role=role,
            endpoint=bucket_faults.url,
            settings={"metadata_timeout": "10s"},
            arguments=("--enable-scale-out",),  # it tells a picture's identifier: `/render`
        )
        for role in ("ec_producer", "ec_consumer")
    }
    return {role: server.wait() for role, server in servers.items()}
