"""The summary page, from whatever reports lie in `build/bench/`.

PYTHONPATH=benchmarks python -m suite.page docs/reference/benchmarks.md
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.measure import digits
from suite.report import out_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

QUESTIONS = {
    "ttft": "How long until the first token?",
    "steps": "Does a slow bucket slow other requests down?",
    "interference": "Does moving data slow vLLM's steps down?",
    "hooks": "What do the hooks cost vLLM's scheduler?",
    "bucket": "How fast does an item come from the bucket?",
    "link": "What is compression worth on a slow link?",
    "exists": "What does a look-up cost, and a miss?",
    "puts": "How long does a put take?",
    "uploads": "How fast does a job fill the bucket?",
    "disk": "How fast does an item come from a disk?",
    "host": "How fast does an item come from host memory?",
    "tier": "What grows with the number of items?",
    "codec": "What does compression cost, and what does it save?",
    "transports": "What does a request cost the client?",
}
"""The sections by their reports' names, in the order of the page; others follow by their titles."""

SPEEDS = ("MB/s", "per second", "us")
COSTS = ("CPU s/GB", "CPU ms", "CPU us")
FIGURES = {*SPEEDS, *COSTS, "low", "high", "wire MB/s", "stored/raw", "free ms"}
"""Columns that are measured; the others say what was measured."""

UNITS = {
    "per second": "Operations per second",
    "us": "Microseconds per operation",
    "CPU s/GB": "CPU seconds of the client per GB",
    "CPU ms": "CPU milliseconds of the client per operation",
    "free ms": "Milliseconds until the caller is free",
}
PICTURE_BYTES = 100_000
"""Largest picture that goes into the documentation."""

QUIET_CORES = 0.1
"""What the system may do beside a benchmark."""

HEAD = """# Benchmarks

Written by `make bench`; how the figures come about is in `benchmarks/README.md`. Contenders take
turns in one run; figures are medians, with quartiles in brackets. Every tensor that a system
returned was compared with what was stored. MB and GB are 10^6 and 10^9 bytes. Client and server
share the machine, so look at ratios and CPU seconds before absolute speeds.
"""


def load(folder: Path) -> list[dict[str, Any]]:
    """All reports of a folder, in the order of the page."""
    reports = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(report, dict) and {"title", "rows", "targets"} <= report.keys():
            pictures = sorted(p.name for p in folder.glob(f"{path.stem}*.png"))
            heading = QUESTIONS.get(path.stem, report["title"])
            reports.append(report | {"heading": heading, "name": path.stem, "pictures": pictures})
    order = {name: at for at, name in enumerate(QUESTIONS)}
    return sorted(reports, key=lambda report: order.get(report["name"], len(order)))


def publish(page: Path) -> None:
    """Write the page, and its pictures into `images/` beside it."""
    folder, images = out_folder(), page.parent / "images"
    reports = load(folder)
    images.mkdir(parents=True, exist_ok=True)
    for report in reports:
        small = [n for n in report["pictures"] if (folder / n).stat().st_size < PICTURE_BYTES]
        for name in small:
            shutil.copyfile(folder / name, images / f"bench-{name}")
        report["pictures"] = [f"bench-{name}" for name in small]
    page.write_text(render(reports), encoding="utf-8")


def render(reports: Sequence[dict[str, Any]]) -> str:
    """The page as Markdown; its pictures are in `images/`."""
    parts = [HEAD]
    machines = list(dict.fromkeys(r.get("machine", "") for r in reports))
    versions = {k: v for r in reports for k, v in r.get("versions", {}).items()}
    dates = sorted({r.get("date", "") for r in reports})
    parts += [f"- Machine: {machine}" for machine in machines]
    parts.append("- Versions: " + ", ".join(f"{k} {v}" for k, v in versions.items()))
    parts.append(f"- Measured: {' and '.join(dates)}")
    disturbed = [r for r in reports if r.get("beside", 0.0) > QUIET_CORES]
    if disturbed:
        names = ", ".join(f"“{r['heading']}” {digits(r['beside'])}" for r in disturbed)
        parts.append(f"- Not on a quiet machine; cores that other work kept busy: {names}")
    if any(r.get("quick") for r in reports):
        names = ", ".join(f"“{r['heading']}”" for r in reports if r.get("quick"))
        parts.append(f"- Shortened runs, only to see that they work: {names}")
    parts.append(targets(reports))
    parts += [section(report) for report in reports]
    return "\n".join(parts).rstrip() + "\n"


def targets(reports: Sequence[dict[str, Any]]) -> str:
    """All promises: first those that are missed, each with its cause."""
    rows = [(bool(t["met"]), target_row(t, r)) for r in reports for t in r["targets"]]
    if not rows:
        return ""
    parts = [f"\n## Targets\n\n{sum(met for met, _ in rows)} of {len(rows)} met."]
    for wanted, name in ((False, "Missed"), (True, "Met")):
        chosen = [row for met, row in rows if met is wanted]
        if chosen:
            parts.append(f"\n### {name}\n\n{table(chosen)}")
    return "\n".join(parts)


def target_row(target: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    return {
        "target": target["text"],
        "limit": target["limit"],
        "measured": target["value"],
        "remark": target.get("note", ""),
        "figures": f"[{report['name']}](#{anchor(report['heading'])})",
    }


def anchor(heading: str) -> str:
    """The fragment that leads to a heading, in the documentation and on code hosts alike."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()))


def section(report: dict[str, Any]) -> str:
    """One report: its pictures, its notes and its tables."""
    parts = [f"\n## {report['heading']}\n"]
    parts += [f"![{report['title']}](images/{name})\n" for name in report.get("pictures", ())]
    parts += [f"{note.strip()}\n" for note in report.get("notes", ())]
    rows = report["rows"]
    if not rows or "system" not in rows[0]:
        parts.append(table(rows))
        return "\n".join(parts)
    for column in (*SPEEDS, *COSTS, "free ms"):
        found = pivot(rows, column)
        if found:
            parts.append(f"{UNITS.get(column, column)}:\n\n{table(found)}\n")
    return "\n".join(parts)


def pivot(rows: Sequence[dict[str, Any]], value: str) -> list[dict[str, Any]]:
    """One row per load and one column per system that has this value; with quartiles of speeds."""
    rows = [row for row in rows if row.get(value) is not None]
    if not rows:
        return []
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
    publish(target)
    print("wrote", target)


if __name__ == "__main__":
    main()
