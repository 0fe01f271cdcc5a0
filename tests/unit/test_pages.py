"""Slab: private, shared by descriptor, populated in steps, gone with its processes."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from ec_s3 import memfd
from ec_s3.errors import ClosedError, ConfigError
from ec_s3.pages import PAGE_BYTES, PageAllocator, Slab
from ec_s3.types import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
ROOT = Path(memfd.__file__).parents[1]  # where a child process finds the package


@pytest.fixture
def slab() -> Iterator[Slab]:
    with Slab.create(4 * MIB) as made:
        yield made


def run_python(code: str) -> str:
    """Output of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def open_slabs() -> int:
    """Descriptors of slabs that this process has open."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("memfd:ec_s3" in link for link in links)


# --- creating and sharing


def test_size_is_rounded_up_to_whole_pages() -> None:
    with Slab.create(PAGE_BYTES + 1) as slab:
        assert slab.nbytes == 2 * PAGE_BYTES
        assert slab.populated_bytes == 0


def test_memory_is_private_sealed_and_not_inherited_by_exec(slab: Slab) -> None:
    status = os.fstat(slab.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert not os.get_inheritable(slab.fd)
    for size in (slab.nbytes // 2, slab.nbytes * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(slab.fd, size)


def test_memory_has_no_name_in_dev_shm() -> None:
    before = set(Path("/dev/shm").iterdir())
    with Slab.create(MIB) as slab:
        slab.populate()
        link = Path(f"/proc/self/fd/{slab.fd}").readlink()
        ours = {path for path in set(Path("/dev/shm").iterdir()) - before if "ec_s3" in path.name}
    assert str(link).startswith("/memfd:")
    assert not ours


def test_works_on_a_kernel_without_noexec_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    real, flags_seen = os.memfd_create, []

    def old_kernel(name: str, flags: int) -> int:
        flags_seen.append(flags)
        if flags & 0x8:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", old_kernel)
    with Slab.create(MIB) as slab:
        assert stat.S_IMODE(os.fstat(slab.fd).st_mode) == 0o600
    assert len(flags_seen) == 2


def test_another_mapping_sees_the_bytes(slab: Slab) -> None:
    with Slab.attach(os.dup(slab.fd), slab.nbytes) as other:
        slab.view(Extent(MIB, 5))[:] = b"hello"
        assert bytes(other.view(Extent(MIB, 5))) == b"hello"
        other.view(Extent(0, 2))[:] = b"yo"
        assert bytes(slab.view(Extent(0, 2))) == b"yo"


def test_attaching_something_else_is_refused_and_closes_it(tmp_path: Path, slab: Slab) -> None:
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, MIB)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, MIB)
    for fd, nbytes in ((plain, MIB), (unsealed, MIB), (os.dup(slab.fd), slab.nbytes * 2)):
        with pytest.raises(ValueError, match="not a sealed memfd"):
            Slab.attach(fd, nbytes)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_slab_beyond_free_memory_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        Slab.create(1 << 50)
    text = str(caught.value)
    assert f"max_local_cpu_size={1 << 50}" in text
    assert "lower max_local_cpu_size" in text
    assert "bytes are free below" in text


@pytest.mark.parametrize("nbytes", [0, -1])
def test_slab_without_bytes_is_refused(nbytes: int) -> None:
    with pytest.raises(ConfigError, match="max_local_cpu_size"):
        Slab.create(nbytes)


def test_refusal_of_the_kernel_is_a_config_error_and_leaks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(memfd, "map_shared", refuse)
    before = open_slabs()
    with pytest.raises(ConfigError, match="max_local_cpu_size"):
        Slab.create(MIB)
    assert open_slabs() <= before


# --- views


def test_extent_outside_the_slab_is_refused(slab: Slab) -> None:
    for extent in (Extent(-1, 1), Extent(0, -1), Extent(slab.nbytes, 1)):
        with pytest.raises(ValueError, match="outside"):
            slab.view(extent)


def test_use_after_close_is_a_named_error_but_views_stay_valid() -> None:
    slab = Slab.create(MIB)
    view, tensor = slab.view(Extent(0, 4)), slab.tensor()
    view[:] = b"kept"
    slab.close()
    slab.close()
    gc.collect()
    assert bytes(view) == b"kept"
    assert bytes(tensor[:4].tolist()) == b"kept"
    assert slab.closed
    assert slab.fd == -1
    for use in (lambda: slab.view(Extent(0, 1)), slab.tensor, slab.pin):
        with pytest.raises(ClosedError):
            use()
    slab.populate()


def test_forgotten_slab_is_reported_and_closed() -> None:
    forgotten = [Slab.create(MIB)]
    fd = forgotten[0].fd
    with pytest.warns(ResourceWarning, match="unclosed Slab"):
        forgotten.clear()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_no_descriptor_is_left_open_after_close() -> None:
    before = open_slabs()
    for _ in range(50):
        slab = Slab.create(MIB)
        slab.populate()
        slab.close()
    assert open_slabs() <= before


def test_tensor_made_in_inference_mode_can_be_written_by_another_thread(slab: Slab) -> None:
    with torch.inference_mode():
        tensor = slab.tensor()
    assert not tensor.is_inference()
    assert tensor.shape == (slab.nbytes,)
    assert slab.tensor() is tensor
    failures: list[BaseException] = []

    def write() -> None:
        try:
            tensor[10:14].copy_(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join(10)
    assert not failures
    assert bytes(slab.view(Extent(10, 4))) == b"\x01\x02\x03\x04"


# --- populating


def test_populate_keeps_content_and_reaches_the_end(slab: Slab) -> None:
    slab.view(Extent(0, 3))[:] = b"abc"
    slab.populate(step=MIB)
    assert slab.populated_bytes == slab.nbytes
    assert bytes(slab.view(Extent(0, 3))) == b"abc"
    with Slab.attach(os.dup(slab.fd), slab.nbytes) as other:
        other.populate()
        assert other.populated_bytes == slab.nbytes
        assert bytes(other.view(Extent(0, 3))) == b"abc"


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT])
def test_populate_without_memory_stops_with_a_warning(
    slab: Slab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    real = memfd.populate

    def short(mapping: object, start: int, nbytes: int, *, write: bool) -> int:
        return code if start >= 2 * MIB else real(mapping, start, nbytes, write=write)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(memfd, "populate", short)
    with caplog.at_level(logging.WARNING):
        slab.populate(step=MIB)
    assert slab.populated_bytes == 2 * MIB
    assert len(caplog.records) == 1
    assert os.strerror(code) in caplog.text


def test_populate_works_on_a_kernel_without_the_call(
    slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memfd, "populate", lambda *_, **__: errno.EINVAL)
    slab.view(Extent(0, 3))[:] = b"abc"
    slab.populate(step=MIB)
    assert slab.populated_bytes == slab.nbytes
    assert os.fstat(slab.fd).st_blocks * 512 == slab.nbytes
    assert bytes(slab.view(Extent(0, 3))) == b"abc"


def test_fallback_without_memory_stops_too(
    slab: Slab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(memfd, "populate", lambda *_, **__: errno.EINVAL)
    monkeypatch.setattr(os, "posix_fallocate", full)
    slab.populate()
    assert slab.populated_bytes == 0
    assert os.strerror(errno.ENOSPC) in caplog.text


def test_close_stops_a_running_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = Slab.create(8 * MIB)
    real, started, resume = memfd.populate, threading.Event(), threading.Event()
    steps = []

    def slow(mapping: object, start: int, nbytes: int, *, write: bool) -> int:
        steps.append(start)
        started.set()
        assert resume.wait(10)
        return real(mapping, start, nbytes, write=write)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(memfd, "populate", slow)
    thread = threading.Thread(target=slab.populate, kwargs={"step": MIB})
    thread.start()
    assert started.wait(10)
    slab.close()
    resume.set()
    thread.join(10)
    assert not thread.is_alive()
    assert steps == [0]


def test_memory_is_populated_where_huge_pages_are_refused(
    slab: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(mapping: object, start: int, nbytes: int) -> bool:
        asked.append(start)
        return False

    monkeypatch.setattr(memfd, "enlarge", refuse)
    slab.populate(step=MIB)
    assert slab.populated_bytes == slab.nbytes
    assert asked == [0]  # and not again


def test_huge_pages_keep_the_content_and_stay_within_their_part() -> None:
    with Slab.create(8 * MIB) as slab:
        slab.view(Extent(3 * MIB, 3))[:] = b"abc"
        mapping = slab.view(Extent(0, slab.nbytes)).obj
        memfd.enlarge(mapping, MIB, 6 * MIB)  # type: ignore[arg-type]  # a view's owner has no type
        assert bytes(slab.view(Extent(3 * MIB, 3))) == b"abc"
        assert os.fstat(slab.fd).st_blocks * 512 <= 6 * MIB


def test_a_part_without_a_whole_huge_page_is_left_alone(slab: Slab) -> None:
    mapping = slab.view(Extent(0, slab.nbytes)).obj
    assert not memfd.enlarge(mapping, MIB, MIB)  # type: ignore[arg-type]  # a view's owner has no type
    assert os.fstat(slab.fd).st_blocks == 0


def test_resident_memory_is_the_setting_within_three_percent() -> None:
    out = run_python("""
        from pathlib import Path
        from ec_s3.pages import Slab
        def shmem():
            rows = Path("/proc/self/status").read_text().splitlines()
            return next(int(row.split()[1]) << 10 for row in rows if row.startswith("RssShmem"))
        before = shmem()
        slab = Slab.create(64 << 20)
        assert shmem() - before < 1 << 20
        slab.populate()
        print(shmem() - before)
        slab.close()
        assert shmem() - before < 1 << 20
    """)
    assert abs(int(out) - 64 * MIB) <= 0.03 * 64 * MIB


# --- processes


def test_fork_does_not_keep_the_memory_alive() -> None:
    out = run_python("""
        import os, gc
        from ec_s3.errors import ClosedError
        from ec_s3.pages import Slab
        from ec_s3.types import Extent
        slab = Slab.create(8 << 20)
        slab.populate()
        slab.view(Extent(0, 4))[:] = b"mine"
        tensor = slab.tensor()
        ready, go = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                         if os.path.exists(f"/proc/self/fd/{fd}")]
                maps = open("/proc/self/maps").read()
                assert not any("memfd:ec_s3" in text for text in [*links, maps])
                try:
                    slab.view(Extent(0, 1))
                except ClosedError:
                    code = 0
                slab.close()
                del tensor, slab
                gc.collect()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert bytes(slab.view(Extent(0, 4))) == b"mine"
        slab.close()
        print("ok")
    """)
    assert out.strip() == "ok"


def test_memory_is_gone_after_sigkill() -> None:
    code = """
        import sys, time
        from ec_s3.pages import Slab
        slab = Slab.create(32 << 20)
        slab.populate()
        print(slab.fd, flush=True)
        time.sleep(60)
    """
    before = set(Path("/dev/shm").iterdir())
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with child:
        assert child.stdout is not None
        fd = int(child.stdout.readline())
        link = Path(f"/proc/{child.pid}/fd/{fd}")
        inode = link.stat().st_ino
        assert link.stat().st_blocks * 512 == 32 * MIB
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(10) == -signal.SIGKILL
    assert not link.exists()
    left = set(Path("/dev/shm").iterdir()) - before
    assert not any(path.stat().st_ino == inode or "ec_s3" in path.name for path in left)


# --- pinning


class FakeCudart:
    """CUDA's runtime as torch exposes it, answering a fixed code."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls += 1
        if self.code == 0:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return self.code


def use_cudart(monkeypatch: pytest.MonkeyPatch, fake: FakeCudart) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)


def test_pinning_registers_the_one_slab_once_and_close_unregisters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeCudart()
    use_cudart(monkeypatch, fake)
    slab = Slab.create(MIB)
    assert slab.pin()
    assert slab.pin()
    assert fake.registered == {slab.tensor().data_ptr(): slab.nbytes}
    assert fake.calls == 1
    slab.close()
    assert not fake.registered


def test_failed_pinning_warns_once_and_leaves_the_slab_usable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, slab: Slab
) -> None:
    fake = FakeCudart(code=2)
    use_cudart(monkeypatch, fake)
    assert not slab.pin()
    assert not slab.pin()
    assert fake.calls == 1
    assert len(caplog.records) == 1
    assert "cudaHostRegister returned 2" in caplog.text
    slab.view(Extent(0, 1))[:] = b"x"


def test_cuda_that_cannot_start_means_unpinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, slab: Slab
) -> None:
    def broken() -> FakeCudart:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", broken)
    assert not slab.pin()
    assert "no driver" in caplog.text


def test_failed_unpinning_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeCudart()
    use_cudart(monkeypatch, fake)
    slab = Slab.create(MIB)
    slab.pin()
    fake.code = 1
    slab.close()
    assert "cudaHostUnregister returned 1" in caplog.text


def test_machine_without_cuda_stays_unpinned_silently(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, slab: Slab
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not slab.pin()
    assert not caplog.records


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_registration_makes_the_slab_pinned_memory() -> None:
    with Slab.create(8 * MIB) as slab:
        assert slab.pin()
        assert slab.tensor().is_pinned()
        there = slab.tensor()[:MIB].to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(there.cpu(), slab.tensor()[:MIB])


# --- the allocator


def sizes(extents: tuple[Extent, ...] | None) -> list[int]:
    assert extents is not None
    return [extent.nbytes // PAGE_BYTES for extent in extents]


def allocator(pages: int) -> PageAllocator:
    made = PageAllocator(pages * PAGE_BYTES)
    made.grow(pages * PAGE_BYTES)
    return made


def test_allocation_is_one_run_of_whole_pages() -> None:
    pages = allocator(16)
    assert sizes(pages.allocate(1)) == [1]
    assert sizes(pages.allocate(PAGE_BYTES * 5)) == [5]
    assert sizes(pages.allocate(PAGE_BYTES * 5 + 1)) == [6]
    assert pages.free_bytes == 4 * PAGE_BYTES
    assert pages.used_bytes == 12 * PAGE_BYTES


def test_zero_bytes_take_no_pages() -> None:
    pages = allocator(1)
    assert pages.allocate(0) == ()
    assert pages.allocate(1) is not None
    assert pages.allocate(0) == ()
    assert pages.allocate(1) is None


def test_only_populated_pages_are_handed_out() -> None:
    pages = PageAllocator(8 * PAGE_BYTES)
    assert pages.allocate(1) is None
    pages.grow(2 * PAGE_BYTES + 5)
    pages.grow(0)
    assert pages.allocate(3 * PAGE_BYTES) is None
    first = pages.allocate(PAGE_BYTES)
    assert first == (Extent(0, PAGE_BYTES),)
    pages.grow(100 * PAGE_BYTES)
    assert pages.free_bytes == 7 * PAGE_BYTES
    assert sizes(pages.allocate(7 * PAGE_BYTES)) == [7]


def test_freed_neighbours_become_one_run_again() -> None:
    pages = allocator(12)
    taken = [pages.allocate(3 * PAGE_BYTES) for _ in range(4)]
    for i in (1, 3, 0, 2):
        part = taken[i]
        assert part is not None
        pages.free(part)
    assert sizes(pages.allocate(12 * PAGE_BYTES)) == [12]


def test_scattered_pages_serve_as_several_extents_when_no_run_is_long_enough() -> None:
    pages = allocator(8)
    taken = [pages.allocate(PAGE_BYTES) for _ in range(8)]
    for part in taken[::2]:
        assert part is not None
        pages.free(part)
    assert sizes(pages.allocate(3 * PAGE_BYTES)) == [1, 1, 1]


def test_short_runs_are_used_before_long_ones_are_cut() -> None:
    pages = allocator(16)
    first = pages.allocate(2 * PAGE_BYTES)
    assert first is not None
    pages.allocate(PAGE_BYTES)
    pages.free(first)
    again = pages.allocate(2 * PAGE_BYTES)
    assert again == first
    assert sizes(pages.allocate(13 * PAGE_BYTES)) == [13]


def test_freeing_twice_or_in_part_is_refused() -> None:
    pages = allocator(4)
    extents = pages.allocate(2 * PAGE_BYTES)
    assert extents is not None
    with pytest.raises(ValueError, match="not allocated"):
        pages.free([Extent(0, PAGE_BYTES)])
    pages.free(extents)
    with pytest.raises(ValueError, match="not allocated"):
        pages.free(extents)
    assert pages.free_bytes == 4 * PAGE_BYTES
