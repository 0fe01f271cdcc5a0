"""One engine with all of our parts, and as much of vLLM as drives them.

Real: the scheduler part as `build_scheduler` makes it, host memory, socket, ranks, the engine on
its thread, the bucket. Played: vLLM's scheduler and runner, which schedule every prompt whole, keep
no encoder output longer than its step, and end as vLLM ends when they are promised what is not
there.
"""

from __future__ import annotations

import contextlib
import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import torch
from vllm_play import DTYPE, WIDTH, Feature, Output, Request, feature

from ec_s3.connector import assembly, identity
from ec_s3.connector.assembly import build_scheduler
from ec_s3.connector.media import Classifier, Rules
from ec_s3.connector.worker import Worker
from ec_s3.metrics import Stats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pytest

    from ec_s3.connector.messages import StepMetadata

PAGE = 256 << 10
_SECONDS = 30.0


class EngineDeadError(Exception):
    """What vLLM raises then: there is no way back."""


def until(done: Callable[[], object], what: str) -> None:
    """Wait for something that must come, if not at once."""
    give_up = time.monotonic() + _SECONDS
    while not done():
        assert time.monotonic() < give_up, what
        time.sleep(0.002)


def reference(item: Feature, *, width: int = WIDTH) -> torch.Tensor:
    """What the encoder makes of an item: its name and rows decide."""
    rows = item.mm_position.get_num_embeds()
    seed = sum(ord(c) << (i % 24) for i, c in enumerate(item.identifier)) + rows
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def prompt(name: str, *items: str, media: bool = True, **more: Any) -> Request:
    """A request with these items of four rows, one after the other."""
    features = [feature(item, offset=at * 4, media=media, **more) for at, item in enumerate(items)]
    return Request(name, features)


class SmallEngine:
    """See the module.

    Args:
        role: `both`, `producer` or `consumer`.
        ranks: worker processes, played by objects.
        width: of an encoder output.
        settings: as in `ec_connector_extra_config`.

    Attributes:
        loaded: items that were loaded, in order.
        encoded: items that were encoded, in order.
        failed: requests that ended with an error.
        steps: engine steps taken.
        encoder: makes outputs of items; a test may put in another.
        right: what an answer must be made of; goes with the encoder.
    """

    def __init__(
        self, *, role: str = "both", ranks: int = 1, width: int = WIDTH, **settings: Any
    ) -> None:
        patient = {"flush_timeout": 20, "fetch_timeout": 20}  # a busy machine's bucket is slow
        extra = {"engine": "thread", "max_local_cpu_size": 64 * PAGE, **patient, **settings}
        config = _vllm_config(role, ranks, {"image": width}, extra)
        self.side = build_scheduler(config)
        self.scheduler = self.side.scheduler
        self.loaded: list[str] = []
        self.encoded: list[str] = []
        self.failed: list[str] = []
        self.steps = 0
        self.encoder: Callable[[Sequence[Feature]], Sequence[torch.Tensor]] = lambda items: [
            reference(item, width=width) for item in items
        ]
        self.right: Callable[[Feature], torch.Tensor] = lambda item: reference(item, width=width)
        self._counted = Stats()
        self._saves = role != "consumer"
        self._loads = role != "producer"
        self._caches: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
        address = assembly._address(config)
        self.workers = [
            Worker(address, rank=rank, device=torch.device("cpu")) for rank in range(ranks)
        ]
        until(lambda: self.side.hub.ready, "every rank maps the memory")
        until(lambda: self.side.slab.populated_bytes == self.side.slab.nbytes, "all is populated")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()
        self.side.close()

    # -- vLLM --------------------------------------------------------------------------------

    def step(self, *requests: Request) -> list[Request]:
        """One engine step; the requests that have been answered in it."""
        self.steps += 1
        encodes: dict[str, list[int]] = {}
        plans: dict[str, bool] = {}
        answered = []
        for request in requests:
            # vLLM asks only about requests that have media.
            if request.mm_features and not self.scheduler.ensure(request, 0):
                continue
            answered.append(request)
            self._schedule(request, plans, encodes)
        metadata = self.scheduler.build_meta(Output(encodes, [], len(answered)))
        self._run(metadata, answered, encodes)
        # Somebody's text in between, in which vLLM evicts all that it has encoded or loaded.
        self._run(self.scheduler.build_meta(Output({}, list(plans))), [], {})
        lost = self.scheduler.take_unavailable()
        for request in requests:
            if request.request_id in lost:
                self.failed.append(request.request_id)
                self.scheduler.finished(request)
        for request in answered:
            self.scheduler.finished(request)
        return answered

    def _schedule(
        self, request: Request, plans: dict[str, bool], encodes: dict[str, list[int]]
    ) -> None:
        for index, item in enumerate(request.mm_features):
            if item.identifier in plans:
                continue
            yes = self.scheduler.has(item.identifier)
            if not yes and "pixel_values" not in (item.data or {}):
                raise EngineDeadError(f"{item.identifier!r} is to be encoded without its media")
            plans[item.identifier] = yes
            self.scheduler.allocated(request, index)
            if yes:
                self.loaded.append(item.identifier)
            else:
                self.encoded.append(item.identifier)
                encodes.setdefault(request.request_id, []).append(index)

    def _run(
        self, metadata: StepMetadata, answered: list[Request], encodes: dict[str, list[int]]
    ) -> None:
        for worker, cache in zip(self.workers, self._caches, strict=True):
            cache.clear()
            worker.begin(metadata, saves=self._saves)
            if self._loads:
                worker.load(metadata, cache)
            items = [
                request.mm_features[index]
                for request in answered
                for index in encodes.get(request.request_id, ())
            ]
            for item, output in zip(items, self.encoder(items) if items else (), strict=True):
                cache[item.identifier] = output
                worker.save(metadata, item.identifier, output)
            if self._loads:
                self._gather(answered, cache)
            worker.end()

    def _gather(self, answered: list[Request], cache: dict[str, torch.Tensor]) -> None:
        for request in answered:
            for item in request.mm_features:
                if item.identifier not in cache:
                    raise EngineDeadError(f"encoder cache miss for {item.identifier!r}")
                if cache[item.identifier].shape[0] != item.mm_position.get_num_embeds():
                    raise EngineDeadError(f"other rows of {item.identifier!r}")
                right = torch.equal(cache[item.identifier], self.right(item))
                assert right, f"a wrong answer from {item.identifier!r}"

    # -- more steps --------------------------------------------------------------------------

    def serve(self, *requests: Request) -> None:
        """Steps until every request has been answered or has failed."""
        left = list(requests)
        give_up = time.monotonic() + _SECONDS
        while left:
            assert time.monotonic() < give_up, f"still waiting: {[r.request_id for r in left]}"
            answered = self.step(*left)
            left = [r for r in left if r not in answered and r.request_id not in self.failed]

    @property
    def stats(self) -> dict[str, float]:
        """Everything counted by both halves so far."""
        # What the scheduler part took from the port in a step is older than what is left there.
        self._counted.merge(self.side.stats.drain())
        self._counted.merge(self.side.port.drain_stats())
        return self._counted.snapshot()

    @property
    def leased(self) -> float:
        """Bytes of host memory that somebody holds after an idle step, to read or to fill."""
        self._run(self.scheduler.build_meta(Output(total_num_scheduled_tokens=0)), [], {})
        stats = self.stats
        return stats["local_bytes_leased"] + stats["local_bytes_reserved"]


def fill(url: str, *items: str, **settings: Any) -> None:
    """Let another server encode and upload items."""
    with SmallEngine(url=url, **settings) as engine:
        engine.serve(*(prompt(item, item) for item in items))
        until(lambda: engine.stats["uploads_written"] == len(items), "the uploads")


def _vllm_config(role: str, ranks: int, widths: dict[str, int], extra: dict[str, Any]) -> Any:
    """What `build_scheduler` reads of a VllmConfig."""
    return SimpleNamespace(
        ec_transfer_config=SimpleNamespace(
            is_ec_producer=role != "consumer",
            is_ec_consumer=role != "producer",
            ec_connector_extra_config={"persist_client_uuids": True, **extra},
            engine_id="engine",
            mm_encoder_output_widths={} if role == "consumer" else widths,
        ),
        model_config=SimpleNamespace(
            model="org/model",
            dtype=getattr(torch, DTYPE),
            revision=None,
            quantization=None,
            seed=0,
            multimodal_config=None,
            hf_config=SimpleNamespace(to_dict=dict),
            get_inputs_embeds_size=lambda: 1,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        shutdown_timeout=10,
        instance_id=f"{os.getpid()}-{os.urandom(4).hex()}",
    )


@contextlib.contextmanager
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the parts be built where vLLM is not installed."""
    with monkeypatch.context() as patch:
        patch.setattr(assembly, "facts_of", lambda _: {"vllm": "0"})
        patch.setattr(identity, "hash_scheme", lambda _: "scheme")
        patch.setattr(
            assembly,
            "_classifier",
            lambda _, config, stats: Classifier(
                Rules(
                    metadata_fields=lambda _: {"image_grid_thw"},
                    client_names=config.persist_client_uuids,
                    salted=config.salted_requests,
                ),
                stats,
            ),
        )
        yield
