"""AWS Signature Version 4 for S3 requests with unsigned bodies.

Pure, any thread; the caller supplies credentials and time. Neither ever leaves here but as a MAC
or in the clear parts of the header that the protocol defines.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"
"""Value of `x-amz-content-sha256` for a body that the signature does not cover."""

_BLOCK_BYTES = 64  # of SHA-256


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """One set of credentials; `token` belongs to temporary ones."""

    access_key: str
    secret_key: str
    token: str | None = None


class Signer:
    """Signs for one region; remembers what follows from the key of the day."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._made_from: tuple[str, str] | None = None
        self._inner = self._outer = hashlib.sha256()  # HMAC's two halves, with the key taken in

    def authorization(
        self,
        credentials: Credentials,
        *,
        method: str,
        path: str,
        query: str,
        headers: Mapping[str, str],
    ) -> str:
        """Value of the Authorization header.

        Args:
            credentials: who signs.
            method: HTTP method.
            path: as it will be sent, percent-encoded.
            query: as it will be sent, sorted, without the question mark.
            headers: everything to be signed by lower-case name, with `host`, `x-amz-date` and
                `x-amz-content-sha256`.
        """
        stamp = headers["x-amz-date"]
        names = sorted(headers)
        signed = ";".join(names)
        lines = "".join(f"{name}:{' '.join(headers[name].split())}\n" for name in names)
        payload = headers["x-amz-content-sha256"]
        canonical = f"{method}\n{path}\n{query}\n{lines}\n{signed}\n{payload}"
        scope = f"{stamp[:8]}/{self._region}/s3/aws4_request"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
        if self._made_from != (credentials.secret_key, stamp[:8]):
            self._derive(credentials.secret_key, stamp[:8])
        inner, outer = self._inner.copy(), self._outer.copy()  # a third of `hmac.digest`'s time
        inner.update(text.encode())
        outer.update(inner.digest())
        return (
            f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, "
            f"SignedHeaders={signed}, Signature={outer.hexdigest()}"
        )

    def _derive(self, secret: str, day: str) -> None:
        key = f"AWS4{secret}".encode()
        for part in (day, self._region, "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))
        self._made_from = (secret, day)
