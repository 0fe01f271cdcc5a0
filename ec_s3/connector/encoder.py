"""The encoder of a prewarm job: vLLM in this process, encode-only, with our connector and bucket.

`VllmEncoder` names entries as a server would, and encodes them; what it writes is written by the
connector, as a server's saves are. All of it runs on the caller's thread, one call at a time, which
is the scheduler's thread, too; the connector's own threads move the bytes.

Weights are loaded by the first call of `encode`, not before. A vLLM that an entry ends is started
again without it.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from ec_s3.connector.encode_only import encode_only_config
from ec_s3.connector.identity import facts_of, namespace_of
from ec_s3.connector.preparing import Prepared, Preparer
from ec_s3.connector.widths import configured_width, output_widths
from ec_s3.errors import ConfigError, ECS3Error
from ec_s3.pages import PAGE_BYTES
from ec_s3.port import ThreadPort
from ec_s3.prewarm.encoding import EncoderSettings, Failed, Identified
from ec_s3.types import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ec_s3.connector.assembly import SchedulerSide
    from ec_s3.keys import Namespace
    from ec_s3.prewarm.encoding import MediaItem

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""How long the host memory may take to be there, once vLLM is up."""

STALL_SECONDS = 600.0
"""Longest time without any request or upload that ends, before what is under way is given up."""

SETTLE_SECONDS = 60.0
"""Longest time from the end of a request to the copy of its output."""

MAX_FAILURES = 8
"""How often in a row vLLM may fail: enough to find one entry among a hundred that it dies of."""

MAX_REASON = 500

_ADDRESS = re.compile(r"\s*<\S+ object at 0x[0-9a-f]+>")
"""What Pillow calls a file that is in memory."""

_NO_ANSWER = "vLLM gave no answer in time"

_OUTCOMES = ("denied", "failed", "error", "queue_full", "evicted", "deleted", "disabled", "closed")
_OF_ITEMS = ("evicted", "deleted")
"""Those of them that say nothing about the next item."""


def open_encoder(settings: EncoderSettings) -> VllmEncoder:
    """The encoder of a job, its weights not loaded yet.

    Raises:
        ConfigError: vLLM is not installed, or the settings cannot be used.
    """
    return VllmEncoder(settings)


class _EngineFailedError(ECS3Error):
    """VLLM has failed, and will not encode anything any more."""


class _Loss(NamedTuple):
    """Why an output is not in the bucket; see `Failed`."""

    reason: str
    blameless: bool = False


class VllmEncoder:
    """See `prewarm.encoding.Encoder`.

    Raises:
        ConfigError: vLLM is not installed, or the settings cannot be used.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        self._vllm_config, self._config = encode_only_config(settings)
        self._namespace = namespace_of(self._vllm_config, self._config)
        self._facts = facts_of(self._vllm_config)
        self._preparer = Preparer(self._vllm_config)
        self._prepared: dict[int, Prepared] = {}
        self._engine: _Engine | None = None
        self._failures = 0

    @property
    def namespace(self) -> Namespace:
        """Where its outputs go."""
        return self._namespace

    @property
    def facts(self) -> Mapping[str, object]:
        """What identifiers depend on but the namespace does not tell."""
        return self._facts

    def identify(
        self, items: Sequence[MediaItem], data: Sequence[bytes | Path]
    ) -> list[Identified | Failed]:
        """What a server would call these entries; see `Encoder.identify`."""
        self._prepared.clear()
        prepared = self._preparer.prepare(list(zip(items, data, strict=True)))
        return [self._identified(item, one) for item, one in zip(items, prepared, strict=True)]

    def _identified(self, item: MediaItem, prepared: Prepared | Exception) -> Identified | Failed:
        if isinstance(prepared, Exception):
            return Failed(item=item, reason=_reason(prepared))
        self._prepared[item.line] = prepared
        first, *others = prepared.features
        return Identified(
            item=item,
            identifier=first.identifier,
            others=tuple(feature.identifier for feature in others),
            num_embeds=first.rows,
            nbytes=self._nbytes(prepared),
            input_digest=first.input_digest,
        )

    def encode(self, items: Sequence[Identified]) -> list[Identified | Failed]:
        """Encode, and wait for the uploads; see `Encoder.encode`.

        Raises:
            ConfigError: vLLM cannot be started.
            ECS3Error: vLLM fails again and again.
            ValueError: an entry is not of the last `identify`.
        """
        strangers = [one.item.line for one in items if one.item.line not in self._prepared]
        if strangers:
            raise ValueError(f"not identified just before: lines {strangers}")
        results: list[Identified | Failed] = []
        for wave in self._waves(items, self._started().room):
            losses = self._run([self._prepared.pop(one.item.line) for one in wave])
            results += [
                Failed(item=one.item, reason=loss.reason, blameless=loss.blameless) if loss else one
                for one, loss in zip(wave, losses, strict=True)
            ]
        return results

    def _started(self) -> _Engine:
        if self._engine is None:
            self._engine = _Engine(self._vllm_config)
        return self._engine

    def _run(self, wave: Sequence[Prepared]) -> list[_Loss | None]:
        """As `_Engine.run`; of what vLLM dies of, the entry is found by halves."""
        try:
            losses = self._started().run(wave)
        except _EngineFailedError as error:
            self._failures += 1
            self._end_engine()
            if self._failures >= MAX_FAILURES:
                raise
            logger.warning("%s; %d entries are tried again", error, len(wave))
            if len(wave) == 1:
                return [_Loss(str(error))]
            half = len(wave) // 2
            return [*self._run(wave[:half]), *self._run(wave[half:])]
        self._failures = 0
        return losses

    def _waves(self, items: Sequence[Identified], room: int) -> Iterator[list[Identified]]:
        """Entries whose outputs lie in half the host memory together, so that none is lost."""
        wave: list[Identified] = []
        total = 0
        most = min(room // 2, self._config.upload_queue_size)
        for one in items:
            nbytes = self._nbytes(self._prepared[one.item.line])
            nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
            if wave and (total + nbytes > most or len(wave) >= self._config.upload_queue_items):
                yield wave
                wave, total = [], 0
            wave.append(one)
            total += nbytes
        if wave:
            yield wave

    def _nbytes(self, prepared: Prepared) -> int:
        widths = output_widths(self._vllm_config)  # measured, once vLLM is up
        default = 0 if widths else configured_width(self._vllm_config.model_config)
        elements = sum(one.rows * widths.get(one.modality, default) for one in prepared.features)
        return elements * DTYPE_BYTES[self._namespace.dtype]

    def close(self) -> None:
        """End the vLLM; idempotent."""
        self._prepared.clear()
        self._end_engine()
        self._preparer.close()

    def _end_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


class _Engine:
    """vLLM's engine with the weights, and the scheduler part of our connector in it."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm import SamplingParams
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        self._params = SamplingParams(max_tokens=1, temperature=0.0)
        self._numbers = itertools.count()
        try:
            self._vllm = LLMEngine(
                vllm_config=vllm_config,
                executor_class=Executor.get_class(vllm_config),
                log_stats=False,
                usage_context=UsageContext.LLM_CLASS,
                multiprocess_mode=False,
            )
        except Exception as error:  # the border to vLLM: whatever keeps a model from being loaded
            raise ConfigError(f"vLLM did not start: {_reason(error)}") from error
        side = self._vllm.engine_core.engine_core.scheduler.ec_connector.side
        assert side is not None  # this process has the scheduler
        assert isinstance(side.port, ThreadPort)  # as configured
        self._side: SchedulerSide = side
        self._cache = side.port.cache
        self._port = side.port
        try:
            self._await_memory()
        except BaseException:
            self.close()
            raise

    @property
    def room(self) -> int:
        """Bytes of host memory for outputs."""
        return self._side.slab.nbytes

    def _await_memory(self) -> None:
        """Before all of it is there, outputs could find no room."""
        slab, give_up = self._side.slab, time.monotonic() + START_SECONDS
        while not (self._side.scheduler.online and slab.populated_bytes >= slab.nbytes):
            if time.monotonic() > give_up:
                raise ConfigError(
                    f"only {slab.populated_bytes} of {slab.nbytes} bytes of host memory could be "
                    "had; lower max_local_cpu_size"
                )
            time.sleep(0.005)

    def run(self, wave: Sequence[Prepared]) -> list[_Loss | None]:
        """Encode and upload; for each request why it is not in the bucket, None if it is.

        Raises:
            _EngineFailedError: vLLM has failed.
        """
        before = self._uploads()
        reasons = self._answer(wave)
        self._settle()
        self._flush()
        ended = self._uploads() - before
        return [
            _Loss(reason, blameless=reason == _NO_ANSWER)
            if reason
            else self._missing(prepared, ended)
            for prepared, reason in zip(wave, reasons, strict=True)
        ]

    def _answer(self, wave: Sequence[Prepared]) -> list[str]:
        """Let vLLM answer the requests, which for it means to encode."""
        reasons = [""] * len(wave)
        waiting: dict[str, int] = {}
        for at, prepared in enumerate(wave):
            name = f"prewarm-{next(self._numbers)}"
            self._vllm.add_request(
                name, prepared.engine_input, self._params, lora_request=prepared.lora
            )
            waiting[name] = at
        give_up = time.monotonic() + STALL_SECONDS
        while waiting and self._vllm.has_unfinished_requests():
            if time.monotonic() > give_up:
                self._vllm.abort_request(list(waiting))
                break
            try:
                outputs = self._vllm.step()
            except Exception as error:  # the border to vLLM, which does not survive this
                raise _EngineFailedError(f"vLLM has failed: {_reason(error)}") from error
            for output in outputs:
                if output.finished and output.request_id in waiting:
                    at = waiting.pop(output.request_id)
                    end = output.outputs[0].finish_reason
                    reasons[at] = "" if end in ("stop", "length") else f"vLLM ended it with {end!r}"
                    give_up = time.monotonic() + STALL_SECONDS
        for at in waiting.values():
            reasons[at] = _NO_ANSWER
        return reasons

    def _settle(self) -> None:
        """Wait until every rank has reported on what it was told to save."""
        give_up = time.monotonic() + SETTLE_SECONDS
        while self._side.holds.saving and time.monotonic() < give_up:
            if self._side.holds.take_in():
                raise _EngineFailedError("vLLM has failed: one of its processes is gone")
            time.sleep(0.001)

    def _flush(self) -> None:
        """Wait for the uploads, as long as any of them ends now and then."""
        left, give_up = -1, time.monotonic() + STALL_SECONDS
        while (pending := self._port.flush(1.0).pending) and time.monotonic() < give_up:
            if pending != left:
                left, give_up = pending, time.monotonic() + STALL_SECONDS

    def _uploads(self) -> Counter[str]:
        stats = self._cache.stats()
        return Counter({name: int(stats.get(f"uploads_{name}", 0)) for name in _OUTCOMES})

    def _missing(self, prepared: Prepared, ended: Counter[str]) -> _Loss | None:
        """Why an output is not in the bucket; None if it is."""
        keys = [self._cache.key_of(feature.identifier) for feature in prepared.features]
        if all(self._cache.is_known_shared(key) for key in keys):
            return None
        for outcome in _OUTCOMES:
            if ended[outcome] > 0:
                reason = f"its output was encoded, but uploads ended as {outcome!r}; see the log"
                return _Loss(reason, blameless=outcome not in _OF_ITEMS)
        return _Loss(
            "its output was encoded, but did not fit into the host memory of "
            f"{self.room} bytes; raise max_local_cpu_size"
        )

    def close(self) -> None:
        """Shut vLLM down."""
        try:
            self._vllm.engine_core.shutdown()
            self._vllm.renderer.shutdown()
        except Exception:  # the border to vLLM: a job has ended, whatever is left of this
            logger.warning("vLLM did not shut down as it should", exc_info=True)


def _reason(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(_ADDRESS.sub("", str(error)).split()) or type(error).__name__
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
