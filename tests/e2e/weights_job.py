"""A process whose vLLM changes its encoder's weights in place: `python weights_job.py <in> <out>`.

The input is JSON: a job as of `ec_s3.connector.offline`, prompts, and whether there is a cache to
be told. The output is a list of what each batch of the prompts brought: two with the first weights,
two with others, one with the first again.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any


class Updates:
    """Methods that every vLLM worker gets (`worker_extension_cls`)."""

    model_runner: Any

    def suspend_cache(self) -> None:
        from vllm.distributed.ec_transfer import get_ec_transfer

        get_ec_transfer().suspend()

    def resume_cache(self, weight_version: str) -> None:
        from vllm.distributed.ec_transfer import get_ec_transfer

        get_ec_transfer().resume(weight_version)

    def change_encoder(self) -> int:
        import torch

        changed = 0
        with torch.no_grad():
            for name, parameter in self.model_runner.get_model().named_parameters():
                if "vision" in name:  # not all are read again: the CPU keeps some packed
                    parameter.mul_(-1.0)
                    changed += 1
        return changed


def _wait_for_uploads(url: str, number: int) -> None:
    """Until so many items are in the bucket: what is pending is dropped with its weights."""
    from ec_s3.config import ECConfig
    from ec_s3.remote import open_store

    async def count() -> int:
        store = open_store(ECConfig(url=url))
        assert store is not None
        try:
            return len([info async for info in store.list("v1/") if "/float32/" in info.key])
        finally:
            await store.aclose()

    give_up = time.monotonic() + 120
    while asyncio.run(count()) < number:
        assert time.monotonic() < give_up, f"{number} items are uploaded"
        time.sleep(0.2)


def main(task: dict[str, Any]) -> list[dict[str, Any]]:
    from ec_s3.connector import encode_log
    from ec_s3.connector.offline import Job, OfflineEngine, Prompt

    prompts = [Prompt.parse(row) for row in task["prompts"]]
    with (
        tempfile.TemporaryDirectory() as workdir,
        encode_log.installed(Path(workdir)) as log,
    ):
        engine = OfflineEngine(Job.parse(json.dumps(task["job"])), log)
        llm: Any = engine._llm
        batches = []

        def ask() -> None:
            llm.reset_prefix_cache()
            batches.append(asdict(engine.generate(prompts)))

        def change(weight_version: str) -> None:
            if task["cached"]:
                _wait_for_uploads(task["url"], len(batches))
                llm.collective_rpc("suspend_cache")
            assert all(llm.collective_rpc("change_encoder"))
            llm.llm_engine.reset_encoder_cache()
            if task["cached"]:
                llm.collective_rpc("resume_cache", args=(weight_version,))

        ask()
        ask()
        change("step-2")
        ask()
        ask()
        change("")  # negated twice they are what they were
        ask()
        engine.close()
    return batches


if __name__ == "__main__":
    found = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(found))
