"""OpenStack Swift with its S3 front end `s3api`: proxy, account, container and object server.

It refuses conditional writes, and ends the answer to a HEAD of what is absent as if it had a body:
its pipeline is the sample's but for the logging, which would hide that. Rings name one device, a
folder; memcached holds nothing that has to last. Its own traffic has a loopback address of its own.
`kill`, `pause` and `start_again` concern the proxy alone: the objects survive it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import urllib.request
from typing import TYPE_CHECKING, ClassVar

from ec_s3.testing.servers.base import Keys, RealServer, program
from ec_s3.testing.servers.processes import ServerError, free_ports, private_address

if TYPE_CHECKING:
    from pathlib import Path

_APT = (
    "apt-get install --no-install-recommends "
    "swift swift-proxy swift-account swift-container swift-object memcached"
)
_USER = "ecs3:tester"  # tempauth's access keys are an account and a user
_PORTS = {"account": 6202, "container": 6201, "object": 6200}
_MEMCACHED_PORT = 11211
_SECONDS = 60  # for what takes milliseconds, on a busy machine

_SWIFT = """\
[swift-hash]
swift_hash_path_prefix = ec_s3
swift_hash_path_suffix = ec_s3
"""
_DEFAULT = """\
[DEFAULT]
swift_dir = {folder}
# None: the process serves by itself, as whoever started it.
workers = 0
bind_ip = {address}
bind_port = {port}
# Not the machine's log; what goes wrong is on the console as well.
log_address = {folder}/no-syslog
log_level = WARNING
"""
_STORAGE = """\
devices = {folder}/devices
mount_check = false
disable_fallocate = true
fallocate_reserve = 0
db_preallocation = false
conn_timeout = {seconds}
node_timeout = {seconds}
# A listing is to show what was written before: no updater runs here to do it later.
container_update_timeout = {seconds}
[pipeline:main]
pipeline = {part}-server
[app:{part}-server]
use = egg:swift#{part}
"""
_PROXY = """\
client_timeout = {seconds}
[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck cache listing_formats bulk s3api tempauth copy slo \
dlo versioned_writes proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
conn_timeout = {seconds}
node_timeout = {seconds}
recoverable_node_timeout = {seconds}
# There is no other device to turn to.
error_suppression_limit = 1000000
[filter:cache]
use = egg:swift#memcache
memcache_servers = {inner}:{memcached_port}
[filter:s3api]
use = egg:swift#s3api
location = {region}
storage_domain = localhost
[filter:tempauth]
use = egg:swift#tempauth
user_{account} = {secret_key} .admin
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:healthcheck]
use = egg:swift#healthcheck
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[filter:versioned_writes]
use = egg:swift#versioned_writes
"""


class Swift(RealServer):
    """Swift over http."""

    kind = "swift"
    programs: ClassVar = dict.fromkeys(
        (
            *("swift-ring-builder", "swift-proxy-server", "memcached"),
            *(f"swift-{part}-server" for part in _PORTS),
        ),
        _APT,
    )
    front = "proxy"

    @staticmethod
    def keys() -> Keys:
        return Keys(_USER, RealServer.keys().secret_key)

    @property
    def version(self) -> str:
        with urllib.request.urlopen(f"{self.endpoint}/info", timeout=_SECONDS) as answer:
            told: str = json.load(answer)["swift"]["version"]
        return told

    def launch(self) -> None:
        port, inner = free_ports()[0], private_address()
        self.endpoint = f"http://127.0.0.1:{port}"
        (self.folder / "devices" / "d").mkdir(parents=True)
        (self.folder / "swift.conf").write_text(_SWIFT)
        for part, part_port in _PORTS.items():
            self._configure(part, _STORAGE, address=inner, port=part_port, part=part)
            self._spawn(part)
        proxy = {"inner": inner, "account": _USER.replace(":", "_"), "region": self.region}
        self._configure("proxy", _PROXY, address="127.0.0.1", port=port, **proxy)
        # Root has to name a user; others cannot choose one.
        options = ("-l", inner, "-p", str(_MEMCACHED_PORT), "-U", "0", "-u", "root")
        self.processes.spawn("memcached", [str(program("memcached")), *options])
        for part, part_port in _PORTS.items():
            self._build_ring(part, f"{inner}:{part_port}")
        for part_port in (_MEMCACHED_PORT, *_PORTS.values()):
            self._wait_listening(inner, part_port)
        self.launch_front()

    def launch_front(self) -> None:
        self._spawn("proxy")

    def _build_ring(self, part: str, address: str) -> None:
        commands = (("create", "0", "1", "0"), ("add", f"r1z1-{address}/d", "1"), ("rebalance",))
        for command, *arguments in commands:
            tool = (str(program("swift-ring-builder")), f"{self.folder}/{part}.builder", command)
            self.processes.run("swift-ring-builder", [*tool, *arguments])

    def _wait_listening(self, address: str, port: int) -> None:
        """The proxy's first requests must find the others: what it began it would not repeat."""
        until = time.monotonic() + _SECONDS
        while time.monotonic() < until and not self.processes.dead():
            with contextlib.suppress(OSError):
                socket.create_connection((address, port), timeout=1).close()
                return
            time.sleep(0.05)
        raise ServerError(f"swift: nothing listens at {address}:{port}\n{self.log_tail()}")

    def _configure(self, name: str, text: str, **values: object) -> None:
        everything = {
            "folder": self.folder,
            "seconds": _SECONDS,
            "memcached_port": _MEMCACHED_PORT,
            "secret_key": self.secret_key,
            **values,
        }
        config = self._config(name)
        config.touch(0o600)
        config.write_text((_DEFAULT + text).format(**everything))

    def _spawn(self, name: str) -> None:
        command = [str(program(f"swift-{name}-server")), str(self._config(name)), "--verbose"]
        self.processes.spawn(name, command, folder=self.folder)

    def _config(self, name: str) -> Path:
        return self.folder / f"{name}.conf"
