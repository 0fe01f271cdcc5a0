"""The socket between the scheduler part and the ranks of one engine.

The scheduler part listens on an abstract Unix socket (`RankHub`, one thread). Each rank connects
from a thread of its own (`RankLink`), gets the slab's memfd, maps it, says so, and later answers
every order exactly once. Messages are JSON in SOCK_SEQPACKET packets. Both sides check the other
one's user id; the hub takes only its own process and its descendants, so that two engines of one
host that share a name cannot get hold of each other's ranks. End of file means: that rank is gone.

Neither side's hooks ever wait for a socket.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import logging
import os
import queue
import selectors
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ec_s3.pages import Slab

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_MESSAGE = 64 << 10
MAX_ANCESTORS = 8
SEND_SECONDS = 5.0


def socket_name(*parts: object) -> str:
    """The address that both parts derive from what they both know of the engine."""
    text = "\0".join(str(part) for part in (os.getuid(), *parts))
    return f"ec_s3-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user id of the other end."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return int(pid), int(uid)


def _is_ours(pid: int) -> bool:
    """Whether a process is this one or descends from it, as far as /proc tells."""
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


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank reported.

    Attributes:
        rank: who.
        kind: `mapped`, `loaded`, `saved` or `gone`.
        number: transfer or ticket of the order.
        done: whether the copy was made.
    """

    rank: int
    kind: str
    number: int = -1
    done: bool = False


class RankHub:
    """The scheduler's side: hands out the slab, collects answers.

    Args:
        name: address wanted; a suffix is added when it is taken.
        nonce: names this slab.
        slab: the host memory; its descriptor goes to the ranks.
        world: ranks that must map the slab before anything may be promised.
        on_answer: called on the hub's thread with every answer; must be quick.
    """

    def __init__(
        self,
        name: str,
        *,
        nonce: str,
        slab: Slab,
        world: int,
        on_answer: Callable[[Answer], None],
    ) -> None:
        self._nonce = nonce
        self._slab = slab
        self._world = world
        self._on_answer = on_answer
        self._ranks: dict[socket.socket, int] = {}
        self._mapped: set[int] = set()
        self._lost = False
        self._closed = threading.Event()
        self._listener = self._listen(name)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="ec_s3-hub", daemon=True)
        self._thread.start()

    def _listen(self, name: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        for suffix in ("", *(f"-{i}" for i in range(1, 100))):
            try:
                listener.bind(f"\0{name}{suffix}")
            except OSError:
                continue
            self.address = f"{name}{suffix}"
            listener.listen(64)
            listener.setblocking(False)
            return listener
        listener.close()
        raise OSError("no free socket name for the engine's ranks")

    @property
    def ready(self) -> bool:
        """Whether every rank has mapped the slab and none is gone."""
        return len(self._mapped) == self._world and not self._lost

    def _serve(self) -> None:
        while not self._closed.is_set():
            for ready, _ in self._selector.select(timeout=0.5):
                try:
                    self._attend(ready.fileobj)
                except Exception:  # the thread's outermost border: it serves every rank
                    logger.exception("unexpected error in the ranks' hub")

    def _attend(self, sock: object) -> None:
        if sock is self._listener:
            self._accept()
        elif isinstance(sock, socket.socket):
            self._receive(sock)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        try:
            pid, uid = _peer(sock)
            if uid != os.getuid() or not _is_ours(pid):
                logger.debug("a stranger's connection was refused (pid %d, uid %d)", pid, uid)
                sock.close()
                return
            sock.settimeout(SEND_SECONDS)
            hello = json.dumps({"nonce": self._nonce, "nbytes": self._slab.nbytes}).encode()
            fds = array.array("i", [self._slab.fd])
            sock.sendmsg([hello], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())])
        except OSError:
            sock.close()
            return
        self._ranks[sock] = -1
        self._selector.register(sock, selectors.EVENT_READ)

    def _receive(self, sock: socket.socket) -> None:
        try:
            raw = sock.recv(MAX_MESSAGE)
        except OSError:
            raw = b""
        message = _parse(raw) if raw else None
        if message is None:
            self._gone(sock)
            return
        rank = self._ranks[sock]
        if message.get("kind") == "mapped":
            rank = int(message.get("rank", -1))
            if message.get("nonce") != self._nonce or rank in self._mapped:
                self._gone(sock)
                return
            self._ranks[sock] = rank
            self._mapped.add(rank)
        self._on_answer(
            Answer(
                rank,
                str(message.get("kind")),
                int(message.get("number", -1)),
                bool(message.get("done")),
            )
        )

    def _gone(self, sock: socket.socket) -> None:
        rank = self._ranks.pop(sock, -1)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)
        sock.close()
        if rank >= 0 and not self._closed.is_set():
            self._lost = True
            self._on_answer(Answer(rank, "gone"))

    def close(self) -> None:
        """Stop listening and drop every rank; idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(2.0)
        for sock in (*self._ranks, self._listener):
            sock.close()
        self._selector.close()


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(raw)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


class RankLink:
    """A rank's side: maps the slab in the background and sends answers.

    Args:
        name: where the hub listens.
        rank: this rank's number within the engine.
        prepare: called with the mapped slab on the link's thread, before `mapped` is reported;
            the place to populate, pin and build views.
    """

    def __init__(self, name: str, *, rank: int, prepare: Callable[[Slab, str], None]) -> None:
        self._name = name
        self._rank = rank
        self._prepare = prepare
        self._sock: socket.socket | None = None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._main, name="ec_s3-link", daemon=True)
        self._sender = threading.Thread(target=self._send, name="ec_s3-answers", daemon=True)
        self._thread.start()
        self._sender.start()

    def redirect(self, name: str) -> None:
        """The hub of this engine listens elsewhere: connect there instead."""
        if name != self._name:
            self._name = name
            self._drop()

    def answer(self, kind: str, number: int, *, done: bool) -> None:
        """Report on an order; any thread, never waits for the hub to read."""
        self._outbox.put(json.dumps({"kind": kind, "number": number, "done": done}).encode())

    def _send(self) -> None:
        """Send answers in order; a burst may fill the socket, which no hook may wait for."""
        while (message := self._outbox.get()) is not None:
            sock = self._sock
            if sock is not None:
                # An answer that is lost would hold its pages for ever: better to be gone.
                try:
                    sock.send(message)
                except OSError:
                    self._drop()

    def _main(self) -> None:
        pause = 0.02
        while not self._closed.wait(pause):
            try:
                self._session()
            except OSError as error:
                logger.debug("the scheduler's socket is not there yet: %s", error)
            except Exception:
                logger.exception("this rank cannot map the host memory; the cache stays off")
                return
            pause = min(1.0, pause * 1.5)

    def _session(self) -> None:
        """Connect, map, report, and stay until the hub is gone."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(SEND_SECONDS)
            sock.connect(f"\0{self._name}")
            if _peer(sock)[1] != os.getuid():
                raise OSError("the socket belongs to another user")
            slab, nonce = _receive_slab(sock)
            self._prepare(slab, nonce)
            report = {"kind": "mapped", "rank": self._rank, "nonce": nonce}
            sock.settimeout(None)
            self._sock = sock  # before the report: orders may follow it at once
            sock.send(json.dumps(report).encode())
            while not self._closed.is_set() and sock.recv(MAX_MESSAGE):
                pass
        finally:
            self._sock = None
            sock.close()

    def _drop(self) -> None:
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up; idempotent."""
        self._closed.set()
        self._outbox.put(None)
        self._sender.join(1.0)
        self._drop()
        self._thread.join(2.0)


def _receive_slab(sock: socket.socket) -> tuple[Slab, str]:
    space = socket.CMSG_SPACE(array.array("i").itemsize)
    raw, ancillary, _, _ = sock.recvmsg(MAX_MESSAGE, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    message = _parse(raw)
    if len(fds) != 1 or message is None:
        for fd in fds:
            os.close(fd)
        raise OSError("the hub hung up before it handed over its memory")
    return Slab.attach(fds[0], int(message["nbytes"])), str(message["nonce"])
