"""The questions that `ec_s3.probe` asks a store, one function for each kind of answer.

Each sends the few requests that show what the store does, and notes what it saw. Knows nothing of
settings or of what a gap costs. Runs on the event loop of a tool; it must write nothing but what
`Prober` removes again.
"""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Awaitable, Callable, Mapping
from hashlib import md5
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from ec_s3.failures import said, status_of
from ec_s3.profile import Seen, Support

if TYPE_CHECKING:
    from types_aiobotocore_s3.client import S3Client

    from ec_s3.probe import Prober

Question = Callable[["Prober", dict[str, Seen]], Awaitable[None]]
"""Sends requests and notes what each capability's answer was."""

BODY = b"written by ec-s3 doctor, which removes it"

_CRC32 = base64.b64encode(zlib.crc32(BODY).to_bytes(4, "big")).decode()
_WRONG_CRC32 = base64.b64encode(bytes(4)).decode()
_OTHER_ETAG = '"0123456789abcdef0123456789abcdef"'
_BARE = "sent twice: an ETag matches only without its quotes"
_FIRST, _LAST = 2, 6
_RANGE = f"bytes={_FIRST}-{_LAST}"
_FAILED = (0, 408, 429, 500, 502, 503, 504)  # says nothing about what was asked
_DENIED = ("AccessDenied", "Forbidden", "403", "")
_CONDITION_FAILED = (304, 412)
_TRAILER, _LENGTHLESS = "trailer", "lengthless"
_LONGEST_KEY = f"{'s' * 81}/bfloat16/00/{'0' * 64}"  # see `ec_s3.keys`

_HONOURED = Seen(Support.HONOURED)
_IGNORED = Seen(Support.IGNORED)


def denied(exc: ClientError) -> bool:
    """Whether a right is missing, so that the answer says nothing of what was asked."""
    status, code = status_of(exc)
    return status == 403 and code in _DENIED


def refusal(exc: ClientError, *, failing: bool = False) -> Seen:
    """What an error answer shows.

    Args:
        exc: the answer.
        failing: whether a 500 is how some servers refuse this.
    """
    status, _ = status_of(exc)
    if denied(exc):
        return Seen(Support.UNKNOWN, f"denied: {said(exc)}")
    if status in _FAILED and not (failing and status == 500):
        return Seen(Support.UNKNOWN, said(exc))
    return Seen(Support.REFUSED, said(exc))


def adapt(client: S3Client) -> None:
    """Have the SDK send what it would not send by itself, for the probes that are about that."""

    def put(params: Any, **_: Any) -> None:
        if params["url_path"].endswith(f"/{_TRAILER}"):  # by itself only over TLS
            params["context"]["checksum"]["request_algorithm"]["in"] = "trailer"

    def delete(params: Any, **_: Any) -> None:
        if b"/md5<" in params["body"]:
            del params["context"]["checksum"]
            digest = md5(params["body"], usedforsecurity=False).digest()
            params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()

    client.meta.events.register("before-call.s3.PutObject", put)
    client.meta.events.register("before-call.s3.DeleteObjects", delete)


class _Lengthless(io.RawIOBase):
    """A body whose length cannot be told."""

    def __init__(self, body: bytes) -> None:
        self._rest = body

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)


async def _condition(attempt: Awaitable[Any]) -> Seen:
    """What a write shows whose condition does not hold."""
    try:
        await attempt
    except ClientError as exc:
        return _HONOURED if status_of(exc)[0] in _CONDITION_FAILED else refusal(exc)
    return _IGNORED


async def _whether(attempt: Awaitable[Any], *, failing: bool = False) -> Seen:
    """Whether a request is taken."""
    try:
        await attempt
    except ClientError as exc:
        return refusal(exc, failing=failing)
    return _HONOURED


async def _body(answer: Mapping[str, Any]) -> bytes:
    body: bytes = await answer["Body"].read()
    return body


async def _conditional_put(probe: Prober, found: dict[str, Seen]) -> None:
    await probe.put("absent")
    found["conditional_put"] = await _condition(probe.put("absent", IfNoneMatch="*"))


async def _conditional_replace(probe: Prober, found: dict[str, Seen]) -> None:
    etag = (await probe.put("changed"))["ETag"]
    seen = await _condition(probe.put("changed", IfMatch=_OTHER_ETAG))
    if seen == _HONOURED:
        seen = await _whether(probe.put("changed", IfMatch=etag))
        if seen.support is Support.REFUSED:
            bare = await _whether(probe.put("changed", IfMatch=etag.strip('"')))
            seen = Seen(Support.HONOURED, _BARE) if bare == _HONOURED else seen
    found["conditional_replace"] = seen


async def _multipart(probe: Prober, found: dict[str, Seen]) -> None:
    try:
        upload = await probe.begin("parts")
    except ClientError as exc:
        found["multipart"] = refusal(exc)
        return
    await probe.complete(upload, BODY)
    body = await _body(await probe.client.get_object(**probe.target("parts")))
    found["multipart"] = _HONOURED if body == BODY else _IGNORED
    again = await probe.begin("parts")
    found["conditional_complete"] = await _condition(probe.complete(again, BODY, IfNoneMatch="*"))
    small = await probe.begin("small-parts")
    found["small_parts"] = await _whether(probe.complete(small, BODY, BODY))


async def _checksum_header(probe: Prober, found: dict[str, Seen]) -> None:
    taken = await _whether(probe.put("checksum", ChecksumCRC32=_CRC32))
    found["checksum_header"] = taken
    if taken.support is not Support.HONOURED:
        await probe.put("checksum")
    await _range(probe, found, name="checksum")
    if taken.support is Support.HONOURED:
        wrong = await _whether(probe.put("checksum", ChecksumCRC32=_WRONG_CRC32))
        if wrong.support is Support.HONOURED:
            found["checksum_header"] = Seen(Support.IGNORED, "a wrong checksum is accepted")


async def _checksum_trailer(probe: Prober, found: dict[str, Seen]) -> None:
    taken = await _whether(probe.put(_TRAILER, ChecksumAlgorithm="CRC32"))
    found["checksum_trailer"] = taken
    if taken.support is not Support.HONOURED:
        return
    target = probe.target(_TRAILER)
    if await _body(await probe.client.get_object(**target)) != BODY:
        found["checksum_trailer"] = Seen(Support.IGNORED, "its framing is kept in the object")
        return
    head: Mapping[str, Any] = await probe.client.head_object(**target, ChecksumMode="ENABLED")
    if not head.get("ChecksumCRC32"):
        found["checksum_trailer"] = Seen(Support.IGNORED, "accepted, and the checksum is not kept")


async def _unknown_length(probe: Prober, found: dict[str, Seen]) -> None:
    attempt = probe.put(_LENGTHLESS, Body=_Lengthless(BODY))
    found["unknown_length"] = await _whether(attempt)


async def _delete(probe: Prober, found: dict[str, Seen]) -> None:
    for capability, name in (("delete_batch", "batch"), ("delete_batch_md5", "md5")):
        await probe.put(name)
        target = probe.target(name)
        doomed: Any = {"Objects": [{"Key": target["Key"]}]}
        attempt = probe.client.delete_objects(Bucket=target["Bucket"], Delete=doomed)
        found[capability] = await _whether(attempt)
        if found[capability].support is Support.HONOURED and await _there(probe, name):
            found[capability] = Seen(Support.IGNORED, "the object is still there")


async def _there(probe: Prober, name: str) -> bool:
    try:
        await probe.client.head_object(**probe.target(name))
    except ClientError as exc:
        if status_of(exc)[0] != 404:
            raise
        return False
    return True


async def _conditional_get(probe: Prober, found: dict[str, Seen], *, name: str = "known") -> None:
    if name:
        await probe.put(name)
    target = probe.target(name)
    etag = (await probe.client.head_object(**target))["ETag"]
    try:
        (await probe.client.get_object(**target, IfNoneMatch=etag))["Body"].close()
    except ClientError as exc:
        known = status_of(exc)[0] == 304
        found["conditional_get"] = _HONOURED if known else refusal(exc)
    else:
        found["conditional_get"] = Seen(Support.IGNORED, "the object is sent again")


async def _range(probe: Prober, found: dict[str, Seen], *, name: str) -> None:
    target = probe.target(name)
    try:
        answer: Any = await probe.client.get_object(**target, Range=_RANGE)
        body = await _body(answer)
    except ClientError as exc:
        found["range"] = refusal(exc)
        return
    whole = len(body) != _LAST - _FIRST + 1 or not answer.get("ContentRange")
    wrong = bool(name) and body != BODY[_FIRST : _LAST + 1]
    found["range"] = Seen(Support.IGNORED, "other bytes come back") if whole or wrong else _HONOURED
    checked: Any = await probe.client.get_object(**target, Range=_RANGE, ChecksumMode="ENABLED")
    checked["Body"].close()
    whole_sum = name and checked.get("ChecksumCRC32") == _CRC32
    found["range_checksum"] = (
        Seen(Support.IGNORED, "the checksum of the whole object comes with a range")
        if whole_sum
        else _HONOURED
    )


async def _tagging(probe: Prober, found: dict[str, Seen]) -> None:
    found["tagging"] = await _whether(probe.put("tagged", Tagging="a=1&b=2"))
    if found["tagging"].support is not Support.HONOURED:
        return
    answer: Any = await probe.client.get_object(**probe.target("tagged"))
    answer["Body"].close()
    if answer.get("TagCount") == 2:
        return
    found["tagging"] = Seen(Support.UNKNOWN, "accepted; reading tags back is denied")
    tags: Any = await probe.client.get_object_tagging(**probe.target("tagged"))
    found["tagging"] = _HONOURED if len(tags["TagSet"]) == 2 else _IGNORED


async def _key(probe: Prober, name: str) -> Seen:
    """Whether a key is taken, and is that key in a listing too."""
    taken = await _whether(probe.put(name), failing=True)
    if taken.support is not Support.HONOURED:
        return taken
    target = probe.target(name)
    folder = target["Key"].rpartition("/")[0] + "/"  # some list whole folders only
    try:
        listed: Any = await probe.client.list_objects_v2(Bucket=target["Bucket"], Prefix=folder)
    except ClientError as exc:
        return refusal(exc, failing=True)
    if target["Key"] not in [entry["Key"] for entry in listed.get("Contents", ())]:
        return Seen(Support.IGNORED, "the object is listed under another key, or not at all")
    return _HONOURED


async def _own_keys(probe: Prober, found: dict[str, Seen]) -> None:
    found["own_keys"] = await _key(probe, _LONGEST_KEY)


async def _long_segments(probe: Prober, found: dict[str, Seen]) -> None:
    found["long_segments"] = await _key(probe, "z" * 900)


async def _empty_segments(probe: Prober, found: dict[str, Seen]) -> None:
    found["empty_segments"] = await _key(probe, "empty//segment")


async def _key_as_folder(probe: Prober, found: dict[str, Seen]) -> None:
    await probe.put("folder")
    found["key_as_folder"] = await _key(probe, "folder/key")


async def _reading(probe: Prober, found: dict[str, Seen]) -> None:
    if probe.target()["Key"]:
        await _conditional_get(probe, found, name="")
        await _range(probe, found, name="")


WRITING: Mapping[tuple[str, ...], Question] = {
    ("conditional_put",): _conditional_put,
    ("conditional_replace",): _conditional_replace,
    ("multipart", "conditional_complete", "small_parts"): _multipart,
    ("checksum_header", "range", "range_checksum"): _checksum_header,
    ("checksum_trailer",): _checksum_trailer,
    ("unknown_length",): _unknown_length,
    ("delete_batch", "delete_batch_md5"): _delete,
    ("conditional_get",): _conditional_get,
    ("tagging",): _tagging,
    ("own_keys",): _own_keys,
}
"""What may be asked wherever writing is allowed."""

ODD_KEYS: Mapping[tuple[str, ...], Question] = {
    ("long_segments",): _long_segments,
    ("empty_segments",): _empty_segments,
    ("key_as_folder",): _key_as_folder,
}
"""About keys that the library never makes."""

READING: Mapping[tuple[str, ...], Question] = {("conditional_get", "range"): _reading}
"""What reading alone can show."""
