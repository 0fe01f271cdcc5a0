"""A server that starts warm answers its first requests from host memory."""

from __future__ import annotations

import pytest
from small_engine import SmallEngine, fill, prompt, until

pytestmark = pytest.mark.usefixtures("small_engines")


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_first_requests_are_answered_from_host_memory(url: str, kind: str) -> None:
    names = ["a", "b", "c"]
    fill(url, *names)
    with SmallEngine(url=url, engine=kind, warm_start="1MiB") as engine:
        until(lambda: engine.stats["warm_start_items_loaded"] == 3, "they are loaded")
        until(lambda: not engine.stats["warm_start_running"], "it has ended")
        engine.serve(*(prompt(name, name) for name in names))
        assert engine.encoded == []
        assert engine.loaded == names
        until(lambda: engine.stats["hits_local"] == 3, "they are counted")
        assert engine.stats["hits_remote"] == 0
        until(lambda: engine.leased == 0, "nothing is held")


def test_engine_that_only_encodes_loads_nothing(url: str) -> None:
    with SmallEngine(role="producer", url=url, engine="thread", warm_start="1MiB") as engine:
        assert engine.side.port._cache.config.warm_start == 0  # type: ignore[attr-defined]  # of a thread's port
