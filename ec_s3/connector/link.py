"""The socket between the scheduler part and the ranks of one engine.

The scheduler part listens on an abstract Unix socket (`RankHub`, one thread). Each rank connects
from a thread of its own (`RankLink`) and says which one it is; it gets the slab's memfd, maps it,
says so, and later answers every order exactly once. Messages are JSON in SOCK_SEQPACKET packets.
Both sides check the other one's user id; the hub takes only its own process and its descendants,
so that two engines of one host that share a name cannot get hold of each other's ranks. End of
file means: that rank is gone. A forked child of either side has none of these sockets.

Neither side's hooks ever wait for a socket. A rank may also ask for something (`RankLink.ask`), and
wait for the answer outside of any hook.

Locking: a link's `_gate` is held while its socket is written to, so that nobody closes it
meanwhile; a burst may block the sending thread there, and only that thread, until `_hang_up`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import selectors
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ec_s3.connector import packets
from ec_s3.connector.asking import Asking
from ec_s3.pages import Slab

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

SEND_SECONDS = 5.0
TICK_SECONDS = 0.5
FIRST_PAUSE = 0.02
MAX_ERROR_CHARS = 2000
LONGEST_PAUSE = 0.1  # a first request may follow the hub by less than a second


def socket_name(*parts: object) -> str:
    """The address that both parts derive from what they both know of the engine."""
    text = "\0".join(str(part) for part in (os.getuid(), *parts))
    return f"ec_s3-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank reported.

    Attributes:
        rank: who.
        kind: `mapped`, `loaded`, `saved`, `failed` (an unexpected error in a hook) or `gone`.
        number: transfer or ticket of the order.
        done: whether the copy was made.
        pinned: whether a mapped slab is registered with CUDA.
        copy_seconds: time of the copy.
        encode_seconds: time that the encoder needed for a saved item.
    """

    rank: int
    kind: str
    number: int = -1
    done: bool = False
    pinned: bool = False
    copy_seconds: float | None = None
    encode_seconds: float | None = None


class RankHub:
    """The scheduler's side: hands out the slab, collects answers.

    Args:
        name: address wanted; a suffix is added when it is taken.
        nonce: names this slab.
        slab: the host memory; its descriptor goes to the ranks.
        world: ranks that must map the slab before anything may be promised.
        on_answer: called on the hub's thread with every answer; must be quick.
        on_request: called there with what a rank asks for, and its argument; it has been done on
            return, and what it raises is told to the rank. Must be quick.

    Attributes:
        address: where it listens.
        on_tick: called on the hub's thread after every message, and at least twice a second.

    Raises:
        OSError: no address is free.
    """

    def __init__(
        self,
        name: str,
        *,
        nonce: str,
        slab: Slab,
        world: int,
        on_answer: Callable[[Answer], None],
        on_request: Callable[[str, str], None],
    ) -> None:
        self._nonce = nonce
        self._slab = slab
        self._world = world
        self._on_answer = on_answer
        self._on_request = on_request
        self.on_tick: Callable[[], object] = lambda: None
        self._ranks: dict[socket.socket, int] = {}  # -1: has not said who it is
        self._mapped: set[int] = set()
        self._lost = False
        self._closed = threading.Event()
        self._listener, self.address = packets.listen(name)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="ec_s3-hub", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether every rank has mapped the slab and none is gone."""
        return len(self._mapped) == self._world and not self._lost

    def _serve(self) -> None:
        while not self._closed.is_set():
            ready = self._selector.select(timeout=TICK_SECONDS)
            try:
                for key, _ in ready:
                    self._attend(key.fileobj)
                self.on_tick()
            except Exception:  # the thread's outermost border: it serves every rank
                logger.exception("unexpected error in the ranks' hub")

    def _attend(self, sock: object) -> None:
        if self._closed.is_set():
            return
        if sock is self._listener:
            self._accept()
        elif isinstance(sock, socket.socket):
            self._receive(sock)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            self._closed.wait(0.05)  # out of descriptors: the caller is still there, do not spin
            return
        packets.not_for_children(sock)
        pid, uid = packets.peer(sock)
        if uid != os.getuid() or not packets.is_ours(pid):
            logger.debug("a stranger's connection was refused (pid %d, uid %d)", pid, uid)
            sock.close()
            return
        sock.settimeout(SEND_SECONDS)
        self._ranks[sock] = -1
        self._selector.register(sock, selectors.EVENT_READ)

    def _receive(self, sock: socket.socket) -> None:
        """Take in one message; whatever is wrong with it costs the connection."""
        try:
            raw = sock.recv(packets.MAX_MESSAGE, socket.MSG_DONTWAIT)
            answer = self._take(sock, packets.parse(raw))
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self._gone(sock)
            return
        if answer is not None:
            self._on_answer(answer)

    def _take(self, sock: socket.socket, message: dict[str, Any]) -> Answer | None:
        rank, kind = self._ranks[sock], message.get("kind")
        if kind == "hello" and rank < 0:
            self._greet(sock, packets.number(message, "rank"))
            return None
        ours = message.get("nonce") == self._nonce
        if kind == "mapped" and ours and rank >= 0 and rank not in self._mapped:
            self._mapped.add(rank)
            return Answer(rank, "mapped", pinned=message.get("pinned") is True)
        if kind == "ask" and rank in self._mapped:
            self._carry_out(sock, message)
            return None
        if kind not in ("loaded", "saved", "failed") or rank not in self._mapped:
            raise ValueError(f"{kind!r} is not expected")
        if not ours:
            return None  # about another slab, which this rank has had before
        number = packets.number(message, "number")
        return Answer(
            rank,
            str(kind),
            number,
            message.get("done") is True,
            copy_seconds=packets.seconds(message, "copy_seconds"),
            encode_seconds=packets.seconds(message, "encode_seconds"),
        )

    def _carry_out(self, sock: socket.socket, message: dict[str, Any]) -> None:
        number, error = packets.number(message, "number"), ""
        try:
            self._on_request(str(message.get("what")), str(message.get("argument")))
        except Exception as problem:  # a border: the rank that asked waits for an answer
            error = str(problem) or type(problem).__name__
            logger.warning("what a rank asked for could not be done", exc_info=True)
        answer = {"kind": "answer", "number": number, "error": error[:MAX_ERROR_CHARS]}
        sock.send(json.dumps(answer).encode())

    def _greet(self, sock: socket.socket, rank: int) -> None:
        """Hand over the slab, unless somebody else is, or was, this rank."""
        if not 0 <= rank < self._world or rank in self._mapped or rank in self._ranks.values():
            raise ValueError(f"rank {rank} is not expected")
        slab = {"nonce": self._nonce, "nbytes": self._slab.nbytes}
        packets.send_memory(sock, slab, self._slab.fd)
        self._ranks[sock] = rank

    def _gone(self, sock: socket.socket) -> None:
        rank = self._ranks.pop(sock)
        self._selector.unregister(sock)
        sock.close()
        if rank in self._mapped:
            self._lost = True
            self._on_answer(Answer(rank, "gone"))

    def close(self) -> None:
        """Stop listening and drop every rank; idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(2.0)
        for sock in (*self._ranks, self._listener):
            sock.close()
        self._selector.close()


class RankLink:
    """A rank's side: maps the slab in the background and sends answers.

    Args:
        name: where the hub listens.
        rank: this rank's number within the engine.
        prepare: called with the mapped slab and its nonce on the link's thread, before `mapped`
            is reported; owns the slab. The place to populate, pin and build views. Returns
            whether the memory is pinned.
    """

    def __init__(self, name: str, *, rank: int, prepare: Callable[[Slab, str], object]) -> None:
        self._name = name
        self._rank = rank
        self._prepare = prepare
        self._gate = threading.Lock()
        self._sock: socket.socket | None = None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._asking = Asking(self._outbox.put)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._main, name="ec_s3-link", daemon=True)
        self._sender = threading.Thread(target=self._send, name="ec_s3-answers", daemon=True)
        self._thread.start()
        self._sender.start()

    def redirect(self, name: str) -> None:
        """The hub of this engine listens elsewhere: connect there instead."""
        if name != self._name:
            self._name = name
            self._hang_up()

    def answer(
        self, kind: str, number: int, *, nonce: str, done: bool, **seconds: float | None
    ) -> None:
        """Report on an order; any thread, never waits for the hub to read.

        Args:
            kind: `loaded`, `saved` or `failed`.
            number: transfer or ticket of the order.
            nonce: the slab that the order spoke of.
            done: whether the copy was made.
            **seconds: `copy_seconds` and `encode_seconds` of an `Answer`, as far as known.
        """
        answer = {"kind": kind, "number": number, "done": done, "nonce": nonce, **seconds}
        self._outbox.put(json.dumps(answer).encode())

    def ask(self, what: str, argument: str, *, timeout: float) -> None:
        """Ask the scheduler part for something, and wait until it has been done; any thread.

        Never from a hook. `TimeoutError` and others are raised as by `Asking.ask`.
        """
        self._asking.ask(what, argument, timeout=timeout)

    def _send(self) -> None:
        """Send answers in order; a burst may fill the socket, which no hook may wait for."""
        while (message := self._outbox.get()) is not None:
            with self._gate:
                if self._sock is None:
                    continue
                # An answer that is lost would hold its pages for ever: better to be gone.
                try:
                    self._sock.send(message)
                except OSError:
                    self._hang_up()

    def _main(self) -> None:
        pause = FIRST_PAUSE
        while not self._closed.wait(pause):
            try:
                self._session()
            except OSError as error:
                logger.debug("the scheduler's socket does not answer: %s", error)
            except Exception:  # the thread's border; whatever `prepare` meets is a reason
                if not self._closed.is_set():
                    logger.exception("this rank cannot map the host memory; the cache stays off")
                return
            pause = min(LONGEST_PAUSE, pause * 1.5)

    def _session(self) -> None:
        """Connect, map, report, and stay until the hub is gone."""
        name = self._name
        sock = packets.open_socket()
        try:
            sock.settimeout(SEND_SECONDS)
            sock.connect(f"\0{name}")
            if packets.peer(sock)[1] != os.getuid():
                raise OSError("the socket belongs to another user")
            sock.send(json.dumps({"kind": "hello", "rank": self._rank}).encode())
            message, fd = packets.receive_memory(sock)
            nonce = str(message.get("nonce"))
            try:
                pinned = self._prepare(Slab.attach(fd, message.get("nbytes", 0)), nonce) is True
            except (OSError, ValueError) as error:
                raise RuntimeError("the slab could not be mapped") from error
            self._stay(sock, name, {"kind": "mapped", "nonce": nonce, "pinned": pinned})
        finally:
            self._hang_up()
            self._asking.disconnected()
            with self._gate:
                self._sock = None
                sock.close()

    def _stay(self, sock: socket.socket, name: str, report: dict[str, Any]) -> None:
        sock.settimeout(None)
        with self._gate:
            self._sock = sock  # before the report: orders may follow it at once
            sock.send(json.dumps(report).encode())
        self._asking.connected()
        # Whoever redirects or closes from here on sees the socket and shuts it.
        while name == self._name and not self._closed.is_set():
            raw = sock.recv(packets.MAX_MESSAGE)
            if not raw:
                return
            try:
                self._asking.take(packets.parse(raw))
            except ValueError as error:
                raise OSError(f"the scheduler's side said something else: {error}") from error

    def _hang_up(self) -> None:
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Send what is to be sent, a second at most, and hang up; idempotent."""
        self._closed.set()
        self._asking.close()
        self._outbox.put(None)
        self._sender.join(1.0)
        self._hang_up()
        self._sender.join(1.0)
        self._thread.join(2.0)
