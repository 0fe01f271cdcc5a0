"""The engine in a process of its own: `ProcessPort` here, `main` in the child.

A slow step of the scheduler's process then costs the engine nothing, and the engine's work costs
the scheduler nothing but a socket write. Both processes map one slab, which the scheduler's owns;
the index over it lives in the child. Messages are JSON packets on a socket pair that only the two
processes have. The child ends, after a bounded flush, when its parent closes the socket or dies;
when the child dies the port is no longer `alive`, and what it had leased stays where it is.

Run as `python -m ec_s3.child <socket fd> <slab fd>`, never by hand.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from ec_s3.config import ECConfig
from ec_s3.engine import EncoderCache
from ec_s3.errors import ECS3Error
from ec_s3.keys import Namespace
from ec_s3.loop import LoopThread
from ec_s3.metrics import combine
from ec_s3.pages import Slab
from ec_s3.port import Absent, Desk, Granted, Present, Ready, Want
from ec_s3.types import Extent, FlushReport, ItemMeta, MissReason, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ec_s3.metrics import Data
    from ec_s3.port import Event

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1 << 20
START_SECONDS = 60.0
STATS_SECONDS = 1.0

MAX_OUTBOX = 100_000
"""Messages that may wait for a child that does not read."""


def _spec(fields: list[Any]) -> TensorSpec:
    return TensorSpec(fields[0], tuple(fields[1]))


def _extents(fields: list[list[int]] | None) -> tuple[Extent, ...] | None:
    return None if fields is None else tuple(Extent(*pair) for pair in fields)


def _pairs(extents: tuple[Extent, ...] | None) -> list[list[int]] | None:
    return None if extents is None else [[extent.offset, extent.nbytes] for extent in extents]


def _pack_event(event: Event) -> dict[str, Any]:
    kind = type(event).__name__
    packed: dict[str, Any] = {"kind": kind, "ticket": event.ticket}
    if isinstance(event, Ready):
        packed["spec"] = [event.spec.dtype, list(event.spec.shape)]
        packed["meta"] = asdict(event.meta)
    if isinstance(event, Absent):
        packed["reason"] = event.reason.value
    if not isinstance(event, Present):
        packed["extents"] = _pairs(event.extents)
    return packed


def _unpack_event(packed: dict[str, Any]) -> Event | None:
    ticket = packed.get("ticket", -1)
    extents = _extents(packed.get("extents"))
    match packed["kind"]:
        case "Ready":
            meta = ItemMeta(**packed["meta"])
            return Ready(ticket, _spec(packed["spec"]), extents or (), meta)
        case "Absent":
            return Absent(ticket, MissReason(packed["reason"]), extents)
        case "Present":
            return Present(ticket)
        case "Granted":
            return Granted(ticket, extents)
    return None


class ProcessPort:
    """The engine in a child process; see `port.EnginePort`.

    Args:
        config: settings.
        namespace: what makes two tensors interchangeable.
        slab: host memory, owned by the caller; the child maps it too.
        facts: what identifiers depend on but the namespace does not; JSON-able.

    Raises:
        ECS3Error: the child did not start.
    """

    def __init__(
        self,
        config: ECConfig,
        namespace: Namespace,
        slab: Slab,
        *,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        self._events: deque[Event] = deque()
        self._stats: Data = {}
        self._stats_lock = threading.Lock()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._started = threading.Event()
        self._report: FlushReport | None = None
        self._closed = False
        self._alive = True
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._child = subprocess.Popen(  # noqa: S603 our own interpreter and module
            [sys.executable, "-m", "ec_s3.child", str(theirs.fileno()), str(slab.fd)],
            pass_fds=(theirs.fileno(), slab.fd),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._reader = threading.Thread(target=self._read, name="ec_s3-port", daemon=True)
        self._reader.start()
        self._writer = threading.Thread(target=self._write, name="ec_s3-port-out", daemon=True)
        self._writer.start()
        self._send(
            kind="start",
            config=_dump(config),
            namespace={f.name: getattr(namespace, f.name) for f in fields(namespace) if f.init},
            nbytes=slab.nbytes,
            facts=dict(facts or {}),
        )
        if not self._started.wait(START_SECONDS) or not self._alive:
            self._stop()
            raise ECS3Error("the engine's process did not start; its log says why")

    @property
    def alive(self) -> bool:
        """See `EnginePort.alive`."""
        return self._alive and not self._closed

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def _send(self, **message: object) -> None:
        """Hand a message over; a burst may fill the socket, which no caller may wait for."""
        if self._outbox.qsize() < MAX_OUTBOX:
            self._outbox.put(json.dumps(message).encode())
        else:
            self._alive = False  # a child that reads no more is as good as gone

    def _write(self) -> None:
        while (raw := self._outbox.get()) is not None:
            try:
                self._sock.send(raw)
            except OSError:
                self._alive = False

    def want(self, want: Want) -> None:
        """See `EnginePort.want`."""
        self._send(kind="want", **asdict(want))

    def reserve(self, ticket: int, identifier: str, nbytes: int) -> None:
        """See `EnginePort.reserve`."""
        self._send(kind="reserve", ticket=ticket, identifier=identifier, nbytes=nbytes)

    def filled(self, ticket: int, spec: TensorSpec, meta: ItemMeta) -> None:
        """See `EnginePort.filled`."""
        fields = [spec.dtype, list(spec.shape)]
        self._send(kind="filled", ticket=ticket, spec=fields, meta=asdict(meta))

    def release(self, ticket: int) -> None:
        """See `EnginePort.release`."""
        self._send(kind="release", ticket=ticket)

    def poll(self) -> list[Event]:
        """See `EnginePort.poll`."""
        events = self._events
        return [events.popleft() for _ in range(len(events))]

    def drain_stats(self) -> Data:
        """See `EnginePort.drain_stats`; at most a second old."""
        with self._stats_lock:
            data, self._stats = self._stats, {}
        return data

    def _read(self) -> None:
        while True:
            try:
                raw = self._sock.recv(MAX_MESSAGE)
            except OSError:
                raw = b""
            if not raw:
                break
            self._take(json.loads(raw))
        self._alive = False
        self._started.set()
        if not self._closed:
            logger.error("the engine's process is gone; the encoder cache is off")

    def _take(self, packed: dict[str, Any]) -> None:
        match packed["kind"]:
            case "started":
                self._started.set()
            case "stats":
                with self._stats_lock:
                    self._stats = combine(self._stats, packed["data"])
            case "closed":
                self._report = FlushReport(**packed["report"])
            case _:
                event = _unpack_event(packed)
                if event is not None:
                    self._events.append(event)

    def close(self, timeout: float) -> FlushReport:
        """See `EnginePort.close`; idempotent."""
        if self._closed:
            return FlushReport()
        self._closed = True
        self._send(kind="close", timeout=timeout)
        self._reader.join(timeout + 5.0)
        self._stop()
        return self._report or FlushReport()

    def _stop(self) -> None:
        self._closed = True
        self._alive = False
        self._outbox.put(None)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        try:
            self._child.wait(2.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(5.0)


def _dump(config: ECConfig) -> dict[str, Any]:
    """Settings as JSON; the salt travels in the namespace."""
    return config.model_dump(mode="json", exclude={"salt", "config_file", "engine"})


class _Service:
    """The child's side: reads messages on the main thread, answers from any."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def emit(self, event: Event) -> None:
        self.send(_pack_event(event))

    def send(self, message: dict[str, Any]) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._sock.send(json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        try:
            raw = self._sock.recv(MAX_MESSAGE)
        except OSError:
            return None
        if not raw:
            return None
        message: dict[str, Any] = json.loads(raw)
        return message

    def report_stats(self, cache: EncoderCache) -> None:
        while not self._ended.wait(STATS_SECONDS):
            cache.stats()
            data = cache.statistics.drain()
            if data:
                self.send({"kind": "stats", "data": data})

    def serve(self, desk: Desk) -> float | None:
        """Carry messages to the desk until told to close; the flush's time limit, if told."""
        while (message := self.receive()) is not None:
            ticket = message.get("ticket", -1)
            match message.pop("kind"):
                case "want":
                    desk.want(Want(**message))
                case "reserve":
                    desk.reserve(ticket, message["identifier"], message["nbytes"])
                case "filled":
                    meta = ItemMeta(**message["meta"])
                    desk.filled(ticket, _spec(message["spec"]), meta)
                case "release":
                    desk.release(ticket)
                case "close":
                    return float(message["timeout"])
        return None

    def end(self) -> None:
        self._ended.set()


def main(sock_fd: int, slab_fd: int) -> None:
    """Run the engine until the parent closes the socket, or is gone."""
    logging.basicConfig(level=logging.INFO, format="ec_s3 engine %(levelname)s %(message)s")
    os.set_inheritable(sock_fd, False)
    os.set_inheritable(slab_fd, False)
    service = _Service(socket.socket(fileno=sock_fd))
    start = service.receive()
    if start is None:
        return
    config = ECConfig.from_mapping(start["config"])
    slab = Slab.attach(slab_fd, start["nbytes"])
    threading.Thread(target=slab.populate, name="ec_s3-populate", daemon=True).start()
    namespace = Namespace(**start["namespace"])
    cache = EncoderCache(config, namespace, slab=slab, facts=start["facts"])
    loop = LoopThread("ec_s3-engine")
    loop.run(cache.start(), timeout=START_SECONDS)
    service.send({"kind": "started"})
    threading.Thread(target=service.report_stats, args=(cache,), daemon=True).start()
    limit = service.serve(Desk(cache, loop, service.emit))
    service.end()
    flush = config.flush_timeout if limit is None else limit
    started = time.monotonic()
    report = loop.run(cache.close(flush), timeout=flush + 10.0)
    service.send({"kind": "closed", "report": asdict(report)})
    logger.debug("flushed in %.1f s", time.monotonic() - started)
    loop.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
