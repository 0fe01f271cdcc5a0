"""The demo's picture: what each vLLM process did, cold and warm, as a PNG.

Pure drawing from the demo's own records; must never open a window or need a display.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ec_s3.cli.demo import Case, Run

_COLORS = {
    "import": "#c9d1d9",
    "load": "#9fb1c1",
    "serve": "#5b7c99",
    "answer": "#3b6ea5",
    "encode": "#d1495b",
    "PUT": "#e08e45",
    "GET": "#2a9d8f",
}
_NAMES = {
    "import": "import vLLM",
    "load": "load model, start engine",
    "serve": "serve, shut down",
    "answer": "prompt answered (by number)",
    "encode": "encoder call",
    "PUT": "S3: item stored",
    "GET": "S3: item fetched",
}
_LANES = ("answers", "encoder", "S3 server")


def draw(cases: Sequence[Case], path: Path) -> None:
    """Write the picture: whole processes on top, then the first moments of serving, one row each.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = len(cases)
    figure: Any = Figure(figsize=(12.5, 2.2 + 0.42 * rows + 1.45 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        1 + rows, 2, height_ratios=[0.7 + 0.42 * rows, *([1.45] * rows)], wspace=0.04
    )
    figure.suptitle(
        "One S3 bucket, two vLLM processes: what the first encodes, the second fetches",
        fontsize=14,
        fontweight="bold",
    )
    _draw_processes(figure.add_subplot(grid[0, :]), cases)
    for row, case in enumerate(cases, start=1):
        limit = 1.04 * max(_serving_ms(case.cold), _serving_ms(case.warm))
        for column, run in enumerate((case.cold, case.warm)):
            axes = figure.add_subplot(grid[row, column])
            _draw_serving(axes, run, limit=limit, last=row == rows, labels=column == 0)
            axes.set_title(
                f"{case.model} {case.dtype}, {run.name}: "
                f"{run.encoder_calls} encoder calls, "
                f"{run.count('GET')} GET, {run.count('PUT')} PUT",
                fontsize=10,
                loc="left",
            )
    figure.legend(
        handles=[_patch(_COLORS[kind], name) for kind, name in _NAMES.items()],
        loc="outside lower center",
        ncols=len(_NAMES),
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, dpi=110)


def _draw_processes(axes: Any, cases: Sequence[Case]) -> None:
    """One bar per process: importing, loading, serving, in seconds."""
    labels = []
    for row, (case, run) in enumerate((c, r) for c in cases for r in (c.cold, c.warm)):
        imports = run.imported - run.process_started
        load = run.ready - run.imported
        serve = run.ended - run.ready
        left = 0.0
        for kind, seconds in (("import", imports), ("load", load), ("serve", serve)):
            axes.barh(row, seconds, left=left, height=0.72, color=_COLORS[kind])
            left += seconds
        axes.text(left + 0.1, row, f"{left:.1f} s", va="center", fontsize=8)
        labels.append(f"{case.model} {case.dtype}, {run.name}")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the start of the process", fontsize=9)
    _bare(axes)


def _draw_serving(axes: Any, run: Run, *, limit: float, last: bool, labels: bool) -> None:
    """Answers, encoder calls and requests at the S3 server, in ms since the first prompt."""
    origin = run.answers[0].started
    for number, answer in enumerate(run.answers):
        start, width = _ms(answer.started - origin), _ms(answer.seconds)
        axes.barh(0, width, left=start, height=0.62, color=_COLORS["answer"], edgecolor="white")
        if width > limit / 40:
            middle, label = start + width / 2, str(number + 1)
            axes.text(middle, 0, label, ha="center", va="center", color="w", fontsize=8)
    for encode in run.encodes:
        start = _ms(encode.started - origin)
        width = max(_ms(encode.seconds), limit / 250)
        axes.barh(1, width, left=start, height=0.62, color=_COLORS["encode"])
    for request in run.requests:
        moment = _ms(request.time - origin)
        axes.plot([moment, moment], [1.72, 2.28], color=_COLORS[request.method], linewidth=2.5)
    if not run.encodes:
        axes.text(limit / 2, 1, "not called", ha="center", va="center", color="#777", fontsize=9)
    axes.set_xlim(0, limit)
    axes.set_ylim(2.5, -0.5)
    axes.set_yticks(range(len(_LANES)), _LANES if labels else [""] * len(_LANES), fontsize=8)
    if last:
        axes.set_xlabel("milliseconds since the first prompt with an image", fontsize=9)
    _bare(axes)


def _serving_ms(run: Run) -> float:
    first = run.answers[0].started
    ends = [answer.started + answer.seconds for answer in run.answers]
    ends += [request.time for request in run.requests]
    return _ms(max(ends) - first)


def _ms(seconds: float) -> float:
    return 1000 * seconds


def _patch(color: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)


def _bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
