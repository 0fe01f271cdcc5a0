"""What the requests for one object and their answers look like on the wire.

Pure, any thread: the SDK's parameters of a verb become the head of a signed request, and the head
of an answer becomes the SDK's answer or its exception. Sends nothing. A value that could end a
header line is refused, and nothing of an answer but its error code reaches a message.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from botocore.exceptions import ClientError

from ec_s3 import __version__
from ec_s3.errors import RemoteError
from ec_s3.failures import status_of
from ec_s3.http_grammar import http_date
from ec_s3.sigv4 import UNSIGNED_PAYLOAD, Signer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ec_s3.http_grammar import Answer
    from ec_s3.sigv4 import Credentials

_MOVED = (301, 302, 307, 308)
_OTHER_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed")
_CODE = re.compile(rb"<Code>([A-Za-z0-9]{1,40})</Code>")
_REGION = re.compile(rb"<Region>([a-z0-9-]{1,40})</Region>")
_HEADERS = {
    "Range": "range",
    "IfMatch": "if-match",
    "IfNoneMatch": "if-none-match",
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
    "StorageClass": "x-amz-storage-class",
    "Tagging": "x-amz-tagging",
}
_NOT_HEADERS = ("Bucket", "Key", "Body", "UploadId", "PartNumber")
_FIXED = f"user-agent: ec_s3/{__version__}\r\naccept-encoding: identity\r\n\r\n"


class Address:
    """Where a bucket is, and who signs for its region.

    Args:
        url: of an object with the key `k`.
        region: to sign for.
    """

    def __init__(self, url: str, region: str) -> None:
        parts = urlsplit(url)
        default = 443 if parts.scheme == "https" else 80
        self.name = parts.hostname or ""
        self.port = parts.port or default
        shown = f"[{self.name}]" if ":" in self.name else self.name
        self.host = shown if self.port == default else f"{shown}:{self.port}"
        self.path = parts.path.removesuffix("k")
        self.region = region
        self.signer = Signer(region)
        self._second, self._stamp = 0, ""

    def stamp(self) -> str:
        """The time in a request's head, which is made once a second."""
        now = int(time.time())
        if now != self._second:
            self._second, self._stamp = now, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
        return self._stamp


def request_head(
    address: Address, credentials: Credentials, *, method: str, params: Mapping[str, Any]
) -> bytes:
    """A signed request up to the empty line, for the SDK's parameters of a verb."""
    path = address.path + quote(params["Key"], safe="/~")
    query = ""
    if "UploadId" in params:
        query = f"partNumber={params['PartNumber']:d}&uploadId={quote(params['UploadId'], safe='')}"
    headers = {
        "host": address.host,
        "x-amz-content-sha256": UNSIGNED_PAYLOAD,
        "x-amz-date": address.stamp(),
    }
    if credentials.token:
        headers["x-amz-security-token"] = credentials.token
    for name, value in params.items():
        if name not in _NOT_HEADERS:
            headers[_HEADERS[name]] = _sendable(name, value)
    headers["authorization"] = address.signer.authorization(
        credentials, method=method, path=path, query=query, headers=headers
    )
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    length = f"content-length: {len(params['Body'])}\r\n" if "Body" in params else ""
    target = f"{path}?{query}" if query else path
    return f"{method} {target} HTTP/1.1\r\n{lines}{length}{_FIXED}".encode()


def _sendable(name: str, value: str) -> str:
    if value.isascii() and value.isprintable():
        return value
    raise RemoteError(f"the value of {name} cannot be sent in a header", operation="send")


def described(answer: Answer) -> dict[str, Any]:
    """What the head of a good answer says, as the SDK has it."""
    headers = answer.headers
    return {
        "ContentLength": answer.length,
        "ContentRange": headers.get("content-range"),
        "ETag": headers.get("etag", ""),
        "LastModified": http_date(headers.get("last-modified", "")),
        "ResponseMetadata": {"HTTPStatusCode": answer.status, "HTTPHeaders": headers},
    }


def client_error(answer: Answer, document: bytes, operation: str) -> ClientError:
    """The SDK's exception for an answer; an error document with a good status is a failure."""
    status = answer.status if answer.status >= 300 else 500
    code, region = _CODE.search(document), _REGION.search(document)
    named = region[1].decode() if region else answer.headers.get("x-amz-bucket-region", "")
    response: Any = {
        "Error": {"Code": code[1].decode() if code else str(status), "Region": named},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": answer.headers},
    }
    return ClientError(response, operation)


def is_elsewhere(exc: ClientError, region: str) -> bool:
    """Whether the answer names another region to be asked; of a HEAD only the status is known."""
    status, code = status_of(exc)
    moved = status in _MOVED or code in _OTHER_REGION or code == "400"
    return moved and exc.response["Error"].get("Region", "") not in ("", region)
