"""Which certificate authorities a store's server is trusted for, the same for both transports.

Owns the choice between the setting, the environment and the machine, and the check that what was
chosen can be used. Reads files: from a worker thread where a loop runs.
"""

from __future__ import annotations

import os
import ssl
from typing import TYPE_CHECKING, NamedTuple

from botocore.httpsession import create_urllib3_context, get_cert_path
from botocore.session import Session

from ec_s3.errors import ConfigError

if TYPE_CHECKING:
    from ec_s3.url import S3Options


class Bundle(NamedTuple):
    """A file of authorities that somebody has named."""

    path: str
    source: str


def named_bundle(options: S3Options, session: Session) -> Bundle | None:
    """The file to trust, as the SDK chooses it; None for the machine's own authorities."""
    if options.ca_bundle:
        return Bundle(options.ca_bundle, "ca_bundle")
    if chosen := session.get_config_variable("ca_bundle"):
        return Bundle(chosen, "AWS_CA_BUNDLE, or ca_bundle in the AWS configuration")
    if chosen := os.environ.get("REQUESTS_CA_BUNDLE"):
        return Bundle(chosen, "REQUESTS_CA_BUNDLE")
    return None


def tls_context(options: S3Options, session: Session) -> ssl.SSLContext:
    """How to meet a server: trust whom the SDK would trust.

    Raises:
        ConfigError: the file that was named for it cannot be used.
    """
    context: ssl.SSLContext = create_urllib3_context()
    context.check_hostname = options.verify
    if not options.verify:
        context.verify_mode = ssl.CERT_NONE
        return context
    bundle = named_bundle(options, session)
    if bundle is None:
        context.load_verify_locations(get_cert_path(True))  # the SDK's way to say: the machine's
        return context
    try:
        context.load_verify_locations(bundle.path)
    except OSError as exc:
        reason = "no certificates in it" if isinstance(exc, ssl.SSLError) else exc.strerror
        raise ConfigError(
            f"{bundle.source}: {bundle.path!r} cannot be used: {reason}; name a file with the "
            "certificates of the authorities to trust"
        ) from exc
    return context


def profile_context(options: S3Options, profile: str) -> ssl.SSLContext:
    """The same for whoever has no session of the SDK; empty for the chain's own profile.

    Raises:
        ConfigError: the file that was named for it cannot be used.
    """
    return tls_context(options, Session(profile=profile or None))
