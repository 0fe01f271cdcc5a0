"""ECCacheEngine: deadlines, threads, forks, loops, leaks, exits."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ec_s3.blocking import ECCacheEngine
from ec_s3.config import ECConfig
from ec_s3.errors import ClosedError, ConfigError, RemoteDeniedError
from ec_s3.keys import Namespace
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import DeleteReport, Expectation, FlushReport, ItemMeta, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ec_s3.store import Buffer

NAMESPACE = Namespace(model="org/model")
PAGE = 256 << 10
ROOT = Path(__file__).parents[2]


class Silent(MemoryStore):
    """Accepts every call and never answers."""

    async def _enter(self, verb: str, *keys: str) -> None:
        self.calls[verb] = self.calls.get(verb, 0) + 1
        await asyncio.Event().wait()


class Shared(MemoryStore):
    """Outlives the engines that use it, one after another; remembers which items were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    async def _enter(self, verb: str, *keys: str) -> None:
        self.read += [key for key in keys if verb == "get" and "/bfloat16/" in key]
        await super()._enter(verb, *keys)

    async def aclose(self) -> None:
        return None


def config(**settings: object) -> ECConfig:
    defaults: dict[str, object] = {"max_local_cpu_size": 16 * PAGE, "flush_timeout": 5.0}
    return ECConfig().model_copy(update={**defaults, **settings})


def tensor(seed: int, rows: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 128, generator=generator).to(torch.bfloat16)


@pytest.fixture
def store() -> Shared:
    return Shared()


@pytest.fixture
def engine(store: Shared) -> Iterator[ECCacheEngine]:
    with ECCacheEngine(config(), NAMESPACE, store=store) as made:
        yield made
        until(lambda: made.stats()["local_bytes_leased"] == 0)  # an upload may be at work


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does in its own time."""
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up, "it did not come to pass"
        time.sleep(0.01)


def same(got: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return got is not None and torch.equal(got, expected)


@pytest.mark.parametrize("timeout", [float("inf"), 1e10])
def test_who_waits_for_ever_is_answered_all_the_same(store: Shared, timeout: float) -> None:
    engine = ECCacheEngine(config(), NAMESPACE, store=store)
    assert engine.put("a", tensor(1))
    assert engine.flush(timeout).complete
    assert same(engine.get("a", timeout=timeout), tensor(1))
    assert engine.contains("a", timeout=timeout)
    assert engine.close(timeout).complete
    with pytest.raises(ClosedError):
        engine.get("a")


def test_the_whole_face(engine: ECCacheEngine, store: Shared) -> None:
    assert engine.put("a", tensor(1), meta=ItemMeta(encode_seconds=0.25))
    assert engine.put_many({"b": tensor(2), "c": tensor(3)}) == {"b": True, "c": True}
    assert engine.flush(10).complete
    assert engine.contains("a")
    assert engine.contains_many(["a", "x"]) == {"a": True, "x": False}
    with ECCacheEngine(config(), NAMESPACE, store=store) as other:
        assert same(other.get("a"), tensor(1))
        got = other.get_many(["c", "x", "b"])
        assert same(got[0], tensor(3))
        assert got[1] is None
        assert same(got[2], tensor(2))
        assert other.get("a", expect=Expectation(rows=7)) is None
        flat = other.stats()
        assert (flat["hits_remote"], flat["misses_absent"], flat["misses_mismatch"]) == (3, 1, 1)
        assert other.delete(["a"]) == DeleteReport((NAMESPACE.object_key("a"),))
        assert other.get("a") is None


def test_more_items_than_the_host_tier_holds_come_all_the_same(store: Shared) -> None:
    names = [f"k{i}" for i in range(50)]
    with ECCacheEngine(config(), NAMESPACE, store=store) as engine:
        for seed, name in enumerate(names):
            engine.put(name, tensor(seed))
            engine.flush(10)
    with ECCacheEngine(config(), NAMESPACE, store=store) as engine:
        got = engine.get_many(names)
        assert all(same(item, tensor(seed)) for seed, item in enumerate(got))
        lease = engine._cache.tier.reserve("in use", 16 * PAGE)
        assert lease is not None
        assert engine.get_many(["k0", "k1"]) == [None, None]  # nothing of theirs takes the room
        lease.abort()


def test_prefetched_items_become_local(engine: ECCacheEngine, store: Shared) -> None:
    engine.put("a", tensor(1))
    engine.flush(10)
    with ECCacheEngine(config(), NAMESPACE, store=store) as other:
        other.prefetch(["a"])
        assert same(other.get("a"), tensor(1))
        assert store.read == [NAMESPACE.object_key("a")]


def test_the_callers_faults_are_raised(engine: ECCacheEngine) -> None:
    with pytest.raises(ValueError, match="float32"):
        engine.put("a", torch.ones(2, 2))
    with pytest.raises(ValueError, match="dense"):
        engine.put("a", torch.eye(2, dtype=torch.bfloat16).to_sparse())


def test_an_error_of_a_deletion_comes_as_it_is() -> None:
    class Denied(MemoryStore):
        async def delete(self, keys: Sequence[str]) -> DeleteReport:
            raise RemoteDeniedError("no DeleteObject", operation="delete")

    with (
        ECCacheEngine(config(), NAMESPACE, store=Denied()) as engine,
        pytest.raises(RemoteDeniedError, match="no DeleteObject"),
    ):
        engine.delete(["a"])


def test_facts_are_written_beside_the_items(store: Shared) -> None:
    with ECCacheEngine(config(), NAMESPACE, store=store, facts={"vllm": "0.32"}) as engine:
        engine.put("a", tensor(1))
        engine.flush(10)
    assert store.objects[NAMESPACE.manifest_key] == NAMESPACE.manifest({"vllm": "0.32"})


# -- deadlines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda e: e.get("a", timeout=0.02) is None, id="get"),
        pytest.param(lambda e: e.get_many(["a", "b"], timeout=0.02) == [None] * 2, id="get_many"),
        pytest.param(lambda e: not e.contains("a", timeout=0.02), id="contains"),
        pytest.param(
            lambda e: e.contains_many("abc", timeout=0.02) == dict.fromkeys("abc", False),
            id="contains_many",
        ),
        pytest.param(lambda e: e.prefetch(["a"]) is None, id="prefetch"),
        pytest.param(lambda e: all(e.put(f"k{i}", tensor(i)) for i in range(8)), id="full queue"),
        pytest.param(lambda e: e.flush(0.02).complete, id="flush"),
        pytest.param(lambda e: e.stats()["queries"] == 0, id="stats"),
    ],
)
def test_every_call_returns_though_the_store_never_answers(
    call: Callable[[ECCacheEngine], bool],
) -> None:
    """LMCache PR #1960: there `contains` waited 25 s with a limit of 10 s."""
    engine = ECCacheEngine(config(upload_queue_items=2), NAMESPACE, store=Silent())
    try:
        assert call(engine)
    finally:
        engine.close(0.02)
        engine.close(0.02)


def test_a_deletion_that_is_not_answered_ends_at_its_deadline() -> None:
    engine = ECCacheEngine(config(), NAMESPACE, store=Silent())
    with pytest.raises(TimeoutError):
        engine.delete(["a"], timeout=0.02)
    engine.close(0)


def test_flush_and_close_say_what_they_leave(store: Shared) -> None:
    engine = ECCacheEngine(config(), NAMESPACE, store=Silent())
    for i in range(6):
        assert engine.put(f"k{i}", tensor(i))
    assert engine.flush(0.02) == FlushReport(uploaded=0, pending=6, dropped=0)
    assert engine.close(0.02) == FlushReport(uploaded=0, pending=6, dropped=6)
    assert engine.close() == FlushReport()
    assert engine.stats()["uploads_closed"] == 6


def test_a_loop_that_is_held_up_is_a_miss(
    engine: ECCacheEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ec_s3.blocking.SLACK_SECONDS", 0.02)
    release = threading.Event()
    engine._loop.post(release.wait, 20)
    try:
        assert engine.get("a", timeout=0.01) is None
        assert engine.contains_many(["a"], timeout=0.01) == {"a": False}
    finally:
        release.set()


def test_what_host_memory_holds_is_had_while_the_loop_is_held_up(engine: ECCacheEngine) -> None:
    engine.put("a", tensor(1))
    engine.put("b", tensor(2))
    release = threading.Event()
    engine._loop.post(release.wait, 20)
    try:
        assert same(engine.get("a", timeout=0), tensor(1))
        first, second = engine.get_many(["a", "b"], timeout=0)
        assert same(first, tensor(1))
        assert same(second, tensor(2))
    finally:
        release.set()
    stats = engine.stats()
    assert (stats["queries"], stats["hits_local"]) == (3, 3)
    assert engine.get("a", expect=Expectation(rows=7)) is None
    engine._cache.suspend()
    assert engine.get("a") is None
    stats = engine.stats()
    assert (stats["misses_mismatch"], stats["misses_suspended"], stats["hits_local"]) == (1, 1, 3)


def test_an_item_just_put_is_found_at_once_whatever_the_store_does() -> None:
    engine = ECCacheEngine(config(), NAMESPACE, store=Silent())
    engine.put("a", tensor(1))
    assert same(engine.get("a", timeout=20), tensor(1))
    assert engine.contains("a", timeout=20)
    engine.close(0)


# -- threads, loops, forks -------------------------------------------------------------------------


def test_sixteen_threads_share_an_engine(engine: ECCacheEngine) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        for i in range(12):
            name = f"k{(number + i) % 20}"
            seed = (number + i) % 20
            engine.put(name, tensor(seed))
            got = engine.get(name)
            if got is not None and not torch.equal(got, tensor(seed)):
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert engine.flush(20).complete


def test_it_works_inside_other_event_loops(engine: ECCacheEngine) -> None:
    """aiobotocore#807: "attached to a different loop" when loops come and go."""

    async def inside(seed: int) -> bool:
        engine.put(f"a{seed}", tensor(seed))
        there = await asyncio.to_thread(engine.get, f"a{seed}")
        return same(there, tensor(seed)) and same(engine.get(f"a{seed}"), tensor(seed))

    assert all(asyncio.run(inside(seed)) for seed in range(3))


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")  # on purpose
def test_a_forked_child_gets_clear_errors_and_the_parent_is_unharmed(
    engine: ECCacheEngine,
) -> None:
    engine.put("a", tensor(1))
    small = tensor(2)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        calls: list[Callable[[], object]] = [
            lambda: engine.get("a"),
            lambda: engine.put("b", small),
            lambda: engine.contains("a"),
            lambda: engine.prefetch(["a"]),
            lambda: engine.delete(["a"]),
            lambda: engine.flush(1),
            engine.stats,
        ]
        clear = 0
        for call in calls:
            try:
                call()
            except ClosedError as error:
                clear += "before the fork" in str(error)
            except BaseException:
                clear -= 100
        engine.close()
        os.write(writing, str(clear).encode())
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 100) == b"7"
    os.close(reading)
    os.waitpid(pid, 0)
    assert same(engine.get("a"), tensor(1))
    assert engine.flush(10).complete


def test_two_threads_may_close_at_once() -> None:
    class Slow(MemoryStore):
        async def put(
            self,
            key: str,
            parts: Sequence[Buffer],
            *,
            if_absent: bool = True,
            if_match: str | None = None,
        ) -> PutOutcome:
            await asyncio.sleep(0.1)
            return await super().put(key, parts, if_absent=if_absent, if_match=if_match)

    store = Slow()
    engine = ECCacheEngine(config(), NAMESPACE, store=store)
    engine.put("a", tensor(1))
    threads = [threading.Thread(target=engine.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert NAMESPACE.object_key("a") in store.objects  # none cut the flush of the first short


# -- closing ---------------------------------------------------------------------------------------


def test_after_close_every_call_but_stats_is_refused(store: Shared) -> None:
    engine = ECCacheEngine(config(), NAMESPACE, store=store)
    engine.put("a", tensor(1))
    assert engine.close().complete
    assert engine.close() == FlushReport()
    calls: list[Callable[[], object]] = [
        lambda: engine.get("a"),
        lambda: engine.put("a", tensor(1)),
        lambda: engine.contains("a"),
        lambda: engine.prefetch(["a"]),
        lambda: engine.delete(["a"]),
        lambda: engine.flush(1),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    assert engine.stats()["uploads_written"] == 1


def test_closing_answers_a_get_that_waits() -> None:
    store = Silent()
    engine = ECCacheEngine(config(), NAMESPACE, store=store)
    seen: list[type[BaseException] | None] = []

    def wait() -> None:
        try:
            engine.get("a", timeout=30)
        except BaseException as error:
            seen.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    give_up = time.monotonic() + 20
    while not store.calls and time.monotonic() < give_up:
        time.sleep(0.001)
    engine.close(0)
    thread.join(20)
    assert seen == [ClosedError]


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("ec_s3")}


def test_opening_and_closing_leaks_nothing(store: Shared) -> None:
    """LMCache#2634, aiobotocore#68: threads, sockets and sessions stayed there."""

    def once(number: int) -> None:
        with ECCacheEngine(config(), NAMESPACE, store=store) as engine:
            engine.put(f"k{number}", tensor(number, 2))
            assert engine.get(f"k{number}") is not None

    once(0)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for number in range(50):
            once(number)
        gc.collect()
    until(lambda: not _threads())
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_settings_that_cannot_be_used_leave_no_thread() -> None:
    class Unusable(MemoryStore):
        async def connect(self) -> None:
            raise ConfigError("sse: not here")

    with pytest.raises(ConfigError, match="sse"):
        ECCacheEngine(config(), NAMESPACE, store=Unusable())
    gc.collect()
    assert not {name for name in _threads() if "loop" in name}


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "forgotten"])
def test_an_exit_with_queued_uploads_flushes_them(tmp_path: Path, *, keep: bool) -> None:
    code = f"""
        import torch
        from ec_s3 import ECCacheEngine, ECConfig, Namespace

        def main():
            engine = ECCacheEngine(
                ECConfig(
                    url="file://{tmp_path}/bucket", max_local_cpu_size="16MiB", flush_timeout=40
                ),
                Namespace(model="m"),
            )
            for i in range(20):
                assert engine.put(f"k{{i}}", torch.full((64, 128), i, dtype=torch.bfloat16))
            return engine

        engine = main()
        if not {keep}:
            del engine
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    with ECCacheEngine(config(url=f"file://{tmp_path}/bucket"), Namespace(model="m")) as engine:
        got = engine.get_many([f"k{i}" for i in range(20)])
    assert all(
        same(item, torch.full((64, 128), i, dtype=torch.bfloat16)) for i, item in enumerate(got)
    )


def test_an_exit_does_not_wait_for_a_store_that_hangs() -> None:
    code = """
        import asyncio, torch
        from ec_s3 import ECCacheEngine, ECConfig, Namespace
        from ec_s3.testing.memory import MemoryStore

        class Silent(MemoryStore):
            async def put(self, *args, **kwargs):
                await asyncio.Event().wait()

        engine = ECCacheEngine(
            ECConfig(max_local_cpu_size="4MiB", flush_timeout=0.2),
            Namespace(model="m"),
            store=Silent(),
        )
        engine.put("k", torch.ones((64, 128), dtype=torch.bfloat16))
        print("end", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
