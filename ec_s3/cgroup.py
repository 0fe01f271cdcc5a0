"""How much memory this process may still take: cgroup limits and the machine's free memory.

Read once per slab, on whichever thread creates it. Only reads `/proc` and `/sys`; never sets a
limit, never raises for a file that is missing or unreadable (that source then sets no bound).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number close to 2**63


@dataclass(frozen=True, slots=True)
class Headroom:
    """One bound on this process's memory.

    Attributes:
        source: the file or field that sets it.
        limit: the bound itself, bytes.
        free: bytes that are left below it; the page cache counts as free.
    """

    source: str
    limit: int
    free: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """File and counter names of one cgroup version."""

    limit: str
    usage: str
    cache: tuple[str, ...]


_V2 = _Layout("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _Layout(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def headroom(root: Path = Path("/")) -> Headroom | None:
    """The tightest bound, None when the system tells of none.

    Args:
        root: where `proc` and `sys` are found.
    """
    bounds = [*_cgroup_bounds(root), *_machine_bounds(root)]
    return min(bounds, key=lambda bound: bound.free, default=None)


def _machine_bounds(root: Path) -> Iterator[Headroom]:
    fields = _counters(root / "proc/meminfo")
    if "MemAvailable" in fields:
        free = fields["MemAvailable"] * 1024
        yield Headroom("MemAvailable", fields.get("MemTotal", 0) * 1024, free)


def _cgroup_bounds(root: Path) -> Iterator[Headroom]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases, layout = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], _V2
        elif "memory" in controllers.split(","):
            bases, layout = ["sys/fs/cgroup/memory"], _V1
        else:
            continue
        # A parent's limit binds too. Inside a container the path may be the host's and lead
        # nowhere; the mount's own root is then this process's group.
        parts = [part for part in path.split("/") if part not in {"", ".."}]
        for base in bases:
            for depth in range(len(parts), -1, -1):
                yield from _bound(root.joinpath(base, *parts[:depth]), layout)


def _bound(directory: Path, layout: _Layout) -> Iterator[Headroom]:
    limit = _text(directory / layout.limit).strip()
    usage = _text(directory / layout.usage).strip()
    if not (limit.isdecimal() and usage.isdecimal()) or int(limit) >= _UNLIMITED:
        return
    counters = _counters(directory / "memory.stat")
    cache = sum(counters.get(name, 0) for name in layout.cache)
    used = max(int(usage) - cache, 0)
    yield Headroom(str(directory / layout.limit), int(limit), max(int(limit) - used, 0))


def _counters(path: Path) -> dict[str, int]:
    """The lines `name number` or `name: number kB` of a file, without their unit."""
    rows = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
