"""Pictures of a report's rows; needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from suite.report import out_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

COLOURS = {
    "ec_s3": "#0b6e4f",
    "ec_s3 direct": "#2f9e77",
    "ec_s3 blocking": "#8fcfb9",
    "LMCache": "#c8553d",
    "LMCache ECCacheEngine": "#c8553d",
    "LMCache batched_get": "#e39d8d",
    "aiobotocore": "#7a7a9d",
    "boto3": "#a9a9c4",
}
OTHERS = ("#d9b44a", "#8d6a9f", "#4c86a8", "#b0b0b0", "#6b4e3d")


def bars(
    name: str,
    rows: Sequence[dict[str, Any]],
    *,
    panels: tuple[str, ...],
    group: str,
    value: str,
    label: str,
    title: str,
    log: bool = False,
) -> Path:
    """Grouped bars with quartiles: one panel per combination of `panels`, one group per `group`.

    Args:
        name: file name below `build/bench`, without suffix.
        rows: with the columns `system`, `group`, `panels`, `value`, and `low` and `high` of it.
        panels: columns whose combinations get a panel each.
        group: column along the x axis.
        value: column that is drawn.
        label: of the y axis.
        title: of the picture.
        log: whether the y axis is logarithmic.
    """
    combinations = list(dict.fromkeys(tuple(row[p] for p in panels) for row in rows))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    spare = iter(OTHERS * 3)
    colours = {system: COLOURS.get(system) or next(spare) for system in systems}
    columns = min(3, len(combinations))
    lines = -(-len(combinations) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(5.2 * columns, 3.4 * lines + 0.9), squeeze=False
    )
    for axis in axes.flat[len(combinations) :]:
        axis.set_visible(False)
    for axis, combination in zip(axes.flat, combinations, strict=False):
        mine = [r for r in rows if tuple(r[p] for p in panels) == combination]
        groups = list(dict.fromkeys(row[group] for row in mine))
        present = [s for s in systems if any(r["system"] == s for r in mine)]
        width = 0.84 / len(present)
        for at, system in enumerate(present):
            chosen = {r[group]: r for r in mine if r["system"] == system}
            places = [i for i, g in enumerate(groups) if g in chosen]
            found = [chosen[groups[i]] for i in places]
            heights = [row[value] for row in found]
            below = [max(0.0, row[value] - row["low"]) for row in found]
            above = [max(0.0, row["high"] - row[value]) for row in found]
            axis.bar(
                [i - 0.42 + width * (at + 0.5) for i in places],
                heights,
                width * 0.92,
                yerr=(below, above),
                color=colours[system],
                error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
                label=system,
            )
        axis.set_xticks(range(len(groups)), [str(g) for g in groups], fontsize=8)
        axis.set_title(
            ", ".join(
                v if isinstance(v, str) else f"{p} {v}"
                for p, v in zip(panels, combination, strict=True)
            ),
            fontsize=9,
        )
        axis.set_xlabel(group, fontsize=8)
        axis.grid(axis="y", linewidth=0.4, alpha=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        if log:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("")
            axis.grid(axis="y", which="minor", linewidth=0.2, alpha=0.6)
    for line in axes:
        line[0].set_ylabel(label)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[system]) for system in systems]
    figure.suptitle(title, fontsize=11)
    figure.legend(handles, systems, loc="lower center", ncols=min(7, len(systems)), fontsize=8)
    figure.tight_layout(rect=(0, 0.9 / (3.4 * lines + 0.9) * 0.4, 1, 1))
    path = out_folder() / f"{name}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
