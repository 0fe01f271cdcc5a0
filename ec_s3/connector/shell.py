"""ECS3Connector: the class that vLLM loads. Builds one part, forwards to it, guards the border.

One instance per process and role. vLLM's hooks must never raise: an unexpected exception is a bug
of ours, counted, logged once with its traceback, and answered safely; after many of them the
connector switches itself off, loudly, and vLLM goes on encoding as if it were not there.
"""

from __future__ import annotations

import atexit
import logging
import time
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from ec_s3.connector.assembly import build_scheduler, build_worker, check_supported
from ec_s3.connector.messages import StepMetadata
from ec_s3.connector.stats import ECS3PromMetrics, ECS3Stats

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ec_s3.connector.assembly import SchedulerSide
    from ec_s3.connector.worker import Worker

T = TypeVar("T")

logger = logging.getLogger(__name__)

ECConnectorMetadata.register(StepMetadata)

MAX_ERRORS = 20
"""Unexpected exceptions after which the connector gives up."""

STATS_SECONDS = 1.0

CHANGE_SECONDS = 30.0
"""How long a rank waits for the scheduler's side to suspend or resume."""


def _join_vllm_log() -> None:
    """Let our log lines appear among vLLM's, unless somebody has set up a log for them."""
    ours, theirs = logging.getLogger("ec_s3"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        ours.handlers.extend(theirs.handlers)
        ours.setLevel(theirs.level)


class ECS3Connector(ECConnectorBase):  # type: ignore[misc]  # vLLM is untyped at this border
    """vLLM EC connector on object storage.

    Args:
        vllm_config: the engine's configuration; settings are in
            `ec_transfer_config.ec_connector_extra_config`, see `ECConfig`.
        role: scheduler or worker.

    Raises:
        ConfigError: a setting, a vLLM or a layout that cannot work.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        _join_vllm_log()
        check_supported(ECConnectorBase, vllm_config)
        self._encoder_decoder = bool(vllm_config.model_config.is_encoder_decoder)
        self._errors = 0
        self._logged: set[str] = set()
        self._stats_at = 0.0
        self._side: SchedulerSide | None = None
        self._worker: Worker | None = None
        if role is ECConnectorRole.SCHEDULER and not self._encoder_decoder:
            self._side = build_scheduler(vllm_config)
            atexit.register(self.shutdown)

    def _safely(self, hook: str, call: Callable[[], T], otherwise: T) -> T:
        """Run a hook's work; on an unexpected exception give the safe answer."""
        try:
            return call()
        except Exception:  # the border to vLLM: whatever escapes here ends the engine
            self._errors += 1
            if self._side is not None:
                self._side.stats.add("errors", where="scheduler")
            elif self._worker is not None:
                self._worker.report_error()
            if hook not in self._logged:
                self._logged.add(hook)
                logger.exception("unexpected error in %s; answered safely", hook)
            if self._errors == MAX_ERRORS and self._side is not None:
                logger.critical("too many unexpected errors: the encoder cache is switched off")
            return otherwise

    @property
    def side(self) -> SchedulerSide | None:
        """The scheduler part, for who drives an engine in its own process; None elsewhere."""
        return self._side

    @property
    def _on(self) -> SchedulerSide | None:
        """The scheduler part, while it is trusted."""
        return self._side if self._errors < MAX_ERRORS else None

    # -- scheduler -------------------------------------------------------------------------

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """See vLLM. False defers the request for this step, and only this request."""
        side = self._side
        if side is None:
            return True
        answer: bool | None = None
        if self._on is not None:
            answer = self._safely(
                "ensure_cache_available",
                lambda: side.scheduler.ensure(request, num_computed_tokens),
                otherwise=None,
            )
        if answer is None:
            answer = self._safely(
                "ensure_cache_available",
                lambda: side.scheduler.excuse(request, num_computed_tokens),
                otherwise=None,
            )
        if answer is None:  # not even what it carries can be told: one request, not the engine
            side.scheduler.give_up(request)
            return False
        return answer

    def has_cache_item(self, identifier: str) -> bool:
        """See vLLM. True means that the bytes are in this host's memory, verified and held."""
        side = self._on
        if side is None:
            return False
        return self._safely(
            "has_cache_item", lambda: side.scheduler.has(identifier), otherwise=False
        )

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """See vLLM."""
        side = self._side
        if side is not None:
            self._safely(
                "update_state_after_alloc",
                lambda: side.scheduler.allocated(request, index),
                otherwise=None,
            )

    def update_state_after_free(self, request: Any, index: int) -> None:
        """See vLLM. The request has used an item."""
        del index  # what matters is whether it was the last
        side = self._side
        if side is not None:
            self._safely(
                "update_state_after_free", lambda: side.scheduler.freed(request), otherwise=None
            )

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """See vLLM. This step's orders for the workers."""
        side = self._side
        if side is None:
            return StepMetadata()
        metadata: StepMetadata | None = self._safely(
            "build_connector_meta",
            lambda: side.scheduler.build_meta(scheduler_output),
            otherwise=None,
        )
        if metadata is not None:
            return metadata
        return self._safely(
            "build_connector_meta",
            lambda: side.scheduler.planned(scheduler_output),
            otherwise=StepMetadata(),
        )

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM. Always False: a True would hold the request and its blocks for ever.

        Beside it, what another engine needs to answer without the request's media.
        """
        side = self._side
        if side is None:
            return False, None
        told = self._safely(
            "request_finished",
            lambda: side.finish(request, tells=self._on is not None),
            otherwise=None,
        )
        if not side.scheduler.busy:
            self._stats_at = 0.0  # there may be no further step to report in
        return False, told

    def take_unavailable_requests(self) -> set[str]:
        """See vLLM. Requests without media whose items cannot be had: they fail, singly."""
        side = self._side
        if side is None:
            return set()
        taken: set[str] = self._safely(
            "take_unavailable_requests", side.scheduler.take_unavailable, otherwise=set()
        )
        if taken:  # to the client vLLM only says "Internal server error"
            logger.warning("items of requests without media cannot be had: %s", sorted(taken))
        return taken

    def get_ec_connector_stats(self) -> ECS3Stats | None:
        """See vLLM, which asks in every step: a report a second, and one before it may idle."""
        side = self._side
        now = time.monotonic()
        if side is None or now < self._stats_at:
            return None
        self._stats_at = now + STATS_SECONDS

        def report() -> ECS3Stats:
            side.stats.set("serving", float(self._on is not None and side.scheduler.online))
            side.collect()
            return ECS3Stats(data=side.stats.drain())

        return self._safely("get_ec_connector_stats", report, otherwise=None)

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> ECS3Stats:
        """See vLLM."""
        return ECS3Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ECS3PromMetrics:
        """See vLLM."""
        return ECS3PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- worker ----------------------------------------------------------------------------

    def start_worker_services(self) -> None:
        """See vLLM. Starts the thread that maps the slab; returns at once."""
        if self.role is ECConnectorRole.WORKER and not self._encoder_decoder:
            self._worker = self._safely(
                "start_worker_services", lambda: build_worker(self._vllm_config), otherwise=None
            )

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """See vLLM. A step begins."""
        super().bind_connector_metadata(connector_metadata)
        worker = self._worker
        if worker is not None:
            self._safely(
                "bind_connector_metadata",
                lambda: worker.begin(connector_metadata, saves=self.is_producer),
                otherwise=None,
            )

    def start_save_caches(self, encoder_cache: dict[str, torch.Tensor], **_: Any) -> None:
        """See vLLM. Saves what lies in vLLM's encoder cache and the bucket has lost."""
        worker = self._worker
        metadata = self._connector_metadata
        if worker is not None and isinstance(metadata, StepMetadata):
            self._safely(
                "start_save_caches",
                lambda: worker.save_cached(metadata, encoder_cache),
                otherwise=None,
            )

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **_: Any) -> None:
        """See vLLM. Only delivers: the fetch was over before the scheduler said yes."""
        worker = self._worker
        metadata = self._connector_metadata
        if worker is not None and isinstance(metadata, StepMetadata) and self.is_consumer:
            worker.load(metadata, encoder_cache)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **_: Any) -> None:
        """See vLLM. Copies an output that the scheduler part wants; skips all others."""
        worker = self._worker
        metadata = self._connector_metadata
        if worker is not None and isinstance(metadata, StepMetadata):
            self._safely(
                "save_caches",
                lambda: worker.save(metadata, mm_hash, encoder_cache[mm_hash]),
                otherwise=None,
            )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        """See vLLM. Called at the end of each step: orders left over are answered "not done"."""
        del finished_req_ids  # completion is reported per order, never per request
        worker = self._worker
        if worker is not None:
            self._safely("get_finished", worker.end, otherwise=None)
        return None, None

    # -- changing the weights --------------------------------------------------------------

    def suspend(self, timeout: float = CHANGE_SECONDS) -> None:
        """Serve and keep nothing until `resume`; call it before weights are changed in place.

        For whoever changes them, on either role and on any number of ranks: the engine is
        suspended when the first call returns. Waits for the scheduler's side, so never from a
        hook. Idempotent.

        Args:
            timeout: seconds to wait.

        Raises:
            TimeoutError: no answer in time; it may be suspended or not.
            ECS3Error: the scheduler's side could not do it.
        """
        if self._side is not None:
            self._side.scheduler.suspend()
        elif self._worker is not None:
            self._worker.suspend(timeout)

    def resume(self, weight_version: str, timeout: float = CHANGE_SECONDS) -> None:
        """Go on with weights of this name: none of other weights is served or written under it.

        As `suspend`. A name stands for the same weights in every process and at any time.
        """
        if self._side is not None:
            self._side.scheduler.resume(str(weight_version))
        elif self._worker is not None:
            self._worker.resume(str(weight_version), timeout)

    # -- the end ---------------------------------------------------------------------------

    def shutdown(self) -> None:
        """See vLLM. Flushes uploads within `flush_timeout`; idempotent."""
        atexit.unregister(self.shutdown)
        side, self._side = self._side, None
        worker, self._worker = self._worker, None
        if worker is not None:
            self._safely("shutdown", worker.close, otherwise=None)
        if side is not None:
            report = self._safely("shutdown", side.close, otherwise=None)
            if report is not None and not report.complete:
                logger.warning("%d uploads were dropped at shutdown", report.pending)
