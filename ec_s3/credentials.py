"""The credentials that a store signs with: read from the AWS chain, renewed beside the requests.

Owns when the chain is asked again. Runs on the event loop of one store; one task at a time asks,
and a request waits for it only where nothing is held that is still valid. They are in no repr,
message or log line, and neither is anything that a provider answered.

The SDK's own renewal is left out on purpose: it lets every request wait once less than ten minutes
are left, which for credentials of a minute is always, and it never looks again at what does not
expire, so that keys replaced in a file or by a provider count from the next start only.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Any, Self

from aiobotocore.credentials import AioCredentials
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from ec_s3.failures import UnobtainableError, status_of
from ec_s3.quiet import Quiet
from ec_s3.sigv4 import Credentials

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

_AHEAD_SECONDS = 900.0  # long before their end, as the SDK does; half of their time if that is less
_MARGIN_SECONDS = 5.0  # what a request may take to reach the server
_ASK_SECONDS = 30.0
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


class Keeper(AioCredentials):
    """Stands in for the SDK's credentials; what it holds is the same for both transports.

    Args:
        chain: asks the AWS chain from the start; None where it has no credentials.
        place: of the store, for log lines.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        chain: Callable[[], Awaitable[Any]],
        *,
        place: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("", "")  # nobody asks for these
        self._chain = chain
        self._place = place
        self._clock = clock
        self._held: Credentials | None = None
        self._ends = self._due = self._answered = -math.inf
        self._margin = 0.0
        self._pause = 0.0  # after an answer that did not help
        self._refused = False
        self._reason = ""  # why the last answer did not help
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._quiet = Quiet(once=True)

    async def load_credentials(self) -> Self:
        """What a session of the SDK asks its chain for."""
        return self

    async def get_frozen_credentials(  # type: ignore[override]  # the SDK's tuple has a telling repr
        self,
    ) -> Credentials:
        """What to sign with now.

        Raises:
            NoCredentialsError: the chain has none.
            UnobtainableError: it cannot give any now.
        """
        now = self._clock()
        if now >= self._due or now < self._answered:  # the clock may have been set back
            self.ask()
        if now >= self._ends - self._margin and self._task is not None:
            await asyncio.wait([self._task])  # a caller that gives up leaves it running
        if self._held is not None and self._clock() < self._ends:
            return self._held
        raise UnobtainableError(reason=self._reason) if self._reason else NoCredentialsError()

    def refused(self) -> None:
        """The server does not accept what is held: look whether the chain has something else."""
        self._refused = True
        self._due = min(self._due, self._answered + self._pause)
        if self._clock() >= self._due:
            self.ask()

    async def aclose(self) -> None:
        """End what runs; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def ask(self) -> None:
        """Read the chain now, beside what goes on; nothing where that is under way."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._renew())

    async def _renew(self) -> None:
        before, refused, self._refused = self._held, self._refused, False
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                self._held, self._ends = await self._read()
        except Exception as error:  # noqa: BLE001  # whatever a provider of the chain raises
            self._failed(error)
        else:
            self._succeeded(in_vain=refused and self._held == before)
        finally:
            self._answered, self._task = self._clock(), None

    async def _read(self) -> tuple[Credentials, float]:
        found = await self._chain()
        if found is None:
            raise NoCredentialsError
        for name in ("_advisory_refresh_timeout", "_mandatory_refresh_timeout"):
            setattr(found, name, 0)  # else it asks its provider a second time
        try:
            frozen = await found.get_frozen_credentials()
        except RuntimeError as error:  # the SDK's way to say so
            raise UnobtainableError(reason="those that it has are expired") from error
        expiry = getattr(found, "_expiry_time", None)  # no public way to it
        ends = math.inf if expiry is None else expiry.timestamp()
        held = Credentials(frozen.access_key, frozen.secret_key, frozen.token)
        if not f"{held.access_key}{held.secret_key}{held.token}".isprintable():
            raise UnobtainableError(reason="a key or token has a line break or the like in it")
        return held, ends

    def _succeeded(self, *, in_vain: bool) -> None:
        left = self._ends - self._clock()
        self._margin = min(_MARGIN_SECONDS, left / 10)
        self._pause = self._longer_pause() if in_vain else 0.0
        self._reason = ""
        self._quiet.over()
        self._ask_in(max(left - _AHEAD_SECONDS, left / 2))

    def _failed(self, error: Exception) -> None:
        self._reason = "" if isinstance(error, NoCredentialsError) else described(error)
        self._pause = self._longer_pause()
        left = self._ends - self._clock()
        self._ask_in(self._pause)
        if 0 < left < math.inf and self._quiet.due() is not None:  # else failing requests say so
            logger.warning(
                "the credentials for %s cannot be renewed: %s; requests fail in %.0f s",
                self._place,
                self._reason or "the AWS chain has none any more",
                left,
            )

    def _longer_pause(self) -> float:
        return min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, 2 * self._pause))

    def _ask_in(self, seconds: float) -> None:
        """Ask again then, or with the first request later on where nothing valid is held."""
        self._due = self._clock() + seconds
        if self._timer is not None:
            self._timer.cancel()
        if math.isfinite(seconds) and self._due < self._ends:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.ask)


def described(error: Exception) -> str:
    """Why credentials cannot be had, without anything that a provider said."""
    if isinstance(error, UnobtainableError):
        return str(error)
    if isinstance(error, ClientError):
        return " ".join(str(part) for part in status_of(error))
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.filename:
        return f"{type(error).__name__}: {error.filename}"
    provider = error.kwargs.get("provider") if isinstance(error, BotoCoreError) else None
    return f"{type(error).__name__} ({provider})" if provider else type(error).__name__
