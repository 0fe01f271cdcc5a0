"""Listings that come page by page: where the next page begins, and that there is an end.

Pure but for what a `Pages` remembers, which belongs to one listing. A listing that a store breaks
off, or would begin again for ever, is an error and no short or endless one: who cleans up by it
would leave something behind, or never come to an end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ec_s3.errors import RemoteUnavailableError
from ec_s3.failures import place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ec_s3.url import S3Location


class Pages:
    """One listing.

    Args:
        operation: for messages.
        location: the store.
        markers: parameters of a request that say where its page begins, each with the field of
            the answer before that holds it; some stores leave out one of two.
    """

    def __init__(self, operation: str, location: S3Location, **markers: str) -> None:
        self._operation = operation
        self._location = location
        self._markers = markers
        self._begun: set[tuple[Any, ...]] = set()

    def after(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters of the next page, none at the end.

        Raises:
            RemoteUnavailableError: there is more, and the answer does not lead there.
        """
        begin = tuple(answer.get(name) or "" for name in self._markers.values())
        if not answer.get("IsTruncated", any(begin)):
            return {}
        if not any(begin) or begin in self._begun:
            raise self._failure("does not say how a listing goes on")
        self._begun.add(begin)
        return dict(zip(self._markers, begin, strict=True))

    def told(self, entry: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
        """Some fields of what is listed.

        Raises:
            RemoteUnavailableError: one of them is missing, or cannot be understood.
        """
        values = tuple(entry.get(name) for name in names)
        if None in values:
            missing = names[values.index(None)]
            raise self._failure(f"lists something without a valid {missing}")
        return values

    def _failure(self, what: str) -> RemoteUnavailableError:
        message = f"{self._operation} failed: {place(self._location)} {what}"
        return RemoteUnavailableError(message, operation=self._operation)
