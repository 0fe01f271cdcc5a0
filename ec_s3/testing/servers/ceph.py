"""A Ceph cluster with its S3 gateway: one monitor, one OSD that keeps objects in memory, radosgw.

Owns their configuration and keyring. The cluster's own traffic has a loopback address of its own,
so that two clusters never meet. `kill`, `pause` and `start_again` concern the gateway alone: the
objects survive it.
"""

from __future__ import annotations

import base64
import json
import os
import uuid
from typing import TYPE_CHECKING, ClassVar

from ec_s3.testing.servers.base import Keys, RealServer, program
from ec_s3.testing.servers.processes import ServerError, free_ports, private_address

if TYPE_CHECKING:
    from pathlib import Path

_APT = "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common"
_USER = "ecs3"
_CONFIG = """\
[global]
fsid = {fsid}
mon host = v2:{address}:3300/0
public addr = {address}
cluster addr = {address}
ms bind msgr1 = false
ms mode = crc
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = true
keyring = {folder}/keyring
run dir = {folder}
admin socket =
log file =
log to stderr = true
err to stderr = true
debug none = 0/0
debug mon = 0/0
debug osd = 0/0
debug paxos = 0/0
debug rgw = 0/0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon warn on pool no redundancy = false
# Without these a start takes ten seconds longer.
paxos propose interval = 0.05
paxos min wait = 0.01
[mon]
mon data = {folder}/mon
mon data avail warn = 1
mon data avail crit = 0
[osd]
osd data = {folder}/osd
osd journal = {folder}/osd/journal
osd objectstore = memstore
memstore device bytes = {memory_bytes}
osd max object name len = 1024
osd check max object name len on startup = false
# A gateway that was killed would hold up the next one for half a minute.
osd client watch timeout = 4
[client.rgw]
objecter tick interval = 1
rgw frontends = beast endpoint=127.0.0.1:{port} ssl_endpoint=127.0.0.1:{https_port} \
ssl_certificate={certificate} tcp_nodelay=1
rgw dns name = localhost
rgw enable usage log = false
rgw enable ops log = false
rgw run sync thread = false
rgw lc debug interval = {lifecycle_day_seconds}
rgw crypt require ssl = false
rgw crypt s3 kms backend = testing
rgw crypt s3 kms encryption keys = testkey-1={kms_key}
rgw s3 auth use sts = {session_tokens}
rgw sts key = {sts_key}
# Overwritten data would stay in memory for two hours.
rgw gc obj min wait = 3
rgw gc processor period = 3
rgw gc processor max time = 3
"""


class Ceph(RealServer):
    """Ceph over http, and over https at `https_endpoint`.

    Args:
        folder: for everything of it.
        lifecycle_day_seconds: length of a day in life-cycle rules; 0 for real days.
        session_tokens: make `session_keys` work; unknown keys are then `AccessDenied` and no
            longer `InvalidAccessKeyId`.
        memory_bytes: how much its objects may take.
    """

    kind = "ceph"
    programs: ClassVar = {
        **dict.fromkeys(
            (
                "radosgw",
                "radosgw-admin",
                "ceph-mon",
                "ceph-osd",
                "ceph",
                "ceph-authtool",
                "monmaptool",
            ),
            _APT,
        ),
        "openssl": "apt-get install openssl",
    }
    front = "radosgw"

    def __init__(
        self,
        folder: Path,
        *,
        lifecycle_day_seconds: int = 0,
        session_tokens: bool = False,
        memory_bytes: int = 6 << 30,
    ) -> None:
        super().__init__(folder)
        self._session_tokens = session_tokens
        self._lifecycle_day_seconds = lifecycle_day_seconds
        self._memory_bytes = memory_bytes
        self._config = self.folder / "ceph.conf"

    @property
    def version(self) -> str:
        words = self.processes.run("version", [_path("radosgw"), "--version"]).split()
        return f"{words[2]} {words[4]}"

    def launch(self) -> None:
        address, (port, https_port) = private_address(), free_ports(2)
        fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
        certificate = self.authority().issue()
        self._config.write_text(
            _CONFIG.format(
                fsid=fsid,
                address=address,
                folder=self.folder,
                port=port,
                https_port=https_port,
                certificate=certificate.both,
                lifecycle_day_seconds=self._lifecycle_day_seconds,
                memory_bytes=self._memory_bytes,
                session_tokens=str(self._session_tokens).lower(),
                kms_key=base64.b64encode(os.urandom(32)).decode(),
                sts_key=uuid.uuid4().hex[:16],
            )
        )
        self.endpoint = f"http://127.0.0.1:{port}"
        self.https_endpoint = f"https://127.0.0.1:{https_port}"
        self._launch_monitor(fsid, address)
        self._launch_osd(osd)
        user = ("--uid", _USER, "--display-name", _USER)
        keys = ("--access-key", self.access_key, "--secret-key", self.secret_key)
        self._admin("user", "create", *user, *keys)
        self.launch_front()

    def launch_front(self) -> None:
        self._spawn("radosgw", "-n", "client.rgw")

    def add_user(self, name: str, *, read_only: bool = False) -> Keys:
        """Further keys to the same buckets; `read_only` ones are denied every change."""
        access = "read" if read_only else "full"
        told = self._admin(
            *("subuser", "create", "--uid", _USER, "--subuser", f"{_USER}:{name}"),
            *("--access", access, "--key-type", "s3", "--gen-access-key", "--gen-secret"),
        )
        for keys in json.loads(told)["keys"]:
            if keys["user"] == f"{_USER}:{name}":
                return Keys(keys["access_key"], keys["secret_key"])
        raise ServerError(f"ceph made no keys for {name}")

    def add_stranger(self, name: str) -> Keys:
        """Keys of another user, to whom none of the buckets belongs."""
        told = self._admin("user", "create", "--uid", name, "--display-name", name)
        keys = json.loads(told)["keys"][0]
        return Keys(keys["access_key"], keys["secret_key"])

    def session_keys(self) -> Keys:
        """Keys of the server's own user with a session token, good for 15 minutes.

        Raises:
            ServerError: started without `session_tokens`.
        """
        if not self._session_tokens:
            raise ServerError("ceph was started without session_tokens=True")
        self._admin("caps", "add", "--uid", _USER, "--caps", "user-policy=*")
        statement = {"Effect": "Allow", "Action": ["sts:GetSessionToken"], "Resource": ["*"]}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam, sts = self.client(service="iam"), self.client(service="sts")
        iam.put_user_policy(UserName=_USER, PolicyName="sessions", PolicyDocument=policy)
        made = sts.get_session_token(DurationSeconds=900)["Credentials"]
        return Keys(made["AccessKeyId"], made["SecretAccessKey"], made["SessionToken"])

    def revoke(self, keys: Keys) -> None:
        """Remove keys; the server's own may be removed, too."""
        self._admin("key", "rm", "--key-type", "s3", "--access-key", keys.access_key)

    def grant(self, keys: Keys) -> None:
        """Give the server's own user keys, for example those that `revoke` took."""
        self._admin(
            *("key", "create", "--uid", _USER, "--key-type", "s3"),
            *("--access-key", keys.access_key, "--secret-key", keys.secret_key),
        )

    def _launch_monitor(self, fsid: str, address: str) -> None:
        keyring, monmap = str(self.folder / "keyring"), str(self.folder / "monmap")
        for name, parts in (
            ("mon.", ("mon",)),
            ("client.admin", ("mon", "osd", "mgr")),
            ("client.rgw", ("mon", "osd", "mgr")),
            ("osd.0", ("mon", "osd", "mgr")),
        ):
            caps = [word for part in parts for word in ("--cap", part, "allow *")]
            new = [] if (self.folder / "keyring").exists() else ["--create-keyring"]
            self._run("ceph-authtool", *new, keyring, "--gen-key", "-n", name, *caps)
        where = ("--addv", "a", f"[v2:{address}:3300]")
        self._run("monmaptool", "--create", "--clobber", "--fsid", fsid, *where, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._spawn("ceph-mon", "-i", "a")

    def _launch_osd(self, osd: str) -> None:
        (self.folder / "osd").mkdir()
        self._run("ceph", "--connect-timeout", "20", "osd", "new", osd)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._spawn("ceph-osd", "-i", "0")

    def _admin(self, *arguments: str) -> str:
        return self._run("radosgw-admin", "-n", "client.rgw", *arguments)

    def _run(self, name: str, *arguments: str) -> str:
        return self.processes.run(
            name, [_path(name), *arguments], environment={"CEPH_CONF": str(self._config)}
        )

    def _spawn(self, name: str, *arguments: str) -> None:
        self.processes.spawn(
            name, [_path(name), *arguments, "-f"], environment={"CEPH_CONF": str(self._config)}
        )


class CephHTTPS(Ceph):
    """The same cluster, whose `endpoint` is the https one."""

    kind = "ceph-https"

    def launch(self) -> None:
        super().launch()
        assert self.https_endpoint is not None
        self.endpoint = self.https_endpoint


def _path(name: str) -> str:
    found = program(name)
    if found is None:
        raise ServerError(f"ceph: no {name} here; install with: {_APT}")
    return found
