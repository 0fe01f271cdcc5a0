"""`RealServer`: what every kind of server has in common.

Owns one server's processes and folder. Runs in the caller's thread; not thread-safe, but `client`,
`url` and `new_bucket` may be called anywhere. Must never listen beyond loopback.
"""

from __future__ import annotations

import copy
import shutil
import signal
import sys
import time
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self
from urllib.parse import quote, urlencode

from ec_s3.testing.servers.certificates import Authority
from ec_s3.testing.servers.processes import Processes, ServerError

if TYPE_CHECKING:
    from collections.abc import Mapping

_HEALTHY_SECONDS = 50.0
_ATTEMPTS = 2  # a port that was free a moment ago may be taken now


@dataclass(frozen=True, slots=True)
class Keys:
    """An access key, its secret, and the token of temporary ones."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str = field(default="", repr=False)


class RealServer(ABC):
    """One running server.

    Attributes:
        kind: one of `KINDS`.
        version: as the program tells it.
        endpoint: `http(s)://127.0.0.1:port`.
        https_endpoint: where it serves https as well, else None.
        access_key: of a user who may do everything.
        secret_key: of that user.
        region: to sign for.
        ca_bundle: PEM file to trust, for those that serve https.
        folder: everything that belongs to it.
    """

    kind: str
    programs: ClassVar[Mapping[str, str]]
    front: ClassVar[str]
    region = "us-east-1"

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.endpoint = ""
        self.https_endpoint: str | None = None
        self.ca_bundle: Path | None = None
        keys = self.keys()
        self.access_key, self.secret_key = keys.access_key, keys.secret_key
        self.processes = Processes(self.folder / "log")

    @classmethod
    def missing(cls) -> str | None:
        """Why it cannot run on this machine, naming the packages to install; None if it can."""
        absent = [name for name in cls.programs if program(name) is None]
        if not absent:
            return None
        packages = dict.fromkeys(cls.programs[name] for name in absent)
        return f"no {', '.join(absent)} here; install with: {' && '.join(packages)}"

    @staticmethod
    def keys() -> Keys:
        """The keys of the user that it is set up with."""
        return Keys("ECS3TESTACCESSKEY", "test-only-secret-of-a-loopback-server")

    @property
    @abstractmethod
    def version(self) -> str:
        """As the program tells it."""

    @abstractmethod
    def launch(self) -> None:
        """Write the configuration and start the processes, on an empty folder."""

    @abstractmethod
    def launch_front(self) -> None:
        """Start the process that clients talk to, on the ports and data that there are."""

    def start(self) -> None:
        """Start on free ports and wait until an object has gone in and out.

        Raises:
            ServerError: it does not start.
        """
        for attempt in range(_ATTEMPTS):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self.launch()
                self.wait_healthy()
            except ServerError:
                self.stop()
                if attempt == _ATTEMPTS - 1:
                    raise
                self._forget()
            else:
                return

    def stop(self) -> None:
        """Kill every process; what is in the folder stays."""
        self.processes.kill_all()

    def kill(self) -> None:
        """Kill the process that clients talk to, as a crash would."""
        self.processes.kill(self.front)

    def start_again(self) -> None:
        """After `kill`: the same ports, and the data where the server keeps any; waits for health.

        Raises:
            ServerError: it does not start.
        """
        self.launch_front()
        self.wait_healthy()

    def pause(self) -> None:
        """Stop the process that clients talk to where it is: connections stay, nothing answers."""
        self.processes.signal(self.front, signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        self.processes.signal(self.front, signal.SIGCONT)

    @property
    def environment(self) -> dict[str, str]:
        """`AWS_*` variables with which a child process reaches it as its user."""
        values = {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        if self.ca_bundle is not None:
            values["AWS_CA_BUNDLE"] = str(self.ca_bundle)
        return values

    def client(self, keys: Keys | None = None, *, service: str = "s3") -> Any:
        """A synchronous boto3 client, of the server's own user or of another; caller closes it."""
        import boto3  # slow to import
        from botocore.config import Config

        keys = keys or Keys(self.access_key, self.secret_key)
        session: Any = boto3.session.Session()
        return session.client(
            service,
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=keys.access_key,
            aws_secret_access_key=keys.secret_key,
            aws_session_token=keys.session_token or None,
            verify=str(self.ca_bundle) if self.ca_bundle else None,
            config=Config(
                s3={"addressing_style": "path", "payload_signing_enabled": False},
                proxies={},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                connect_timeout=5,
                read_timeout=30,
                retries={"total_max_attempts": 1},
            ),
        )

    def new_bucket(self) -> str:
        """Make a bucket with a name of its own and return the name."""
        name = f"test-{uuid.uuid4().hex[:16]}"
        client = self.client()
        try:
            client.create_bucket(Bucket=name)
        finally:
            client.close()
        return name

    def url(self, bucket: str, prefix: str = "", **query: str) -> str:
        """The `s3://` URL of a bucket on this server; `ca_bundle` is a setting, not part of it."""
        values = {"endpoint": self.endpoint, "region": self.region, **query}
        return f"s3://{bucket}/{quote(prefix)}?{urlencode(values)}"

    def log_tail(self) -> str:
        """The end of its logs, for the message of a failure."""
        return self.processes.tail()

    def secure(self) -> Self:
        """The same server, reached over https.

        Raises:
            ServerError: it serves no https.
        """
        if self.https_endpoint is None:
            raise ServerError(f"{self.kind} serves no https")
        other = copy.copy(self)
        other.endpoint = self.https_endpoint
        other.kind = f"{self.kind}-https"
        return other

    def authority(self) -> Authority:
        """A new certificate authority in its folder; `ca_bundle` names it from then on."""
        made = Authority(self.folder / "tls")
        self.ca_bundle = made.bundle
        return made

    def wait_healthy(self, seconds: float = _HEALTHY_SECONDS) -> None:
        """Wait until an object goes in and comes out by signed requests.

        Raises:
            ServerError: a process died, or the time is up.
        """
        until = time.monotonic() + seconds
        while (reason := self._unhealthy()) is not None:
            if dead := self.processes.dead():
                raise ServerError(f"{self.kind}: {', '.join(dead)} ended\n{self.log_tail()}")
            if time.monotonic() > until:
                raise ServerError(
                    f"{self.kind}: no health in {seconds} s: {reason}\n{self.log_tail()}"
                )
            time.sleep(0.05)

    def _unhealthy(self) -> str | None:
        from botocore.exceptions import BotoCoreError, ClientError

        client = self.client()
        bucket = "health-check"
        try:
            client.create_bucket(Bucket=bucket)
            client.put_object(Bucket=bucket, Key="k", Body=b"healthy")
            body = client.get_object(Bucket=bucket, Key="k")["Body"].read()
            client.delete_object(Bucket=bucket, Key="k")
            client.delete_bucket(Bucket=bucket)
        except (BotoCoreError, ClientError) as exc:
            return str(exc)
        finally:
            client.close()
        return None if body == b"healthy" else "it answers with another object's bytes"

    def _forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def program(name: str) -> str | None:
    """Path of a program on `PATH` or beside this Python, where pip puts it; None if absent."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name) or shutil.which(name, path=f"{beside}:/usr/sbin:/sbin")
