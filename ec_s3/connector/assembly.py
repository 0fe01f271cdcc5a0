"""Builds the two parts of the connector from a VllmConfig; runs once per process, at start-up.

Everything that can be wrong with a deployment is found here, as a `ConfigError` with its remedy.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ec_s3.config import ECConfig
from ec_s3.connector.asking import WeightChanges
from ec_s3.connector.binding import Binder
from ec_s3.connector.holds import Holds
from ec_s3.connector.identity import facts_of, namespace_of
from ec_s3.connector.link import RankHub, socket_name
from ec_s3.connector.media import Classifier, Rules
from ec_s3.connector.published import published, uploads_work
from ec_s3.connector.reports import RankReports
from ec_s3.connector.scheduler import Scheduler
from ec_s3.connector.state import Setup
from ec_s3.connector.widths import MODALITIES, output_widths
from ec_s3.connector.worker import Worker
from ec_s3.errors import ConfigError
from ec_s3.estimates import Estimates
from ec_s3.metrics import Stats
from ec_s3.pages import Slab
from ec_s3.policy import Policy, waits
from ec_s3.port import ThreadPort
from ec_s3.restart import RestartingPort

if TYPE_CHECKING:
    from ec_s3.keys import Namespace
    from ec_s3.port import EnginePort
    from ec_s3.types import FlushReport

logger = logging.getLogger(__name__)

_NEEDED_HOOKS = ("take_unavailable_requests", "start_worker_services", "ensure_cache_available")


RANKS_SECONDS = 1.0
"""How long the start waits for the ranks; they map in the background, whatever it takes."""


COLLECT_SECONDS = 2.0
"""After how long a finished request counts for itself, where vLLM has not asked for statistics."""


@dataclass(slots=True)
class SchedulerSide:
    """The scheduler part with all that it owns."""

    scheduler: Scheduler
    port: EnginePort
    hub: RankHub
    slab: Slab
    binder: Binder
    stats: Stats
    flush_timeout: float
    classifier: Classifier
    holds: Holds
    publishes: bool
    estimates: Estimates
    collected_at: float = 0.0

    def finish(self, request: Any, *, tells: bool) -> dict[str, Any] | None:
        """The request has ended; what is told of its items, see `published`."""
        shared = self.scheduler.finished(request)
        if not (shared and tells and self.publishes):
            return None
        return published(request.mm_features, shared, placeholder=self.classifier.placeholder)

    def tick(self) -> None:
        """Collect, now and then: vLLM may not ask for statistics at all. The hub's thread."""
        if time.monotonic() >= self.collected_at + COLLECT_SECONDS:
            self.collect()

    def collect(self) -> None:
        """Add what the engine has counted to `stats`; learn whether saves reach the bucket."""
        self.collected_at = time.monotonic()
        counted = self.port.drain_stats()
        self.holds.uploading = uploads_work(counted, before=self.holds.uploading)
        self.estimates.take(counted, now=self.collected_at)
        self.stats.merge(counted)

    def close(self) -> FlushReport:
        """Flush within the configured time, then let go of everything."""
        self.binder.close()
        report = self.port.close(self.flush_timeout)
        self.hub.close()
        self.slab.close()
        return report


def check_supported(base: type, vllm_config: Any) -> None:
    """Refuse what cannot work, at start-up.

    Raises:
        ConfigError: a vLLM below the floor, or ranks that cannot share this host's memory.
    """
    missing = [name for name in _NEEDED_HOOKS if not hasattr(base, name)]
    if missing:
        raise ConfigError(
            f"this vLLM's connector interface lacks {', '.join(missing)}: ec_s3 needs 0.30 or newer"
        )
    parallel = vllm_config.parallel_config
    nodes = getattr(parallel, "nnodes_within_dp", 1)
    backend = parallel.distributed_executor_backend
    if nodes > 1:
        raise ConfigError(
            f"the ranks of one engine span {nodes} hosts (nnodes): they cannot share one host's "
            "memory; run each engine on one host, or leave the EC connector out"
        )
    if backend not in (None, "mp", "uni"):
        raise ConfigError(
            f"distributed_executor_backend={backend!r}: ec_s3 needs ranks that are processes of "
            "this host's engine; use 'mp' or 'uni'"
        )


def _address(vllm_config: Any) -> str:
    parallel = vllm_config.parallel_config
    return socket_name(
        vllm_config.instance_id,
        vllm_config.ec_transfer_config.engine_id,
        getattr(parallel, "data_parallel_index", 0),
    )


def _ranks(vllm_config: Any) -> int:
    """Ranks of the first pipeline stage: the only ones that see encoder outputs."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size) * int(
        getattr(parallel, "prefill_context_parallel_size", 1)
    )


def build_scheduler(vllm_config: Any) -> SchedulerSide:
    """The scheduler part: slab, engine, hub, and what decides."""
    ec = vllm_config.ec_transfer_config
    config = ECConfig.from_mapping(ec.ec_connector_extra_config)
    if not ec.is_ec_consumer:  # whoever only encodes for others is not choosy, and loads nothing
        ours = {"second_sight": False, "policy": "always", "warm_start": 0}
        config = config.model_copy(update=ours)
    namespace = namespace_of(vllm_config, config)
    _warn_shutdown(vllm_config, config)
    warn_of_local_names(vllm_config)
    estimates = Estimates()
    setup = _setup(vllm_config, config, namespace, estimates)
    stats = Stats()
    classifier = _classifier(vllm_config, config, stats)
    with ExitStack() as undo:
        slab = Slab.create(config.max_local_cpu_size)
        undo.callback(slab.close)
        threading.Thread(target=slab.populate, name="ec_s3-populate", daemon=True).start()
        port = _open_port(config, namespace, slab, facts_of(vllm_config))
        undo.callback(port.close, 0.0)
        binder = Binder(stats)
        undo.callback(binder.close)
        holds = Holds(setup, port)
        reports = RankReports(setup.ranks, stats, then=holds.on_answer)
        changes = WeightChanges()
        nonce = secrets.token_hex(16)
        # Ranks may answer from here on.
        hub = RankHub(
            _address(vllm_config),
            nonce=nonce,
            slab=slab,
            world=setup.ranks,
            on_answer=reports.take,
            on_request=changes.carry_out,
        )
        undo.pop_all()
    scheduler = Scheduler(
        setup,
        port=port,
        holds=holds,
        hub=hub,
        classifier=classifier,
        bind=binder.bind,
        stats=stats,
        nonce=nonce,
    )
    changes.scheduler = scheduler
    logger.info("encoder cache namespace %s", namespace.id)
    _await_ranks(hub)
    side = SchedulerSide(
        scheduler,
        port,
        hub,
        slab,
        binder,
        stats,
        config.flush_timeout,
        classifier,
        holds,
        publishes=setup.producer and config.url is not None,
        estimates=estimates,
    )
    hub.on_tick = side.tick
    return side


def _await_ranks(hub: RankHub) -> None:
    """Let the first requests find the cache on: ranks need milliseconds to map a small slab."""
    give_up = time.monotonic() + RANKS_SECONDS
    while not hub.ready and time.monotonic() < give_up:
        time.sleep(0.002)
    if not hub.ready:
        logger.info("the encoder cache turns on once every rank has mapped the host memory")


def _open_port(
    config: ECConfig, namespace: Namespace, slab: Slab, facts: dict[str, object]
) -> EnginePort:
    if config.engine == "process":
        from ec_s3.child import ProcessPort

        return RestartingPort(lambda now: ProcessPort(config, now, slab, facts=facts), namespace)
    return ThreadPort(config, namespace, slab, facts=facts)


def _setup(vllm_config: Any, config: ECConfig, namespace: Namespace, estimates: Estimates) -> Setup:
    ec = vllm_config.ec_transfer_config
    policy = Policy(config.policy)
    scheduler = vllm_config.scheduler_config
    return Setup(
        producer=bool(ec.is_ec_producer),
        consumer=bool(ec.is_ec_consumer),
        dtype=namespace.dtype,
        widths=output_widths(vllm_config),
        # A drafter reads, and so needs, a little more than the chunk.
        window=int(scheduler.max_num_batched_tokens)
        + int(getattr(vllm_config, "num_prefill_lookahead_tokens", 0)),
        ranks=_ranks(vllm_config),
        fetch_timeout=config.fetch_timeout,
        metadata_timeout=config.metadata_timeout,
        max_deferred=config.max_deferred_requests,
        min_width=int(vllm_config.model_config.get_inputs_embeds_size()),
        require_binding=config.require_binding,
        replay=_replay(vllm_config),
        # Comparing takes both what others have saved and an encoder's output.
        audit_fraction=config.audit_fraction if ec.is_ec_producer and ec.is_ec_consumer else 0.0,
        patience=lambda nbytes, waited: waits(
            policy, estimates.measured, nbytes=nbytes, waited=waited
        ),
    )


def _classifier(vllm_config: Any, config: ECConfig, stats: Stats) -> Classifier:
    from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

    # Resolved now: the first look-up builds a processor, which no hook may wait for.
    resolver = PlaceholderMetadataResolver(vllm_config.model_config)
    fields = {modality: set(resolver.fields_for(modality)) for modality in MODALITIES}
    lora = getattr(vllm_config, "lora_config", None)
    tower = bool(lora is not None and getattr(lora, "enable_tower_connector_lora", False))
    if tower and not config.adapter:
        logger.warning(
            "requests with an adapter on the encoder are not cached: an adapter's name does not "
            "tell its content; set `adapter` to a fingerprint of it"
        )
    return Classifier(
        Rules(
            metadata_fields=lambda modality: fields.get(modality, set()),
            tower_adapters=tower and not config.adapter,
            salted=config.salted_requests,
            client_names=config.persist_client_uuids,
        ),
        stats,
    )


def _replay(vllm_config: Any) -> int:
    """Most tokens of a prefix hit that vLLM computes again.

    It does so for sliding windows over latent attention (its `prefix_replay_tokens`, 0.32); which
    layers have them is not known here, so every model that could is taken for one.
    """
    model = vllm_config.model_config
    replays = getattr(vllm_config.cache_config, "swa_bounded_replay", False)
    if not (replays and getattr(model, "use_mla", False)):
        return 0
    return int(getattr(model.hf_text_config, "sliding_window", None) or 0)


def _warn_shutdown(vllm_config: Any, config: ECConfig) -> None:
    if config.url is not None and not getattr(vllm_config, "shutdown_timeout", 1):
        logger.warning(
            "vLLM's shutdown timeout is 0: a server that is told to stop loses the uploads under "
            "way; start it with --shutdown-timeout of 5 s or more"
        )


def warn_of_local_names(vllm_config: Any) -> None:
    """Say so when vLLM names items by their request: nothing so named can be found again."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    cache = getattr(vllm_config, "cache_config", None)
    processed = getattr(multimodal, "mm_processor_cache_gb", None)
    if processed == 0 and not getattr(cache, "enable_prefix_caching", True):
        logger.warning(
            "with mm_processor_cache_gb=0 and enable_prefix_caching=False vLLM does not hash "
            "media, and what it names by the request is not cached; switch one of them on"
        )


def build_worker(vllm_config: Any) -> Worker | None:
    """The worker part of this rank, None on a pipeline stage that sees no encoder output.

    Call it once the model is loaded: only then are ranks and device known.
    """
    import torch
    from vllm.distributed.parallel_state import (
        get_pcp_group,
        get_pp_group,
        get_tensor_model_parallel_rank,
    )

    if not get_pp_group().is_first_rank:
        return None
    tp = int(vllm_config.parallel_config.tensor_parallel_size)
    rank = get_tensor_model_parallel_rank() + tp * get_pcp_group().rank_in_group
    kind = vllm_config.device_config.device_type
    device = (
        torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )
    return Worker(_address(vllm_config), rank=rank, device=device)
