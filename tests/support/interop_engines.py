"""Engines on a real server, with deadlines for a busy machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ec_s3 import ECCacheEngine, ECConfig, Namespace

if TYPE_CHECKING:
    from ec_s3.testing.servers import RealServer

SECONDS = 90.0
"""Deadline of whatever must come in the end."""


def open_engine(
    server: RealServer,
    url: str,
    namespace: Namespace,
    *,
    transport: str = "sdk",
    memory: str = "16MiB",
) -> ECCacheEngine:
    """An engine with a memory of its own, all of which is ready for use."""
    engine = ECCacheEngine(
        ECConfig(
            url=url,
            ca_bundle=server.ca_bundle,
            s3_transport=transport,
            max_local_cpu_size=memory,
            connect_timeout=20,
            read_timeout=20,
            metadata_timeout=20,
            fetch_timeout=SECONDS,
            flush_timeout=SECONDS,
            blocking_timeout=SECONDS,
        ),
        namespace,
    )
    give_up = time.monotonic() + SECONDS
    while (stats := engine.stats())["local_bytes_populated"] < stats["local_bytes_capacity"]:
        assert time.monotonic() < give_up, stats
        time.sleep(0.005)
    return engine
