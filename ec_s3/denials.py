"""Refused reads: which of them mean that there is no such object.

Owns what a store's 404 and 403 mean to a reader, and finds out why a HEAD was refused, of which
the answer itself does not tell. Runs on the event loop of one store. Never repeats what a server
said but its error code.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from ec_s3.failures import status_of
from ec_s3.quiet import Quiet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from types_aiobotocore_s3.client import S3Client

logger = logging.getLogger(__name__)

_DENIED = ("AccessDenied", "Forbidden")
_UNSAID = ("403", "")


class Denials:
    """Tells absence from denial for one store.

    Args:
        place: of the store, for log lines.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._quiet = Quiet()
        self._reason: Mapping[str, Any] | None = None  # why HEADs are refused, where it was said

    async def absent(self, exc: ClientError, client: S3Client, target: Mapping[str, Any]) -> bool:
        """Whether an error on a read means that there is no such object.

        Raises:
            ClientError: why the read was refused, for one whose answer did not tell.
        """
        status, code = status_of(exc)
        if status == 404:
            return code != "NoSuchBucket"
        if status != 403:
            return False
        if code in _UNSAID:
            if self._quiet.due("head") is not None:
                self._reason = await _reason(client, target)
            if self._reason is not None:
                raise ClientError(dict(self._reason), exc.operation_name)  # type: ignore[arg-type]  # the SDK's own
        elif code not in _DENIED:
            return False
        if self._quiet.due("read") is not None:
            logger.warning(
                "a read was answered 403 by %s and counts as a miss: without s3:GetObject every "
                "object looks like this, and without s3:ListBucket an absent one; grant both",
                self._place,
            )
        return True


async def _reason(client: S3Client, target: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Why an object may not be read; None where that is no more than a missing right."""
    try:
        answer: Any = await client.get_object(**target, Range="bytes=0-0")
    except ClientError as exc:
        status, code = status_of(exc)
        said = status == 403 and code not in (*_DENIED, *_UNSAID)
        return exc.response if said else None
    with contextlib.suppress(OSError):
        answer["Body"].close()
    return None
