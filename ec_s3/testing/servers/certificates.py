"""A certificate authority for tests, and certificates of servers signed by it; by `openssl`.

Owns the files of its folder. Runs in the caller's thread. Its keys are for loopback: nothing that
matters may ever trust them.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LOOPBACK = ("DNS:localhost", "DNS:*.localhost", "IP:127.0.0.1")
_DAYS = 2
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM files of a server's certificate.

    Attributes:
        certificate: the certificate.
        key: its private key.
        both: key and certificate in one file.
    """

    certificate: Path
    key: Path
    both: Path


class Authority:
    """A certificate authority of its own; two of them do not trust each other's certificates.

    Attributes:
        bundle: PEM file that a client must trust.
    """

    def __init__(self, folder: Path, name: str = "ec_s3 test authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.bundle = folder / "ca.pem"
        self._folder = folder
        self._key = folder / "ca.key"
        _openssl(
            *("req", "-x509", *_KEY, "-days", str(_DAYS), "-subj", f"/CN={name}"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
            *("-keyout", str(self._key), "-out", str(self.bundle)),
        )

    def issue(
        self, name: str = "server", hosts: Sequence[str] = LOOPBACK, *, days: int = _DAYS
    ) -> Certificate:
        """Make a certificate.

        Args:
            name: of its files and of its subject.
            hosts: for whom, as in `DNS:localhost` and `IP:127.0.0.1`.
            days: how long it is valid; below zero, it expired so long ago.
        """
        made = Certificate(*(self._folder / f"{name}.{end}" for end in ("crt", "key", "pem")))
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text(
            f"subjectAltName={','.join(hosts)}\nbasicConstraints=CA:FALSE\n"
            "extendedKeyUsage=serverAuth\n"
        )
        _openssl(
            "req", *_KEY, "-subj", f"/CN={name}", "-keyout", str(made.key), "-out", str(request)
        )
        _openssl(
            *("x509", "-req", "-in", str(request), "-days", str(days), "-extfile", str(extensions)),
            *("-CA", str(self.bundle), "-CAkey", str(self._key), "-CAcreateserial"),
            *("-out", str(made.certificate)),
        )
        made.both.touch(0o600)
        made.both.write_bytes(made.key.read_bytes() + made.certificate.read_bytes())
        return made


def _openssl(*arguments: str) -> None:
    subprocess.run(
        ["openssl", *arguments],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=30,
    )
