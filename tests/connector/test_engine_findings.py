"""What a prototype in real vLLM has shown, with ranks, an engine and a bucket that really run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from small_engine import PAGE, SmallEngine, fill, prompt, until

from ec_s3.testing.faults import Fault

if TYPE_CHECKING:
    from ec_s3.testing.faults import FaultServer

pytestmark = pytest.mark.usefixtures("small_engines")


def test_no_hook_starts_a_thread(url: str) -> None:
    with SmallEngine(url=url) as engine:
        before = set(threading.enumerate())
        requests = [prompt(f"r{i}", f"i{i}") for i in range(8)]
        for request in requests:
            engine.scheduler.ensure(request, 0)
            engine.scheduler.has(request.mm_features[0].identifier)
        ours = [t.name for t in set(threading.enumerate()) - before if t.name.startswith("ec_s3-")]
        assert [name for name in ours if "codec" not in name and "encode" not in name] == []
        engine.serve(*requests)


def test_fetches_that_nobody_waits_for_any_more_are_dropped(url: str, proxy: FaultServer) -> None:
    """128 aborted requests kept a process alive for three minutes."""
    proxy.add(Fault(method="GET", hang=True))
    with SmallEngine(url=url, max_deferred_requests=256, flush_timeout=0) as engine:
        requests = [prompt(f"r{i}", f"i{i}") for i in range(128)]
        for request in requests:
            assert not engine.scheduler.ensure(request, 0)
        for request in requests:
            engine.scheduler.finished(request)
        asked = proxy.count("GET")
        proxy.clear()
        engine.serve(prompt("after", "x"))
        assert engine.encoded == ["x"]
        assert asked + proxy.count("GET") < 128, "most were dropped before they were sent"
        until(lambda: not engine.leased, "nothing is held for them")


def test_slow_bucket_is_filled_all_the_same(url: str, proxy: FaultServer) -> None:
    """The encode is saved although a fetch of the same item is still under way."""
    proxy.add(Fault(method="GET", path="bfloat16|float32", hang=True))
    with SmallEngine(url=url, fetch_timeout=0.4) as engine:
        engine.serve(prompt("1", "a"))
        assert engine.encoded == ["a"]
        assert engine.stats["given_up_deadline"] == 1
        until(lambda: engine.stats["uploads_written"] == 1, "the upload")
    proxy.clear()
    with SmallEngine(url=url) as engine:
        engine.serve(prompt("2", "a"))
        assert (engine.loaded, engine.encoded) == (["a"], [])


def test_encode_only_server_asks_without_fetching_and_skips_what_is_there(
    url: str, proxy: FaultServer
) -> None:
    fill(url, "a")
    proxy.clear()
    with SmallEngine(role="producer", url=url) as engine:
        engine.serve(prompt("1", "a"), prompt("2", "b"))
        assert engine.encoded == ["b"]
        assert proxy.count("GET", "/float32/") == 0
        asked = [request.path for request in proxy.log if request.method == "HEAD"]
        assert len(set(asked)) == 2, "each once, and perhaps again before its body"
        until(lambda: engine.stats["uploads_written"] == 1, "the upload")


def test_two_requests_with_room_for_one_item_do_not_take_it_from_each_other(
    url: str, proxy: FaultServer
) -> None:
    """Each fetch evicted the other's item: 14 fetches and 4.5 s, by a race."""
    fill(url, "a", "b", "c")
    proxy.clear()
    with SmallEngine(url=url, max_local_cpu_size=PAGE) as engine:
        engine.serve(prompt("1", "a", "b", "c"), prompt("2", "c", "b", "a"))
        assert proxy.count("GET", "/float32/") <= 6, "one per request and item at most"
        assert engine.loaded
        until(lambda: not engine.leased, "nothing is held")


def test_rank_whose_process_is_gone_ends_promises_but_not_uploads(
    url: str, proxy: FaultServer
) -> None:
    fill(url, "a")
    proxy.add(Fault(method="PUT", delay=0.3))
    with SmallEngine(url=url, ranks=2) as engine:
        engine.serve(prompt("1", "b"))
        engine.workers[1].close()
        until(lambda: not engine.side.hub.ready, "the end of the rank is noticed")
        assert engine.scheduler.ensure(prompt("2", "a"), 0), "nothing is fetched any more"
        assert not engine.scheduler.has("a")
        until(lambda: engine.stats["uploads_written"] == 1, "the upload goes on")


def test_uploads_do_not_wait_for_a_flush_or_another_step(url: str, proxy: FaultServer) -> None:
    """vLLM's default shutdown kills the process before any flush: nothing is left for it."""
    proxy.add(Fault(method="PUT", delay=0.2))
    with SmallEngine(url=url) as engine:
        engine.serve(*(prompt(f"r{i}", f"i{i}") for i in range(5)))
        steps = engine.steps
        until(lambda: engine.stats["uploads_written"] == 5, "the uploads")
        assert engine.steps == steps
