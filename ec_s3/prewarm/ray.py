"""A prewarm over the machines of a Ray cluster, for those who have one.

A Ray Data pipeline of shares: each worker keeps one vLLM, and runs the same job as `ec-s3 prewarm`
for the shares that Ray gives it. What is in the bucket is the only state: Ray may run a share
again, on another machine, and it goes on where it was. Every machine must reach the manifest and
the media.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ec_s3.config import ECConfig
from ec_s3.errors import ConfigError
from ec_s3.prewarm.isolation import open_encoder
from ec_s3.prewarm.job import Wanted, opened
from ec_s3.prewarm.runner import Listeners, Mode
from ec_s3.prewarm.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ec_s3.prewarm.encoding import Encoder, EncoderSettings
    from ec_s3.prewarm.manifest import BadEntry

SHARES_A_WORKER = 8
"""More shares than workers even out what they take, and are less to do again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How the work is spread.

    Attributes:
        workers: vLLMs that run at a time.
        gpus: GPUs of each; Ray lets fractions share one.
        shares: parts of the manifest, None for `SHARES_A_WORKER` each.
        max_requests: requests a second of all of them together, None for no limit.
    """

    workers: int
    gpus: float = 1.0
    shares: int | None = None
    max_requests: float | None = None


def pipeline(
    media: str,
    settings: EncoderSettings,
    cluster: Cluster,
    *,
    start: Callable[[EncoderSettings], Encoder] = open_encoder,
) -> Any:
    """A lazy `ray.data.Dataset`; using it does the work.

    Args:
        media: manifest, folder, pattern or `s3://...`, as `ec-s3 prewarm --media` takes it.
        settings: of every worker's vLLM; its `connector` names the bucket.
        cluster: how the work is spread.
        start: starts a worker's encoder; it is pickled.

    Returns:
        A row a share: `share`, the counts `entries`, `encoded`, `present`, `duplicates` and
        `failed`, why it was `stopped` (empty where it was not), and `failures`: as JSON a list of
        `uri`, `line` and `reason`.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        import ray.data
    except ImportError as error:
        raise ConfigError(
            f"Ray Data is not installed ({error}): pip install 'ec-s3[ray]'"
        ) from error
    shares = cluster.shares or cluster.workers * SHARES_A_WORKER
    rate = cluster.max_requests and cluster.max_requests / cluster.workers
    return ray.data.range(shares, override_num_blocks=shares).map(
        Worker,
        fn_constructor_kwargs={
            "media": media,
            "settings": settings,
            "shares": shares,
            "max_requests": rate,
            "start": start,
        },
        num_gpus=cluster.gpus or None,
        compute=ray.data.ActorPoolStrategy(size=cluster.workers),
    )


class Worker:
    """One vLLM of the pipeline, in an actor of Ray's."""

    def __init__(
        self,
        *,
        media: str,
        settings: EncoderSettings,
        shares: int,
        max_requests: float | None,
        start: Callable[[EncoderSettings], Encoder],
    ) -> None:
        self._media = media
        self._settings = settings
        self._shares = shares
        self._max_requests = max_requests
        self._start = start
        self._encoder: _Kept | None = None

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Do the share of this number."""
        return asyncio.run(self._run(Shard(int(row["id"]), self._shares)))

    async def _run(self, shard: Shard) -> dict[str, Any]:
        failures: list[BadEntry] = []
        config = ECConfig.from_mapping(self._settings.connector)
        wanted = Wanted(
            media=self._media,
            open_encoder=lambda: self._kept(config),
            mode=Mode(self._settings.batch_size, index=False),
            shard=shard,
            max_requests=self._max_requests,
        )
        with tempfile.TemporaryDirectory(prefix="ec_s3-prewarm-") as scratch:
            async with opened(wanted, config, scratch=Path(scratch)) as job:
                report = await job.run(Listeners(failed=failures.append))
        if report.stopped and not report.unreachable and self._encoder is not None:
            # A worker whose encoder is gone for good would be given, and fail, share after share.
            await asyncio.to_thread(self._encoder.end)
            self._encoder = None
        tally = report.tally
        rows = [{"uri": one.uri, "line": one.line, "reason": one.reason} for one in failures]
        return {
            "share": shard.index,
            "entries": tally.entries,
            "encoded": tally.encoded,
            "present": tally.present,
            "duplicates": tally.duplicates,
            "failed": tally.failed,
            "stopped": report.stopped,
            "failures": json.dumps(rows),
        }

    def _kept(self, config: ECConfig) -> Encoder:
        """The worker's encoder, which outlives its jobs."""
        if self._encoder is None:
            # The job's bucket, whatever the server's options name.
            connector = {**self._settings.connector, "url": config.url}
            self._encoder = _Kept(self._start(replace(self._settings, connector=connector)))
        return self._encoder


class _Kept:
    """An encoder that a job cannot end; its process does."""

    def __init__(self, encoder: Encoder) -> None:
        self.namespace = encoder.namespace
        self.facts = encoder.facts

        self.identify = encoder.identify
        self.encode = encoder.encode
        self.end = encoder.close

    def close(self) -> None:
        """Stay."""
