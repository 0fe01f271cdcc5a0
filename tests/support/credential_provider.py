"""A provider of temporary credentials on loopback: a container's endpoint, and an STS.

Owns a thread. Answers as ECS, EKS Pod Identity and `AssumeRoleWithWebIdentity` do, with what the
test has it issue, at once or when the test lets it.
"""

from __future__ import annotations

import datetime
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_STS = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{AccessKeyId}</AccessKeyId>
<SecretAccessKey>{SecretAccessKey}</SecretAccessKey><SessionToken>{Token}</SessionToken>
<Expiration>{Expiration}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""


@dataclass(frozen=True, slots=True)
class Issued:
    """Credentials that end, in seconds since the epoch."""

    access_key: str
    secret_key: str = field(repr=False)
    ends: float
    token: str = field(default="a-session-token", repr=False)


class CredentialProvider:
    """The provider, as a context manager.

    Args:
        issue: makes what the next answer holds; runs on the provider's thread.

    Attributes:
        issued: what was given out, in order.
        asked: requests so far, with an answer or without.
        answers: cleared, it answers nobody until it is set again.
        broken: answer 500 to everybody.
    """

    def __init__(self, issue: Callable[[], Issued]) -> None:
        self.issued: list[Issued] = []
        self.asked = 0
        self.answers = threading.Event()
        self.answers.set()
        self.broken = False
        self._issue = issue
        self._lock = threading.Lock()
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider._answer(self, sts=False)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                provider._answer(self, sts=True)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing on standard error."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def container(self) -> dict[str, str]:
        """Environment of a process whose container endpoint this is."""
        return {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{self._url}/credentials"}

    def web_identity(self, token_file: Path) -> dict[str, str]:
        """Environment of a process that shows this file to this STS."""
        token_file.write_text("HUSH-identity-token")
        return {
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(token_file),
            "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/encoder-cache",
            "AWS_ENDPOINT_URL_STS": self._url,
        }

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _answer(self, request: BaseHTTPRequestHandler, *, sts: bool) -> None:
        with self._lock:
            self.asked += 1
        self.answers.wait(60)
        if self.broken:
            request.send_error(500, "HUSH")  # it must not be repeated
            return
        with self._lock:
            issued = self._issue()
            self.issued.append(issued)
        ends = datetime.datetime.fromtimestamp(issued.ends, datetime.UTC)
        values = {
            "AccessKeyId": issued.access_key,
            "SecretAccessKey": issued.secret_key,
            "Token": issued.token,
            "Expiration": ends.isoformat().replace("+00:00", "Z"),
        }
        body = (_STS.format(**values) if sts else json.dumps(values)).encode()
        request.send_response(200)
        request.send_header("Content-Type", "text/xml" if sts else "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
