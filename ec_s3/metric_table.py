"""The table of metrics: what is counted, under which labels.

`METRICS` drives registration, the reference page, and the tests of the dashboard and the alerts.
Constants only; any thread may read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ec_s3.types import MissReason, PutOutcome, Tier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 30.0),  # what is asked for without media may wait that long
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row of the table.

    Attributes:
        name: without prefix, and for counters without `_total`.
        kind: what Prometheus calls its type.
        help: one sentence.
        labels: label names to their allowed values; an empty tuple allows any.
        buckets: upper bounds of a histogram, the infinite one left out.
    """

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()

    def series(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        """Label values in the table's order.

        Raises:
            KeyError: a label is missing, unknown, or has a value that is not allowed.
        """
        if not labels and not self.labels:
            return ()
        if labels.keys() != self.labels.keys():
            raise KeyError(f"{self.name} has the labels {list(self.labels)}, not {list(labels)}")
        for label, allowed in self.labels.items():
            if allowed and labels[label] not in allowed:
                raise KeyError(f"{self.name}: {label} may not be {labels[label]!r}")
        return tuple(str(labels[label]) for label in self.labels)

    def all_series(self) -> list[tuple[str, ...]]:
        """The label values of every series; none for a metric with a label that allows any."""
        rows: list[tuple[str, ...]] = [()]
        for allowed in self.labels.values():
            rows = [(*row, value) for row in rows for value in allowed]
        return rows


def _counter(name: str, text: str, **labels: Sequence[str]) -> Metric:
    return Metric(name=name, kind="counter", help=text, labels=_allowed(labels))


def _gauge(name: str, text: str, **labels: Sequence[str]) -> Metric:
    return Metric(name=name, kind="gauge", help=text, labels=_allowed(labels))


def _seconds(name: str, text: str, **labels: Sequence[str]) -> Metric:
    return Metric(name=name, kind="histogram", help=text, labels=_allowed(labels), buckets=SECONDS)


def _allowed(labels: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    return {label: tuple(str(value) for value in values) for label, values in labels.items()}


_TIERS = tuple(Tier)
_STORES = (Tier.DISK, Tier.REMOTE)
_OPERATIONS = ("get", "put", "head", "list", "delete")
_REFUSALS = ("timeout", "throttled", "denied", "unreachable", "changed", "failed")

NAMESPACE_LABELS = (
    *("namespace", "dtype", "model", "revision", "quantization", "weight_version", "adapter"),
    *("encoder_config", "hash_scheme", "salt", "key_version"),
    *("model_argument", "mm_processor_kwargs", "media_io_kwargs", "vllm"),
)

METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        _counter("queries", "Items asked for."),
        _counter("hits", "Items found, by the tier that had them.", tier=_TIERS),
        _counter("misses", "Items asked for and not delivered.", reason=tuple(MissReason)),
        _seconds("load_seconds", "Time of one fetch into host memory.", tier=_STORES),
        _counter("load_bytes", "Tensor bytes fetched into host memory.", tier=_STORES),
        _seconds(
            "fetch_seconds",
            "Time of one phase of a read from the bucket: `queue` and `copy` (to the device) once "
            "an item, the others once a range of its object; `decode` includes every check.",
            phase=("queue", "first_byte", "body", "decode", "copy"),
        ),
        _counter(
            "download_bytes",
            "Bytes read from the bucket: those that came, and those of the tensors made of them.",
            kind=("raw", "stored"),
        ),
        _seconds(
            "save_seconds",
            "Time of one stage of a save: copy to host memory, encode, write to the stores.",
            stage=("copy", "encode", "store"),
        ),
        _counter(
            "rejected_puts",
            "Puts not taken.",
            reason=(
                *("no_room", "too_large", "first_sight"),
                *("suspended", "disabled", "stale", "deleted", "closed"),
            ),
        ),
        _counter(
            "uploads",
            "Uploads that ended.",
            outcome=(
                *(*PutOutcome, "queue_full", "evicted", "denied", "failed", "error"),
                *("superseded", "disabled", "stale", "deleted", "closed"),
            ),
        ),
        _counter(
            "upload_bytes", "Bytes uploaded, before and after encoding.", kind=("raw", "stored")
        ),
        _gauge("upload_queue_items", "Items waiting for their upload or being uploaded."),
        _gauge("upload_queue_bytes", "Bytes held for uploads."),
        _counter(
            "disk_writes", "Writes to the disk tier.", outcome=("written", "skipped", "failed")
        ),
        _counter(
            "remote_requests",
            "Requests to the bucket; `rested` ones were not sent because the breaker was open.",
            op=_OPERATIONS,
            outcome=("ok", "absent", *_REFUSALS, "cancelled", "rested"),
        ),
        _seconds("remote_seconds", "Time of one request to the bucket.", op=_OPERATIONS),
        _gauge("breaker_open", "1 while the bucket is left alone after failures, else 0."),
        _counter("corrupt_objects", "Stored objects refused on reading.", tier=_STORES),
        _counter("repaired_objects", "Refused objects replaced by a good one."),
        _gauge(
            "local_bytes",
            "Host memory by state.",
            state=("capacity", "populated", "used", "reserved", "leased", "dirty"),
        ),
        _counter(
            "local_evictions",
            "Entries evicted from host memory; dirty ones were not yet uploaded.",
            kind=("clean", "dirty"),
        ),
        _counter(
            "control_polls",
            "Looks at the bucket's control document.",
            outcome=("changed", "unchanged", "absent", "malformed", "failed"),
        ),
        _counter(
            "index_polls",
            "Looks at the namespace's index.",
            outcome=("loaded", "unchanged", "absent", "refused", "failed"),
        ),
        _gauge("index_items", "Items of the index that is believed, 0 without one."),
        _counter(
            "index_answers",
            "Items that the index called absent, so that no request was sent; and those of them "
            "that turned out to be there when they were put.",
            outcome=("absent", "wrong"),
        ),
        _counter(
            "warm_start_items",
            "Items that the warm start has looked at: brought into host memory, there already, or "
            "not to be had.",
            outcome=("loaded", "present", "failed"),
        ),
        _counter("warm_start_bytes", "Tensor bytes that the warm start has loaded.", tier=_STORES),
        _gauge("warm_start_running", "1 while the warm start goes on, else 0."),
        _counter(
            "refreshed_objects",
            "Objects that were served when they were old: written again; left alone as they turned "
            "out to be young, had changed or were gone, or may not be written; or not written.",
            outcome=("written", "young", "changed", "refused", "failed"),
        ),
        _counter(
            "audits",
            "Items that were found and encoded all the same, by what the comparison gave; "
            "`skipped` ones could not be compared then.",
            outcome=("same", "close", "different", "skipped"),
        ),
        _gauge(
            "audit_worst_cosine",
            "Least cosine of an audited row with its stored counterpart, since the start.",
        ),
        _gauge(
            "switched_off",
            "1 while nothing is served or saved, by cause, else 0.",
            cause=("suspended", "disabled"),
        ),
        _gauge("pinned", "1 when host memory is registered with CUDA by every rank, else 0."),
        _gauge(
            "serving",
            "1 while the connector answers; 0 when a rank or the engine is not there or is gone, "
            "or when the connector has switched itself off.",
        ),
        _counter(
            "unusable_inputs",
            "What requests brought along and could not be used: `ec_transfer_params` that are not "
            "understood (the defaults hold), media that cannot be digested (the item stays unbound)"
            ".",
            what=("params", "media"),
        ),
        _gauge("deferred_requests", "Requests that wait for a fetch."),
        _seconds(
            "deferral_seconds",
            "Time that a request was kept waiting for its items, by how that ended.",
            outcome=("ready", "absent", "deadline", "limit", "policy", "failed", "ended"),
        ),
        _counter(
            "given_up",
            "Fetches that a request stopped waiting for.",
            reason=("deadline", "limit", "policy", "mismatch", "binding", "rank_gone"),
        ),
        _seconds("encode_seconds", "Time that the encoder needed for one item that was saved."),
        _counter("saved_encoder_seconds", "Encoder time that hits replaced, where it is known."),
        _counter("encoder_seconds", "Encoder time of the items saved, where it is known."),
        _counter("encoder_bytes", "Tensor bytes of these items."),
        _counter(
            "errors",
            "Unexpected exceptions; each is a bug.",
            where=(
                *("scheduler", "worker", "engine", "fetch", "upload", "control", "index"),
                *("warm_start", "refresh", "audit"),
            ),
        ),
        _gauge(
            "info",
            "Always 1; its labels name the release and the format that it writes.",
            version=(),
            wire=(),
        ),
        _gauge(
            "namespace_info",
            "Always 1; its labels name the namespace that the engine was started with and what it "
            "is made of, the salt as an HMAC, for jobs that must agree with it.",
            **dict.fromkeys(NAMESPACE_LABELS, ()),
        ),
    )
}
"""Every metric by name. Unknown names and label values are a KeyError: a programming error."""
