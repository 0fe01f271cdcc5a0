"""Packets on Unix sockets: addresses, who is at the other end, and memory that goes along.

Pure calls on sockets, for any thread; nothing here waits longer than the socket's own time limit.
A message is a JSON map in one SOCK_SEQPACKET packet. A forked child has none of these sockets.
"""

from __future__ import annotations

import array
import json
import math
import os
import socket
import struct
import weakref
from pathlib import Path
from typing import Any

MAX_MESSAGE = 64 << 10
MAX_ANCESTORS = 8

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_in_child)


def open_socket() -> socket.socket:
    """A new socket, inherited by nobody."""
    return not_for_children(
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    )


def not_for_children(sock: socket.socket) -> socket.socket:
    """Close a forked child's copy: it would hide the end of its parent from the other side."""
    _sockets.add(sock)
    return sock


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user id of the other end."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return int(pid), int(uid)


def is_ours(pid: int) -> bool:
    """Whether a process is this one or descends from it, as far as /proc tells."""
    if pid <= 0:
        return False  # of a process namespace that this one cannot see
    me = os.getpid()
    for _ in range(MAX_ANCESTORS):
        if pid == me:
            return True
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True  # hidden /proc: the user id has been checked
        pid = int(stat.rpartition(")")[2].split()[1])
        if pid <= 1:
            return False
    return False


def listen(name: str) -> tuple[socket.socket, str]:
    """Listen at an abstract address, with a suffix when it is taken; the address that it is.

    Raises:
        OSError: no address is free.
    """
    listener = open_socket()
    for suffix in ("", *(f"-{i}" for i in range(1, 100))):
        try:
            listener.bind(f"\0{name}{suffix}")
        except OSError:
            continue
        listener.listen(64)
        listener.setblocking(False)
        return listener, f"{name}{suffix}"
    listener.close()
    raise OSError(f"no free socket address like {name}")


def parse(raw: bytes) -> dict[str, Any]:
    """One message.

    Raises:
        ValueError: it is none; so is the end of file.
    """
    message = json.loads(raw)
    if not isinstance(message, dict):
        raise ValueError("a message is a map")  # noqa: TRY004  a wrong message, whatever is wrong
    return message


def number(message: dict[str, Any], name: str) -> int:
    """A whole number of a message.

    Raises:
        ValueError: there is none of this name.
    """
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}")  # noqa: TRY004  a wrong message
    return value


def seconds(message: dict[str, Any], name: str) -> float | None:
    """A time of a message, None when it names none.

    Raises:
        ValueError: it is no time.
    """
    value = message.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}")
    return float(value)


def send_memory(sock: socket.socket, message: dict[str, Any], fd: int) -> None:
    """Send a message with a descriptor.

    Raises:
        OSError: the other end is gone, or does not read.
    """
    fds = array.array("i", [fd])
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())]
    sock.sendmsg([json.dumps(message).encode()], ancillary)


def receive_memory(sock: socket.socket) -> tuple[dict[str, Any], int]:
    """A message and the descriptor that came with it, which the caller owns.

    Raises:
        OSError: the other end hung up, or sent something else.
    """
    space = socket.CMSG_SPACE(array.array("i").itemsize)
    raw, ancillary, _, _ = sock.recvmsg(MAX_MESSAGE, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    try:
        message = parse(raw)
    except ValueError:
        message = {}
    if message and len(fds) == 1:
        return message, fds[0]
    for fd in fds:
        os.close(fd)
    raise OSError("the other end did not hand over its memory")
