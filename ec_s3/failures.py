"""What goes wrong with a store, in our words: the one table from the SDK's errors to ours.

Pure, any thread. Serves the SDK and the direct transport alike. No message repeats what a server
or URL said but an error code, cut to letters and digits.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import aiohttp
from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError

from ec_s3.errors import (
    RemoteChangedError,
    RemoteDeniedError,
    RemoteError,
    RemoteThrottledError,
    RemoteTimeoutError,
    RemoteUnavailableError,
)

if TYPE_CHECKING:
    from ec_s3.url import S3Location

SDK_ERRORS = (ClientError, BotoCoreError, aiohttp.ClientError, OSError, RecursionError)
"""Whatever the SDK and the transport under it raise when a store fails.

The last one is its answer to a redirect that names no region.
"""

BODY_ERRORS = (aiohttp.ClientError, BotoCoreError, ConnectionError, TimeoutError)
"""What reading a response body raises when the connection breaks or falls silent."""

_CREDENTIALS = "check the credentials of the AWS chain (environment, profile, role) and the clock"
_BUCKET = "check bucket, endpoint and addressing in the store's URL"
_POLICY = "grant the missing permission on the bucket"
_NETWORK = "check that the endpoint is up and reachable"
_MOVED = "the bucket is in another region; set region in url"
_PACE = "the store asks for a slower pace"

_BY_CODE: dict[str, tuple[type[RemoteError], str]] = {
    "NoSuchBucket": (RemoteDeniedError, _BUCKET),
    "PermanentRedirect": (RemoteDeniedError, _MOVED),
    "AuthorizationHeaderMalformed": (RemoteDeniedError, "check region in the store's URL"),
    **dict.fromkeys(
        (
            *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"),
            *("TokenRefreshRequired", "RequestTimeTooSkewed", "RequestExpired", "AccountProblem"),
        ),
        (RemoteDeniedError, _CREDENTIALS),
    ),
    **dict.fromkeys(
        (
            "SlowDown",
            "Throttling",
            "ThrottlingException",
            "TooManyRequests",
            "RequestLimitExceeded",
        ),
        (RemoteThrottledError, _PACE),
    ),
    "RequestTimeout": (RemoteTimeoutError, _NETWORK),
}
_BY_STATUS: dict[int, tuple[type[RemoteError], str]] = {
    **dict.fromkeys((301, 302, 307, 308), (RemoteDeniedError, _MOVED)),
    401: (RemoteDeniedError, _CREDENTIALS),
    403: (RemoteDeniedError, _POLICY),
    408: (RemoteTimeoutError, _NETWORK),
    409: (RemoteUnavailableError, "another write of the same object is in progress"),
    412: (RemoteChangedError, "the object was replaced"),
    429: (RemoteThrottledError, _PACE),
    503: (RemoteThrottledError, _PACE),
}
_BY_TYPE: tuple[tuple[tuple[type[BaseException], ...], type[RemoteError], str], ...] = (
    (
        (
            *(boto.NoCredentialsError, boto.PartialCredentialsError, boto.NoAuthTokenError),
            *(boto.CredentialRetrievalError, boto.TokenRetrievalError, boto.SSOError),
        ),
        RemoteDeniedError,
        _CREDENTIALS,
    ),
    (
        (boto.SSLError, aiohttp.ClientSSLError, ssl.SSLError),
        RemoteUnavailableError,
        "the server's certificate is not trusted; set ca_bundle or AWS_CA_BUNDLE to its CA",
    ),
    ((RecursionError,), RemoteDeniedError, _MOVED),
    (
        (TimeoutError, boto.ReadTimeoutError, boto.ConnectTimeoutError),
        RemoteTimeoutError,
        _NETWORK,
    ),
    (
        (boto.ConnectionError, boto.HTTPClientError, aiohttp.ClientError, OSError),
        RemoteUnavailableError,
        _NETWORK,
    ),
)


def status_of(exc: ClientError) -> tuple[int, str]:
    """HTTP status and S3 error code; the code is cut to letters and digits, it comes from outside.

    HEAD has no error document: its code is the status as text.
    """
    status = int(exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = str(exc.response.get("Error", {}).get("Code", ""))
    return status, "".join(c for c in code if c.isalnum())[:40]


def retry_after(exc: BaseException | None) -> float:
    """Seconds that the server asks to wait, 0.0 when it does not say."""
    if not isinstance(exc, ClientError):
        return 0.0
    headers = exc.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    text = headers.get("retry-after", "")
    return float(text) if text.isdigit() else 0.0


def place(location: S3Location) -> str:
    """Bucket and endpoint for a message."""
    return f"bucket {location.bucket!r} at {location.endpoint or 'the AWS endpoint'}"


def map_error(exc: BaseException, *, operation: str, key: str, location: S3Location) -> RemoteError:
    """Our error for one of the SDK's; the caller raises it `from` the original."""
    kind, remedy, what = RemoteError, "see the cause", type(exc).__name__
    if isinstance(exc, ClientError):
        status, code = status_of(exc)
        what = f"{status} {code}" if code and code != str(status) else str(status)
        fallback = (RemoteUnavailableError, _NETWORK) if status >= 500 else (kind, remedy)
        kind, remedy = _BY_CODE.get(code) or _BY_STATUS.get(status) or fallback
    else:
        for types, mapped, advice in _BY_TYPE:
            if isinstance(exc, types):
                kind, remedy = mapped, advice
                break
    message = f"{operation} failed: {what} from {place(location)}; {remedy}"
    return kind(message, operation=operation, key=key)
