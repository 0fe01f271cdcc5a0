"""Memory bounds, read from made-up /proc and /sys trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ec_s3 import pages
from ec_s3.cgroup import Headroom, headroom
from ec_s3.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def free_below(root: Path) -> int:
    bound = headroom(root)
    assert bound is not None
    return bound.free


def test_without_any_limit_the_machines_free_memory_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 1048576 kB\n",
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/fs/cgroup/memory.current": "5\n",
        },
    )
    assert headroom(root) == Headroom("MemAvailable", 8 * GIB, GIB)


def test_v2_limit_counts_page_cache_as_free(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": f"MemAvailable: {64 << 20} kB\n",
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/pod/app/memory.max": str(4 * GIB),
            "sys/fs/cgroup/pod/app/memory.current": str(3 * GIB),
            "sys/fs/cgroup/pod/app/memory.stat": f"inactive_file {GIB}\nactive_file {GIB}\n",
        },
    )
    assert free_below(root) == 3 * GIB


def test_a_parents_tighter_limit_binds(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/pod/app/memory.max": str(4 * GIB),
            "sys/fs/cgroup/pod/app/memory.current": "0",
            "sys/fs/cgroup/pod/memory.max": str(2 * GIB),
            "sys/fs/cgroup/pod/memory.current": str(GIB),
        },
    )
    assert free_below(root) == GIB


def test_v1_limit_is_found_at_the_mount_when_the_path_is_the_hosts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 2}\n",
        },
    )
    assert free_below(root) == GIB + GIB // 2


def test_v1_number_for_no_limit_is_no_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
        },
    )
    assert headroom(root) is None


def test_exhausted_limit_leaves_nothing(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "100",
            "sys/fs/cgroup/memory.current": "150",
        },
    )
    assert free_below(root) == 0


def test_system_that_tells_nothing_sets_no_bound(tmp_path: Path) -> None:
    assert headroom(tmp_path) is None


def test_slab_beyond_the_cgroup_limit_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = Headroom("/sys/fs/cgroup/memory.max", 1 << 20, 512 << 10)
    monkeypatch.setattr(pages, "headroom", lambda: bound)
    with pytest.raises(ConfigError) as caught:
        pages.Slab.create(1 << 20)
    for part in ("max_local_cpu_size=1048576", "524288", "/sys/fs/cgroup/memory.max", "lower"):
        assert part in str(caught.value)
    pages.Slab.create(512 << 10).close()
