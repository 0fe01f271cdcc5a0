"""An encoder in a process of its own, which media may kill without ending the job.

A decoder that crashes, or memory that runs out, ends a whole process. This one is then started
again, and the medium is looked for by halves of what the process was given, told, and left out; one
of which a decoder finds no end, entry by entry.
It is in a process group of its own, but in this session: Linux may share out the processors by
session, and one full of ranks that wait busily can then keep another waiting for a minute. Called
from one thread at a time. Never imports vLLM: `encoder_process` does, on the other side.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from enum import Enum, auto
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ec_s3.errors import ConfigError, ECS3Error
from ec_s3.prewarm.encoding import Failed, Identified

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ec_s3.keys import Namespace
    from ec_s3.prewarm.encoding import Encoder, EncoderSettings, MediaItem

    Entry = tuple[MediaItem, bytes | Path]
    Result = Identified | Failed

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_DEATHS = 16
"""How often in a row the process may die: enough to find one entry among the most of a batch."""

HANG_SECONDS = 600.0
HANG_SECONDS_AN_ENTRY = 30.0
"""How long entries may take to be decoded and processed: so long, and so much more for each."""

_LOOK_SECONDS = 0.5
_END_SECONDS = 30.0


class Opener(NamedTuple):
    """What opens an encoder, by name: a function of `EncoderSettings`."""

    module: str
    function: str


VLLM = Opener("ec_s3.connector.encoder", "open_encoder")
"""By name: only the connector may depend on vLLM, and nothing but vLLM on the connector."""


class Answer(Enum):
    """What has become of a call."""

    DONE = auto()
    CONFIG = auto()
    """A ConfigError; its message follows."""

    ERROR = auto()
    """Another error of ours; likewise."""

    DIED = auto()
    """None came: the process has ended."""


def open_encoder(settings: EncoderSettings) -> Encoder:
    """The vLLM of a job; it starts when it first has to encode.

    Raises:
        ConfigError: vLLM is not installed, or the settings cannot be used.
    """
    return IsolatedEncoder(settings, VLLM)


class _DiedError(ECS3Error):
    """The process has ended by itself; the message says how."""


class _HungError(_DiedError):
    """The process gave no answer, and was ended."""


class IsolatedEncoder:
    """An `ec_s3.prewarm.encoding.Encoder`.

    Args:
        settings: of the encoder.
        opener: what opens it, over there.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, settings: EncoderSettings, opener: Opener) -> None:
        self._settings = settings
        self._opener = opener
        self._deaths = 0
        self._entries: dict[int, Entry] = {}
        self._known: set[int] = set()  # lines that the process has identified, and not encoded
        self._warm = False
        try:
            self._process = _Process(settings, opener)
        except _DiedError as error:
            raise ConfigError(f"the encoder's process did not start: {error}") from error

    @property
    def namespace(self) -> Namespace:
        """Where its outputs go."""
        return self._process.namespace

    @property
    def facts(self) -> Mapping[str, object]:
        """What identifiers depend on but the namespace does not tell."""
        return self._process.facts

    def identify(
        self, items: Sequence[MediaItem], data: Sequence[bytes | Path]
    ) -> list[Identified | Failed]:
        """What a server would call these entries; see `Encoder.identify`.

        Raises:
            ECS3Error: the process dies again and again.
        """
        entries = list(zip(items, data, strict=True))
        self._entries = {item.line: (item, source) for item, source in entries}
        return self._by_halves(entries, self._identify, lambda entry: entry[0])

    def encode(self, items: Sequence[Identified]) -> list[Identified | Failed]:
        """Encode entries of the last `identify`; see `Encoder.encode`.

        Raises:
            ConfigError: vLLM cannot be started.
            ECS3Error: the process, or vLLM in it, dies again and again.
            ValueError: an entry is not of the last `identify`.
        """
        strangers = [one.item.line for one in items if one.item.line not in self._entries]
        if strangers:
            raise ValueError(f"not identified just before: lines {strangers}")
        return self._by_halves(list(items), self._encode, lambda one: one.item)

    def close(self) -> None:
        """End the process; idempotent."""
        self._process.close()

    def _by_halves(
        self,
        work: list[T],
        call: Callable[[list[T]], list[Result]],
        item_of: Callable[[T], MediaItem],
    ) -> list[Result]:
        """One result for each; the one that the process dies of is found and left out."""
        if (ended := self._process.ended()) is not None:  # with nothing to do: no entry's fault
            self._bury(ended, 0)
        try:
            results = call(work)
        except _DiedError as error:
            self._bury(error, len(work))
            if len(work) == 1:
                return [Failed(item=item_of(work[0]), reason=f"the encoder died of it: {error}")]
            # To wait for the end of a time limit again and again would cost more than small calls.
            size = 1 if isinstance(error, _HungError) else -(-len(work) // 2)
            parts = [work[start : start + size] for start in range(0, len(work), size)]
            return [one for part in parts for one in self._by_halves(part, call, item_of)]
        self._deaths = 0
        return results

    def _identify(self, entries: list[Entry]) -> list[Result]:
        items, data = [item for item, _ in entries], [source for _, source in entries]
        seconds = HANG_SECONDS + HANG_SECONDS_AN_ENTRY * len(entries)
        results: list[Result] = self._process.call("identify", items, data, seconds=seconds)
        self._known = {one.item.line for one in results if isinstance(one, Identified)}
        return results

    def _encode(self, items: list[Identified]) -> list[Result]:
        if not self._warm:
            # What it dies of before it is given anything is no entry's fault.
            try:
                self._process.call("encode", [])
            except _DiedError as error:
                raise ECS3Error(f"the encoder's process died as vLLM started: {error}") from error
            self._warm = True
        lines = [one.item.line for one in items]
        done: dict[int, Result] = {}
        if not self._known.issuperset(lines):  # a new process, or another half
            again = self._identify([self._entries[line] for line in lines])
            done = {one.item.line: one for one in again}
            items = [one for one in again if isinstance(one, Identified)]
        self._known.difference_update(lines)
        results: list[Result] = self._process.call("encode", items)
        done |= {one.item.line: one for one in results}
        return [done[line] for line in lines]

    def _bury(self, error: _DiedError, entries: int) -> None:
        self._deaths += 1
        if self._deaths >= MAX_DEATHS:
            raise ECS3Error(f"the encoder's process has died {MAX_DEATHS} times in a row: {error}")
        logger.warning("the encoder's process died: %s; %d entries are tried again", error, entries)
        self._known, self._warm = set(), False
        before = self._process.namespace
        try:
            self._process = _Process(self._settings, self._opener)
        except ECS3Error as again:
            raise ECS3Error(f"the encoder's process cannot be started again: {again}") from again
        if self._process.namespace != before:
            raise ECS3Error(f"{before.id} has become {self._process.namespace.id} meanwhile")


class _Process:
    """One process; it ends with this object's `close`, or with this very process."""

    namespace: Namespace
    facts: Mapping[str, object]
    _how = ""

    def __init__(self, settings: EncoderSettings, opener: Opener) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                [sys.executable, "-m", "ec_s3.prewarm.encoder_process", str(theirs.fileno())],
                stdin=subprocess.PIPE,  # its end tells the child that we are gone
                stdout=2,  # ours is for the report
                pass_fds=(theirs.fileno(),),
                process_group=0,  # a Ctrl-C is ours, and vLLM's own children end with it
            )
        self._link = Connection(ours.detach())
        try:
            self.namespace, self.facts = self._exchange((settings, opener))
        except BaseException:
            self.close()
            raise

    def ended(self) -> _DiedError | None:
        """How it has ended; None when it runs."""
        return None if self._child.poll() is None else _DiedError(self._end())

    def call(self, verb: str, *arguments: object, seconds: float = math.inf) -> Any:
        """Let the encoder do something, for so long; what encodes has time limits of its own.

        Raises:
            _DiedError: it died of that.
            _HungError: it was not done in time, and is ended.
            ConfigError: what the encoder has raised.
            ECS3Error: likewise.
        """
        return self._exchange((verb, arguments), seconds)

    def _exchange(self, message: object, seconds: float = math.inf) -> Any:
        give_up = time.monotonic() + seconds
        try:
            self._link.send(message)
            # Children of the child may hold the other end of the link, so that it does not tell.
            while not self._link.poll(_LOOK_SECONDS) and self._child.poll() is None:
                if time.monotonic() > give_up:
                    self._child.kill()
                    self._end()
                    raise _HungError(f"it gave no answer within {seconds:.0f} s")
            kind, value = self._link.recv() if self._link.poll(0) else (Answer.DIED, None)
        except (EOFError, OSError):
            kind, value = Answer.DIED, None
        if kind is Answer.DIED:
            raise _DiedError(self._end())
        if kind is Answer.CONFIG:
            raise ConfigError(value)
        if kind is Answer.ERROR:
            raise ECS3Error(value)
        return value

    def close(self) -> None:
        """Let it end, for so long as it may take; idempotent."""
        if self._link.closed:
            return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._link.send(("close", ()))
            self._child.wait(_END_SECONDS)
        self._end()

    def _end(self) -> str:
        """Make sure that nothing of it is left; how it has ended."""
        if self._how:
            return self._how  # its number may be another's by now
        self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_END_SECONDS)  # its link ends before it does
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        try:
            self._how = _described(self._child.wait(_END_SECONDS))
        except subprocess.TimeoutExpired:  # in a driver that hangs
            self._how = "it cannot be ended"
        if self._child.stdin is not None:
            self._child.stdin.close()
        return self._how


def _described(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"it was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
