"""Our connector against the installed vLLM: its every call fits, and all that we read exists.

vLLM's own source is read for its call sites, so that a version with other ones is noticed here and
not in a running engine. `make versions` runs this for every version that the documentation names.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

_SOURCES = (
    "v1/core/sched/scheduler.py",
    "v1/engine/core.py",
    "v1/worker/ec_connector_model_runner_mixin.py",
    "v1/worker/gpu/ec_connector.py",
    "v1/worker/gpu_model_runner.py",
    "v1/worker/gpu_worker.py",
    "distributed/ec_transfer/ec_transfer_state.py",
)
"""Where vLLM calls a connector, in both model runners."""

_ALSO = "distributed/ec_transfer/ec_connector/metrics.py"
"""The same, from 0.31 on."""

_CONNECTORS = {
    "self.ec_connector",
    "get_ec_transfer()",
    "self.connector_cls",
    "connector_cls",
    "_EC_CONNECTOR_AGENT",
}
"""Expressions that are the connector, or its class."""

_EXPECTED = {
    "bind_connector_metadata",
    "build_connector_meta",
    "clear_connector_metadata",
    "ensure_cache_available",
    "get_finished",
    "has_cache_item",
    "has_pending_push_work",
    "is_consumer",
    "is_producer",
    "request_finished",
    "save_caches",
    "shutdown",
    "start_load_caches",
    "start_save_caches",
    "start_worker_services",
    "take_unavailable_requests",
    "update_connector_output",
    "update_state_after_alloc",
    "update_state_after_free",
}
"""Of the names that every supported vLLM uses; a scan that finds fewer has gone blind."""


@pytest.fixture(scope="module")
def vllm() -> Any:
    """VLLM's package; the tests here are skipped where it is not installed."""
    if os.environ.get("REQUIRE_VLLM"):
        import vllm

        return vllm
    return pytest.importorskip("vllm", exc_type=ImportError)


@dataclass(frozen=True, slots=True)
class Use:
    """One use of the connector in vLLM's source."""

    name: str
    where: str
    call: ast.Call | None


def uses_of_connector(vllm: Any) -> list[Use]:
    root = Path(vllm.__file__).parent
    sources = [*_SOURCES, *([_ALSO] if (root / _ALSO).exists() else [])]
    return [use for source in sources for use in _uses(root / source, source)]


def _uses(path: Path, source: str) -> Iterator[Use]:
    for scope in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(scope, ast.FunctionDef):
            continue
        names = _CONNECTORS | {
            target.id
            for statement in ast.walk(scope)
            if isinstance(statement, ast.Assign) and ast.unparse(statement.value) in _CONNECTORS
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        calls = {id(c.func): c for c in ast.walk(scope) if isinstance(c, ast.Call)}
        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in names:
                yield Use(node.attr, f"{source}:{node.lineno}", calls.get(id(node)))


def _hooks_of_base() -> dict[str, Any]:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    found = inspect.getmembers(ECConnectorBase, inspect.isroutine)
    return {name: hook for name, hook in found if not name.startswith("__")}


def test_every_call_of_vllms_fits_our_hooks(vllm: Any) -> None:
    from ec_s3.connector import ECS3Connector

    uses = uses_of_connector(vllm)
    assert {use.name for use in uses} >= _EXPECTED
    for use in uses:
        hook = inspect.getattr_static(ECS3Connector, use.name, None)
        assert hook is not None, f"{use.where} uses {use.name}"
        if use.call is None:
            assert isinstance(hook, property), f"{use.where} reads {use.name}"
            continue
        signature = inspect.signature(getattr(ECS3Connector, use.name))
        positional = [
            argument for argument in use.call.args if not isinstance(argument, ast.Starred)
        ]
        bound = () if isinstance(hook, classmethod) else (None,)
        keywords = [keyword.arg for keyword in use.call.keywords]
        named = {name: None for name in keywords if name is not None}
        signature.bind(*bound, *positional, **named)  # TypeError: vLLM's call would fail
        if None in keywords:
            kinds = {parameter.kind for parameter in signature.parameters.values()}
            assert inspect.Parameter.VAR_KEYWORD in kinds, f"{use.where} passes **kwargs"


def test_every_hook_takes_what_the_interface_declares_by_place_and_by_name(vllm: Any) -> None:
    from ec_s3.connector import ECS3Connector

    for name, theirs in _hooks_of_base().items():
        parameters = list(inspect.signature(theirs).parameters.values())
        single = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        ours = inspect.signature(getattr(ECS3Connector, name))
        # What arrives in its **kwargs only the call sites tell; see the test before.
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        bind = ours.bind_partial if open_ended else ours.bind
        bind(*(None for _ in single))
        bind(**{p.name: None for p in single})
        assert [p.name for p in single] == list(ours.parameters)[: len(single)], name


def test_no_hook_is_left_to_the_interface_that_raises_there(vllm: Any) -> None:
    from ec_s3.connector import ECS3Connector

    assert not ECS3Connector.__abstractmethods__
    for name, theirs in _hooks_of_base().items():
        if inspect.getattr_static(ECS3Connector, name) is inspect.getattr_static(
            ECS3Connector.__mro__[1], name
        ):
            source = ast.parse(textwrap.dedent(inspect.getsource(theirs)))
            raises = [node for node in ast.walk(source) if isinstance(node, ast.Raise)]
            assert not raises, f"{name} is not ours, and raises"


def test_what_we_read_of_vllms_objects_is_there(vllm: Any) -> None:
    from vllm.config import ECTransferConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    read = {
        SchedulerOutput: {
            "free_encoder_mm_hashes",
            "scheduled_encoder_inputs",
            "total_num_scheduled_tokens",
        },
        MultiModalFeatureSpec: {"data", "identifier", "mm_hash", "mm_position", "modality"},
        PlaceholderRange: {"length", "offset"},
        ECTransferConfig: {"ec_connector_extra_config", "engine_id"},
        ParallelConfig: {
            "data_parallel_index",
            "distributed_executor_backend",
            "prefill_context_parallel_size",
            "tensor_parallel_size",
        },
        SchedulerConfig: {"max_num_batched_tokens"},
        VllmConfig: {"ec_transfer_config", "instance_id", "load_config", "lora_config"},
    }
    for kind, names in read.items():
        missing = names - {field.name for field in dataclasses.fields(kind)}
        assert not missing, f"{kind.__name__} has no {missing}"
    assert callable(PlaceholderRange.get_num_embeds)
    assert isinstance(ECTransferConfig.is_ec_producer, property)
    body = ast.parse(textwrap.dedent(inspect.getsource(Request.__init__)))
    stored = {
        node.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert stored >= {"cache_salt", "lora_request", "mm_features", "request_id"}


def test_embeddings_of_a_placeholder_are_counted_without_its_holes(vllm: Any) -> None:
    import torch
    from vllm.multimodal.inputs import PlaceholderRange

    mask = torch.tensor([False, True, True, False, True])
    assert PlaceholderRange(offset=3, length=5, is_embed=mask).get_num_embeds() == 3
    assert PlaceholderRange(offset=3, length=5).get_num_embeds() == 5


def test_metadata_fields_can_be_asked_for_by_modality(vllm: Any) -> None:
    from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

    inspect.signature(PlaceholderMetadataResolver).bind(object())
    inspect.signature(PlaceholderMetadataResolver.fields_for).bind(object(), "image")


def test_metadata_travels_between_processes(vllm: Any) -> None:
    import pickle

    from ec_s3.connector import ECS3Connector
    from ec_s3.connector.messages import LoadOrder, StepMetadata
    from ec_s3.types import Extent, TensorSpec

    assert ECS3Connector is not None  # its import makes StepMetadata one of vLLM's kind
    order = LoadOrder(1, "a", TensorSpec("float32", (4, 8)), (Extent(0, 128),))
    metadata = StepMetadata("nonce", "hub", [order])
    assert pickle.loads(pickle.dumps(metadata)) == metadata
