"""What `doctor` asks beside the store: where credentials come from, and the endpoint's time.

Blocking calls for a worker thread. Never returns or logs a credential; the endpoint is asked
without one.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import boto3

from ec_s3.credentials import described
from ec_s3.trust import profile_context
from ec_s3.url import S3Location

if TYPE_CHECKING:
    import ssl

    from ec_s3.config import ECConfig


def credential_method(location: S3Location) -> str | None:
    """How the AWS chain finds credentials (`env`, `shared-credentials-file`, `iam-role`...).

    Raises:
        ConnectionError: a source that is set fails.
    """
    session = boto3.Session(profile_name=location.profile or None)
    try:
        credentials = session.get_credentials()
    except Exception as error:  # noqa: BLE001  # a provider's, whose text may repeat what it said
        raise ConnectionError(f"the source that is set fails: {described(error)}") from None
    return None if credentials is None else str(credentials.method)


def endpoint_url(location: S3Location) -> str:
    """The endpoint that the SDK would use, without the bucket."""
    session = boto3.Session(profile_name=location.profile or None)
    client = session.client(
        "s3",
        endpoint_url=location.endpoint or None,
        region_name=location.region or session.region_name or "us-east-1",
        aws_access_key_id="none",  # else it asks the chain for them
        aws_secret_access_key="none",  # noqa: S106  # no secret
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
            request, timeout=config.read_timeout, context=_trusted(url, config)
        ) as answer:
            date = answer.headers["Date"]
    except urllib.error.HTTPError as refusal:  # unsigned, so a refusal is the usual answer
        date = refusal.headers["Date"]
        refusal.close()
    except urllib.error.URLError as error:
        raise ConnectionError(f"{url} cannot be reached: {error.reason}") from error
    return parsedate_to_datetime(date).timestamp() if date else None


def _trusted(url: str, config: ECConfig) -> ssl.SSLContext | None:
    if not url.startswith("https:"):
        return None
    location = config.location()
    profile = location.profile if isinstance(location, S3Location) else ""
    return profile_context(config.s3_options(), profile)
