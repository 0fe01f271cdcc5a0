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
from botocore.parsers import ResponseParserError

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

SDK_ERRORS = (
    *(ClientError, BotoCoreError, ResponseParserError),
    *(aiohttp.ClientError, OSError, RecursionError),
)
"""Whatever the SDK and the transport under it raise when a store fails.

The last one is its answer to a redirect that names no region.
"""

BODY_ERRORS = (aiohttp.ClientError, BotoCoreError, ConnectionError, TimeoutError)
"""What reading a response body raises when the connection breaks or falls silent."""

_CREDENTIALS = "check the credentials of the AWS chain (environment, profile, role)"
_CLOCK = "set the clock of this machine; S3 refuses what is signed 15 minutes off"
_BUCKET = "check bucket, endpoint and addressing in the store's URL"
_POLICY = "grant {action} on the bucket; `ec-s3 policy` prints what each role needs"
_NETWORK = "check that the endpoint is up, reachable and an S3 server"
_ACTIONS = {
    "get": "s3:GetObject",
    "head": "s3:GetObject",
    "put": "s3:PutObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
}
_CERTIFICATE = "no trusted CA has signed the server's certificate; set ca_bundle or AWS_CA_BUNDLE"
_HOST = "the server's certificate is for another host; use a name in endpoint that it holds"
_VALIDITY = "the server's certificate has expired or is not valid yet; renew it, or set the clock"
_HANDSHAKE = "the TLS handshake failed; check that the endpoint serves https at this port"
_BY_VERIFICATION = {9: _VALIDITY, 10: _VALIDITY, 62: _HOST, 64: _HOST}
"""By OpenSSL's X509_V_ERR_* code; most others mean an unknown CA."""
_MOVED = "the bucket is in another region; set region in url"
_PACE = "the store asks for a slower pace"
_NO_S3 = "no S3 server answers there; check endpoint (http or https, host and port) in url"


class UnobtainableError(boto.BotoCoreError):
    """The AWS chain cannot give credentials now; `reason` holds nothing that a provider said."""

    fmt = "no credentials: {reason}"


_REFUSED_CREDENTIALS = (
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"),
    *("TokenRefreshRequired", "AccountProblem", "UserSuspended"),
)

_BY_CODE: dict[str, tuple[type[RemoteError], str]] = {
    "NoSuchBucket": (RemoteDeniedError, _BUCKET),
    "PermanentRedirect": (RemoteDeniedError, _MOVED),
    "AuthorizationHeaderMalformed": (RemoteDeniedError, "check region in the store's URL"),
    **dict.fromkeys(_REFUSED_CREDENTIALS, (RemoteDeniedError, _CREDENTIALS)),
    **dict.fromkeys(("RequestTimeTooSkewed", "RequestExpired"), (RemoteDeniedError, _CLOCK)),
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
ANYBODYS = (301, 302, 303, 307, 308, 400, 404, 405, 406, 410, 415, 421, 426)
"""Statuses that other servers give, too; S3 gives them with a document, but for a HEAD."""

_BY_TYPE: tuple[tuple[tuple[type[BaseException], ...], type[RemoteError], str], ...] = (
    (
        (
            *(boto.NoCredentialsError, boto.PartialCredentialsError, boto.NoAuthTokenError),
            *(boto.CredentialRetrievalError, boto.TokenRetrievalError, boto.SSOError),
            UnobtainableError,
        ),
        RemoteDeniedError,
        _CREDENTIALS,
    ),
    (
        (boto.SSLError, aiohttp.ClientSSLError, ssl.SSLError),
        RemoteUnavailableError,
        _HANDSHAKE,
    ),
    ((RecursionError,), RemoteDeniedError, _MOVED),
    (
        (TimeoutError, boto.ReadTimeoutError, boto.ConnectTimeoutError),
        RemoteTimeoutError,
        _NETWORK,
    ),
    (
        (
            *(boto.ConnectionError, boto.HTTPClientError, ResponseParserError),
            *(aiohttp.ClientError, OSError),
        ),
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


def said(exc: BaseException) -> str:
    """An error in few words, without anything that a server could choose but its code."""
    if not isinstance(exc, ClientError):
        return type(exc).__name__
    status, code = status_of(exc)
    return f"{status} {code}" if code and code != str(status) else str(status)


def is_documented(exc: ClientError) -> bool:
    """Whether the answer says in the words of S3 what is wrong; that of a HEAD never does."""
    code = status_of(exc)[1]
    return bool(code) and not code.isdigit()


def _is_of_s3(exc: ClientError) -> bool:
    headers = exc.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return is_documented(exc) or "x-amz-bucket-region" in headers


def no_s3_server(operation: str, location: S3Location) -> RemoteUnavailableError:
    """The error for an answer that no S3 store gives."""
    message = f"{operation} failed: an answer of another kind from {place(location)}; {_NO_S3}"
    return RemoteUnavailableError(message, operation=operation)


def repeated(exc: ClientError) -> bool:
    """Whether the request was sent more than once: an earlier one may have done its work."""
    return bool(exc.response.get("ResponseMetadata", {}).get("RetryAttempts"))


def refuses_credentials(exc: BaseException) -> bool:
    """Whether the store does not know who asks, any more: others may be accepted."""
    return isinstance(exc, ClientError) and status_of(exc)[1] in _REFUSED_CREDENTIALS


def retry_after(exc: BaseException | None) -> float:
    """Seconds that the server asks to wait, 0.0 when it does not say."""
    if not isinstance(exc, ClientError):
        return 0.0
    headers = exc.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    text = headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0


def place(location: S3Location) -> str:
    """Bucket and endpoint for a message."""
    return f"bucket {location.bucket!r} at {location.endpoint or 'the AWS endpoint'}"


def map_error(exc: BaseException, *, operation: str, key: str, location: S3Location) -> RemoteError:
    """Our error for one of the SDK's; the caller raises it `from` the original."""
    kind, remedy, what = RemoteError, "see the cause", said(exc)
    if isinstance(exc, ClientError):
        status, code = status_of(exc)
        fallback = (RemoteUnavailableError, _NETWORK) if status >= 500 else (kind, remedy)
        kind, remedy = _BY_CODE.get(code) or _BY_STATUS.get(status) or fallback
        if status in ANYBODYS and operation not in ("", "head") and not _is_of_s3(exc):
            kind, remedy = RemoteUnavailableError, _NO_S3
    else:
        for types, mapped, advice in _BY_TYPE:
            if isinstance(exc, types):
                kind, remedy = mapped, advice
                break
        if isinstance(exc, UnobtainableError):
            what = str(exc)
        if remedy is _HANDSHAKE:
            remedy = _handshake(exc)
    if remedy is _POLICY:
        remedy = remedy.format(action=_ACTIONS.get(operation, "what is missing"))
    message = f"{operation} failed: {what} from {place(location)}; {remedy}"
    return kind(message, operation=operation, key=key)


def _handshake(exc: BaseException) -> str:
    """What to do about a handshake that failed."""
    found: BaseException | None = exc
    while found is not None:
        code = getattr(found, "verify_code", None)  # aiohttp's has none, but a cause that has
        if code is not None:
            return _BY_VERIFICATION.get(code, _CERTIFICATE)
        found = found.__cause__ or found.__context__
    return _HANDSHAKE
