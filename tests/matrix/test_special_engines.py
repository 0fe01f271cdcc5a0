"""Failures that need an engine of their own: its memory, its disk, its processes, its end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from matrix_bench import MODEL, SETTINGS, Engine
from matrix_failures import ITEM

from ec_s3.testing import vllm_server
from ec_s3.testing.census import group_processes, named_like, slab_users
from ec_s3.testing.faults import Fault, FaultServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from matrix_bench import Bench, Item

_TWO_ITEMS = "512KiB"  # pages of 256 KiB, and an item of the tiny model fits into one
_DISK_BYTES = 2 << 20


@contextmanager
def _engine(bench: Bench, role: str = "ec_both", layout: str = "one process", **settings: object):  # type: ignore[no-untyped-def]
    bench.close_engine()
    engine = Engine(bench.lab, bench.reference, role=role, layout=layout, **settings)
    try:
        yield engine
    finally:
        engine.close()


def _items(engine: Engine, name: str, number: int, *, stored: bool = True) -> list[Item]:
    items = [engine.reference.item(f"{name}-{n}") for n in range(number)]
    if stored:
        engine.store(*items)
    return items


@pytest.mark.parametrize(
    ("role", "layout"),
    [
        ("ec_both", "one process"),
        ("ec_producer", "one process"),
        ("ec_consumer", "one process"),
        ("ec_both", "TP=2"),
    ],
)
def test_host_tier_of_two_items(
    bench: Bench, record: Callable[..., Any], role: str, layout: str
) -> None:
    """More at once than fits, and all of it leased: whoever carries media is answered rightly."""
    with (
        record("host tier far too small, full of leases", f"{role}, {layout}") as figures,
        # Enough time for all turns, whatever the machine does beside: nothing is timed here.
        _engine(bench, role, layout, max_local_cpu_size=_TWO_ITEMS, metadata_timeout=15) as engine,
    ):
        stored, new = _items(engine, "small", 6), _items(engine, "small-new", 4, stored=False)
        asks = [engine.ask(text="tell me a long story", max_tokens=120)]
        asks += [engine.ask(item) for item in (*stored, *new)]
        asks += [engine.ask(stored[0], stored[1], new[0])]
        engine.run(asks[:1], timed=False)
        for _ in range(3):
            loaded = engine.run(asks, timed=False)
            assert not loaded.wrong
        if engine.loads:
            # All at once they do not fit: they take turns.
            bare = [engine.ask_bare(item) for item in _items(engine, "small-bare", 4)]
            loaded = engine.run(bare, timed=False)
            assert not loaded.wrong
            assert loaded.reasons.count("error") == 0
        metrics = engine.metrics()
        assert metrics.get("local_bytes leased", 0.0) == 0
        assert metrics.get("local_bytes reserved", 0.0) == 0
        assert metrics.get("errors_total", 0.0) == 0
        took, wrong = engine.recover("the crowd")
        assert not wrong
        figures |= {"requests": 3 * len(asks), "recovery": round(took, 2)}


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own, which can be full and read-only even for root."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES},mode=700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        yield folder
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _mounted(folder: Path) -> bool:
    return folder.is_mount()


def _fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


@contextmanager
def _read_only(folder: Path) -> Iterator[None]:
    """Nothing can be written below the folder, not even by root where it is a mount."""
    if _mounted(folder):  # a second mount above the first, which an open lock keeps writable
        subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        return
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o500)
    try:
        yield
    finally:
        for path in folders:
            path.chmod(0o700)


def _edit_by_hand(folder: Path) -> int:
    """Delete, cut, swap, and replace by directories what lies in the disk tier."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and len(path.name) == 64)
    for number, file in enumerate(files):
        if number % 4 == 0:
            file.unlink()
        elif number % 4 == 1:
            file.write_bytes(file.read_bytes()[:-20])
        elif number % 4 == 2:
            file.write_bytes(files[-1].read_bytes() if files[-1].is_file() else b"")
        else:
            file.unlink()
            file.mkdir()
    return len(files)


def test_disk_tier_full_read_only_and_edited(
    bench: Bench, record: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    with (
        _small_disk(folder) as disk,
        _engine(
            bench, max_local_cpu_size=_TWO_ITEMS, local_disk=str(disk), max_local_disk_size="64MiB"
        ) as engine,
    ):
        name = "both, one process, " + ("a small tmpfs" if _mounted(disk) else "a plain directory")
        items = _items(engine, "disk", 8)

        def rounds(figures: dict[str, Any]) -> None:
            for _ in range(2):
                asks = [engine.ask(item) for item in items]
                assert not engine.run(asks, timed=False).wrong
            figures["requests"] = 2 * len(items)

        with record("disk tier in order", name) as figures:
            rounds(figures)
            deadline = time.monotonic() + 20.0
            while not (files := _written(disk)) and time.monotonic() < deadline:
                time.sleep(0.1)
            figures["note"] = f"{len(files)} files"
            assert files
        with record("disk tier edited by hand", name) as figures:
            figures["note"] = f"{_edit_by_hand(disk)} files deleted, cut, swapped or made folders"
            rounds(figures)
        if _mounted(disk):
            with record("disk tier full (ENOSPC)", name) as figures:
                _fill(disk)
                items = _items(engine, "disk-full", 8)
                rounds(figures)
                (disk / "filler").unlink()
        if _mounted(disk) or os.geteuid() != 0:
            with record("disk tier read-only", name) as figures:
                items = _items(engine, "disk-read-only", 8)
                with _read_only(disk):
                    with pytest.raises(OSError, match=r"Read-only|Permission"):
                        (disk / "probe").touch()
                    rounds(figures)
        with record("disk tier's directory deleted", name) as figures:
            for path in disk.iterdir():
                shutil.rmtree(path, ignore_errors=True)
            items = _items(engine, "disk-deleted", 8)
            rounds(figures)
            took, wrong = engine.recover("the disk's failures")
            assert not wrong
            figures["recovery"] = round(took, 2)
            assert engine.metrics().get("errors_total", 0.0) == 0


def _written(disk: Path) -> list[Path]:
    return [path for path in disk.rglob("*") if path.is_file() and len(path.name) == 64]


def test_engine_process_killed(bench: Bench, record: Callable[..., Any]) -> None:
    """The child that holds the index dies while a request waits for it: vLLM encodes by itself."""
    with (
        record("the engine's own process killed", "both, one process, engine: process") as figures,
        _engine(bench, engine="process") as engine,
    ):
        *stored, bare = _items(engine, "child", 4)
        assert engine.run([engine.ask(stored[0])], timed=False).encoded == 0
        (child,) = named_like(engine.process.pid, "ec_s3.child")
        os.kill(child, signal.SIGKILL)
        asks = [engine.ask(item) for item in stored]
        asks += [engine.ask(text="hello"), engine.ask_bare(bare)]
        for _ in range(2):
            loaded = engine.run(asks, timed=False)
            assert not loaded.wrong
        figures["requests"] = 2 * len(asks)
        engine.process.finish()
        assert child not in set(group_processes(engine.process.pid))


def test_engine_process_stopped(bench: Bench, record: Callable[..., Any]) -> None:
    """The child is alive and does not answer: requests go on at their deadline."""
    with (
        record("the engine's own process hangs", "both, one process, engine: process") as figures,
        _engine(bench, engine="process") as engine,
    ):
        *stored, bare = _items(engine, "hung-child", 4)
        assert engine.run([engine.ask(stored[0])], timed=False).encoded == 0
        (child,) = named_like(engine.process.pid, "ec_s3.child")
        os.kill(child, signal.SIGSTOP)
        asks = [engine.ask(item) for item in stored]
        asks += [engine.ask(text="hello"), engine.ask_bare(bare)]
        engine.base = {"text": 0.5, "media": 0.5, "bare": 0.5}
        loaded = engine.run(asks)
        os.kill(child, signal.SIGCONT)
        assert not loaded.wrong
        figures["late"] = round(engine.lateness(loaded.seconds), 2)
        took, wrong = engine.recover("the pause")
        assert not wrong
        figures |= {"requests": len(asks), "recovery": round(took, 2)}


def test_clean_end_flushes(bench: Bench, record: Callable[..., Any]) -> None:
    """The end of a process waits for slow uploads, and leaves nothing behind."""
    with (
        record("clean end with uploads pending", "both, one process") as figures,
        _engine(bench, flush_timeout="20s") as engine,
    ):
        new = _items(engine, "flushed", 4, stored=False)
        engine.process.generate([{"text": "hello"}])
        engine.proxy.add(Fault(method="PUT", path=ITEM, delay=0.7))
        assert not engine.run([engine.ask(item) for item in new], timed=False).wrong
        group = engine.process.pid
        everyone = set(group_processes(group))
        engine.process.finish()
        assert engine.wait_stored(*new, seconds=0.0) == []
        assert not set(group_processes(group))
        assert not everyone & slab_users()
        figures["requests"] = len(new)
        log = engine.process.log.read_text(errors="replace")
        assert "shutdown timeout is 0" in log, "no warning that SIGTERM would lose uploads"


@pytest.mark.parametrize("answering", [True, False], ids=["slow", "never answering"])
def test_sigterm_with_a_shutdown_timeout(
    bench: Bench, record: Callable[..., Any], answering: bool
) -> None:
    """An HTTP server told to stop flushes what it can, within its bounds."""
    bench.close_engine()
    what = "slow" if answering else "silent"
    prefix = f"sigterm-{what}"
    with (
        record(f"SIGTERM, bucket {what} (--shutdown-timeout 10)", "both, HTTP server") as figures,
        FaultServer(bench.lab.server.url) as proxy,
        bench.lab.serve(
            MODEL,
            prefix=prefix,
            role="ec_both",
            endpoint=proxy.url,
            settings={**SETTINGS, "flush_timeout": "5s"},
        ) as server,
    ):
        server.wait()
        proxy.add(
            Fault(method="PUT", path=ITEM, delay=1.0)
            if answering
            else Fault(method="PUT", path=ITEM, hang=True)
        )
        items = [bench.reference.item(f"sigterm-{n}") for n in range(3)]
        for item in items:
            reply = server.chat([vllm_server.text(), vllm_server.picture(item.path)])
            assert reply.status == 200
        begun = time.monotonic()
        code = server.stop(30.0)
        figures |= {"requests": 3, "note": f"exit after {time.monotonic() - begun:.1f} s"}
        assert code is not None, "the server did not end by itself"
        stored = bench.lab.server.items(prefix)
        assert len(stored) == (3 if answering else 0)
