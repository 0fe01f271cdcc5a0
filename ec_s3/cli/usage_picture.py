"""The picture of `du`: one bar a namespace, in the colours of its objects' ages, as an SVG file.

Pure drawing, by hand: nothing to install, and a browser shows it. Text comes from a bucket and is
escaped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from ec_s3.cli.inventory import AGES
from ec_s3.cli.output import counted, human_bytes, printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

AGE_NAMES = (
    f"up to {AGES[0]} day",
    *(f"{younger} to {older} days" for younger, older in pairwise(AGES)),
    f"over {AGES[-1]} days",
)
"""The groups of ages in words."""

_COLORS = ("#1b6ca8", "#3fa7a0", "#a5c663", "#f2b84b", "#c8553d")
_MAX_BARS = 15
_WIDTH, _LEFT, _BAR, _ROW, _TOP = 960, 350, 400, 34, 84
_MAX_LABEL = 46


@dataclass(frozen=True, slots=True)
class Bar:
    """One row.

    Attributes:
        label: what it stands for.
        age_bytes: stored bytes in each group of ages.
        raw_bytes: tensor bytes, None when that is not known.
    """

    label: str
    age_bytes: tuple[int, ...]
    raw_bytes: int | None

    @property
    def stored(self) -> int:
        """Stored bytes of all ages."""
        return sum(self.age_bytes)


def draw(bars: Sequence[Bar], path: Path, *, moment: float) -> None:
    """Write the picture.

    Args:
        bars: the rows, largest first; those that do not fit become one.
        path: the file, which is replaced.
        moment: when the numbers were taken, in seconds since the epoch.
    """
    rows = _fit(bars)
    longest = max((max(bar.stored, bar.raw_bytes or 0) for bar in rows), default=0) or 1
    height = _TOP + _ROW * max(1, len(rows)) + 16
    total = human_bytes(sum(bar.stored for bar in rows))
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="13" fill="#24292f">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="17" font-weight="bold">{total} stored, {date}</text>',
        *_legend(),
    ]
    for index, bar in enumerate(rows):
        parts += _row(bar, _TOP + _ROW * index, _BAR / longest)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _fit(bars: Sequence[Bar]) -> list[Bar]:
    if len(bars) <= _MAX_BARS:
        return list(bars)
    kept, rest = bars[: _MAX_BARS - 1], bars[_MAX_BARS - 1 :]
    sizes = tuple(sum(column) for column in zip(*(bar.age_bytes for bar in rest), strict=True))
    raws = [bar.raw_bytes for bar in rest if bar.raw_bytes is not None]
    raw = sum(raws) if len(raws) == len(rest) else None
    return [*kept, Bar(counted(len(rest), "smaller namespace"), sizes, raw)]


def _legend() -> list[str]:
    parts, x = [], 16
    for name, color in zip(AGE_NAMES, _COLORS, strict=True):
        parts.append(f'<rect x="{x}" y="46" width="14" height="14" fill="{color}"/>')
        parts.append(f'<text x="{x + 20}" y="58">{name}</text>')
        x += 42 + 7 * len(name)
    parts.append(
        f'<rect x="{x}" y="46.5" width="24" height="13" fill="none" stroke="#57606a" '
        'stroke-dasharray="3 2"/>'
    )
    parts.append(f'<text x="{x + 30}" y="58">before compression</text>')
    return parts


def _row(bar: Bar, y: int, scale: float) -> list[str]:
    label = printable(bar.label)
    if len(label) > _MAX_LABEL:
        label = f"{label[: _MAX_LABEL // 2]}…{label[-_MAX_LABEL // 2 :]}"
    parts = [
        f'<text x="{_LEFT - 10}" y="{y + 16}" font-size="12" text-anchor="end">'
        f"{escape(label)}</text>"
    ]
    x = float(_LEFT)
    for nbytes, color in zip(bar.age_bytes, _COLORS, strict=True):
        if nbytes:
            width = nbytes * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="22" fill="{color}"/>'
            )
            x += width
    text = human_bytes(bar.stored)
    end = x
    if bar.raw_bytes is not None:
        width = bar.raw_bytes * scale
        parts.append(
            f'<rect x="{_LEFT}" y="{y - 1.5}" width="{width:.1f}" height="25" fill="none" '
            'stroke="#57606a" stroke-dasharray="3 2"/>'
        )
        end = max(end, _LEFT + width)
        text += f" ({human_bytes(bar.raw_bytes)} raw)"
    parts.append(f'<text x="{end + 8:.1f}" y="{y + 16}">{escape(text)}</text>')
    return parts
