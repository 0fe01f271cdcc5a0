"""The border to vLLM, with vLLM's own classes: nothing that goes wrong inside may escape."""

from __future__ import annotations

import inspect
import json
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from vllm_play import Output, Play, feature, spec

from ec_s3.connector.assembly import check_supported
from ec_s3.connector.messages import StepMetadata
from ec_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ec_s3.connector.shell import ECS3Connector

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def vllm() -> Any:
    """VLLM's package; the tests here are skipped where it is not installed."""
    if os.environ.get("REQUIRE_VLLM"):
        import vllm

        return vllm
    return pytest.importorskip("vllm", exc_type=ImportError)


def vllm_config(role: str = "ec_both", *, encoder_decoder: bool = False, **parallel: Any) -> Any:
    ec = SimpleNamespace(
        is_ec_producer=role != "ec_consumer",
        is_ec_consumer=role != "ec_producer",
        ec_connector_extra_config={},
    )
    layout = {"nnodes_within_dp": 1, "distributed_executor_backend": "mp", **parallel}
    return SimpleNamespace(
        ec_transfer_config=ec,
        model_config=SimpleNamespace(is_encoder_decoder=encoder_decoder),
        parallel_config=SimpleNamespace(**layout),
    )


class Inside:
    """A connector whose scheduler part a test can reach."""

    def __init__(self, vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        del vllm
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

        from ec_s3.connector import shell

        self.play = Play()
        self.closed = 0

        def close() -> None:
            self.closed += 1

        self.told: list[tuple[Any, Any]] = []

        def finish(request: Any, *, tells: bool) -> dict[str, Any] | None:
            shared = self.play.scheduler.finished(request)
            if not (shared and tells):
                return None
            self.told.append((request.mm_features, shared))
            return {"a": {"item_indices": [0]}}

        def collect() -> None:
            self.play.stats.merge(self.play.port.drain_stats())

        side = SimpleNamespace(
            scheduler=self.play.scheduler,
            port=self.play.port,
            stats=self.play.stats,
            close=close,
            finish=finish,
            collect=collect,
        )
        monkeypatch.setattr(shell, "build_scheduler", lambda _: side)
        self.shell = shell
        self.connector: ECS3Connector = shell.ECS3Connector(
            vllm_config(), ECConnectorRole.SCHEDULER
        )


@pytest.fixture
def inside(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    inside = Inside(vllm, monkeypatch)
    yield inside
    inside.connector.shutdown()


def test_every_hook_of_vllm_is_there_with_its_own_signature(vllm: Any) -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    from ec_s3.connector import ECS3Connector

    for name, theirs in inspect.getmembers(ECConnectorBase, inspect.isfunction):
        if name.startswith("__"):
            continue
        ours = inspect.signature(getattr(ECS3Connector, name))
        for parameter in inspect.signature(theirs).parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD:
                assert parameter.name in ours.parameters, f"{name}({parameter.name})"
    assert not ECS3Connector.__abstractmethods__


def test_requests_go_through_the_shell(inside: Inside) -> None:
    inside.play.port.items["a"] = spec(4)
    request = inside.play.request(feature())
    assert inside.connector.ensure_cache_available(request, 0)
    assert inside.connector.has_cache_item("a")
    inside.connector.update_state_after_alloc(request, 0)
    metadata = inside.connector.build_connector_meta(Output())
    assert [order.identifier for order in metadata.loads] == ["a"]
    inside.connector.update_state_after_free(request, 0)
    assert inside.connector.request_finished(request) == (False, None)
    assert inside.connector.take_unavailable_requests() == set()
    assert not inside.connector.has_pending_push_work()


def encoded(inside: Inside, name: str) -> Any:
    """A request whose item has been encoded, with an order to save it."""
    request = inside.play.request(feature(name), name=name)
    assert not inside.connector.ensure_cache_available(request, 0)
    inside.play.port.absent(inside.play.only_want())
    assert inside.connector.ensure_cache_available(request, 0)
    inside.connector.update_state_after_alloc(request, 0)
    inside.connector.build_connector_meta(Output(scheduled_encoder_inputs={name: [0]}))
    return request


def test_items_on_their_way_to_the_bucket_are_told_of(inside: Inside) -> None:
    request = encoded(inside, "a")
    answer = inside.connector.request_finished(request)
    assert answer == (False, {"a": {"item_indices": [0]}})
    assert inside.told == [(request.mm_features, {"a": ""})]


def test_items_are_not_told_of_while_uploads_fail(inside: Inside) -> None:
    inside.play.holds.uploading = False
    assert inside.connector.request_finished(encoded(inside, "a")) == (False, None)


def test_items_that_were_neither_saved_nor_found_are_not_told_of(inside: Inside) -> None:
    request = inside.play.request(feature())
    assert not inside.connector.ensure_cache_available(request, 0)
    inside.play.now = 100.0  # the encoder runs before the bucket has answered, and nothing is saved
    inside.play.port.room = False
    assert inside.connector.ensure_cache_available(request, 0)
    inside.connector.update_state_after_alloc(request, 0)
    assert inside.connector.request_finished(request) == (False, None)
    assert inside.told == []


def test_log_names_the_requests_that_fail_for_want_of_an_item(
    inside: Inside, caplog: pytest.LogCaptureFixture
) -> None:
    assert inside.connector.take_unavailable_requests() == set()
    assert not caplog.records
    request = inside.play.request(feature(media=False), name="lost")
    assert not inside.connector.ensure_cache_available(request, 0)
    inside.play.now = 100.0
    assert not inside.connector.ensure_cache_available(request, 0)
    assert inside.connector.take_unavailable_requests() == {"lost"}
    assert [record.getMessage() for record in caplog.records] == [
        "items of requests without media cannot be had: ['lost']"
    ]


def test_metadata_counts_as_vllms(vllm: Any) -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

    from ec_s3.connector import ECS3Connector

    assert ECS3Connector.__name__ == "ECS3Connector"
    assert isinstance(StepMetadata(), ECConnectorMetadata)


@pytest.mark.parametrize(
    ("hook", "broken", "arguments", "safe"),
    [
        ("ensure_cache_available", "ensure", lambda p: (p.request(feature()), 0), True),
        ("has_cache_item", "has", lambda _: ("a",), False),
        ("update_state_after_alloc", "allocated", lambda p: (p.request(feature()), 0), None),
        ("update_state_after_free", "freed", lambda p: (p.request(feature()), 0), None),
        ("request_finished", "finished", lambda p: (p.request(feature()),), (False, None)),
        ("take_unavailable_requests", "take_unavailable", lambda _: (), set()),
    ],
)
def test_error_inside_is_answered_safely_counted_and_logged_once(
    inside: Inside,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hook: str,
    broken: str,
    arguments: Any,
    safe: object,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(inside.play.scheduler, broken, fail)
    for _ in range(3):
        assert getattr(inside.connector, hook)(*arguments(inside.play)) == safe
    assert inside.play.stats.snapshot()["errors_scheduler"] == 3
    assert caplog.text.count("Traceback") == 1


def test_request_without_media_never_reaches_the_encoder_through_an_error(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(inside.play.scheduler._judge, "verdict", fail)
    request = inside.play.request(feature(media=False))
    assert not inside.connector.ensure_cache_available(request, 0)
    assert inside.connector.take_unavailable_requests() == {"r"}


def test_after_many_errors_it_switches_itself_off_but_keeps_what_it_planned(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inside.play.port.items["a"] = spec(4)
    request = inside.play.request(feature())
    assert inside.connector.ensure_cache_available(request, 0)
    assert inside.connector.has_cache_item("a")
    inside.connector.update_state_after_alloc(request, 0)
    with monkeypatch.context() as patch:
        patch.setattr(inside.play.scheduler, "take_unavailable", lambda: 1 / 0)
        for _ in range(inside.shell.MAX_ERRORS):
            inside.connector.take_unavailable_requests()
    assert "switched off" in caplog.text
    assert len(inside.connector.build_connector_meta(Output()).loads) == 1
    other = inside.play.request(feature("b"), name="s")
    assert inside.connector.ensure_cache_available(other, 0)
    assert not inside.connector.has_cache_item("b")


def test_planned_load_is_delivered_although_the_rest_of_the_hook_fails(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.play.port.items["a"] = spec(4)
    request = inside.play.request(feature())
    assert inside.connector.ensure_cache_available(request, 0)
    assert inside.connector.has_cache_item("a")
    inside.connector.update_state_after_alloc(request, 0)
    monkeypatch.setattr(inside.play.scheduler, "_pump", lambda: 1 / 0)
    assert len(inside.connector.build_connector_meta(Output()).loads) == 1
    assert not inside.connector.build_connector_meta(Output()).loads


def test_switched_off_it_fails_only_what_still_needs_an_item_without_media(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = inside.play.request(feature(media=False), name="decoding")
    with monkeypatch.context() as patch:
        patch.setattr(inside.play.scheduler, "take_unavailable", lambda: 1 / 0)
        for _ in range(inside.shell.MAX_ERRORS):
            inside.connector.take_unavailable_requests()
    assert inside.connector.ensure_cache_available(decoding, 4)
    late = inside.play.request(feature(media=False), name="late")
    assert not inside.connector.ensure_cache_available(late, 0)
    assert inside.connector.take_unavailable_requests() == {"late"}
    inside.connector.request_finished(late)
    assert inside.connector.take_unavailable_requests() == set()


def test_encoder_decoder_models_are_left_alone(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

    from ec_s3.connector import shell

    monkeypatch.setattr(shell, "build_scheduler", lambda _: pytest.fail("started something"))
    connector = shell.ECS3Connector(vllm_config(encoder_decoder=True), ECConnectorRole.SCHEDULER)
    assert connector.ensure_cache_available(Play().request(feature()), 0)
    assert not connector.has_cache_item("a")
    assert isinstance(connector.build_connector_meta(Output()), StepMetadata)
    connector.shutdown()


def test_shutdown_is_idempotent(inside: Inside) -> None:
    inside.connector.shutdown()
    inside.connector.shutdown()
    assert inside.closed == 1
    assert inside.connector.ensure_cache_available(inside.play.request(feature()), 0)


def test_stats_travel_to_vllms_log_and_to_prometheus(inside: Inside) -> None:
    import prometheus_client
    from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats

    inside.play.stats.add("given_up", reason="deadline")
    inside.play.stats.set("deferred_requests", 3)
    stats = inside.connector.get_ec_connector_stats()
    assert isinstance(stats, ECConnectorStats)
    assert inside.connector.get_ec_connector_stats() is None, "once a second"
    data = json.loads(json.dumps(stats.data))
    twice = inside.connector.build_ec_connector_stats(data).aggregate(
        inside.connector.build_ec_connector_stats(data)
    )
    assert twice.reduce()["Given up waiting"] == 2
    registry = prometheus_client.CollectorRegistry()

    def made(kind: Any) -> Any:
        return lambda **more: kind(registry=registry, **more)

    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    metrics = inside.connector.build_prom_metrics(
        vllm_config(),
        {kind: made(kind) for kind in kinds},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    metrics.observe(data, 0)
    metrics.observe({"load_seconds|remote": [[0.0, 2.0] + [0.0] * 13, [0.0, 0.003] + [0.0] * 13]})
    labels = {"model_name": "m", "engine": "0"}
    value = registry.get_sample_value
    assert value("vllm:ec_s3_given_up_total", {**labels, "reason": "deadline"}) == 1
    assert value("vllm:ec_s3_deferred_requests", labels) == 3
    assert value("vllm:ec_s3_load_seconds_count", {**labels, "tier": "remote"}) == 2


def test_vllms_own_log_and_prometheus_classes_take_the_stats(
    vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import functools

    import msgspec
    import prometheus_client
    from vllm.distributed.ec_transfer.ec_connector.metrics import (
        ECConnectorLogging,
        ECConnectorProm,
    )

    from ec_s3.metrics import Stats

    stats = Stats()
    stats.add("hits", 2, tier="local")
    stats.observe("load_seconds", 0.002, tier="remote")
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.drain()))
    ec = SimpleNamespace(ec_connector="ECS3Connector", ec_connector_module_path="ec_s3.connector")
    log, lines = ECConnectorLogging(ec), []
    log.observe(dict(data))
    log.observe(dict(data))
    log.log(lambda text, values: lines.append(text % values))
    assert lines == ["EC Transfer metrics: Items=0, From host memory=4, Avg bucket fetch (ms)=2"]
    registry = prometheus_client.CollectorRegistry()
    for name in ("Gauge", "Counter", "Histogram"):
        kind = functools.partial(getattr(prometheus_client, name), registry=registry)
        monkeypatch.setattr(ECConnectorProm, f"_{name.lower()}_cls", kind)
    prom = ECConnectorProm(SimpleNamespace(ec_transfer_config=ec), ["engine"], {0: ["0"]})
    prom.observe(data, 0)
    local, remote = ({"engine": "0", "tier": tier} for tier in ("local", "remote"))
    assert registry.get_sample_value("vllm:ec_s3_hits_total", local) == 2
    assert registry.get_sample_value("vllm:ec_s3_load_seconds_count", remote) == 1
    # A first failure must be an increase; of a gauge nothing is known before it is reported.
    assert registry.get_sample_value("vllm:ec_s3_repaired_objects_total", {"engine": "0"}) == 0
    assert registry.get_sample_value("vllm:ec_s3_serving", {"engine": "0"}) is None


def test_plugin_registers_once_and_both_ways_of_loading_find_the_class(vllm: Any) -> None:
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    from ec_s3.connector import ECS3Connector
    from ec_s3.connector.plugin import register

    register()
    register()
    by_name = SimpleNamespace(ec_connector="ECS3Connector", ec_connector_module_path=None)
    by_path = SimpleNamespace(
        ec_connector="ECS3Connector", ec_connector_module_path="ec_s3.connector"
    )
    assert ECConnectorFactory.get_connector_class(by_name) is ECS3Connector
    assert ECConnectorFactory.get_connector_class(by_path) is ECS3Connector


class _OldBase:
    """A connector interface from before vLLM 0.30."""

    def ensure_cache_available(self) -> None: ...


@pytest.mark.parametrize(
    ("layout", "named"),
    [({"nnodes_within_dp": 2}, "nnodes"), ({"distributed_executor_backend": "ray"}, "'ray'")],
)
def test_layout_that_cannot_share_memory_is_refused_at_the_start(
    layout: dict[str, Any], named: str
) -> None:
    base = type(
        "Base",
        (),
        dict.fromkeys(
            ("take_unavailable_requests", "start_worker_services", "ensure_cache_available")
        ),
    )
    with pytest.raises(ConfigError, match=named):
        check_supported(base, vllm_config(**layout))
    check_supported(base, vllm_config())


def test_vllm_below_the_floor_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"0\.30"):
        check_supported(_OldBase, vllm_config())


def test_scheduler_role_changes_the_weights_by_itself(inside: Inside) -> None:
    port = inside.play.port
    inside.connector.suspend()
    states = [port.suspended]
    inside.connector.resume("next")
    states.append(port.suspended)
    assert states == [True, False]
    assert inside.play.port.weight_versions == ["next"]


def test_worker_role_asks_the_schedulers_side_and_waits(
    vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

    from ec_s3.connector import shell

    calls: list[tuple[Any, ...]] = []
    worker = SimpleNamespace(
        suspend=lambda timeout: calls.append(("suspend", timeout)),
        resume=lambda name, timeout: calls.append(("resume", name, timeout)),
        close=lambda: None,
    )
    monkeypatch.setattr(shell, "build_worker", lambda _: worker)
    connector = shell.ECS3Connector(vllm_config(), ECConnectorRole.WORKER)
    connector.suspend()  # before the model is loaded there is nothing to wait for
    assert calls == []
    connector.start_worker_services()
    connector.suspend(timeout=5)
    connector.resume("next", timeout=6)
    connector.resume("last")
    assert calls == [
        ("suspend", 5),
        ("resume", "next", 6),
        ("resume", "last", shell.CHANGE_SECONDS),
    ]
    connector.shutdown()
