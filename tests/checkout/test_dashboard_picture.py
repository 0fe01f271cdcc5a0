"""The pictures of the dashboard: what is evaluated, and that every query of it can be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dashboard_picture import (
    DASHBOARD,
    IMAGES,
    NOT_DRAWN,
    RECORDING,
    legend,
    lines,
    readable,
    rows,
)
from dashboard_recording import PHASES, load
from doc_pages import ROOT
from promql import Recording, evaluate

WINDOWS = {"$__rate_interval": 10.0, "$__range": 100.0}
PAGE = ROOT / "docs/how-to/read-the-dashboard.md"


def recorded(**series: dict[str, list[float]]) -> Recording:
    """A sample every five seconds of each series, by metric and value of its label `k`."""
    made = Recording()
    for name, of_name in series.items():
        for value, samples in of_name.items():
            for number, sample in enumerate(samples):
                made.add(5.0 * number, name, {"k": value}, sample)
    return made


def at(expression: str, recording: Recording, time: float = 10.0) -> dict[str, float]:
    """The value of an expression, by the values of its labels."""
    found = evaluate(expression, recording, time, WINDOWS)
    return {",".join(value for _, value in sorted(labels)): v for labels, v in found.items()}


COUNTS = recorded(m={"a": [0, 10, 30], "b": [5, 5, 15]})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("m", {"a": 30, "b": 15}),
        ('m{k="a"}', {"a": 30}),
        ('m{k!~"a|c"}', {"b": 15}),
        ('m{k=~"$k"}', {"a": 30, "b": 15}),
        ("rate(m[$__rate_interval])", {"a": 3, "b": 1}),
        ("sum(rate(m[$__rate_interval]))", {"": 4}),
        ("sum by (k) (increase(m[$__range]))", {"a": 30, "b": 10}),
        ("sum by (k) (m) > 20", {"a": 30}),
        ("max(m) / sum(m)", {"": 30 / 45}),
        ("count by (k) (m)", {"a": 1, "b": 1}),
    ],
)
def test_expressions_have_their_value(expression: str, value: dict[str, float]) -> None:
    assert at(expression, COUNTS) == pytest.approx(value)


@pytest.mark.parametrize("expression", ["topk(1, m)", "m offset 5m", "m + m", "m[5m]"])
def test_other_forms_are_refused(expression: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        at(expression, COUNTS)


def test_counter_that_starts_again_grows_by_what_it_has() -> None:
    assert at("increase(m[$__range])", recorded(m={"a": [50, 60, 4]})) == {"a": 14}


def test_sample_without_successor_is_forgotten() -> None:
    assert at("m", COUNTS, time=1000.0) == {}


@pytest.mark.parametrize(("share", "value"), [(0.5, 1.5), (0.9, 3.2), (0.25, 1.0), (1.0, 4.0)])
def test_quantiles_are_within_their_bucket(share: float, value: float) -> None:
    made = Recording()
    for bound, grown in (("1", 5.0), ("2", 15.0), ("4", 20.0), ("+Inf", 20.0)):
        made.add(0.0, "m_bucket", {"le": bound}, 0.0)
        made.add(5.0, "m_bucket", {"le": bound}, grown)
    expression = f"histogram_quantile({share}, sum by (le) (rate(m_bucket[$__rate_interval])))"
    assert at(expression, made) == {"": pytest.approx(value)}


def test_quantile_of_nothing_is_nothing() -> None:
    made = recorded(m_bucket={})
    expression = "histogram_quantile(0.5, sum by (le) (rate(m_bucket[$__rate_interval])))"
    assert at(expression, made) == {}


def panels() -> list[dict[str, Any]]:
    found = rows(json.loads(DASHBOARD.read_text()))
    return [panel for of_row in found.values() for panel in of_row]


@pytest.fixture(scope="module")
def recording() -> Recording:
    return load(RECORDING)


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_every_panel_can_be_evaluated(panel: dict[str, Any], recording: Recording) -> None:
    times = recording.times()
    found = lines(panel, recording, [times[0], times[len(times) // 2], times[-1]])
    assert all(len(line.values) == 3 for line in found)


def test_recording_shows_a_bucket_that_fills_fails_and_comes_back(recording: Recording) -> None:
    (hits,) = [panel for panel in panels() if panel["title"] == "Hits by tier"]
    seen = {line.legend for line in lines(hits, recording, recording.times())}
    assert seen == {"local", "remote"}
    (breaker,) = [panel for panel in panels() if panel["title"] == "Bucket answers"]
    (line,) = lines(breaker, recording, recording.times())
    assert set(line.values) == {0.0, 1.0}


def test_the_page_shows_every_picture_and_says_who_drew_it() -> None:
    text = PAGE.read_text()
    names = {f"dashboard-{title.lower().replace(' ', '-')}.png" for title in shown_rows()}
    assert {path.name for path in IMAGES.glob("dashboard-*.png")} == names
    for name in names:
        assert f"(images/{name})" in text
        assert (IMAGES / name).read_bytes().startswith(b"\x89PNG")
    assert "tools/dashboard/dashboard_picture.py" in text
    assert all(phase in text for phase in PHASES)


def shown_rows() -> set[str]:
    return set(rows(json.loads(DASHBOARD.read_text()))) - NOT_DRAWN


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.7, "percentunit", "70 %"),
        (0.02, "s", "20 ms"),
        (2.5, "s", "2.5 s"),
        (3.2e6, "Bps", "3.2 MB/s"),
        (12.0, "bytes", "12 B"),
        (1.5, "reqps", "1.5 /s"),
        (3.0, "short", "3"),
    ],
)
def test_numbers_have_units(value: float, unit: str, text: str) -> None:
    assert readable(value, unit) == text


def test_legends_are_filled_in() -> None:
    assert legend("{{tier}} p50", {"tier": "disk"}) == "disk p50"
