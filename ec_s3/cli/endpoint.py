"""What `doctor` asks beside the store: where credentials come from, and the endpoint's time.

Blocking calls for a worker thread. Never returns or logs a credential; the endpoint is asked
without one.
"""

from __future__ import annotations

import os
import ssl
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import boto3

if TYPE_CHECKING:
    from ec_s3.config import ECConfig
    from ec_s3.url import S3Location


def credential_method(location: S3Location) -> str | None:
    """How the AWS chain finds credentials (`env`, `shared-credentials-file`, `iam-role`...)."""
    session = boto3.Session(profile_name=location.profile or None)
    credentials = session.get_credentials()
    return None if credentials is None else str(credentials.method)


def endpoint_url(location: S3Location) -> str:
    """The endpoint that the SDK would use, without the bucket."""
    session = boto3.Session(profile_name=location.profile or None)
    client = session.client(
        "s3",
        endpoint_url=location.endpoint or None,
        region_name=location.region or session.region_name or "us-east-1",
    )
    try:
        return client.meta.endpoint_url
    finally:
        client.close()


def server_time(url: str, config: ECConfig) -> float | None:
    """The endpoint's clock in seconds since the epoch, None when it does not tell.

    Raises:
        ConnectionError: the endpoint cannot be reached.
    """
    request = urllib.request.Request(url, method="HEAD")  # noqa: S310  the SDK's own endpoint
    try:
        with urllib.request.urlopen(  # noqa: S310  as above
            request, timeout=config.read_timeout, context=_context(config)
        ) as answer:
            date = answer.headers["Date"]
    except urllib.error.HTTPError as refusal:  # unsigned, so a refusal is the usual answer
        date = refusal.headers["Date"]
        refusal.close()
    except urllib.error.URLError as error:
        raise ConnectionError(f"{url} cannot be reached: {error.reason}") from error
    return parsedate_to_datetime(date).timestamp() if date else None


def _context(config: ECConfig) -> ssl.SSLContext:
    bundle = config.ca_bundle or os.environ.get("AWS_CA_BUNDLE")
    context = ssl.create_default_context(cafile=bundle)
    if not config.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
