"""What importing the package loads: nothing heavy before it is used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def loaded_by(statement: str) -> set[str]:
    """Names of all modules in a fresh interpreter after the statement."""
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "module", ["torch", "vllm", "aiobotocore", "botocore", "boto3", "typer", "rich", "numpy"]
)
def test_importing_the_package_loads_nothing_heavy(module: str) -> None:
    assert module not in loaded_by("import ec_s3")


def test_the_plugin_loads_neither_cuda_nor_an_sdk_nor_vllm() -> None:
    loaded = loaded_by("import ec_s3.connector.plugin")
    assert not loaded & {"torch.cuda", "torch", "aiobotocore", "botocore", "vllm", "typer"}


def test_the_engine_loads_no_sdk_before_a_bucket_is_opened() -> None:
    loaded = loaded_by("from ec_s3 import ECCacheEngine")
    assert not loaded & {"aiobotocore", "botocore", "vllm", "typer", "prometheus_client"}
