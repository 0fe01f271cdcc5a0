"""The matrix's table: rows of what failed, columns of who met it; as text, Markdown and JSON."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_SHORT = {"ec_both": "both", "ec_producer": "producer", "ec_consumer": "consumer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The outcome of one cell.

    Attributes:
        failure: the row.
        column: role and layout, or the name of a special engine.
        ok: whether everything held.
        note: figures, or what went wrong.
        requests: sent while the failure lasted.
        late: seconds beyond deadline and model time of the slowest of them, None if not timed.
        recovery: seconds until the encoder was spared again, None if not measured.
        seconds: duration of the cell.
    """

    failure: str
    column: str
    ok: bool
    note: str = ""
    requests: int = 0
    late: float | None = None
    recovery: float | None = None
    seconds: float = 0.0


def column(role: str, layout: str) -> str:
    """The heading of a role in a layout."""
    return f"{_SHORT[role]}, {layout}"


def markdown(cells: Iterable[Cell], columns: Sequence[str]) -> str:
    """The grid of the shared engines, the list of the special ones, and the complaints."""
    cells = list(cells)
    grid = [cell for cell in cells if cell.column in columns]
    special = [cell for cell in cells if cell.column not in columns]
    used = [name for name in columns if any(cell.column == name for cell in grid)]
    lines: list[str] = []
    if grid:
        lines += [_row("Failure", *used), _row(*["---"] * (len(used) + 1))]
        for failure in dict.fromkeys(cell.failure for cell in grid):
            by_column = {cell.column: cell for cell in grid if cell.failure == failure}
            lines.append(_row(failure, *(_mark(by_column.get(name)) for name in used)))
    if special:
        lines += ["", _row("Failure", "Engine", "Result", "Note"), _row(*["---"] * 4)]
        lines += [_row(c.failure, c.column, _mark(c), c.note if c.ok else "") for c in special]
    lines += ["", _figures(cells)]
    bad = [cell for cell in cells if not cell.ok]
    if bad:
        lines += ["", "What went wrong:", ""]
        lines += [f"- {cell.failure} ({cell.column}): {_brief(cell.note)}" for cell in bad]
    return "\n".join(lines) + "\n"


def _brief(note: str) -> str:
    """The first line, without folders of the machine that it happened on."""
    return re.sub(r"/[^\s'\"]*/", "", note.partition("\n")[0])[:160]


def to_json(cells: Iterable[Cell], path: Path) -> None:
    """Write all cells with their figures."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")


def from_json(path: Path) -> list[Cell]:
    """The cells of an earlier run, none when there was none."""
    if not path.exists():
        return []
    return [Cell(**row) for row in json.loads(path.read_text())]


def merged(earlier: Iterable[Cell], later: Iterable[Cell]) -> list[Cell]:
    """Cells by failure and column, the later ones where both have them."""
    cells = {(cell.failure, cell.column): cell for cell in (*earlier, *later)}
    return list(cells.values())


def _figures(cells: list[Cell]) -> str:
    late = [cell.late for cell in cells if cell.late is not None]
    recovery = sorted(cell.recovery for cell in cells if cell.recovery is not None)
    parts = [
        f"{len(cells)} cells, {sum(not cell.ok for cell in cells)} failed, "
        f"{sum(cell.requests for cell in cells)} requests under failure."
    ]
    if late:
        parts.append(f"Latest answer: {max(late):+.2f} s from its deadline.")
    if recovery:
        parts.append(
            f"First hit after a failure: median {recovery[len(recovery) // 2]:.1f} s, "
            f"worst {recovery[-1]:.1f} s."
        )
    return " ".join(parts)


def _mark(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return "ok" if cell.ok else "**FAILED**"


def _row(*fields: str) -> str:
    return "| " + " | ".join(field.replace("|", "/").replace("\n", " ") for field in fields) + " |"
