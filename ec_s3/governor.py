"""Turns an engine's gate, and forgets what must not outlive a turn.

Follows the bucket's control document in the background, and suspends and resumes the engine when
its weights change. `suspend` and `resume` may be called from any thread and never wait: the gate
has turned when they return, and what is left to forget is forgotten on the engine's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from ec_s3 import deletion
from ec_s3.control import control_poll
from ec_s3.errors import RemoteError
from ec_s3.gate import Gate

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from ec_s3.control import Control
    from ec_s3.keys import Namespace
    from ec_s3.local import LocalTier
    from ec_s3.metrics import Stats
    from ec_s3.polling import Poll
    from ec_s3.reader import Reader
    from ec_s3.uploads import UploadQueue

logger = logging.getLogger(__name__)

STOP_SECONDS = 1.0


class Governor:
    """One engine's.

    Args:
        namespace: what the engine was started with.
        tier: its host tier.
        stats: gauge `switched_off`, and what the poll of the control document counts.

    Attributes:
        gate: what the engine's parts ask.
        poll: follows the control document; None without a bucket, and before the start.
    """

    def __init__(self, namespace: Namespace, *, tier: LocalTier, stats: Stats) -> None:
        self.gate = Gate(namespace)
        self.poll: Poll | None = None
        self._tier = tier
        self._stats = stats
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: Reader | None = None
        self._queue: UploadQueue | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._forgotten: dict[str, float] = {}  # keys deleted here, and until when they stay so
        self._tell()

    def start(self, reader: Reader, queue: UploadQueue | None) -> None:
        """Begin to follow the control document; on the engine's loop."""
        self._loop = asyncio.get_running_loop()
        self._reader, self._queue = reader, queue
        if reader.tiers.remote is not None:
            self.poll = control_poll(
                reader.tiers.remote,
                key=lambda: self.gate.now.namespace.control_key,
                obey=self.obey,
                stats=self._stats,
            )
            self._keep(asyncio.ensure_future(self.poll.run()))

    def attend(self, work: Coroutine[object, object, None]) -> None:
        """Run background work until the engine is closed; on the engine's loop."""
        self._keep(asyncio.ensure_future(work))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End the background work, or leave it behind: a dead file system lets go of nothing."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS)

    # -- weights ---------------------------------------------------------------------------

    def suspend(self) -> None:
        """Nothing is served or kept from now on."""
        if self.gate.suspend():
            logger.info("the encoder cache is suspended")
        self._tell()

    def resume(self, weight_version: str) -> None:
        """Go on with the weights of this name."""
        others = self.gate.now.namespace.weight_version != weight_version
        if others:
            self._tier.clear()  # before anything of the new weights comes in
        if not self.gate.resume(weight_version):
            return  # every rank of an engine says so
        self._tell()
        namespace = self.gate.now.namespace
        logger.info("the encoder cache goes on, with namespace %s", namespace.id)
        if others and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the engine's loop is closed
                self._loop.call_soon_threadsafe(self._turned, namespace)

    def _turned(self, namespace: Namespace) -> None:
        """On the loop: the weights are others now."""
        assert self._reader is not None
        self._reader.tiers.presence.clear()
        self._reader.tiers.refused.clear()
        prefix = f"{namespace.prefix}/"
        old = [key for key in self._under_way() if not key.startswith(prefix)]
        self._keep(asyncio.ensure_future(self._call_off(old, "superseded")))
        if self.poll is not None:
            self.poll.hurry()  # these weights have a document of their own

    # -- the operator ----------------------------------------------------------------------

    async def obey(self, control: Control) -> None:
        """A control document holds from now on."""
        assert self._reader is not None
        tiers = self._reader.tiers
        before = self.gate.apply(control)
        self._tell()
        if control.enabled != before.enabled:
            level = logging.INFO if control.enabled else logging.WARNING
            word = "on" if control.enabled else "off"
            logger.log(level, "an operator has switched the encoder cache %s", word)
        if control.valid_after != before.valid_after:
            logger.info("objects made before %.0f do not count", control.valid_after)
            tiers.presence.clear()
            tiers.refused.clear()
        if control.valid_after > before.valid_after:
            self._tier.clear()
            await self._call_off(self._under_way(), "stale")
        if not control.enabled:
            await self._call_off(self._under_way(), "disabled")
        await self._forget(control.deleted)

    async def _forget(self, deleted: Mapping[str, float]) -> None:
        """An operator has deleted these items; some again, after they had come back."""
        assert self._reader is not None
        namespace = self.gate.now.namespace
        told = {namespace.digest_key(digest): until for digest, until in deleted.items()}
        keys = [key for key, until in told.items() if self._forgotten.get(key) != until]
        if not keys:
            return
        try:
            report = await deletion.forget(
                keys, tiers=self._reader.tiers, reader=self._reader, queue=self._queue
            )
            failed, why = report.failed.keys(), next(iter(report.failed.values()), "")
        except RemoteError as error:
            failed, why = told.keys(), str(error)
        if failed:  # tried again with the next document
            logger.warning("deleted items could not be removed from the disk: %s", why)
        self._forgotten = {key: told[key] for key in told.keys() - failed}

    def _under_way(self) -> list[str]:
        assert self._reader is not None
        uploads = self._queue.keys() if self._queue is not None else set()
        return [*self._reader.under_way() | uploads]

    async def _call_off(self, keys: list[str], outcome: str) -> None:
        assert self._reader is not None
        async with self._reader.barred(keys):
            if self._queue is not None:
                await self._queue.withdraw(keys, outcome=outcome)

    def _tell(self) -> None:
        self._stats.set("switched_off", float(self.gate.suspended), cause="suspended")
        self._stats.set("switched_off", float(not self.gate.control.enabled), cause="disabled")
