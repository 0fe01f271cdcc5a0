"""Faults of the machine and of other projects' caches, against a whole engine.

What is shown elsewhere is not repeated: buckets that misbehave in `test_engine_faults.py` and
`test_s3_faults.py`, the scheduler part under such faults in `tests/connector/test_engine_rows.py`.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ec_s3.blocking import ECCacheEngine
from ec_s3.config import ECConfig
from ec_s3.connector.assembly import warn_of_local_names
from ec_s3.keys import Namespace
from ec_s3.testing.memory import MemoryStore

NAMESPACE = Namespace(model="org/model")
ROOT = Path(__file__).parents[2]
PAGE = 256 << 10


def config(**settings: Any) -> ECConfig:
    return ECConfig().model_copy(update={"max_local_cpu_size": 16 * PAGE, **settings})


def _grown(engine: ECCacheEngine, sizes: range, rounds: int) -> int:
    """Bytes by which Python's memory grows while items of many sizes come and go."""
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for turn in range(rounds):
        for rows in sizes:
            name = f"{turn}-{rows}"
            assert engine.put(name, torch.zeros((rows, 8), dtype=torch.bfloat16))
            assert engine.get(name) is not None
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before


def _check_growth(rounds: int) -> None:
    tracemalloc.start()
    try:
        with ECCacheEngine(config(), NAMESPACE) as engine:
            _grown(engine, range(1, 500), 1)
            assert _grown(engine, range(500, 1_000), rounds) < 100_000
    finally:
        tracemalloc.stop()


def test_items_of_ever_new_sizes_leave_no_memory_behind() -> None:
    """LMCache#3767: a type made for each size leaked one or two kilobytes."""
    _check_growth(2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_thousand_items_leave_no_memory_behind() -> None:
    _check_growth(400)


def test_engine_serves_where_no_memory_may_be_locked() -> None:
    """LMCache#1063, nvidia-container-toolkit#226: pinning failed in containers, and the start."""
    code = """
        import resource
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
        import torch
        from ec_s3 import ECCacheEngine, ECConfig, Namespace

        with ECCacheEngine(ECConfig(max_local_cpu_size="8MiB"), Namespace(model="m")) as engine:
            tensor = torch.ones(64, 64, dtype=torch.bfloat16)
            assert engine.put("a", tensor)
            assert torch.equal(engine.get("a"), tensor)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


class Stalled(MemoryStore):
    """A bucket that takes nothing."""

    async def put(self, key: str, *_: object, **__: object) -> Any:
        del key
        await asyncio.Event().wait()


def test_full_upload_queue_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Mooncake#2997: a failure to enqueue was ignored without a log or a metric."""
    settings = config(upload_queue_items=1, max_uploads=1, flush_timeout=0.0)
    engine = ECCacheEngine(settings, NAMESPACE, store=Stalled())
    try:
        for i in range(8):
            assert engine.put(f"k{i}", torch.zeros((4, 8), dtype=torch.bfloat16)), "kept here"
        give_up = time.monotonic() + 20
        while engine.stats()["uploads_queue_full"] < 6:
            assert time.monotonic() < give_up, "each is counted"
            time.sleep(0.005)
        assert caplog.text.count("items are not uploaded") == 1
    finally:
        engine.close(0.0)


@pytest.mark.parametrize(
    ("processor_cache", "prefix_caching", "said"),
    [(0, False, 1), (0.0, False, 1), (4, False, 0), (0, True, 0)],
)
def test_server_that_names_media_by_the_request_is_told_which_two_settings_do_that(
    caplog: pytest.LogCaptureFixture, processor_cache: float, prefix_caching: bool, said: int
) -> None:
    """LMCache#5055: such names were stored, and collided after a restart."""
    warn_of_local_names(
        SimpleNamespace(
            model_config=SimpleNamespace(
                multimodal_config=SimpleNamespace(mm_processor_cache_gb=processor_cache)
            ),
            cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        )
    )
    assert caplog.text.count("mm_processor_cache_gb=0") == said
    assert caplog.text.count("enable_prefix_caching=False") == said
