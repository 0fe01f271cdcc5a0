"""What a user's type checker makes of the package: it finds our types (`py.typed`)."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from doc_pages import ROOT

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
[mypy]
strict = true
[mypy-torch.*]
follow_imports = skip
"""
"""Torch is left out: reading it takes a minute, and it is not what is tested."""

GOOD = """
from collections.abc import AsyncIterator, Mapping

from ec_s3 import ECCacheEngine, ECConfig, EncoderCache, Namespace, UploadReport, upload_items
from ec_s3.store import Store
from ec_s3.testing.memory import MemoryStore


def statistics(url: str) -> dict[str, float]:
    config = ECConfig(url=url, max_local_cpu_size="64MiB", fetch_timeout="250ms")
    with ECCacheEngine(config, Namespace(model="org/model", dtype="bfloat16")) as engine:
        there: bool = engine.contains("a-picture", timeout=1.0)
        several: Mapping[str, bool] = engine.contains_many(["a-picture"])
        complete: bool = engine.flush(timeout=10).complete
        assert there or several or complete
        return engine.stats()


async def keys(cache: EncoderCache, store: Store = MemoryStore()) -> AsyncIterator[str]:
    async for info in store.list():
        yield info.key


def written(report: UploadReport) -> int:
    return report.written


upload = upload_items
"""

BAD = """
from ec_s3 import ECCacheEngine, Namespace


def wrong(engine: ECCacheEngine) -> int:
    Namespace(model=7)
    engine.contains("a-picture", wait=1.0)
    return engine.stats()
"""


def checked(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Mypy's verdict on a file of a project that only has the package installed."""
    (folder / "mypy.ini").write_text(CONFIG)
    (folder / "consumer.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(folder / "cache"), "consumer.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_a_consumer_finds_our_types(tmp_path: Path) -> None:
    ended = checked(tmp_path, GOOD)
    assert ended.returncode == 0, ended.stdout
    ended = checked(tmp_path, BAD)
    found = [line.rpartition("[")[2] for line in ended.stdout.splitlines() if "error:" in line]
    assert found == ["arg-type]", "call-arg]", "return-value]"], ended.stdout


def test_the_wheel_brings_the_marker() -> None:
    assert (ROOT / "ec_s3" / "py.typed").is_file()
