"""VLLM's V2 model runner, as far as it drives a connector, around our real worker part.

The runner itself needs Triton and so a GPU; its connector wrapper is plain Python and is the real
one here, and so are both parts of the connector, their socket, the host memory and the engine.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
from small_engine import PAGE, prompt, reference, until, without_vllm
from vllm_play import DTYPE, WIDTH, Output

from ec_s3.connector import assembly
from ec_s3.connector.messages import LoadOrder, SaveOrder, StepMetadata
from ec_s3.connector.worker import Worker
from ec_s3.types import Extent, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_play import Request

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

_EXTENT = (Extent(0, PAGE),)
_SPEC = TensorSpec(DTYPE, (4, WIDTH))


class EncoderError(Exception):
    """The forward pass of a step has failed."""


class V2Engine:
    """An engine of one rank whose steps run inside the V2 runner's wrapper.

    Attributes:
        cache: the runner's encoder cache.
        answers: what the rank has answered, in order: kind, number of the order, done.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, role: str) -> None:
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
        from vllm.v1.worker.gpu import ec_connector as v2

        from ec_s3.connector import shell

        config = _vllm_config(role)
        address = assembly._address(config)
        patch.setattr(
            shell, "build_worker", lambda _: Worker(address, rank=0, device=torch.device("cpu"))
        )
        with without_vllm(patch):
            self.scheduler = shell.ECS3Connector(config, ECConnectorRole.SCHEDULER)
        self.worker = shell.ECS3Connector(config, ECConnectorRole.WORKER)
        self.worker.start_worker_services()
        side, rank = self.scheduler._side, self.worker._worker
        assert side is not None
        assert rank is not None
        self.side = side
        until(lambda: side.hub.ready, "the rank maps the memory")
        until(lambda: side.slab.populated_bytes == side.slab.nbytes, "all is populated")
        self.answers: list[tuple[str, int, bool]] = []
        self._listen(rank._link)
        self.cache: dict[str, torch.Tensor] = {}
        self._probes = 0
        patch.setattr(v2, "get_ec_transfer", lambda: self.worker)
        self.wrapper = v2.ActiveECConnector(config, self.cache)

    def _listen(self, link: Any) -> None:
        answer = link.answer

        def heard(kind: str, number: int, **more: Any) -> None:
            self.answers.append((kind, number, more["done"]))
            answer(kind, number, **more)

        link.answer = heard

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def run(
        self, metadata: StepMetadata | None, *, encoded: Sequence[str] = (), fails: bool = False
    ) -> set[str]:
        """One step in the wrapper; what was in the cache before the encoder ran."""
        output = SimpleNamespace(ec_connector_metadata=metadata, finished_req_ids=set())
        with self.wrapper.maybe_get_output(output):
            before = set(self.cache)
            for identifier in encoded:
                self.cache[identifier] = tensor_of(identifier)
            if fails:
                raise EncoderError
        return before

    def schedule(self, request: Request) -> tuple[StepMetadata, list[str]]:
        """Plan the request's whole prompt; the orders, and what is to be encoded."""
        until(lambda: self.scheduler.ensure_cache_available(request, 0), "it is let through")
        encodes: list[int] = []
        for index, item in enumerate(request.mm_features):
            if item.identifier in self.cache:
                continue
            if not self.scheduler.has_cache_item(item.identifier):
                encodes.append(index)
            self.scheduler.update_state_after_alloc(request, index)
        output = Output(scheduled_encoder_inputs={request.request_id: encodes})
        metadata = self.scheduler.build_connector_meta(output)
        return metadata, [request.mm_features[index].identifier for index in encodes]

    def serve(self, request: Request) -> set[str]:
        """Schedule and run the request in one step, then end it."""
        metadata, encoded = self.schedule(request)
        before = self.run(metadata, encoded=encoded)
        self.scheduler.request_finished(request)
        return before

    def forget(self, *identifiers: str) -> None:
        """A step in which vLLM evicts items, saved before, from its encoder cache."""
        metadata = self.scheduler.build_connector_meta(
            Output(free_encoder_mm_hashes=list(identifiers))
        )
        for identifier in identifiers:
            del self.cache[identifier]
        self.run(metadata)
        until(lambda: all(map(self.resident, identifiers)), "all are in memory")

    def resident(self, identifier: str) -> bool:
        """Whether the host memory holds the item: the engine takes it in on its own thread."""
        self._probes += 1
        probe = prompt(f"probe {self._probes}", identifier)
        until(lambda: self.scheduler.ensure_cache_available(probe, 0), "it is let through")
        found = self.scheduler.has_cache_item(identifier)
        self.scheduler.request_finished(probe)
        self.scheduler.build_connector_meta(Output())
        return found

    def settled(self) -> bool:
        """Whether nothing is held, once the scheduler has heard all answers."""
        self.scheduler.build_connector_meta(Output())
        return not len(self.side.scheduler._holds)


def _vllm_config(role: str) -> Any:
    """What both parts read of a VllmConfig."""
    return SimpleNamespace(
        ec_transfer_config=SimpleNamespace(
            is_ec_producer=role != "ec_consumer",
            is_ec_consumer=role != "ec_producer",
            ec_connector_extra_config={
                "max_local_cpu_size": 16 * PAGE,
                "persist_client_uuids": True,
            },
            engine_id="engine",
            mm_encoder_output_widths={} if role == "ec_consumer" else {"image": WIDTH},
        ),
        model_config=SimpleNamespace(
            model="org/model",
            dtype=getattr(torch, DTYPE),
            revision=None,
            quantization=None,
            seed=0,
            multimodal_config=None,
            is_encoder_decoder=False,
            hf_config=SimpleNamespace(to_dict=dict),
            get_inputs_embeds_size=lambda: 1,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, nnodes_within_dp=1, distributed_executor_backend="mp"
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        instance_id=f"{os.getpid()}-{os.urandom(4).hex()}",
    )


def tensor_of(identifier: str) -> torch.Tensor:
    return reference(prompt("any", identifier).mm_features[0])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[V2Engine]:
    """An engine; parametrised indirectly by its role, `ec_both` otherwise."""
    if not os.environ.get("REQUIRE_VLLM"):
        pytest.importorskip("vllm", exc_type=ImportError)
    with V2Engine(monkeypatch, role=getattr(request, "param", "ec_both")) as engine:
        yield engine


def test_new_outputs_of_a_step_are_saved_and_loaded_before_the_encoder_of_a_later_one(
    engine: V2Engine,
) -> None:
    assert engine.serve(prompt("first", "a", "b")) == set()
    saved = sorted(engine.answers)
    assert [(kind, done) for kind, _, done in saved] == [("saved", True)] * 2
    engine.forget("a", "b")
    assert engine.serve(prompt("second", "a", "c", "b")) == {"a", "b"}
    assert torch.equal(engine.cache["a"], tensor_of("a"))
    assert torch.equal(engine.cache["b"], tensor_of("b"))
    kinds = sorted(kind for kind, _, done in engine.answers if done)
    assert kinds == ["loaded"] * 2 + ["saved"] * 3
    assert len({(kind, number) for kind, number, _ in engine.answers}) == len(engine.answers)
    until(engine.settled, "nothing is held")


def test_outputs_of_earlier_steps_are_not_saved_again(engine: V2Engine) -> None:
    engine.serve(prompt("first", "a"))
    assert engine.serve(prompt("second", "a", "b")) == {"a"}
    assert [(kind, done) for kind, _, done in engine.answers] == [("saved", True)] * 2


def test_order_whose_step_failed_before_the_saves_is_answered_not_done_and_given_back(
    engine: V2Engine,
) -> None:
    request = prompt("first", "a", "b")
    metadata, encoded = engine.schedule(request)
    with pytest.raises(EncoderError):
        engine.run(metadata, encoded=encoded[:1], fails=True)
    assert sorted(engine.answers) == sorted(
        ("saved", order.ticket, False) for order in metadata.saves
    )
    assert len(metadata.saves) == 2
    assert engine.worker._connector_metadata is None
    engine.scheduler.request_finished(request)
    until(engine.settled, "the pages are given back")
    del engine.cache["a"]
    engine.serve(prompt("second", "c"))
    assert engine.answers[-1][::2] == ("saved", True), "the next step saves as ever"


def test_output_that_nobody_ordered_is_left_alone(engine: V2Engine) -> None:
    metadata = engine.scheduler.build_connector_meta(Output())
    engine.run(metadata, encoded=["x"])
    assert engine.answers == []


def test_step_without_a_forward_pass_carries_out_loads_and_answers_saves(engine: V2Engine) -> None:
    engine.serve(prompt("first", "a"))
    nonce = engine.scheduler.build_connector_meta(Output()).nonce
    metadata = StepMetadata(
        nonce,
        engine.side.hub.address,
        [LoadOrder(901, "z", _SPEC, _EXTENT)],
        [SaveOrder(902, "y", _SPEC, _EXTENT)],
    )
    engine.answers.clear()
    output = SimpleNamespace(ec_connector_metadata=metadata, finished_req_ids={"first"})
    result = engine.wrapper.no_forward(output)
    assert engine.answers == [("loaded", 901, True), ("saved", 902, False)]
    assert engine.cache["z"].shape == _SPEC.shape
    assert not result.sampled_token_ids
    assert result.ec_connector_output is None or not result.ec_connector_output.finished_sending


def test_step_of_the_scheduler_without_tokens_orders_nothing_and_loses_no_load(
    engine: V2Engine,
) -> None:
    engine.serve(prompt("first", "a"))
    engine.forget("a")
    request = prompt("second", "a")
    until(lambda: engine.scheduler.ensure_cache_available(request, 0), "it is in memory")
    assert engine.scheduler.has_cache_item("a")
    engine.scheduler.update_state_after_alloc(request, 0)
    idle = engine.scheduler.build_connector_meta(Output(total_num_scheduled_tokens=0))
    engine.wrapper.no_forward(SimpleNamespace(ec_connector_metadata=idle, finished_req_ids=set()))
    assert "a" not in engine.cache
    assert engine.run(engine.scheduler.build_connector_meta(Output())) == {"a"}


def test_item_that_is_loaded_over_a_leftover_is_answered_once_and_not_saved(
    engine: V2Engine,
) -> None:
    engine.serve(prompt("first", "a"))
    engine.forget("a")
    metadata, encoded = engine.schedule(prompt("second", "a"))
    assert encoded == []
    engine.cache["a"] = torch.zeros(4, WIDTH)  # a leftover, which vLLM counts as gone
    engine.answers.clear()
    engine.run(metadata)
    (load,) = metadata.loads
    assert engine.answers == [("loaded", load.transfer, True)]
    assert torch.equal(engine.cache["a"], tensor_of("a"))
    engine.scheduler.request_finished(prompt("second", "a"))
    until(engine.settled, "the answer has ended the lease")


@pytest.mark.parametrize("engine", ["ec_producer"], indirect=True)
def test_producer_saves_and_never_loads(engine: V2Engine) -> None:
    assert engine.wrapper.save_new_caches
    engine.serve(prompt("first", "a", "b"))
    assert [(kind, done) for kind, _, done in engine.answers] == [("saved", True)] * 2
    metadata = engine.scheduler.build_connector_meta(Output(total_num_scheduled_tokens=0))
    metadata.loads.append(LoadOrder(901, "z", _SPEC, _EXTENT))
    engine.wrapper.no_forward(
        SimpleNamespace(ec_connector_metadata=metadata, finished_req_ids=set())
    )
    assert "z" not in engine.cache
    until(engine.settled, "nothing is held")


@pytest.mark.parametrize("engine", ["ec_consumer"], indirect=True)
def test_consumer_never_saves(engine: V2Engine) -> None:
    assert not engine.wrapper.save_new_caches
    metadata, encoded = engine.schedule(prompt("first", "a"))
    assert (encoded, metadata.saves) == (["a"], [])
    engine.run(metadata, encoded=encoded)
    assert engine.answers == []


def test_step_without_metadata_calls_nothing(engine: V2Engine) -> None:
    assert engine.run(None, encoded=["x"]) == set()
    assert engine.answers == []
