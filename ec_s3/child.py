"""The engine in a process of its own: `ProcessPort` here, `main` in the child.

A slow step of the scheduler's process then costs the engine nothing, and the engine's work costs
the scheduler nothing but a socket write. Both processes map one slab, which the scheduler's owns;
the index over it lives in the child. Messages go over a socket pair that only the two processes
have. The child ends, after a bounded flush, when its parent closes the socket or is gone; when the
child dies the port is no longer `alive`, and what it had leased stays where it is.

Run as `python -m ec_s3.child <socket fd> <slab fd>`, never by hand.

Locking: under `_receiving` one thread at a time takes what the child has sent; `_stats_lock` guards
the metrics received and not yet handed out; under `_gate_lock` the gate turns and the child is
told, so that both turn in one order.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from ec_s3.channel import Channel
from ec_s3.config import ECConfig
from ec_s3.desk import Desk
from ec_s3.engine import EncoderCache
from ec_s3.errors import ConfigError, ECS3Error
from ec_s3.gate import Gate
from ec_s3.header import MAX_IDENTIFIER_BYTES
from ec_s3.keys import Namespace
from ec_s3.loop import LoopThread
from ec_s3.metrics import combine
from ec_s3.pages import Slab
from ec_s3.port import CLOSE_GRACE, UNKNOWN
from ec_s3.sources import without_settings
from ec_s3.tickets import Absent, Granted, Want, outdated, pack_event, unpack_event, unpack_spec
from ec_s3.types import FlushReport, ItemMeta, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ec_s3.metrics import Data
    from ec_s3.tickets import Event
    from ec_s3.types import TensorSpec

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
STATS_SECONDS = 1.0
END_SECONDS = 2.0
"""How long either process waits for the other's last move before it goes on without."""


class ProcessPort:
    """The engine in a child process; see `port.EnginePort`.

    Args:
        config: settings.
        namespace: what makes two tensors interchangeable.
        slab: host memory, owned by the caller; the child maps it too.
        facts: what identifiers depend on but the namespace does not; JSON-able.

    Raises:
        ConfigError: the settings cannot be used.
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
        self._pid = os.getpid()
        self._events: deque[tuple[Event, int]] = deque()
        # What the child's gate will be once it has read all messages.
        self._gate = Gate(namespace)
        self._gate_lock = threading.Lock()
        self._stats: Data = {}
        self._stats_lock = threading.Lock()
        self._started = False
        self._failure: ECS3Error | None = None
        self._report = UNKNOWN
        self._closed = self._gone = self._reported = False
        self._receiving = threading.Lock()
        self._child, sock = _spawn(slab.fd)
        self._channel = Channel(sock, name="ec_s3-port-send")
        self._watch = threading.Thread(target=self._await_end, name="ec_s3-port", daemon=True)
        self._watch.start()
        try:
            self._start(config, namespace, slab, facts)
        except BaseException:
            self._stop(END_SECONDS)
            raise

    def _start(
        self,
        config: ECConfig,
        namespace: Namespace,
        slab: Slab,
        facts: Mapping[str, object] | None,
    ) -> None:
        self._post(
            kind="start",
            parent=self._pid,
            config=_dump(config),
            namespace={f.name: getattr(namespace, f.name) for f in fields(namespace) if f.init},
            nbytes=slab.nbytes,
            facts=dict(facts or {}),
        )
        self._receive(START_SECONDS, lambda: self._started or self._failure is not None)
        if self._failure is not None:
            raise self._failure
        if not self._started or not self.alive:
            raise ECS3Error("the engine's process did not start; its log says why")

    @property
    def alive(self) -> bool:
        """See `EnginePort.alive`. A forked child of this process has no engine."""
        ended = self._closed or self._gone or self._channel.broken
        return not ended and self._pid == os.getpid()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def _post(self, **message: object) -> None:
        if self.alive:
            self._channel.send(message)

    def want(self, want: Want) -> None:
        """See `EnginePort.want`."""
        if len(want.identifier) > MAX_IDENTIFIER_BYTES:  # chosen by a client: of any length
            self._answer(Absent(want.ticket, MissReason.TOO_LARGE))
            return
        self._post(kind="want", **asdict(want))

    def reserve(self, ticket: int, identifier: str, nbytes: int) -> None:
        """See `EnginePort.reserve`."""
        if len(identifier) > MAX_IDENTIFIER_BYTES:
            self._answer(Granted(ticket, None))
            return
        self._post(kind="reserve", ticket=ticket, identifier=identifier, nbytes=nbytes)

    def filled(
        self, ticket: int, spec: TensorSpec, meta: ItemMeta, *, compare: bool = False
    ) -> None:
        """See `EnginePort.filled`."""
        fields = [spec.dtype, list(spec.shape)]
        self._post(kind="filled", ticket=ticket, spec=fields, meta=asdict(meta), compare=compare)

    def release(self, ticket: int) -> None:
        """See `EnginePort.release`."""
        self._post(kind="release", ticket=ticket)

    def poll(self) -> list[Event]:
        """See `EnginePort.poll`."""
        self._receive()
        events = self._events
        weights = self._gate.now.weights
        return [self._told(*events.popleft(), weights) for _ in range(len(events))]

    def _told(self, event: Event, asked: int, weights: int) -> Event:
        if asked >= weights:
            return event
        self.release(event.ticket)
        return outdated(event)

    def _answer(self, event: Event) -> None:
        self._events.append((event, self._gate.now.weights))

    def suspend(self) -> None:
        """See `EnginePort.suspend`."""
        with self._gate_lock:
            if self._gate.suspend():
                self._post(kind="suspend")

    def resume(self, weight_version: str) -> None:
        """See `EnginePort.resume`."""
        with self._gate_lock:
            if self._gate.resume(weight_version):
                self._post(kind="resume", weight_version=weight_version)

    def drain_stats(self) -> Data:
        """See `EnginePort.drain_stats`; at most a second old."""
        self._receive()
        with self._stats_lock:
            data, self._stats = self._stats, {}
        return data

    def _await_end(self) -> None:
        # Waits in the kernel: no thread of ours ever wants the interpreter beside the scheduler's.
        self._child.wait()
        self._gone = True
        if self._started and not self._closed:
            logger.error("the engine's process is gone; the encoder cache is off")

    def wait_for_end(self) -> None:
        """See `restart.MortalPort.wait_for_end`."""
        self._watch.join()

    def _receive(self, timeout: float = 0.0, enough: Callable[[], bool] = lambda: True) -> None:
        """Take what the child has sent; wait until that is enough, at most `timeout` seconds."""
        if self._pid != os.getpid():
            return
        give_up = time.monotonic() + timeout
        while True:
            with self._receiving:
                for packed in self._channel.receive_ready():
                    self._take(packed)
                ended = self._channel.ended
            left = give_up - time.monotonic()
            if enough() or ended or left <= 0:
                return
            self._channel.wait_ready(left)

    def _take(self, packed: dict[str, Any]) -> None:
        match packed["kind"]:
            case "started":
                self._started = True
            case "failed":
                error = ConfigError if packed["config"] else ECS3Error
                self._failure = error(packed["error"])
            case "stats":
                with self._stats_lock:
                    self._stats = combine(self._stats, packed["data"])
            case "closed":
                self._report, self._reported = FlushReport(**packed["report"]), True
            case _:
                event = unpack_event(packed)
                if event is not None:
                    self._events.append((event, packed["weights"]))

    def close(self, timeout: float) -> FlushReport:
        """See `EnginePort.close`; idempotent."""
        if self._closed or self._pid != os.getpid():
            return self._report
        give_up = time.monotonic() + timeout + CLOSE_GRACE
        self._closed = True
        self._channel.send({"kind": "close", "timeout": timeout})
        self._receive(timeout + CLOSE_GRACE, lambda: self._reported)
        self._stop(max(END_SECONDS, give_up - time.monotonic()))
        return self._report

    def _stop(self, timeout: float) -> None:
        self._closed = True
        self._channel.close()
        try:
            self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(END_SECONDS)


def _spawn(slab_fd: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the child; our end of the socket pair."""
    ours, theirs = socket.socketpair()
    try:
        child = subprocess.Popen(  # noqa: S603 our own interpreter and module
            [sys.executable, "-P", "-m", "ec_s3.child", str(theirs.fileno()), str(slab_fd)],
            pass_fds=(theirs.fileno(), slab_fd),
            env=without_settings(os.environ),  # it is told; a file may be gone when it restarts
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # whoever reads our output must not wait for the child
        )
    except OSError as error:
        ours.close()
        raise ECS3Error(f"the engine's process cannot be started: {error}") from error
    finally:
        theirs.close()
    return child, ours


def _dump(config: ECConfig) -> dict[str, Any]:
    """Settings as JSON; the salt travels in the namespace."""
    dumped = config.model_dump(mode="json", exclude={"salt", "config_file", "engine"})
    if config.signing_key is not None:  # the socket is between the two processes alone
        dumped["signing_key"] = config.signing_key.get_secret_value()
    return dumped


class _Service:
    """The child's side: reads messages on the main thread, answers from any."""

    def __init__(self, channel: Channel, cache: EncoderCache, loop: LoopThread) -> None:
        self._channel = channel
        self._cache = cache
        self._loop = loop
        self._desk = Desk(cache, loop, self._send)
        self._ended = threading.Event()

    def _send(self, event: Event, weights: int) -> None:
        self._channel.send({**pack_event(event), "weights": weights})

    def watch(self, parent: int) -> None:
        """Report metrics until the end, and end when the parent has."""
        while not self._ended.wait(STATS_SECONDS):
            self._send_stats()
            # No end of file comes while a process that the parent forked has the socket, too.
            if os.getppid() != parent:
                self._channel.stop_receiving()

    def _send_stats(self) -> None:
        self._cache.gauges.update()
        data = self._cache.statistics.drain()
        if data:
            self._channel.send({"kind": "stats", "data": data})

    def serve(self) -> float | None:
        """Carry messages to the desk until told to close; the flush's time limit, if told."""
        while (message := self._channel.receive()) is not None:
            if message["kind"] == "close":
                return float(message["timeout"])
            try:
                self._carry(message)
            except Exception:  # the outermost border: one bad message must not end the engine
                self._cache.statistics.add("errors", where="engine")
                logger.exception("a message could not be carried out")
        return None

    def _carry(self, message: dict[str, Any]) -> None:
        ticket = message.get("ticket", -1)
        match message.pop("kind"):
            case "want":
                self._desk.want(Want(**message))
            case "reserve":
                self._desk.reserve(ticket, message["identifier"], message["nbytes"])
            case "filled":
                spec, meta = unpack_spec(message["spec"]), ItemMeta(**message["meta"])
                self._desk.filled(ticket, spec, meta, compare=message["compare"])
            case "release":
                self._desk.release(ticket)
            case "suspend":
                self._desk.suspend()
            case "resume":
                self._desk.resume(message["weight_version"])

    def end(self, timeout: float) -> None:
        """Flush, report, stop."""
        self._ended.set()
        try:
            report = self._loop.run(self._cache.close(timeout), timeout=timeout + CLOSE_GRACE)
        except TimeoutError:
            report = UNKNOWN
        self._send_stats()
        self._channel.send({"kind": "closed", "report": asdict(report)})
        self._channel.drain(END_SECONDS)
        self._loop.close()


def _open(start: dict[str, Any], slab_fd: int) -> tuple[EncoderCache, LoopThread]:
    config = ECConfig.from_mapping(start["config"])
    slab = Slab.attach(slab_fd, start["nbytes"])
    threading.Thread(target=slab.populate, name="ec_s3-populate", daemon=True).start()
    cache = EncoderCache(config, Namespace(**start["namespace"]), slab=slab, facts=start["facts"])
    loop = LoopThread("ec_s3-engine")
    loop.run(cache.start(), timeout=START_SECONDS)
    return cache, loop


def main(sock_fd: int, slab_fd: int) -> None:
    """Run the engine until the parent closes the socket, or is gone."""
    logging.basicConfig(level=logging.INFO, format="ec_s3 engine %(levelname)s %(message)s")
    os.set_inheritable(sock_fd, False)
    os.set_inheritable(slab_fd, False)
    # A terminal's Ctrl-C is for the parent, which closes us; SIGTERM may be for the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=sock_fd), name="ec_s3-answers")
    channel.stop_receiving_on(signal.SIGTERM)
    start = channel.receive()
    if start is None:
        return
    try:
        cache, loop = _open(start, slab_fd)
    except ECS3Error as error:
        config = isinstance(error, ConfigError)
        channel.send({"kind": "failed", "error": str(error), "config": config})
        channel.drain(END_SECONDS)
        return
    service = _Service(channel, cache, loop)
    threading.Thread(target=service.watch, args=(start["parent"],), daemon=True).start()
    channel.send({"kind": "started"})
    limit = service.serve()
    service.end(cache.config.flush_timeout if limit is None else limit)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    logging.shutdown()
    os._exit(0)  # not to wait for threads that a dead file system may hold for ever
