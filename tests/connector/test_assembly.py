"""Starting the scheduler part: what is refused, what is warned about, what is cleaned up."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ec_s3.config import ECConfig
from ec_s3.connector import assembly, identity
from ec_s3.connector.assembly import SchedulerSide, build_scheduler
from ec_s3.connector.link import Answer
from ec_s3.connector.media import Classifier, Rules
from ec_s3.errors import ConfigError
from ec_s3.metrics import Stats
from ec_s3.pages import Slab
from ec_s3.testing.fake_port import FakePort

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.types import FlushReport


def engine(role: str = "ec_both", **more: Any) -> Any:
    extra = {
        "engine": "thread",
        "max_local_cpu_size": "1MiB",
        "flush_timeout": 3,
        **more.pop("extra", {}),
    }
    return SimpleNamespace(
        ec_transfer_config=SimpleNamespace(
            is_ec_producer=role != "ec_consumer",
            is_ec_consumer=role != "ec_producer",
            ec_connector_extra_config=extra,
            engine_id="engine",
            mm_encoder_output_widths={"image": 8},
        ),
        model_config=SimpleNamespace(
            model="org/model",
            dtype=torch.float32,
            revision=None,
            quantization=None,
            seed=0,
            multimodal_config=None,
            get_inputs_embeds_size=lambda: 8,
            hf_config=SimpleNamespace(to_dict=dict),
        ),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(swa_bounded_replay=True),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, prefill_context_parallel_size=2),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        instance_id=f"{os.getpid()}-{threading.get_ident()}",
        **more,
    )


class Parts:
    """Stands in for vLLM and for the engine; remembers what they were given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slabs: list[Slab] = []
        self.ports: list[FakePort] = []
        self.configs: list[Any] = []
        self.facts: list[object] = []
        self.patch = monkeypatch
        create = Slab.create

        def slab(nbytes: int) -> Slab:
            self.slabs.append(create(nbytes))
            return self.slabs[-1]

        def port(config: Any, namespace: Any, slab: Slab, facts: object) -> FakePort:
            del namespace, slab
            self.configs.append(config)
            self.facts.append(facts)
            self.ports.append(FakePort())
            return self.ports[-1]

        monkeypatch.setattr(assembly, "RANKS_SECONDS", 0.0)
        monkeypatch.setattr(Slab, "create", slab)
        monkeypatch.setattr(assembly, "_open_port", port)
        monkeypatch.setattr(assembly, "facts_of", lambda _: {"vllm": "0"})
        monkeypatch.setattr(identity, "hash_scheme", lambda _: "scheme")
        monkeypatch.setattr(
            assembly,
            "_classifier",
            lambda *_: Classifier(Rules(metadata_fields=lambda _: set())),
        )


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(monkeypatch)


def test_engine_is_described_to_the_part_that_decides(parts: Parts) -> None:
    with closing(build_scheduler(engine(num_prefill_lookahead_tokens=3))) as side:
        setup = side.scheduler._setup
        assert (setup.producer, setup.consumer, setup.dtype) == (True, True, "float32")
        assert (setup.window, setup.ranks, setup.widths) == (67, 4, {"image": 8})
        assert parts.facts == [{"vllm": "0"}]
        assert not side.scheduler.online, "no rank has mapped the memory"


@pytest.mark.parametrize(
    ("latent", "window", "switch", "replay"),
    [(True, 128, True, 128), (True, 128, False, 0), (False, 128, True, 0), (True, None, True, 0)],
)
def test_models_that_may_compute_part_of_a_prefix_hit_again_are_known(
    parts: Parts, *, latent: bool, window: int | None, switch: bool, replay: int
) -> None:
    config = engine()
    config.model_config.use_mla = latent
    config.model_config.hf_text_config = SimpleNamespace(sliding_window=window)
    config.cache_config.swa_bounded_replay = switch
    with closing(build_scheduler(config)) as side:
        assert side.scheduler._setup.replay == replay


def test_start_waits_a_little_for_the_ranks_so_that_the_first_request_finds_the_cache(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []

    class SlowHub:
        address = "hub"

        def __init__(self, *_: object, **__: object) -> None: ...

        @property
        def ready(self) -> bool:
            looks.append(len(looks) > 2)
            return looks[-1]

        def close(self) -> None: ...

    monkeypatch.setattr(assembly, "RANKS_SECONDS", 60.0)
    monkeypatch.setattr(assembly, "RankHub", SlowHub)
    with closing(build_scheduler(engine())):
        assert looks[-1]


def test_answer_that_comes_before_all_is_built_is_not_lost(parts: Parts) -> None:
    class QuickHub:
        address = "hub"
        ready = True

        def __init__(self, *_: object, on_answer: Callable[[Answer], None], **__: object) -> None:
            on_answer(Answer(0, "mapped"))

        def close(self) -> None: ...

    parts.patch.setattr(assembly, "RankHub", QuickHub)
    with closing(build_scheduler(engine())) as side:
        assert side.scheduler.online


@pytest.mark.parametrize("broken", ["_open_port", "RankHub"])
def test_failed_start_leaves_no_memory_and_no_engine_behind(parts: Parts, broken: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConfigError("cannot work")

    parts.patch.setattr(assembly, broken, fail)
    with pytest.raises(ConfigError, match="cannot work"):
        build_scheduler(engine())
    (slab,) = parts.slabs
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(slab.fd)
    assert not any(port.alive for port in parts.ports)


def test_bad_setting_is_refused_before_anything_is_taken(parts: Parts) -> None:
    with pytest.raises(ConfigError, match="fetch_timeout"):
        build_scheduler(engine(extra={"fetch_timeout": "soon"}))
    assert not parts.slabs


def test_unknown_setting_is_warned_about(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    with closing(build_scheduler(engine(extra={"fetch_timeuot": 1}))):
        assert "fetch_timeuot" in caplog.text


def test_close_flushes_within_the_configured_time(parts: Parts) -> None:
    side: SchedulerSide = build_scheduler(engine())
    limits: list[float] = []
    close = side.port.close

    def flush(timeout: float) -> FlushReport:
        limits.append(timeout)
        return close(timeout)

    parts.patch.setattr(side.port, "close", flush)
    assert side.close().complete
    assert limits == [3]


@pytest.mark.parametrize(
    ("role", "kept"), [("ec_both", True), ("ec_consumer", True), ("ec_producer", False)]
)
def test_server_that_only_encodes_uploads_everything(parts: Parts, role: str, kept: bool) -> None:
    with closing(build_scheduler(engine(role, extra={"second_sight": True}))):
        assert parts.configs[0].second_sight is kept


@pytest.mark.parametrize(
    ("url", "timeout", "warned"),
    [
        ("s3://bucket/x", {"shutdown_timeout": 0}, 1),
        ("s3://bucket/x", {"shutdown_timeout": 30}, 0),
        ("s3://bucket/x", {}, 0),
        (None, {"shutdown_timeout": 0}, 0),
    ],
)
def test_server_that_would_lose_its_uploads_when_stopped_is_warned_once(
    parts: Parts,
    caplog: pytest.LogCaptureFixture,
    url: str | None,
    timeout: dict[str, Any],
    warned: int,
) -> None:
    with closing(build_scheduler(engine(extra={"url": url} if url else {}, **timeout))):
        assert caplog.text.count("--shutdown-timeout") == warned


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("adapter", "warned"), [("", True), ("f00", False)])
def test_adapters_on_the_encoder_are_warned_about_unless_their_content_is_named(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    adapter: str,
    warned: bool,
) -> None:
    if not os.environ.get("REQUIRE_VLLM"):
        pytest.importorskip("vllm", exc_type=ImportError)
    from vllm.distributed.ec_transfer.ec_connector import utils

    class Resolver:
        def __init__(self, _: object) -> None: ...

        def fields_for(self, modality: str) -> set[str]:
            return {f"{modality}_grid"}

    monkeypatch.setattr(utils, "PlaceholderMetadataResolver", Resolver)
    lora = SimpleNamespace(enable_tower_connector_lora=True)
    classifier = assembly._classifier(
        SimpleNamespace(model_config=None, lora_config=lora), ECConfig(adapter=adapter), Stats()
    )
    assert classifier._rules.metadata_fields("vision_chunk") == {"vision_chunk_grid"}
    assert ("adapter" in caplog.text) is warned


@pytest.mark.parametrize(
    ("role", "url", "told"),
    [
        ("ec_producer", "file:///tmp/x", True),
        ("ec_both", "file:///tmp/x", True),
        ("ec_consumer", "file:///tmp/x", False),
        ("ec_producer", None, False),
    ],
)
def test_items_are_told_of_by_engines_that_upload(
    parts: Parts, role: str, url: str | None, told: bool
) -> None:
    parts.patch.setattr(
        assembly, "_classifier", lambda *_: Classifier(Rules(metadata_fields=lambda _: {"grid"}))
    )
    item = SimpleNamespace(
        identifier="a", modality="image", data={"grid": SimpleNamespace(data=[1, 2])}
    )
    with closing(build_scheduler(engine(role, extra={"url": url} if url else {}))) as side:
        shared: dict[str, str] = {}
        parts.patch.setattr(side.scheduler, "finished", lambda _: shared)
        request = SimpleNamespace(mm_features=[item])
        assert side.finish(request, tells=True) is None
        shared["a"] = "5a" * 32
        entry = {"modality": "image", "item_indices": [0], "metadata": {"grid": [1, 2]}}
        assert side.finish(request, tells=True) == (
            {"a": {**entry, "input_digest": "5a" * 32}} if told else None
        )
        assert side.finish(request, tells=False) is None


def test_engine_notices_that_its_uploads_fail_whether_or_not_statistics_are_asked_for(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(build_scheduler(engine("ec_producer", extra={"url": "file:///tmp/x"}))) as side:
        monkeypatch.setattr(parts.ports[0], "drain_stats", lambda: {"uploads|denied": 2.0})
        side.tick()
        assert not side.holds.uploading
        assert side.stats.drain()["uploads|denied"] == 2.0
        monkeypatch.setattr(parts.ports[0], "drain_stats", lambda: {"uploads|written": 1.0})
        side.tick()
        assert not side.holds.uploading, "it does not look twice a second"
        side.collect()
        assert side.holds.uploading
