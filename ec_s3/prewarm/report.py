"""What became of a job: counts, and one record for programs.

Pure; a tally belongs to its job's event loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Outcome(Enum):
    """How much of what was asked for is in the bucket; the exit code tells it."""

    ALL = "all"
    SOME = "some"
    NONE = "none"


@dataclass(slots=True)
class Tally:
    """Counts so far.

    Attributes:
        entries: of this share, bad ones included.
        encoded: written by this run.
        present: in the bucket before.
        duplicates: further entries of an item of the same batch.
        missing: what a dry run would encode.
        failed: not in the bucket, for a reason that was reported.
        media_bytes: size of all media read.
        output_bytes: size of what was or would be encoded, before compression; of items that tell
            their size.
        identify_seconds: spent on preparing items.
        encode_seconds: spent on encoding and uploading.
        known_seconds: encoder time of items in the bucket that tell it, and their number.
    """

    entries: int = 0
    encoded: int = 0
    present: int = 0
    duplicates: int = 0
    missing: int = 0
    failed: int = 0
    batches: int = 0
    media_bytes: int = 0
    output_bytes: int = 0
    identify_seconds: float = 0.0
    encode_seconds: float = 0.0
    known_seconds: float = 0.0
    known_items: int = 0
    modalities: dict[str, int] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Entries of which all is well."""
        return self.encoded + self.present + self.duplicates + self.missing

    @property
    def outcome(self) -> Outcome:
        """How much is done; of nothing, all."""
        if not self.failed:
            return Outcome.ALL
        return Outcome.SOME if self.done else Outcome.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A job that has ended.

    Attributes:
        tally: the counts.
        namespace: `Namespace.id`; empty when nothing came as far as the encoder.
        seconds: from start to end.
        stopped: why it ended before its end, empty when it did not.
        unreachable: whether that was the bucket's fault.
        index: items and bytes of the index that was written, None when none was.
        requests: to the job's buckets; those of the encoder's uploads are counted as two an item.
        retries: requests that were made again.
    """

    tally: Tally
    namespace: str
    seconds: float
    stopped: str
    unreachable: bool
    index: tuple[int, int] | None
    requests: int
    retries: int

    @property
    def outcome(self) -> Outcome:
        """How much is done; a job that was stopped has not done all."""
        outcome = self.tally.outcome
        if self.stopped and outcome is Outcome.ALL:
            return Outcome.SOME if self.tally.done else Outcome.NONE
        return outcome

    def record(self) -> dict[str, object]:
        """The report as JSON."""
        tally = self.tally
        done = tally.encoded + tally.present + tally.duplicates
        return {
            "outcome": self.outcome.value,
            "namespace": self.namespace,
            "entries": tally.entries,
            "encoded": tally.encoded,
            "present": tally.present,
            "duplicates": tally.duplicates,
            "failed": tally.failed,
            "batches": tally.batches,
            "modalities": dict(sorted(tally.modalities.items())),
            "media_bytes": tally.media_bytes,
            "output_bytes": tally.output_bytes,
            "seconds": round(self.seconds, 3),
            "identify_seconds": round(tally.identify_seconds, 3),
            "encode_seconds": round(tally.encode_seconds, 3),
            "items_per_second": round(done / self.seconds, 3) if self.seconds else 0.0,
            "requests": self.requests,
            "retries": self.retries,
            "index_items": self.index[0] if self.index else None,
            "index_bytes": self.index[1] if self.index else None,
            "stopped": self.stopped or None,
        }
