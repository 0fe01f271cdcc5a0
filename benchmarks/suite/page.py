"""The summary page, from whatever reports lie in `build/bench/`.

PYTHONPATH=benchmarks python -m suite.page docs/reference/benchmarks.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.measure import digits
from suite.report import out_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

SPEEDS = ("MB/s", "per second", "us")
COSTS = ("CPU s/GB", "CPU ms", "CPU us")
FIGURES = {*SPEEDS, *COSTS, "low", "high", "wire MB/s", "stored/raw", "free ms"}
"""Columns that are measured; the others say what was measured."""

HEAD = """# Benchmarks

Written by `make bench` from the reports in `build/bench/`; how they come about is in
`benchmarks/README.md`. Contenders take turns in one run; figures are medians, with quartiles in
brackets. Every tensor that a system returned was compared with what was stored. MB and GB are 10^6
and 10^9 bytes. Client and server share the machine, so look at ratios and CPU seconds before
absolute speeds.
"""


def load(folder: Path) -> list[dict[str, Any]]:
    """All reports of a folder, in the order of their files' names."""
    reports = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(report, dict) and {"title", "rows", "targets"} <= report.keys():
            pictures = sorted(p.name for p in folder.glob(f"{path.stem}*.png"))
            reports.append(report | {"name": path.stem, "pictures": pictures})
    return reports


def render(reports: Sequence[dict[str, Any]]) -> str:
    """The page as Markdown."""
    parts = [HEAD]
    machines = list(dict.fromkeys(r.get("machine", "") for r in reports))
    versions = {k: v for r in reports for k, v in r.get("versions", {}).items()}
    dates = sorted({r.get("date", "") for r in reports})
    parts += [f"- Machine: {machine}" for machine in machines]
    parts.append("- Versions: " + ", ".join(f"{k} {v}" for k, v in versions.items()))
    parts.append(f"- Measured: {' and '.join(dates)}")
    if any(r.get("quick") for r in reports):
        names = ", ".join(r["title"] for r in reports if r.get("quick"))
        parts.append(f"- Shortened runs, only to see that they work: {names}")
    targets = [target for report in reports for target in report["targets"]]
    if targets:
        met = sum(bool(target["met"]) for target in targets)
        parts.append(f"\n## Targets\n\n{met} of {len(targets)} met.\n")
        parts.append(table([target_row(t) for t in targets]))
    for report in reports:
        parts.append(section(report))
    return "\n".join(parts).rstrip() + "\n"


def target_row(target: dict[str, Any]) -> dict[str, Any]:
    return {
        "": "met" if target["met"] else "**missed**",
        "target": target["text"],
        "limit": target["limit"],
        "measured": target["value"],
        "remark": target.get("note", ""),
    }


def section(report: dict[str, Any]) -> str:
    """One report: its notes and its tables."""
    parts = [f"\n## {report['title']}\n"]
    parts += [f"{note}\n" for note in report.get("notes", ())]
    rows = report["rows"]
    speed = next((c for c in SPEEDS if rows and c in rows[0]), None)
    if speed is None or "system" not in rows[0]:
        parts.append(table(rows))
    else:
        unit = "microseconds per operation" if speed == "us" else speed
        parts.append(f"{unit[0].upper() + unit[1:]}:\n\n{table(pivot(rows, speed))}")
        for column in (*COSTS, "free ms"):
            if column in rows[0]:
                parts.append(f"\n{column}:\n\n{table(pivot(rows, column))}")
    if report.get("pictures"):
        parts.append("\nPictures: " + ", ".join(f"`{name}`" for name in report["pictures"]) + ".")
    return "\n".join(parts)


def pivot(rows: Sequence[dict[str, Any]], value: str) -> list[dict[str, Any]]:
    """One row per load and one column per system; with quartiles where `low` and `high` fit."""
    keys = [column for column in rows[0] if column not in FIGURES and column != "system"]
    systems = list(dict.fromkeys(row["system"] for row in rows))
    made: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        load = tuple(row[key] for key in keys)
        line = made.setdefault(
            load, dict(zip(keys, load, strict=True)) | dict.fromkeys(systems, "")
        )
        line[row["system"]] = cell(row, value)
    return list(made.values())


def cell(row: dict[str, Any], value: str) -> str:
    if row.get(value) is None:
        return ""
    spread = ""
    if value in ("MB/s", "per second") and row.get("low") is not None:
        spread = f" ({digits(row['low'])} to {digits(row['high'])})"
    return digits(row[value]) + spread


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table; floats with three figures."""
    if not rows:
        return "Nothing was measured."
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns)]
    lines += [[shown(row.get(column)) for column in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(value: Any) -> str:
    if value is None:
        return "-"
    text = digits(value) if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")


def main() -> None:
    target = Path(sys.argv[1])
    target.write_text(render(load(out_folder())), encoding="utf-8")
    print("wrote", target)


if __name__ == "__main__":
    main()
