"""What may be served and saved at this moment: the weights in use, and what an operator forbids.

Pure state that every part of an engine asks before it hands out or takes in an item; any thread,
no I/O. Between two changes of it lies an *epoch*: work that began in one epoch and ends in another
is worth nothing, and its item is neither served nor kept.

Locking: one lock makes each change one step. Readers take none: they read one reference, `now`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ec_s3.control import Control
from ec_s3.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.keys import Namespace


@dataclass(frozen=True, slots=True, eq=False)
class Epoch:
    """A time in which nothing changes; compared by identity.

    Attributes:
        namespace: of the weights in use.
        weights: number of suspensions and resumptions so far.
        closed: why nothing at all is served or saved, None when things are.
    """

    namespace: Namespace
    weights: int = 0
    closed: MissReason | None = None


class Gate:
    """Says what may pass.

    Args:
        namespace: what the engine was started with.
        wall_clock: seconds since the epoch, as in the control document.

    Attributes:
        now: the present epoch.
        control: the control document that holds.
    """

    def __init__(
        self, namespace: Namespace, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.now = Epoch(namespace)
        self.control = Control()
        self._wall_clock = wall_clock
        self._suspended = False
        self._lock = threading.Lock()

    @property
    def suspended(self) -> bool:
        """Whether the weights are being changed."""
        return self._suspended

    def refusal(self, key: str, since: Epoch) -> MissReason | None:
        """Why the item of this key may be neither served nor saved, None when it may.

        Args:
            key: its object key.
            since: the epoch in which the caller's work on it began.
        """
        now = self.now
        if now.closed is not None:
            return now.closed
        if now is not since:
            return MissReason.SUSPENDED if now.weights != since.weights else MissReason.STALE
        return MissReason.DELETED if self._deleted(key) else None

    def upload_refusal(self, key: str) -> str | None:
        """Why an item that the host tier holds may not go to the stores, None when it may.

        Items of the weights in use may go there while the weights are being changed: they were
        encoded before.
        """
        if not self.control.enabled:
            return "disabled"
        if not key.startswith(f"{self.now.namespace.prefix}/"):
            return "superseded"
        return "deleted" if self._deleted(key) else None

    def _deleted(self, key: str) -> bool:
        control = self.control
        if not control.deleted:  # nearly always, and asked at every hit
            return False
        return control.deletes(key.rpartition("/")[2], now=self._wall_clock())

    def suspend(self) -> bool:
        """Nothing may pass until `resume`; whether that is new."""
        with self._lock:
            if self._suspended:
                return False
            self._suspended = True
            self._turn(weights=1)
            return True

    def resume(self, weight_version: str) -> bool:
        """Go on with weights of this name; whether that changes anything."""
        with self._lock:
            namespace = self.now.namespace
            if not self._suspended and namespace.weight_version == weight_version:
                return False
            self._suspended = False
            self._turn(replace(namespace, weight_version=weight_version), weights=1)
            return True

    def apply(self, control: Control) -> Control:
        """Obey a control document from now on; the one before."""
        with self._lock:
            before, self.control = self.control, control
            if control.enabled != before.enabled or control.valid_after != before.valid_after:
                self._turn()
            return before

    def _turn(self, namespace: Namespace | None = None, *, weights: int = 0) -> None:
        """Locked: begin a new epoch."""
        closed = MissReason.SUSPENDED if self._suspended else None
        if not self.control.enabled:
            closed = MissReason.DISABLED
        last = self.now
        self.now = Epoch(namespace or last.namespace, last.weights + weights, closed)
