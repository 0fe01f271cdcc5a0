"""vLLM's own scheduler with our scheduler part in it, driven step by step.

Real: vLLM's `Scheduler` or `AsyncScheduler` with its KV and encoder cache managers, its requests,
our shell and scheduler part. Played: clients, the engine's answers (`FakePort`), the ranks, and the
model runner's encoder cache, which raises where a runner would end the engine.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from real_layouts import CHUNK, Layout, carries_media, fields
from vllm_play import Play, spec

from ec_s3.connector.link import Answer
from ec_s3.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

BLOCK = 4
ROWS = {"a": 4, "b": 4, "c": 6, "d": 3}
FETCH_SECONDS = 2.0


class EngineDeadError(Exception):
    """What a model runner would raise: there is no way back."""


@dataclass(frozen=True)
class _Flight:
    """A step under way: what the runner knows of its requests, and who gets a token in it."""

    output: Any
    known: dict[str, tuple[int, list[Any]]]
    samples: frozenset[str]


class RealScheduler:
    """See the module.

    Args:
        config: a VllmConfig.
        layout: how the engine runs.
        seed: decides everything that happens.

    Attributes:
        counted: what has happened, by name.
    """

    def __init__(
        self, config: Any, layout: Layout, monkeypatch: pytest.MonkeyPatch, *, seed: int
    ) -> None:
        self.random = random.Random(seed)
        self.layout = layout
        self.ranks = 2
        self.play = Play(
            ranks=self.ranks,
            role=layout.role,
            window=CHUNK + layout.lookahead,
            replay=layout.replay,
            max_deferred=2,
            fetch_timeout=FETCH_SECONDS,
        )
        self.vllm = self._make(config, monkeypatch)
        self.connector = self.vllm.ec_connector
        self.counted: Counter[str] = Counter()
        self.requests: dict[str, Any] = {}
        self._serial = 0
        self._flight: deque[_Flight] = deque()
        self._caches: list[dict[str, int]] = [{} for _ in range(self.ranks)]
        self._answers: list[Answer] = []
        self._allocated: dict[str, tuple[str, int]] = {}
        self._lost: dict[str, int] = {}
        self._waiting: dict[tuple[str, int], float] = {}
        self._wrap()

    def _make(self, config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from ec_s3.connector import shell

        side = SimpleNamespace(
            scheduler=self.play.scheduler,
            port=self.play.port,
            stats=self.play.stats,
            close=lambda: None,
            finish=lambda request, tells: self.play.scheduler.finished(request) and None,
            collect=lambda: None,
        )
        monkeypatch.setattr(shell, "build_scheduler", lambda _: side)
        blocks = self.layout.blocks
        config.cache_config.num_gpu_blocks = blocks
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        attention = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        kind = AsyncScheduler if self.layout.ahead else Scheduler
        made: Any = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        made.encoder_cache_manager = EncoderCacheManager(cache_size=10)
        made.max_num_encoder_input_tokens = 10
        made.num_prefill_lookahead = self.layout.lookahead
        made.prefix_replay_tokens = self.layout.replay
        return made

    def _wrap(self) -> None:
        """Look at what the connector is told and answers, on its way."""
        alloc, ensure = (
            self.connector.update_state_after_alloc,
            self.connector.ensure_cache_available,
        )

        def allocated(request: Any, index: int) -> None:
            self._allocated[request.mm_features[index].identifier] = (request.request_id, index)
            alloc(request, index)

        def ensured(request: Any, computed: int) -> bool:
            name, answer = request.request_id, bool(ensure(request, computed))
            self.counted["deferred"] += not answer
            if not answer and all(map(carries_media, request.mm_features)):
                media = (name, len(request.mm_features))  # a session may have gained some
                waited = self.play.now - self._waiting.setdefault(media, self.play.now)
                assert waited < FETCH_SECONDS, f"{name} waits beyond its deadline"
            return answer

        self.connector.update_state_after_alloc = allocated
        self.connector.ensure_cache_available = ensured

    # -- clients -----------------------------------------------------------------------------

    def arrive(self, names: Sequence[str], media: Sequence[bool], *, stream: bool = False) -> None:
        self._serial += 1
        self._add(f"r{self._serial}", names, media, stream=stream)

    def goes_on(self, name: str, names: Sequence[str], media: Sequence[bool]) -> None:
        """A streaming client sends more."""
        self._add(name, names, media, stream=True)

    def _add(self, name: str, names: Sequence[str], media: Sequence[bool], *, stream: bool) -> None:
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        choice = self.random.choice
        tokens, features = [1] * choice([1, 1, 9]), []
        for item, carried in zip(names, media, strict=True):
            rows = ROWS[item]
            hole = [False] if self.random.random() < 0.2 else []
            mask = torch.tensor([True] * 2 + hole + [True] * (rows - 2)) if hole else None
            place = PlaceholderRange(len(tokens), rows + len(hole), is_embed=mask)
            data = fields(media=carried)
            features.append(MultiModalFeatureSpec(data, "image", item, place, mm_hash=item))
            tokens += [7] * place.length + [1] * choice([1, 2, 9])
        request = Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=choice([1, 2, 6, 12]), ignore_eos=True),
            pooling_params=None,
            mm_features=features,
            block_hasher=self._hasher,
            priority=self.random.randrange(3),
            resumable=stream,
            arrival_time=float(self._serial),
        )
        self.requests.setdefault(name, request)
        self.vllm.add_request(request)

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.vllm.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.requests.pop(name, None)
        self.counted["aborted"] += 1

    def reset_encoder_cache(self) -> None:
        """As `EngineCore.reset_encoder_cache` does; vLLM warns against it under load."""
        if not self._flight:
            self.vllm.reset_encoder_cache()
            for cache in self._caches:
                cache.clear()

    # -- steps -------------------------------------------------------------------------------

    def step(self) -> None:
        if self.vllm.has_requests():
            self._allocated.clear()
            output = self.vllm.schedule()
            self.counted["preempted"] += len(output.preempted_req_ids or ())
            self._fill_vllms_hole(output)
            samples = frozenset(
                name
                for name in output.num_scheduled_tokens
                if not self.vllm.requests[name].is_prefill_chunk
            )
            self._flight.append(_Flight(output, self._known(output), samples))
        behind = self.layout.ahead if self.vllm.has_unfinished_requests() else 0
        while len(self._flight) > behind:
            self._finish(self._flight.popleft())

    def _fill_vllms_hole(self, output: Any) -> None:
        """vLLM forgets the encodes of a request that it preempts within the step, and counts them
        as cached all the same. That is its own hole; it is filled, so that only ours are found."""
        kept = {order.identifier for order in self.play.scheduler._plans.loads}
        kept |= {order.identifier for order in output.ec_connector_metadata.loads}
        for identifier, (name, index) in self._allocated.items():
            planned = index in output.scheduled_encoder_inputs.get(name, ())
            if identifier not in kept and not planned:
                self._lost[identifier] = ROWS[identifier]
                self.counted["vLLM's hole"] += 1

    def _known(self, output: Any) -> dict[str, tuple[int, list[Any]]]:
        known = {
            new.req_id: (new.num_computed_tokens, list(new.mm_features))
            for new in output.scheduled_new_reqs
        }
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            known[name] = (computed, list(self.requests[name].mm_features))
        return known

    def _finish(self, flight: _Flight) -> None:
        for rank, cache in enumerate(self._caches):
            self._run(rank, cache, flight)
        for outputs in self.vllm.update_from_output(flight.output, self._sampled(flight)).values():
            for one in outputs.outputs:
                if one.finish_reason is None or one.request_id in self.vllm.requests:
                    continue  # a streaming session's turn has ended, not the session
                reason = str(one.finish_reason)
                self.counted[reason] += 1
                request = self.requests.pop(one.request_id, None)
                if reason == "error" and request is not None:
                    bare = [item for item in request.mm_features if not carries_media(item)]
                    assert bare, "a request that carries its media has failed"

    def _sampled(self, flight: _Flight) -> Any:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

        scheduled = flight.output.num_scheduled_tokens
        if not scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        return ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={name: index for index, name in enumerate(scheduled)},
            sampled_token_ids=[[5] if name in flight.samples else [] for name in scheduled],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _run(self, rank: int, cache: dict[str, int], flight: _Flight) -> None:
        """One rank's part of a step, as far as its encoder cache is concerned."""
        output = flight.output
        metadata = output.ec_connector_metadata
        for identifier in output.free_encoder_mm_hashes:
            cache.pop(identifier, None)
            self._lost.pop(identifier, None)
        hooks = output.total_num_scheduled_tokens or self.layout.runner == 2
        if not hooks and self.layout.role != "producer":
            assert not metadata.loads, "the runner throws them away"
            assert not metadata.saves, "the runner throws them away"
            return
        for order in metadata.loads:
            cache[order.identifier] = order.spec.shape[0]
            self.counted["loaded"] += 1
            self._answers.append(Answer(rank, "loaded", order.transfer, done=True))
        self._encode(rank, cache, flight)
        if self.layout.role != "producer":
            for shift in {0, self.layout.lookahead}:
                self._gather(cache, flight, shift)

    def _encode(self, rank: int, cache: dict[str, int], flight: _Flight) -> None:
        orders = self._orders(flight) if rank == 0 else {}
        for identifier in [name for name, order in orders.items() if order.cached]:
            if identifier in cache:
                self._saved(orders.pop(identifier))
        for name, indices in flight.output.scheduled_encoder_inputs.items():
            for item in (flight.known[name][1][index] for index in indices):
                if not carries_media(item):
                    raise EngineDeadError(f"{item.identifier} is to be encoded without its media")
                if self.layout.runner == 2 and item.identifier in cache:
                    continue
                cache[item.identifier] = item.mm_position.get_num_embeds()
                self.counted["encoded"] += 1
                if item.identifier in orders:
                    self._saved(orders.pop(item.identifier))
        for order in orders.values():  # the end of the step
            self._answers.append(Answer(0, "saved", order.ticket, done=False))

    def _orders(self, flight: _Flight) -> dict[str, Any]:
        """What is to be saved in a step, as a rank takes it in."""
        orders: dict[str, Any] = {}
        for order in flight.output.ec_connector_metadata.saves:
            if order.identifier in orders:
                other = orders[order.identifier]
                self._answers.append(Answer(0, "saved", other.ticket, done=False))
            orders[order.identifier] = order
        return orders

    def _saved(self, order: Any) -> None:
        done = self.random.random() < 0.8
        self._answers.append(Answer(0, "saved", order.ticket, done=done))

    def _gather(self, cache: dict[str, int], flight: _Flight, shift: int) -> None:
        for name, count in flight.output.num_scheduled_tokens.items():
            computed, items = flight.known[name]
            start, end = computed + shift, computed + shift + count
            for item in items:
                place = item.mm_position
                low, high = max(place.offset, start), min(place.offset + place.length, end)
                if low >= high:
                    continue
                wanted = place.get_embeds_indices_in_range(low - place.offset, high - place.offset)
                if wanted[0] == wanted[1]:
                    continue
                rows = cache.get(item.identifier, self._lost.get(item.identifier))
                if rows is None and shift and place.offset + shift >= end:
                    continue  # the drafter does without
                if rows != place.get_num_embeds():
                    raise EngineDeadError(f"{name} needs {item.identifier}, which has rows {rows}")

    # -- the engine and the ranks ------------------------------------------------------------

    def engine_answers(self) -> None:
        port, chance = self.play.port, self.random.random
        for ticket in sorted(port.wants) if port.alive else ():
            want = port.wants.get(ticket)
            if want is None or chance() < 0.5:
                continue
            port.room = chance() < 0.8
            if want.probe:
                answer: Callable[[int], None] = port.present if chance() < 0.5 else port.absent
                answer(ticket)
            elif chance() < 0.6:
                port.ready(ticket, spec(ROWS[want.identifier] + (chance() < 0.1)))
            else:
                reasons = [MissReason.ABSENT, MissReason.NO_ROOM, MissReason.FAILED]
                port.absent(ticket, self.random.choice(reasons))

    def ranks_answer(self, *, all_of_them: bool = False) -> None:
        while self._answers and (all_of_them or self.random.random() < 0.7):
            index = self.random.randrange(len(self._answers))
            self.play.holds.on_answer(self._answers.pop(index))

    @property
    def busy(self) -> bool:
        return bool(self._flight) or self.vllm.has_requests()
