"""Situations in which other projects' caches killed an engine, hung, leaked or answered wrongly.

Each runs ranks, host memory, engine and bucket for real. Every item that is used is compared with
its reference, and the engine ends as vLLM would when it is promised what is not there.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_engine import PAGE, SmallEngine, fill, prompt, reference, until
from vllm_play import Feature, feature

from ec_s3.testing.faults import Fault

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ec_s3.testing.faults import FaultServer
    from ec_s3.testing.moto import S3Server

pytestmark = pytest.mark.usefixtures("small_engines")


class Bucket:
    """What happens to a bucket behind everybody's back."""

    def __init__(self, server: S3Server, name: str) -> None:
        self._client, self._name = server.client(), name

    def items(self) -> list[str]:
        found = self._client.list_objects_v2(Bucket=self._name).get("Contents", [])
        return [entry["Key"] for entry in found if "/float32/" in entry["Key"]]

    def remove_all(self) -> None:
        for key in self.items():
            self._client.delete_object(Bucket=self._name, Key=key)

    def damage_all(self) -> None:
        for key in self.items():
            self._client.put_object(Bucket=self._name, Key=key, Body=os.urandom(500))

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def objects(s3_server: S3Server, bucket: str) -> Iterator[Bucket]:
    made = Bucket(s3_server, bucket)
    yield made
    made.close()


# -- waiting -----------------------------------------------------------------------------------


def test_text_beside_a_slow_look_up_is_scheduled_at_once(url: str, proxy: FaultServer) -> None:
    """vLLM#41627: the look-up blocked `schedule()`."""
    fill(url, "a")
    proxy.add(Fault(method="GET", delay=0.3))
    with SmallEngine(url=url, fetch_timeout=20) as engine:
        image = prompt("image", "a")
        texts = [prompt(f"t{i}") for i in range(10)]
        assert engine.step(image, *texts) == texts
        assert engine.loaded == []
        engine.serve(image)
        assert (engine.loaded, engine.encoded) == (["a"], [])


def test_get_that_is_never_answered_ends_at_the_deadline_and_holds_nothing(
    url: str, proxy: FaultServer
) -> None:
    """LMCache#5047, PR #1960: the request was parked for ever."""
    fill(url, "a", "b")
    proxy.add(Fault(method="GET", path="float32", hang=True))
    settings: dict[str, Any] = {"fetch_timeout": 0.3, "metadata_timeout": 0.6, "flush_timeout": 0.1}
    with SmallEngine(url=url, **settings) as engine:
        engine.serve(prompt("media", "a"), prompt("bare", "b", media=False))
        assert engine.encoded == ["a"]
        assert engine.failed == ["bare"]
        until(lambda: not engine.leased, "nothing is held for either")


def test_looking_up_sends_nothing(url: str, proxy: FaultServer) -> None:
    """LMCache#891: look-ups cost up to 655 ms on the scheduler's thread."""
    fill(url, "a")
    with SmallEngine(url=url) as engine:
        request = prompt("1", "a")
        until(lambda: engine.scheduler.ensure(request, 0), "the fetch")
        asked = proxy.count(path="float32")
        proxy.add(Fault(delay=0.2))
        assert all(engine.scheduler.has("a") for _ in range(1_000))
        assert proxy.count(path="float32") == asked
        engine.serve(request)


def test_consumer_gets_what_its_producer_uploads_a_moment_later(
    url: str, proxy: FaultServer
) -> None:
    """vLLM#29248, PR #56432: a key that nobody has produced yet, or never will."""
    proxy.add(Fault(method="PUT", delay=0.4))
    with (
        SmallEngine(role="producer", url=url) as producer,
        SmallEngine(role="consumer", url=url, metadata_timeout=20) as consumer,
    ):
        request = prompt("1", "a", media=False)
        consumer.step(request)
        producer.serve(prompt("1", "a"))
        consumer.serve(request)
        assert consumer.loaded == ["a"]
    with SmallEngine(role="consumer", url=url, metadata_timeout=0.3) as consumer:
        consumer.serve(prompt("2", "nobody's", media=False), prompt("3", "a", media=False))
        assert consumer.failed[:1] == ["2"]
        for turn in range(4, 100):
            if consumer.loaded:  # a busy machine may need more than one request's time
                break
            consumer.serve(prompt(str(turn), "a", media=False))
        assert set(consumer.loaded) == {"a"}
        assert consumer.stats["misses_absent"] >= 1


# -- promises ----------------------------------------------------------------------------------


def test_three_items_and_room_for_two_end_no_engine(url: str) -> None:
    """vLLM#38551: an entry was evicted between "has" and "load"."""
    fill(url, "a", "b", "c")
    with SmallEngine(url=url, max_local_cpu_size=2 * PAGE) as engine:
        for turn in range(6):
            names = ["abc", "bca", "cab"][turn % 3]
            engine.serve(prompt(f"r{turn}", *names), prompt(f"s{turn}", *names[::-1]))
        assert engine.loaded
        until(lambda: not engine.leased, "nothing is held")


@pytest.mark.parametrize("fate", ["remove_all", "damage_all"])
@pytest.mark.parametrize("media", [True, False])
def test_object_that_is_lost_after_the_yes_is_loaded_all_the_same(
    url: str, objects: Bucket, fate: str, media: bool
) -> None:
    """vLLM#45658, #32469: a cache miss at gather time ends the engine."""
    fill(url, "a")
    with SmallEngine(url=url, fetch_timeout=20) as engine:
        request = prompt("1", "a", media=media)
        until(lambda: engine.scheduler.ensure(request, 0), "the fetch")
        getattr(objects, fate)()
        engine.serve(request)
        assert (engine.loaded, engine.failed) == (["a"], [])


@pytest.mark.parametrize("fate", ["remove_all", "damage_all"])
def test_object_that_is_lost_before_its_fetch_fails_at_most_one_request(
    url: str, objects: Bucket, fate: str
) -> None:
    fill(url, "a")
    getattr(objects, fate)()
    with SmallEngine(url=url, metadata_timeout=0.5) as engine:
        engine.serve(prompt("bare", "a", media=False), prompt("text"))
        assert engine.failed == ["bare"]
        engine.serve(prompt("media", "a"))
        assert engine.encoded == ["a"]


def test_one_failing_fetch_costs_only_its_own_item(
    url: str, objects: Bucket, proxy: FaultServer
) -> None:
    """sglang#28031: it threw away all hits of the batch."""
    fill(url, "b")
    (middle,) = objects.items()
    fill(url, "a", "c")
    proxy.add(Fault(method="GET", path=middle.rsplit("/", 1)[1], status=403))
    with SmallEngine(url=url, fetch_timeout=20) as engine:
        engine.serve(prompt("1", "a", "b", "c"))
        assert (engine.loaded, engine.encoded) == (["a", "c"], ["b"])


def test_item_used_most_stays(url: str) -> None:
    """LMCache 0.5.6: its LRU never heard of encoder reads and evicted the most used entry."""
    with SmallEngine(url=url, max_local_cpu_size=12 * PAGE) as engine:
        for i in range(12):
            engine.serve(prompt(f"r{i}", f"k{i}"))
        until(lambda: engine.stats["uploads_written"] == 12, "all are clean")
        for i in range(5):
            engine.serve(prompt(f"again{i}", "k0"))
        engine.serve(prompt("x", "k12"), prompt("y", "k13"))
        until(lambda: engine.stats["uploads_written"] == 14, "all are clean")
        tier = engine.side.port._cache.tier  # type: ignore[attr-defined]  # a ThreadPort
        key = engine.side.port._cache.key_of  # type: ignore[attr-defined]
        gone = [i for i in range(14) if not tier.contains(key(f"k{i}"))]
        assert gone == [1, 2]


def test_item_larger_than_the_tier_evicts_nothing(url: str) -> None:
    """LMCache 0.5.6: it evicted everything and was then refused."""
    with SmallEngine(url=url, max_local_cpu_size=12 * PAGE) as engine:
        engine.serve(*(prompt(f"r{i}", f"k{i}") for i in range(12)))
        until(lambda: engine.stats["uploads_written"] == 12, "all are clean")
        big = prompt("big", "huge", rows=24 * PAGE // 32)
        engine.serve(big)
        assert engine.encoded[-1] == "huge"
        engine.loaded.clear()
        engine.serve(*(prompt(f"s{i}", f"k{i}") for i in range(12)))
        assert len(engine.loaded) == 12


def test_wide_outputs_of_several_encoder_levels_come_back_exactly(url: str) -> None:
    """dynamo#11244: buffers sized by the hidden size."""
    width, rows = 4 * 2_048, 1_024
    fill(url, "deep")
    with SmallEngine(url=url, width=width, max_local_cpu_size=256 * PAGE) as engine:
        engine.serve(prompt("1", "wide", rows=rows))
        until(lambda: engine.stats["uploads_written"] == 1, "the upload")
    consumer = SmallEngine(
        role="consumer", ranks=2, url=url, width=width, max_local_cpu_size=256 * PAGE
    )
    with consumer:
        consumer.serve(prompt("2", "wide", rows=rows, media=False))
        assert consumer.loaded == ["wide"]


# -- what is kept ------------------------------------------------------------------------------


def test_stalled_bucket_keeps_no_batch_of_the_encoder_alive(url: str, proxy: FaultServer) -> None:
    """EasyR1#11002: encoder tensors stayed referenced on the GPU until it ran out of memory."""
    proxy.add(Fault(method="PUT", hang=True))
    batches: list[weakref.ref[torch.Tensor]] = []

    def encode(items: Sequence[Feature]) -> list[torch.Tensor]:
        """One batch whose parts are views of one storage, as many models hand them out."""
        batch = torch.stack([reference(item) for item in items])
        batches.append(weakref.ref(batch))
        return list(batch.unbind(0))

    settings: dict[str, Any] = {"flush_timeout": 0.1, "max_deferred_requests": 0}
    with SmallEngine(url=url, max_local_cpu_size=16 * PAGE, **settings) as engine:
        engine.encoder = encode
        for i in range(20):
            engine.serve(prompt(f"r{i}", *(f"{i}-{k}" for k in range(10))))
        gc.collect()
        assert len(batches) == 20
        assert [ref for ref in batches if ref() is not None] == []
        stats = engine.stats
        assert stats["local_bytes_used"] <= 16 * PAGE
        assert stats["local_evictions_dirty"] > 0, "dropped and counted"


def test_starting_and_stopping_leaves_nothing_behind(url: str) -> None:
    """LMCache#2634: shutting a connector down never closed its engine."""

    def cycle(name: str) -> None:
        with SmallEngine(url=url, ranks=2, max_local_cpu_size=4 * PAGE) as engine:
            engine.serve(prompt(name, name))

    cycle("warm")
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for i in range(10):
        cycle(f"i{i}")

    def ours() -> list[str]:
        started = set(threading.enumerate()) - threads
        return [thread.name for thread in started if thread.name.startswith("ec_s3")]

    # They are told to end, not waited for; and the server ends its side of connections later.
    until(lambda: not ours(), "the end of every thread")
    until(lambda: len(os.listdir("/proc/self/fd")) <= files, "the end of every connection")


def test_four_ranks_share_one_memory_and_upload_once(url: str, objects: Bucket) -> None:
    """sglang PR #35145: a pool per rank; vllm-ascend PR #16953: an upload per rank and put."""
    with SmallEngine(url=url, ranks=4) as engine:
        for i in range(3):
            engine.serve(prompt(f"r{i}", "a"))
        assert engine.encoded == ["a"]
        until(lambda: engine.stats["uploads_written"] == 1, "the upload")
        mapped = {os.fstat(worker._mapping.slab.fd).st_ino for worker in engine.workers}  # type: ignore[union-attr]  # mapped
        assert mapped == {os.fstat(engine.side.slab.fd).st_ino}
    assert len(objects.items()) == 1


def test_other_picture_under_a_used_name_is_encoded_and_replaces_nothing(url: str) -> None:
    """vLLM#55547, #57696: the engine died, for all later requests too."""
    fill(url, "X")
    with SmallEngine(url=url, fetch_timeout=20) as engine:
        for turn in range(2):
            engine.serve(prompt(f"other{turn}", "X", rows=6), prompt(f"text{turn}"))
        assert engine.encoded == ["X", "X"]
        engine.serve(prompt("right", "X"))
        assert engine.loaded == ["X"]
    with SmallEngine(role="consumer", url=url) as engine:
        wrong = prompt("wrong")
        wrong.mm_features.append(feature("X", rows=6, media=False))
        engine.serve(wrong, prompt("right", "X", media=False))
        assert engine.failed == ["wrong"]
        assert engine.loaded == ["X"]
