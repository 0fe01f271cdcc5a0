"""Hooks: what the scheduler part costs vLLM's scheduler, in CPU time of its thread.

    python benchmarks/hooks.py [--steps 5000] [--quick]      1 minute; quick: 40 s

Real: the connector class as vLLM builds it from a real VllmConfig, the engine on its thread, host
memory, the rank's socket, vLLM's request objects. Played: vLLM's scheduler, which calls the hooks
in vLLM's order, and the runner; the bucket is a dictionary that counts. Two loads:

* 32 requests with images decode; now and then one ends and another comes, whose images are new, in
  the bucket, or in host memory by turns. Limit: 50 us for each hook at p99.
* 256 requests with 4 new images each wait. Limit: 5 ms for all hooks of one step together.

CPU time of the thread does not count what other threads take; the time between steps is slept, as
a model's forward pass would leave it to them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from suite.report import Report

from ec_s3.config import ECConfig
from ec_s3.testing.memory import MemoryStore
from ec_s3.testing.model_folder import LLM_WIDTH
from ec_s3.testing.tiny_models import LLAVA_ROWS, MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator

HOOK_LIMIT_US = 50.0
STEP_LIMIT_MS = 5.0
DECODING = 32
WAITING = 256
ITEMS = 4
ENCODED_ITEMS = 32
"""Items that the encoder's budget of one step has room for."""

TURNOVER = 20
"""Steps after which one request ends and another comes."""

FORWARD_SECONDS = 0.001
WAIT_SECONDS = 30.0
MOST_STEPS = 2000
HOST_BYTES = 64 << 20
KNOWN = 64
"""Images that the bucket holds from the start."""


class CountingStore(MemoryStore):
    """Counts requests for items, and those that come from the scheduler's own thread."""

    def __init__(self) -> None:
        super().__init__()
        self.for_items = 0
        self.from_hooks = 0
        self._scheduler = threading.get_ident()

    async def _enter(self, verb: str, *keys: str) -> None:
        self.for_items += any(not key.endswith((".json", ".bin")) for key in keys)
        self.from_hooks += threading.get_ident() == self._scheduler
        await super()._enter(verb, *keys)


@dataclass(slots=True)
class Timed:
    """The scheduler's connector; every call of a hook is timed.

    Attributes:
        nanoseconds: by hook, and for `ensure_cache_available` by situation.
    """

    connector: Any
    nanoseconds: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def call(self, hook: str, *arguments: object, case: str = "") -> Any:
        method = getattr(self.connector, hook)
        begun = time.thread_time_ns()
        answer = method(*arguments)
        taken = time.thread_time_ns() - begun
        self.nanoseconds[hook].append(taken)
        if case:
            self.nanoseconds[f"{hook}, {case}"].append(taken)
        return answer

    def total(self) -> int:
        return sum(sum(taken) for hook, taken in self.nanoseconds.items() if ", " not in hook)


class Bench:
    """One engine with its rank, in this process."""

    def __init__(self, model: Path, store: MemoryStore, **settings: object) -> None:
        import torch
        from vllm.config import ECTransferConfig
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.gc_utils import freeze_gc_heap

        from ec_s3.connector import ECS3Connector, assembly
        from ec_s3.connector.worker import Worker
        from ec_s3.port import ThreadPort

        transfer = ECTransferConfig(
            ec_connector="ECS3Connector",
            ec_connector_module_path="ec_s3.connector",
            ec_role="ec_both",
            ec_connector_extra_config={
                "url": "s3://bench/hooks?endpoint=http://127.0.0.1:9",
                "max_local_cpu_size": HOST_BYTES,
                "engine": "thread",
                **settings,
            },
        )
        config = EngineArgs(
            model=str(model), dtype="float32", max_model_len=1024, ec_transfer_config=transfer
        ).create_engine_config()
        config.ec_transfer_config.mm_encoder_output_widths = {"image": LLM_WIDTH}
        address = assembly._address(config)  # noqa: SLF001  where the rank finds its engine
        self.rank = Worker(address, rank=0, device=torch.device("cpu"))
        port = functools.partial(ThreadPort, store=store)  # the bucket of this experiment
        with mock.patch.object(assembly, "ThreadPort", port):
            connector = ECS3Connector(config, ECConnectorRole.SCHEDULER)
        self.timed = Timed(connector)
        side = connector._side  # noqa: SLF001  vLLM never asks whether it is on
        assert side is not None
        self._stats, scheduler = side.stats, side.scheduler
        give_up = time.monotonic() + WAIT_SECONDS
        while not scheduler.online and time.monotonic() < give_up:
            time.sleep(0.01)
        assert scheduler.online, "the rank has not mapped the memory"
        freeze_gc_heap()  # as vLLM's engine does: a collection would look at all of torch
        self._output = torch.ones(LLAVA_ROWS, LLM_WIDTH)
        self._encoder_cache: dict[str, Any] = {}
        self._to_free: list[str] = []

    def close(self) -> None:
        seen = self._stats.snapshot()
        bugs = {name: n for name, n in seen.items() if name.startswith("errors_") and n}
        assert not bugs, f"unexpected errors, answered safely: {bugs}"
        self.rank.close()
        self.timed.connector.shutdown()

    def schedule(self, decoding: list[Any], waiting: list[Any]) -> list[Any]:
        """One step of vLLM's scheduler; the requests that were let through."""
        timed = self.timed
        output = SimpleNamespace(
            scheduled_encoder_inputs={},
            free_encoder_mm_hashes=self._to_free,
            total_num_scheduled_tokens=len(decoding),
        )
        self._to_free = []
        for request in decoding:
            computed = request.num_computed_tokens
            assert timed.call("ensure_cache_available", request, computed, case="decoding")
        through, room = [], ENCODED_ITEMS
        for request in waiting:
            case = "again" if hasattr(request, "seen") else "first time"
            request.seen = True
            if not timed.call("ensure_cache_available", request, 0, case=case):
                continue
            if room < len(request.mm_features):
                break  # vLLM asks nobody any more
            room -= len(request.mm_features)
            through.append(request)
            output.total_num_scheduled_tokens += request.num_prompt_tokens
            for index, feature in enumerate(request.mm_features):
                found = timed.call("has_cache_item", feature.identifier)
                timed.call("update_state_after_alloc", request, index)
                if not found:
                    encoded = output.scheduled_encoder_inputs.setdefault(request.request_id, [])
                    encoded.append(index)
        metadata = timed.call("build_connector_meta", output)
        self._execute(metadata, output, through)
        for request in through:
            request.num_computed_tokens = request.num_prompt_tokens
        return through

    def _execute(self, metadata: Any, output: Any, requests: list[Any]) -> None:
        """The runner's part of the step; not timed."""
        self.rank.begin(metadata, saves=True)
        self.rank.load(metadata, self._encoder_cache)
        for request in requests:
            for index in output.scheduled_encoder_inputs.get(request.request_id, ()):
                name = request.mm_features[index].identifier
                self._encoder_cache[name] = self._output
                self.rank.save(metadata, name, self._output)
        self.rank.end()
        time.sleep(FORWARD_SECONDS)

    def update(self, ended: list[Any]) -> None:
        """What vLLM's scheduler asks after the step."""
        timed = self.timed
        for request in ended:
            timed.call("request_finished", request)
            for feature in request.mm_features:
                self._to_free.append(feature.identifier)
                self._encoder_cache.pop(feature.identifier, None)
        assert not timed.call("take_unavailable_requests")
        timed.call("get_ec_connector_stats")


def make_request(name: str, images: list[str]) -> Any:
    """A request as vLLM's scheduler has it: images first, then text."""
    import torch
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        MultiModalSharedField,
        PlaceholderRange,
    )
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    features = [
        MultiModalFeatureSpec(
            data=MultiModalKwargsItem(
                {
                    "pixel_values": MultiModalFieldElem(
                        torch.zeros(64), MultiModalSharedField(batch_size=1)
                    )
                }
            ),
            modality="image",
            identifier=image,
            mm_position=PlaceholderRange(offset=1 + i * LLAVA_ROWS, length=LLAVA_ROWS),
            mm_hash=image,
        )
        for i, image in enumerate(images)
    ]
    tokens = [1] * (1 + len(images) * LLAVA_ROWS + 16)
    return Request(name, tokens, SamplingParams(max_tokens=100_000), None, mm_features=features)


def content_hash(text: str) -> str:
    """An identifier that looks like vLLM's own."""
    from blake3 import blake3

    return str(blake3(text.encode()).hexdigest())


def image_names(number: int) -> Iterator[list[str]]:
    """Images of one request after the other: new ones, ones in the bucket, ones used before."""
    for turn in itertools.count():
        count = 1 + turn % number
        source = ("new", "known", "used")[turn % 3]
        if source == "new":
            yield [content_hash(f"new {turn} {i}") for i in range(count)]
        elif source == "known":
            yield [content_hash(f"known {(turn + i) % KNOWN}") for i in range(count)]
        else:
            yield [content_hash(f"new {turn - 2} {i}") for i in range(min(count, 1))]


def fill_bucket(model: Path, store: MemoryStore) -> dict[str, bytes]:
    """Let an engine save the known images, whose objects another one can then fetch."""
    bench = Bench(model, store)
    waiting = [make_request(f"fill-{i}", [content_hash(f"known {i}")]) for i in range(KNOWN)]
    done: list[Any] = []
    give_up = time.monotonic() + WAIT_SECONDS
    while waiting and time.monotonic() < give_up:
        through = bench.schedule([], waiting)
        done += through
        waiting = [request for request in waiting if request not in through]
        bench.update([])
    bench.update(done)
    bench.close()
    objects = {k: body for k, body in store.objects.items() if not k.endswith((".json", ".bin"))}
    assert len(objects) == KNOWN, f"{len(objects)} of {KNOWN} images are in the bucket"
    return objects


def decode(bench: Bench, store: CountingStore, steps: int) -> dict[str, object]:
    """The first load."""
    names = image_names(ITEMS)
    requests = (make_request(f"request-{i}", next(names)) for i in itertools.count())
    decoding: list[Any] = []
    waiting = [next(requests) for _ in range(DECODING)]
    give_up = time.monotonic() + WAIT_SECONDS
    while waiting and time.monotonic() < give_up:
        through = bench.schedule(decoding, waiting)
        decoding += through
        waiting = [request for request in waiting if request not in through]
        bench.update([])
    assert len(decoding) == DECODING, "not all requests have begun"
    bench.timed.nanoseconds.clear()
    quiet, before = 0, store.for_items
    for step in range(steps):
        if step % TURNOVER == 0:
            waiting.append(next(requests))
        through = bench.schedule(decoding, waiting)
        waiting = [request for request in waiting if request not in through]
        ended = [decoding.pop(0) for _ in through]
        decoding += through
        for request in decoding:
            request.num_computed_tokens += 1
        bench.update(ended)
        quiet += not waiting
    moved = store.for_items - before
    idle_before = store.for_items
    for _ in range(steps // 10):  # nobody comes: nothing may be asked for
        bench.schedule(decoding, [])
        bench.update([])
    bench.update(decoding + waiting)
    return {
        "steps": steps,
        "requests to the bucket": moved,
        "of which from hooks": store.from_hooks,
        "while all decode": store.for_items - idle_before,
        "hooks": table(bench.timed),
    }


def wait(bench: Bench) -> dict[str, object]:
    """The second load: the first step, in which every fetch starts, and those after it."""
    requests = [
        make_request(f"waiting-{i}", [content_hash(f"cold {i} {k}") for k in range(ITEMS)])
        for i in range(WAITING)
    ]
    waiting, done, totals = list(requests), 0, []
    for _ in range(MOST_STEPS):
        bench.timed.nanoseconds.clear()
        through = bench.schedule([], waiting)
        bench.update([])
        totals.append(bench.timed.total() / 1e6)
        waiting = [request for request in waiting if request not in through]
        done += len(through)
        if not waiting:
            break
    bench.update(requests)
    rest = totals[1:] or [0.0]
    return {
        "first step, ms": totals[0],
        "later steps, ms": {"median": statistics.median(rest), "max": max(rest)},
        "steps": len(totals),
    }


def table(timed: Timed) -> dict[str, dict[str, float]]:
    """Microseconds by hook."""
    rows = {}
    for hook, taken in sorted(timed.nanoseconds.items()):
        ordered = sorted(taken)
        rows[hook] = {
            "calls": len(ordered),
            "p50": ordered[len(ordered) // 2] / 1e3,
            "p99": ordered[int(len(ordered) * 0.99)] / 1e3,
            "max": ordered[-1] / 1e3,
        }
    return rows


class Held(CountingStore):
    """A bucket that does not answer: whoever waits for it goes on waiting."""

    async def _enter(self, verb: str, *keys: str) -> None:
        import asyncio

        await super()._enter(verb, *keys)
        if verb == "get":
            await asyncio.sleep(60)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of the scheduler part's hooks.")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--quick", action="store_true", help="a fifth of the steps")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    steps = arguments.steps // 5 if arguments.quick else arguments.steps
    with tempfile.TemporaryDirectory() as folder:
        model = MODELS["llava"].make(Path(folder), dtype="float32")
        known = fill_bucket(model, MemoryStore())
        store = CountingStore()
        store.objects.update(known)
        bench = Bench(model, store)
        decoding = decode(bench, store, steps)
        bench.close()
        waiting = {}
        for limit in (16, WAITING):
            bench = Bench(model, Held(), max_deferred_requests=limit, fetch_timeout=1.0)
            waiting[limit] = wait(bench)
            bench.close()
    made = report(decoding, waiting)
    made.quick = arguments.quick
    made.write("hooks")
    for row in made.rows:
        print("  ", *(f"{v:>9.1f}" if isinstance(v, float) else v for v in row.values()))
    for target in made.targets:
        print("  ", "met " if target.met else "MISSED", target.text, round(target.value, 2))


def report(decoding: dict[str, Any], waiting: dict[int, dict[str, Any]]) -> Report:
    made = Report(title="CPU time of the scheduler's hooks")
    made.notes.append(
        f"{DECODING} requests with images decode for {decoding['steps']} steps, one ends and one "
        f"comes every {TURNOVER}; microseconds of the thread's CPU time. The bucket got "
        f"{decoding['requests to the bucket']} requests, "
        f"{decoding['while all decode']} of them while all decoded."
    )
    for hook, row in decoding["hooks"].items():
        made.rows.append({"hook": hook, **row})
        if ", " not in hook:
            text = f"`{hook}`, microseconds at p99, {DECODING} requests decoding"
            made.at_most(text, value=row["p99"], limit=HOOK_LIMIT_US)
    made.at_most(
        "requests to the bucket from hooks", value=decoding["of which from hooks"], limit=0
    )
    for limit, row in waiting.items():
        worst = max(row["first step, ms"], row["later steps, ms"]["max"])
        made.at_most(
            f"all hooks of one step, ms, {WAITING} requests with {ITEMS} new images waiting, "
            f"`max_deferred_requests` {limit}",
            value=worst,
            limit=STEP_LIMIT_MS,
            note=f"the default is {ECConfig().max_deferred_requests}",
        )
    return made


if __name__ == "__main__":
    main()
