"""Asks a store what it does: each capability of `ec_s3.profile` with small objects of its own.

For tools, never for a server: some sixty requests, most of them at the same time. Runs on the event
loop of a tool, with the SDK's client as the library tunes it. Whatever it writes lies below one
folder and is removed again, also when it is cancelled; it touches nothing else. Where writing is
not allowed it only reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from ec_s3.failures import SDK_ERRORS, map_error, no_s3_server, said, status_of
from ec_s3.profile import Seen, Support
from ec_s3.questions import BODY, ODD_KEYS, READING, WRITING, adapt, denied, refusal
from ec_s3.transport import Connection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from types_aiobotocore_s3.client import S3Client

    from ec_s3.errors import ECS3Error
    from ec_s3.questions import Question
    from ec_s3.url import S3Location, S3Options

QUESTION_SECONDS = 10.0
"""For all requests of one question; what it has not told by then stays unknown."""

_CLEANING_SECONDS = 15.0
_HONOURED = Seen(Support.HONOURED)
_STYLES = {"path": "path_style", "virtual": "virtual_host"}


@dataclass(slots=True)
class Report:
    """What a store does.

    Attributes:
        seen: every capability that was asked about.
        headers: of its answer to a listing, in lower case.
        region: of the bucket, as the store tells it; empty when it does not.
        configured_region: what requests are signed for.
        leftovers: keys of probes that could not be removed.
    """

    seen: dict[str, Seen] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    region: str = ""
    configured_region: str = ""
    leftovers: tuple[str, ...] = ()


async def ask(
    location: S3Location,
    options: S3Options,
    *,
    folder: str,
    writable: bool = True,
    every_key: bool = False,
) -> Report:
    """Ask about everything that can be asked about here.

    Args:
        location: the store.
        options: how to talk to it.
        folder: key below which the probes lie; nothing else may be there.
        writable: whether writing may be tried.
        every_key: ask about keys that the library never makes, which some servers then cannot
            delete; only for a server that is thrown away afterwards.

    Raises:
        RemoteError: the store cannot be used at all.
    """
    connection = Connection(location, options)
    try:
        prober = Prober(await connection.client(), location, folder)
        await prober.look()
        questions = READING
        if writable:
            questions = {**WRITING, **(ODD_KEYS if every_key else {})}
        try:
            asked = (prober.answer(question, names) for names, question in questions.items())
            results = await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await prober.clean()
        for result in results:
            if result is not None:
                raise result
        await prober.address(options)
        return prober.report
    finally:
        await connection.aclose()


class Prober:
    """One round of questions.

    Attributes:
        client: the SDK's.
        report: what was found so far.
    """

    def __init__(self, client: S3Client, location: S3Location, folder: str) -> None:
        self.client = client
        self.report = Report()
        self._location = location
        self._folder = folder
        self._written: set[str] = set()
        self._uploads: set[tuple[str, str]] = set()
        self._existing = ""
        adapt(client)

    def target(self, name: str = "") -> dict[str, Any]:
        """Bucket and key for a probe that is to be removed; without a name an object to read."""
        if not name:
            return {"Bucket": self._location.bucket, "Key": self._existing}
        key = self._location.object_key(f"{self._folder}/{name}")
        self._written.add(key)
        return {"Bucket": self._location.bucket, "Key": key}

    async def put(self, name: str, **more: Any) -> Any:
        """Write a probe, or try to."""
        return await self.client.put_object(**{**self.target(name), "Body": BODY, **more})

    async def begin(self, name: str, **more: Any) -> dict[str, Any]:
        """Begin an upload in parts."""
        target = self.target(name)
        answer = await self.client.create_multipart_upload(**target, **more)
        self._uploads.add((target["Key"], answer["UploadId"]))
        return {**target, "UploadId": answer["UploadId"]}

    async def complete(self, upload: dict[str, Any], *bodies: bytes, **more: Any) -> None:
        """Send the parts of an upload and end it."""
        parts: list[Any] = []
        for number, body in enumerate(bodies, 1):
            answer = await self.client.upload_part(**upload, PartNumber=number, Body=body)
            parts.append({"PartNumber": number, "ETag": answer["ETag"]})
        await self.client.complete_multipart_upload(
            **upload, MultipartUpload={"Parts": parts}, **more
        )
        self._uploads.discard((upload["Key"], upload["UploadId"]))

    async def look(self) -> None:
        """What a listing shows: who answers, for which region, and an object that may be read.

        Raises:
            RemoteError: the store cannot be used.
        """
        self.report.configured_region = self.client.meta.region_name
        try:
            answer = await _list_one(self.client, self._location)
        except ClientError as exc:
            if not denied(exc):
                raise self._mapped(exc) from exc
            answer = exc.response
        except ResponseParserError as exc:
            raise no_s3_server("list", self._location) from exc
        except SDK_ERRORS as exc:
            raise self._mapped(exc) from exc
        self.report.headers = dict(answer["ResponseMetadata"].get("HTTPHeaders", {}))
        self.report.region = self.report.headers.get("x-amz-bucket-region", "")
        self._existing = next((entry["Key"] for entry in answer.get("Contents", ())), "")

    async def answer(self, question: Question, names: tuple[str, ...]) -> None:
        """Ask one question; what it does not tell stays unknown."""
        found: dict[str, Seen] = {}
        rest = Seen(Support.UNKNOWN, "not asked, as an earlier answer made it pointless")
        try:
            async with asyncio.timeout(QUESTION_SECONDS):
                await question(self, found)
        except TimeoutError:
            rest = Seen(Support.UNKNOWN, f"no answer within {QUESTION_SECONDS:.0f} s")
        except SDK_ERRORS as exc:
            rest = Seen(Support.UNKNOWN, said(exc))
        except KeyError as exc:
            rest = Seen(Support.UNKNOWN, f"an answer without {exc.args[0]}")
        self.report.seen.update({name: found.get(name, rest) for name in names})

    async def address(self, options: S3Options) -> None:
        """Which styles of addressing reach the bucket: the one in use, and the other."""
        used = "path" if self._location.style == "path" else "virtual"
        other = "virtual" if used == "path" else "path"
        host = urlsplit(self.client.meta.endpoint_url).hostname or ""
        self.report.seen[_STYLES[used]] = _HONOURED
        if other == "virtual" and _is_ip(host):
            told = Seen(Support.UNKNOWN, "the endpoint is an IP address, which has no sub-domains")
            self.report.seen[_STYLES[other]] = told
            return

        async def question(_: Prober, found: dict[str, Seen]) -> None:
            if other == "virtual" and not await _resolves(f"{self._location.bucket}.{host}"):
                found[_STYLES[other]] = Seen(Support.REFUSED, "the bucket's host name is not known")
                return
            second = Connection(replace(self._location, addressing=other), options)
            try:
                await _list_one(await second.client(), self._location)
                found[_STYLES[other]] = _HONOURED
            except ClientError as exc:
                found[_STYLES[other]] = _HONOURED if denied(exc) else refusal(exc)
            except SDK_ERRORS as exc:
                found[_STYLES[other]] = Seen(Support.REFUSED, said(exc))
            finally:
                await second.aclose()

        await self.answer(question, (_STYLES[other],))

    async def clean(self) -> None:
        """Remove what was written; `leftovers` names what could not be."""
        left: list[str] = []

        async def remove(key: str) -> None:
            try:
                await self.client.delete_object(Bucket=self._location.bucket, Key=key)
            except ClientError as exc:
                if status_of(exc)[0] != 404:
                    left.append(key)
            except SDK_ERRORS:
                left.append(key)

        async def abort(key: str, upload: str) -> None:
            with contextlib.suppress(*SDK_ERRORS):  # most are gone: completed, or never begun
                await self.client.abort_multipart_upload(
                    Bucket=self._location.bucket, Key=key, UploadId=upload
                )

        try:
            async with asyncio.timeout(_CLEANING_SECONDS):
                await asyncio.gather(*(abort(*upload) for upload in self._uploads))
                await asyncio.gather(*(remove(key) for key in sorted(self._written)))
        except TimeoutError:
            left = sorted(self._written)
        self.report.leftovers = tuple(left)

    def _mapped(self, exc: BaseException) -> ECS3Error:
        return map_error(exc, operation="list", key="", location=self._location)


async def _list_one(client: S3Client, location: S3Location) -> Any:
    return await client.list_objects_v2(
        Bucket=location.bucket, Prefix=location.object_key(""), MaxKeys=1
    )


async def _resolves(host: str) -> bool:
    try:
        await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
