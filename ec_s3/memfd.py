"""The kernel calls behind a slab: sealed anonymous files, their mapping, and populating it.

Runs on any thread; `populate` blocks without the GIL. Holds no state but the mappings that a
fork must not unmap. Never makes a named file, and never leaves a second descriptor of the file
open: the file's memory must go when its owner closes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref

_MFD_NOEXEC_SEAL = 0x8
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_HUGE_BYTES = 2 << 20

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_LIBC.mmap.restype = ctypes.c_void_p

_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def create(nbytes: int) -> int:
    """File descriptor of a new memfd of fixed size, private to this user, not inherited by exec.

    Raises:
        OSError: the kernel refuses.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("ec_s3", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 6.3 does not know the flag
            raise
        fd = os.memfd_create("ec_s3", flags)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def check(fd: int, nbytes: int) -> None:
    """Refuse a descriptor that is no memfd of this size, sealed against resizing.

    A file that shrinks under a mapping kills the process that reads it (SIGBUS).

    Raises:
        ValueError: it is something else.
    """
    try:
        seals: int = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no memfd at all
        seals = 0
    if seals & _SEALS != _SEALS or os.fstat(fd).st_size != nbytes:
        raise ValueError(f"file descriptor {fd} is not a sealed memfd of {nbytes} bytes")


def map_shared(fd: int, nbytes: int) -> mmap.mmap:
    """Map a memfd for reading and writing; unmapped when the last view of it is gone.

    A forked child does not have the mapping: touching a view there is a segmentation fault.

    Raises:
        OSError: the kernel refuses.
    """
    # mmap.mmap(fd) would keep a duplicate of fd that no one can close in a forked child. So
    # Python's object maps nothing of its own, and the file is laid over its address range.
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE)
    at = address(mapping)
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    if _LIBC.mmap(at, nbytes, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != at:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    mapping.madvise(mmap.MADV_DONTFORK)
    _mappings.add(mapping)
    return mapping


def address(mapping: mmap.mmap) -> int:
    """Where the mapping starts; valid as long as the mapping object lives."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def populate(mapping: mmap.mmap, start: int, nbytes: int, *, write: bool) -> int:
    """Back a part of the mapping with memory, for writing or only for reading; keeps its content.

    Args:
        mapping: result of `map_shared`, kept alive by the caller for the whole call.
        start: first byte, a multiple of the system's page size.
        nbytes: length of the part.
        write: whether this process will write to it.

    Returns:
        0, or the errno that says why not: EINVAL where the kernel knows no such call.
    """
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    # Not mapping.madvise: that one holds the GIL for as long as the kernel populates.
    code: int = _LIBC.madvise(address(mapping) + start, nbytes, advice)
    return ctypes.get_errno() if code else 0


def enlarge(mapping: mmap.mmap, start: int, nbytes: int) -> bool:
    """Back a part with huge pages, for writing: copies then wait for no page table.

    Blocks, without the GIL; keeps the content. Works whatever the system's setting for shared
    memory is. What cannot be enlarged is left for `populate`.

    Args:
        mapping: as for `populate`.
        start: first byte.
        nbytes: length of the part.

    Returns:
        Whether it was done; False on a kernel before 6.1, without memory in such pieces, or where
        the part holds no whole huge page.
    """
    first = address(mapping) + start
    pieces = range(first + -first % _HUGE_BYTES, first + nbytes - _HUGE_BYTES + 1, _HUGE_BYTES)
    for piece in pieces:  # the kernel enlarges nothing where there is no page at all
        if _LIBC.madvise(piece, mmap.PAGESIZE, _MADV_POPULATE_WRITE):
            return False
    return bool(pieces) and not _LIBC.madvise(pieces[0], len(pieces) * _HUGE_BYTES, _MADV_COLLAPSE)


def touch(mapping: mmap.mmap, fd: int, start: int, nbytes: int) -> int:
    """What `populate` does, for kernels without it; holds the GIL while reading."""
    try:
        # Fails cleanly when memory is short; writing into a hole would be a SIGBUS instead.
        os.posix_fallocate(fd, start, nbytes)
    except OSError as error:
        return error.errno or errno.ENOMEM
    memoryview(mapping)[start : start + nbytes : mmap.PAGESIZE].tobytes()
    return 0


def _leak_in_child() -> None:
    """Never unmap in a child what it did not inherit: something else may lie there by then."""
    for mapping in list(_mappings):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_leak_in_child)
