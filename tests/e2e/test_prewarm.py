"""A catalogue that was prewarmed by real vLLM is not encoded again by another one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from ec_s3.cli.output import ExitCode
from ec_s3.keys import parse_key
from ec_s3.testing.model_folder import LLM_WIDTH
from ec_s3.testing.prewarm_jobs import end_job, make_catalogue, sent, start_job
from ec_s3.testing.vllm_server import picture, text

if TYPE_CHECKING:
    from pathlib import Path

    from ec_s3.testing.lab import Lab


def test_prewarmed_catalogue_is_never_encoded_again(lab: Lab, tmp_path: Path) -> None:
    catalogue = make_catalogue(tmp_path, 20)
    job = start_job(
        url=lab.server.location("prewarmed"),
        model=lab.model("qwen2-vl"),
        media=catalogue.manifest,
        workdir=tmp_path,
        name="job",
    )
    code = end_job(job)
    log = (tmp_path / "job.log").read_text(encoding="utf-8")
    assert code == ExitCode.FINDING, log
    report = json.loads((tmp_path / "job.json").read_text(encoding="utf-8"))
    assert (report["encoded"], report["failed"]) == (20, catalogue.broken)
    assert report["index_items"] == 20
    keys = lab.server.items("prewarmed")
    assert len(keys) == 20
    assert {parse_key(key.removeprefix("prewarmed/")).namespace for key in keys} == {
        report["namespace"]
    }

    server = lab.start("qwen2-vl", prefix="prewarmed")
    answers = [lab.ask_with(server, sent(path)) for path in catalogue.pictures[::4]]
    assert [answer.encoded for answer in answers] == [0] * 5
    assert {answer.finish_reason for answer in answers} <= {"stop", "length"}


def _write_adapter(folder: Path) -> Path:
    """A LoRA for the first layer of the tiny model's language model, as PEFT writes it."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    generator = torch.Generator().manual_seed(7)
    weights = {
        f"{name}.lora_A.weight": torch.randn(8, LLM_WIDTH, generator=generator),
        f"{name}.lora_B.weight": torch.randn(LLM_WIDTH, 8, generator=generator),
    }
    save_file(weights, str(folder / "adapter_model.safetensors"))
    return folder


@pytest.mark.slow
def test_catalogue_serves_those_who_answer_under_the_adapter_of_a_modality(
    lab: Lab, tmp_path: Path
) -> None:
    adapter = json.dumps({"image": str(_write_adapter(tmp_path / "adapter"))})
    loras = ("--enable-lora", "--max-lora-rank", "8", "--default-mm-loras", adapter)
    media = tmp_path / "media"
    media.mkdir()
    pictures = [lab.pictures["china-1"], lab.pictures["hopper-1"]]
    for path in pictures:
        (media / path.name).write_bytes(path.read_bytes())
    job = start_job(
        url=lab.server.location("adapted"),
        model=lab.model("qwen2-vl"),
        media=media,
        workdir=tmp_path,
        name="job",
        arguments=loras,
    )
    assert end_job(job) == ExitCode.OK, (tmp_path / "job.log").read_text(encoding="utf-8")
    assert len(lab.server.items("adapted")) == len(pictures)

    server = lab.serve(prefix="adapted", role="ec_both", arguments=loras).wait()
    replies = [server.chat([picture(path), text()]) for path in pictures]
    assert [reply.status for reply in replies] == [200] * len(pictures)
    assert server.encoded == 0
    server.stop()
