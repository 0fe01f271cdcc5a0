"""vLLM."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from ec_s3.testing import vllm_process
from ec_s3.testing.photographs import photographs
from ec_s3.testing.servers import KINDS
from ec_s3.testing.tiny_models import MODELS
from ec_s3.testing.vllm_process import PATIENT, VLLMProcess, client_environment

if TYPE_CHECKING:
    from pathlib import Path

    from ec_s3.testing.servers import RealServer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

_SMOKE = "ceph-https"  # the one whose transport differs most from the mock's of the other tests


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("vllm") is None:
        if os.environ.get("REQUIRE_INTEROP"):
            pytest.fail("vLLM is not installed; run `make setup`")
        pytest.skip("vLLM is not installed")
    return MODELS["llava"].make(tmp_path_factory.mktemp("model"), dtype="float32")


@pytest.mark.parametrize(
    "real_server",
    [pytest.param(kind, marks=pytest.mark.smoke if kind == _SMOKE else ()) for kind in KINDS],
    indirect=True,
)
def test_a_warm_process_encodes_nothing_that_a_cold_one_stored(
    real_server: RealServer, shared_bucket: str, model: Path, tmp_path: Path
) -> None:
    prompts = [
        vllm_process.prompt(vllm_process.image(path)) for path in list(photographs().values())[:2]
    ]
    settings = {
        **PATIENT,
        "url": real_server.url(shared_bucket, f"vllm/{uuid4().hex}"),
        **({"ca_bundle": str(real_server.ca_bundle)} if real_server.ca_bundle else {}),
        "flush_timeout": "30s",
    }
    runs = {}
    for name in ("cold", "warm"):
        process = VLLMProcess(
            {
                "model": str(model),
                "dtype": "float32",
                "ec_transfer_config": {
                    "ec_connector": "ECS3Connector",
                    "ec_connector_module_path": "ec_s3.connector",
                    "ec_role": "ec_both",
                    "ec_connector_extra_config": settings,
                },
            },
            workdir=tmp_path,
            name=name,
            environment=client_environment() | real_server.environment,
        )
        try:
            process.generate([vllm_process.prompt(text="hello")])  # the ranks map the memory
            runs[name] = process.generate(prompts)
            process.finish()
        finally:
            process.kill()
    assert (runs["cold"]["encoder_items"], runs["warm"]["encoder_items"]) == (len(prompts), 0)
    assert vllm_process.token_ids(runs["warm"]) == vllm_process.token_ids(runs["cold"])
