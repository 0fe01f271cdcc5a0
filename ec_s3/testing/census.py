"""What the processes of a group hold: threads, files, sockets, shared memory. For leak checks.

Reads Linux's /proc from outside, so that the processes under test need no help of their own. Runs
in the caller's thread; a process that ends meanwhile is left out.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC = Path("/proc")
_SLAB = re.compile(r" /memfd:ec_s3\b")
_SLAB_INODE = re.compile(r"^\S+ \S+ \S+ \S+ (\d+) +/memfd:ec_s3\b", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """Totals over all processes of a group.

    Attributes:
        processes: their ids.
        threads: of all of them together.
        descriptors: open file descriptors, sockets included.
        sockets: those of them that are sockets.
        slabs: different pieces of host memory of ec_s3 that are mapped.
        resident_bytes: memory in use, shared pages counted in every process.
    """

    processes: tuple[int, ...]
    threads: int
    descriptors: int
    sockets: int
    slabs: int
    resident_bytes: int


def census(group: int) -> Census:
    """Count what the processes of a group hold; `group` is its leader's process id."""
    found = tuple(group_processes(group))
    links = [link for pid in found for link in _descriptors(pid)]
    slabs = {inode for pid in found for inode in _SLAB_INODE.findall(_read(pid, "maps"))}
    return Census(
        processes=found,
        threads=sum(_status(pid, "Threads") for pid in found),
        descriptors=len(links),
        sockets=sum(link.startswith("socket:") for link in links),
        slabs=len(slabs),
        resident_bytes=sum(_status(pid, "VmRSS") for pid in found) << 10,
    )


def group_processes(group: int) -> Iterator[int]:
    """Ids of the living processes of a process group, zombies left out."""
    for pid in _pids():
        _, _, rest = _read(pid, "stat").rpartition(") ")
        fields = rest.split()
        if len(fields) > 2 and fields[0] != "Z" and int(fields[2]) == group:
            yield pid


def slab_users() -> set[int]:
    """Processes of this machine that have host memory of ec_s3 mapped."""
    return {pid for pid in _pids() if _SLAB.search(_read(pid, "maps"))}


def rank_sockets(group: int | None = None) -> set[str]:
    """Inodes of the abstract sockets between scheduler parts and ranks, of a group or of all."""
    rows = (line.split() for line in (_PROC / "net" / "unix").read_text().splitlines())
    found = {row[6] for row in rows if len(row) > 7 and row[7].startswith("@ec_s3-")}
    if group is None:
        return found
    links = {link for pid in group_processes(group) for link in _descriptors(pid)}
    return {inode for inode in found if f"socket:[{inode}]" in links}


def named_like(group: int, pattern: str) -> list[int]:
    """Processes of a group whose title or command line matches an expression."""
    return [pid for pid in group_processes(group) if re.search(pattern, _title(pid))]


def _title(pid: int) -> str:
    return _read(pid, "comm").strip() + " " + _read(pid, "cmdline").replace("\0", " ")


def _pids() -> Iterator[int]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def _read(pid: int, name: str) -> str:
    try:
        return (_PROC / str(pid) / name).read_text(errors="replace")
    except OSError:  # it has ended, or belongs to somebody else
        return ""


def _status(pid: int, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+)", _read(pid, "status"), re.MULTILINE)
    return int(found[1]) if found else 0


def _descriptors(pid: int) -> Iterator[str]:
    folder = _PROC / str(pid) / "fd"
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                yield str(entry.readlink())
