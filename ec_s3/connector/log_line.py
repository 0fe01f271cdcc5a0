"""The interval's log line: few numbers, in units that people think in.

Pure. What is not in it is on `/metrics`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ec_s3.metric_table import METRICS
from ec_s3.metrics import Stats

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ec_s3.metrics import Data

_MB = 1e6
_LOST_UPLOADS = ("queue_full", "evicted", "denied", "failed", "error", "closed")
_FAILURES = ("denied", "timeout", "throttled", "unreachable", "failed")


def log_line(data: Data) -> dict[str, int | float]:
    """What happened since the last line, by the text that it is shown under.

    "Items" is always there, everything else only when it is not zero.
    """
    stats = Stats()
    stats.merge(data)
    seen = stats.snapshot()
    items, hits = int(seen["queries"]), _total(seen, "hits")
    lost = sum(seen[f"uploads_{outcome}"] for outcome in _LOST_UPLOADS)
    deferrals = _total(seen, "deferral_seconds", "_count")
    shown: dict[str, float] = {
        "Hit rate (%)": round(100 * hits / items, 1) if items else 0,
        "From host memory": seen["hits_local"],
        "From disk": seen["hits_disk"],
        "From bucket": seen["hits_remote"],
        "Avg bucket fetch (ms)": _mean_ms(seen, "load_seconds_remote"),
        "Downloaded (MB)": round(seen["download_bytes_stored"] / _MB, 1),
        "Deferred": deferrals,
        "Avg deferral (ms)": _mean(_total(seen, "deferral_seconds", "_sum"), deferrals),
        "Given up waiting": _total(seen, "given_up"),
        "Encoder time saved (s)": round(seen["saved_encoder_seconds"], 2),
        "Uploaded": seen["uploads_written"],
        "Uploaded (MB)": round(seen["upload_bytes_stored"] / _MB, 1),
        "Uploads lost": lost,
        "Uploads waiting": seen["upload_queue_items"],
        "Bucket failures": sum(
            value
            for name, value in seen.items()
            if name.startswith("remote_requests_") and name.endswith(_FAILURES)
        ),
        "Bad objects": _total(seen, "corrupt_objects"),
        "Bucket left alone": seen["breaker_open"],
        "Errors": _total(seen, "errors"),
    }
    whole = {text: _tidy(value) for text, value in shown.items() if value}
    return {"Items": items, **whole}


def _total(seen: Mapping[str, float], name: str, suffix: str = "") -> float:
    """The sum over all label values of a metric."""
    return sum(seen["_".join((name, *row)) + suffix] for row in METRICS[name].all_series())


def _mean(seconds: float, count: float) -> float:
    return round(1000 * seconds / count, 1) if count else 0


def _mean_ms(seen: Mapping[str, float], series: str) -> float:
    return _mean(seen[f"{series}_sum"], seen[f"{series}_count"])


def _tidy(value: float) -> int | float:
    return int(value) if value == int(value) else value
