"""Draw the Grafana dashboard from a recording of metrics: for people who want to see it first.

    python tools/dashboard/dashboard_picture.py

Reads `deploy/grafana/ec-s3.json` and `tools/dashboard/recording.jsonl.gz` (see
`dashboard_recording.py`) and writes a PNG for each row of the dashboard into `docs/how-to/images`.
Titles, queries, units, legends and places are the dashboard's; the drawing is not Grafana's, and
leaves out lines that stay at zero. The row on health is not drawn: it is flat when all is well.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from dashboard_recording import PHASE_SECONDS, PHASES, load
from matplotlib.figure import Figure
from promql import evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from promql import Recording

    Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy/grafana/ec-s3.json"
RECORDING = Path(__file__).with_name("recording.jsonl.gz")
IMAGES = ROOT / "docs/how-to/images"
RATE_SECONDS = 14.0
"""Window of a rate: Grafana takes four scrapes at least, and these came every two seconds."""

COLOURS = ("#3e7cb1", "#d9822b", "#4f9d69", "#b4485a", "#7d6bb3", "#7f7f7f", "#c0a030", "#35a0a0")
GOOD, BAD, INK, FAINT = "#2f7d4f", "#b4382f", "#24292f", "#d6dae0"
LONG = 27
"""Letters of a legend that fit into half of a panel."""

MANY = 5
"""Lines of a panel whose legends leave no room for their highest values."""

NOT_DRAWN = {"Health"}
COLUMNS, COLUMN_INCHES, ROW_INCHES = 24, 0.46, 0.36
STYLE = {
    "font.size": 8,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": "#57606a",
    "ytick.color": "#57606a",
    "text.color": INK,
    "axes.grid": True,
    "grid.color": "#eceff2",
    "svg.hashsalt": "ec_s3",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel: its legend, and its value at each time, None for a gap."""

    legend: str
    values: tuple[float | None, ...]


def rows(dashboard: Json) -> dict[str, list[Json]]:
    """The panels below each heading."""
    found: dict[str, list[Json]] = {}
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            found[panel["title"]] = []
        else:
            found[next(reversed(found))].append(panel)
    return found


def lines(panel: Json, recording: Recording, times: Sequence[float]) -> list[Line]:
    """What a panel shows."""
    windows = {"$__rate_interval": RATE_SECONDS, "$__range": times[-1] - times[0]}
    found: list[Line] = []
    for target in panel["targets"]:
        at = [evaluate(target["expr"], recording, time, windows) for time in times]
        for labels in sorted({labels for vector in at for labels in vector}, key=sorted):
            values = tuple(vector.get(labels) for vector in at)
            if panel["type"] == "stat" or any(values):
                found.append(Line(legend(target.get("legendFormat", ""), dict(labels)), values))
    return found


def legend(form: str, labels: Mapping[str, str]) -> str:
    """As Grafana fills one in."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), form)


def readable(value: float, unit: str) -> str:
    """A number with its unit, short."""
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s" and value and abs(value) < 1:
        return f"{1000 * value:.3g} ms"
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit in {"bytes", "Bps"} and abs(value) >= size:
            value, unit = value / size, prefix + {"bytes": "B", "Bps": "B/s"}[unit]
            break
    shown = {"reqps": "/s", "ops": "/s", "bytes": "B", "Bps": "B/s", "none": "", "short": ""}
    return f"{value:.3g} {shown.get(unit, unit)}".strip()


def draw_row(title: str, panels: Sequence[Json], recording: Recording) -> Figure:
    """One row of the dashboard."""
    top = min(panel["gridPos"]["y"] for panel in panels)
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) - top
    figure = Figure((COLUMNS * COLUMN_INCHES, height * ROW_INCHES + 0.4), dpi=140)
    figure.text(0.008, 1 - 0.26 / figure.get_figheight(), title, fontsize=11, weight="bold")
    usable = 1 - 0.4 / figure.get_figheight()
    sampled = recording.times()
    times = [time for time in sampled if time >= sampled[0] + RATE_SECONDS / 2][::2]
    for panel in panels:
        place = panel["gridPos"]
        left, wide = place["x"] / COLUMNS, place["w"] / COLUMNS
        low = usable * (1 - (place["y"] - top + place["h"]) / height)
        tall = usable * place["h"] / height
        found = lines(panel, recording, times)
        unit = panel["fieldConfig"]["defaults"].get("unit", "none")
        if panel["type"] == "timeseries":
            inside = (left + 0.05, low + tall * 0.38, wide - 0.064, tall * 0.5)
            axes = figure.add_axes(inside, title=panel["title"])
            _draw_lines(axes, panel, found, times)
            _draw_legend(axes, found, unit, columns=2 if place["w"] > 6 else 1)
        else:
            axes = figure.add_axes((left + 0.006, low + 0.012, wide - 0.012, tall - 0.03))
            _draw_value(axes, panel, found, unit)
    return figure


def _draw_lines(axes: Axes, panel: Json, found: Sequence[Line], times: Sequence[float]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    unit, custom = defaults.get("unit", "none"), defaults.get("custom", {})
    axes.title.set(fontsize=9, weight="bold", ha="left", position=(0, 1), y=1.03)
    axes.margins(x=0)
    for number in range(len(PHASES)):
        if number % 2:
            begin = number * PHASE_SECONDS
            axes.axvspan(begin, begin + PHASE_SECONDS, color="#f6f7f9", zorder=0)
    below = [0.0] * len(times)
    for number, line in enumerate(found):
        colour = COLOURS[number % len(COLOURS)]
        values = [float("nan") if value is None else value for value in line.values]
        if custom.get("stacking", {}).get("mode") == "normal":
            upper = [b + (0 if v != v else v) for b, v in zip(below, values, strict=True)]
            axes.fill_between(times, below, upper, color=colour, alpha=0.3, linewidth=0)
            axes.plot(times, upper, color=colour, linewidth=1)
            below = upper
        else:
            axes.plot(times, values, color=colour, linewidth=1.2)
    if custom.get("scaleDistribution", {}).get("type") == "log" and any(
        value for line in found for value in line.values
    ):
        axes.set_yscale("log")
    elif defaults.get("min") == 0:
        top = axes.get_ylim()[1]
        axes.set_ylim(0, 1.15 * top if found and top > 0 else 1)  # room for the numbers
    axes.set_xlim(times[0], times[-1])
    axes.xaxis.set_major_formatter(lambda value, _: f"{int(value) // 60}:{int(value) % 60:02}")
    axes.yaxis.set_major_formatter(lambda value, _: readable(value, unit))
    axes.xaxis.set_major_locator(mpl.ticker.MultipleLocator(PHASE_SECONDS))
    axes.yaxis.set_major_locator(mpl.ticker.MaxNLocator(4)) if axes.get_yscale() != "log" else None
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for number in range(len(PHASES)):
        middle = (max(number * PHASE_SECONDS, times[0]) + (number + 1) * PHASE_SECONDS) / 2
        place = axes.get_xaxis_transform()
        axes.text(
            middle,
            0.97,
            number + 1,
            transform=place,
            ha="center",
            va="top",
            fontsize=7,
            color="#57606a",
            bbox={"boxstyle": "circle,pad=0.25", "facecolor": "white", "edgecolor": FAINT},
        )
    if not found:
        axes.text(
            0.5, 0.5, "0 all the time", transform=axes.transAxes, ha="center", color="#8b949e"
        )


def _draw_legend(axes: Axes, found: Sequence[Line], unit: str, *, columns: int) -> None:
    """Below the panel: each line's name, and its last and highest value."""
    texts = []
    for line in found:
        known = [value for value in line.values if value is not None]
        last = readable(line.values[-1], unit) if line.values[-1] is not None else "-"
        highest = f", max {readable(max(known), unit)}" if len(found) < MANY else ""
        texts.append(f"{line.legend}: {last}{highest}")
    if any(len(text) > LONG for text in texts):
        columns = 1
    for number, shown in enumerate(texts):
        x, y = (number % columns) * 0.53, -0.27 - 0.115 * (number // columns)
        axes.plot(
            [x, x + 0.03],
            [y, y],
            transform=axes.transAxes,
            clip_on=False,
            color=COLOURS[number % len(COLOURS)],
            linewidth=2,
        )
        axes.text(x + 0.045, y, shown, transform=axes.transAxes, va="center", fontsize=6.5)


def _draw_value(axes: Axes, panel: Json, found: Sequence[Line], unit: str) -> None:
    """A panel that shows its last value."""
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.text(
        0.03, 0.9, panel["title"], transform=axes.transAxes, fontsize=9, weight="bold", va="top"
    )
    last = next((line.values[-1] for line in found), None)
    text, colour, size = _stat(panel, last, unit)
    axes.text(
        0.5,
        0.4,
        text,
        transform=axes.transAxes,
        ha="center",
        va="center",
        color=colour,
        fontsize=size,
    )


def _stat(panel: Json, value: float | None, unit: str) -> tuple[str, str, float]:
    if value is None:
        return "No data", "#8b949e", 12.0
    defaults = panel["fieldConfig"]["defaults"]
    texts = {
        key: option["text"]
        for mapping in defaults.get("mappings", ())
        for key, option in mapping["options"].items()
    }
    colour = INK
    for step in defaults.get("thresholds", {}).get("steps", ()):
        if step["value"] is None or value >= step["value"]:
            colour = {"green": GOOD, "red": BAD}.get(step["color"], INK)
    return texts.get(f"{value:g}", readable(value, unit)), colour, 20.0


def pictures(recording: Recording) -> dict[str, Figure]:
    """A figure for each row, by the name of its file."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    with mpl.rc_context(STYLE):
        return {
            f"dashboard-{re.sub(r'[^a-z]+', '-', title.lower())}.png": draw_row(
                title, panels, recording
            )
            for title, panels in rows(dashboard).items()
            if title not in NOT_DRAWN
        }


def main() -> int:
    """Draw all of them."""
    IMAGES.mkdir(exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, figure in pictures(load(RECORDING)).items():
            figure.savefig(IMAGES / name, metadata={"Software": None})
            sys.stdout.write(f"{IMAGES / name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
