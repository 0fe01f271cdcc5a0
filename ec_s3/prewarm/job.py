"""Puts a prewarm job together from a configuration. Runs on the job's event loop."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ec_s3.errors import ConfigError
from ec_s3.prewarm.buckets import MediaBuckets
from ec_s3.prewarm.expect import check
from ec_s3.prewarm.media import MediaReader, Source
from ec_s3.prewarm.pace import Pace
from ec_s3.prewarm.runner import Hooks, Job, Mode
from ec_s3.prewarm.shard import Shard
from ec_s3.prewarm.target import Target
from ec_s3.remote import open_store
from ec_s3.url import S3Location, parse_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from ec_s3.config import ECConfig
    from ec_s3.prewarm.encoding import Encoder
    from ec_s3.prewarm.expect import Expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A job as somebody wants it.

    Attributes:
        media: see `media.Source`.
        open_encoder: starts the vLLM.
        mode: how it is run.
        shard: the share of the entries.
        max_requests: requests a second to all buckets, None for no limit.
        expected: what a server uses, which the encoder must agree with; None does not ask.
    """

    media: str
    open_encoder: Callable[[], Encoder]
    mode: Mode = field(default_factory=Mode)
    shard: Shard = field(default_factory=Shard)
    max_requests: float | None = None
    expected: Expected | None = None


@contextlib.asynccontextmanager
async def opened(wanted: Wanted, config: ECConfig, *, scratch: Path) -> AsyncIterator[Job]:
    """A job that is ready to run, with its connections.

    Args:
        wanted: the job.
        config: settings of the bucket.
        scratch: folder for temporary files.

    Raises:
        ConfigError: there is no bucket, or nothing to do.
    """
    store = open_store(config)
    if store is None:
        raise ConfigError("no store: give --url or set EC_S3_URL")
    pace = Pace(wanted.max_requests)
    buckets = MediaBuckets(_media_location(wanted.media, config), config.s3_options(), pace)

    async def open_target(encoder: Encoder) -> Target:
        if wanted.expected is not None:
            check(wanted.expected, encoder.namespace, encoder.facts)
        target = Target(store, encoder.namespace, pace=pace, keyring=config.keyring())
        await target.open()
        return target

    try:
        source = Source(wanted.media, buckets=buckets, scratch=scratch, shard=wanted.shard)
        total = await source.open()
        yield Job(
            source,
            reader=MediaReader(source, buckets),
            pace=pace,
            mode=wanted.mode,
            hooks=Hooks(open_encoder=wanted.open_encoder, open_target=open_target),
            scratch=scratch,
            total=total,
        )
    finally:
        await buckets.aclose()
        await store.aclose()


def _media_location(media: str, config: ECConfig) -> S3Location | None:
    """Where media buckets are: as `media` says, or else beside the cache's own."""
    location = config.location()
    path, _, query = media.partition("?")
    if path.startswith("s3://") and query:
        location = parse_url(f"s3://{path.split('/')[2]}?{query}")
    return location if isinstance(location, S3Location) else None
