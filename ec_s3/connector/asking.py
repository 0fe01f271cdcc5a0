"""What a rank asks of the scheduler part, and how it waits for the answer.

`Asking` belongs to a rank's link: `ask` is called on any thread of the rank and is the only call of
this side that waits, always with a time limit; the link's threads bring requests out and answers
in. `WeightChanges` is the scheduler's side of it and runs on the hub's thread. Requests may be sent
again when a connection broke, so each must mean the same the second time.

Locking: none. A request is popped from the table by exactly one taker, which then ends it.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ec_s3.connector import packets
from ec_s3.errors import ClosedError, ECS3Error

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.connector.scheduler import Scheduler

SUSPEND = "suspend"
RESUME = "resume"


@dataclass(slots=True, eq=False)
class _Request:
    """One request on its way; `error` is None as long as it is not answered."""

    ended: threading.Event = field(default_factory=threading.Event)
    error: str | None = None


def _packed(number: int, what: str, argument: str) -> bytes:
    message = {"kind": "ask", "number": number, "what": what, "argument": argument}
    raw = json.dumps(message).encode()
    if len(raw) > packets.MAX_MESSAGE:  # would cost the connection, and with it the cache
        raise ECS3Error(f"the scheduler part could not {what}: {len(raw)} bytes are too long")
    return raw


class Asking:
    """Requests of one rank.

    Args:
        send: brings a packet to the hub, later and if there is a connection; never waits.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._requests: dict[int, _Request] = {}
        self._numbers = itertools.count(1)
        self._connected = threading.Event()
        self._closed = False

    def connected(self) -> None:
        """The hub hears us."""
        self._connected.set()

    def disconnected(self) -> None:
        """What was asked is lost, or its answer is."""
        if not self._closed:
            self._connected.clear()
        while self._requests:
            self._requests.popitem()[1].ended.set()

    def take(self, message: dict[str, Any]) -> None:
        """The hub has answered.

        Raises:
            ValueError: this is no answer.
        """
        number, error = packets.number(message, "number"), message.get("error")
        if message.get("kind") != "answer" or not isinstance(error, str):
            raise ValueError(f"{message.get('kind')!r} is not expected")
        request = self._requests.pop(number, None)
        if request is not None:
            request.error = error
            request.ended.set()

    def ask(self, what: str, argument: str, *, timeout: float) -> None:
        """Ask for something, and return when it has been done.

        Raises:
            TimeoutError: no answer within `timeout` seconds; it may be done or not.
            ClosedError: closed meanwhile or before.
            ECS3Error: the scheduler part could not do it.
        """
        give_up = time.monotonic() + timeout
        request = _Request()
        while request.error is None:
            number, request = next(self._numbers), _Request()
            message = _packed(number, what, argument)
            if self._connected.wait(max(0.0, give_up - time.monotonic())):
                self._requests[number] = request
                self._send(message)
                if self._closed or not self._connected.is_set():  # since the request was not there
                    request.ended.set()
                request.ended.wait(max(0.0, give_up - time.monotonic()))
                self._requests.pop(number, None)
            if self._closed and request.error is None:
                raise ClosedError(f"closed before the scheduler part could {what}")
            if time.monotonic() >= give_up and request.error is None:
                raise TimeoutError(f"the scheduler part did not {what} within {timeout} s")
        if request.error:
            raise ECS3Error(f"the scheduler part could not {what}: {request.error}")

    def close(self) -> None:
        """End every request."""
        self._closed = True
        self._connected.set()
        self.disconnected()


class WeightChanges:
    """Carries out what the ranks ask for.

    Attributes:
        scheduler: who does it; None as long as the engine is starting.
    """

    def __init__(self) -> None:
        self.scheduler: Scheduler | None = None

    def carry_out(self, what: str, argument: str) -> None:
        """Do what a rank asks for; it has been done on return.

        Raises:
            ECS3Error: it cannot be done.
        """
        if self.scheduler is None:
            raise ECS3Error("the engine is still starting")
        if what == SUSPEND:
            self.scheduler.suspend()
        elif what == RESUME:
            self.scheduler.resume(argument)
        else:
            raise ECS3Error(f"{what!r} is not known here")
