"""Transports: CPU time of the client for what goes to and comes from S3.

    python benchmarks/transports.py [--rounds 5] [--quick]      1 minute; quick: 20 s

Three clients take turns in one process, in every round and for every kind of request: `http.client`
with a recycled buffer, unsigned (the floor), and ec_s3's S3 store over the SDK and over its direct
transport. The server is nginx where it is installed (GET of files, PUT through its DAV module),
otherwise a small byte server of ours; it runs in a process of its own, so its CPU time does not
count. One request at a time, on warm connections; the median of the rounds, and their range.
Every body is compared after its block. Limits: GET at most 2.4 times the floor and PUT at most 3.0
times, for 8 and 32 MB, with both transports; requests of 256 KB or less and look-ups at most
800 us with the SDK and 100 us with the direct transport.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import io
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from suite.report import Report

from ec_s3.s3 import S3Store
from ec_s3.url import S3Location, S3Options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ec_s3.types import ObjectInfo

KB, MB = 1000, 1 << 20
CELLS = [
    ("GET", 8 * MB, 12),
    ("GET", 32 * MB, 4),
    ("PUT", 8 * MB, 12),
    ("PUT", 32 * MB, 4),
    ("GET", 10 * KB, 200),
    ("GET", 256 * KB, 150),
    ("PUT", 10 * KB, 200),
    ("HEAD", 10 * KB, 200),
]
"""Verb, size of the object, requests in a block."""

ROUNDS = 5
LARGE = 1 * MB
TIMES_FLOOR = {"GET": 2.4, "PUT": 3.0}
MICROSECONDS = {"sdk": 800.0, "direct": 100.0}
CLIENTS = ("floor", "sdk", "direct")
BUCKET = "bench"
NGINX = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log off; sendfile on; tcp_nopush on; tcp_nodelay on;
  keepalive_requests 1000000; keepalive_timeout 120;
  client_max_body_size 0; client_body_temp_path {folder}/tmp; client_body_buffer_size 128k;
  server {{
    listen 127.0.0.1:{port}; root {folder}/data;
    location / {{ dav_methods PUT DELETE; create_full_put_path on; }}
  }}
}}
"""


# -- the server --------------------------------------------------------------------------------


def serve(port: int) -> None:
    """Hold what was PUT in memory and give it back; no more HTTP than the clients here need."""
    objects: dict[str, bytearray] = {}
    listening = socket.create_server(("127.0.0.1", port), backlog=64)
    while True:
        connection, _ = listening.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=converse, args=(connection, objects), daemon=True).start()


def converse(connection: socket.socket, objects: dict[str, bytearray]) -> None:
    stream = io.BufferedReader(socket.SocketIO(connection, "r"), 1 << 16)
    while line := stream.readline():
        method, path, _ = line.decode("latin-1").split(" ")
        length = 0
        while (header := stream.readline()) not in (b"\r\n", b""):
            if header.lower().startswith(b"content-length:"):
                length = int(header.split(b":")[1])
        if method == "PUT":
            body = bytearray(length)
            stream.readinto(body)
            objects[path] = body
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            continue
        found = objects.get(path)
        status, found = ("200 OK", found) if found is not None else ("404 Not Found", bytearray())
        connection.sendall(
            f'HTTP/1.1 {status}\r\nContent-Length: {len(found)}\r\nETag: "e"\r\n'
            "Last-Modified: Mon, 30 Nov 2026 10:00:00 GMT\r\n\r\n".encode()
        )
        if method == "GET":
            connection.sendall(found)


@contextmanager
def byte_server() -> Iterator[tuple[str, str]]:
    """A running server: its kind and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = Path("/dev/shm")
    where = shared if shared.is_dir() and shutil.disk_usage(shared).free > 1 << 30 else None
    with tempfile.TemporaryDirectory(dir=where) as folder:
        nginx = shutil.which("nginx")
        if nginx:
            (Path(folder) / "data").mkdir()
            Path(folder).chmod(0o777)
            (Path(folder) / "data").chmod(0o777)
            configuration = Path(folder) / "nginx.conf"
            user = "user root;" if os.geteuid() == 0 else ""
            configuration.write_text(user + NGINX.format(folder=folder, port=port))
            command = [nginx, "-c", str(configuration), "-p", folder]
        else:
            command = [sys.executable, __file__, "--serve", str(port)]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_for(port)
            yield "nginx" if nginx else "python byte server", f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(10.0)


def wait_for(port: int) -> None:
    give_up = time.monotonic() + 15.0
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)
        else:
            return


# -- the clients -------------------------------------------------------------------------------


class Client(Protocol):
    def block(self, verb: str, size: int, count: int) -> None: ...


class Floor:
    """`http.client`; receives into one buffer."""

    def __init__(self, url: str, space: memoryview, body: Callable[[int], memoryview]) -> None:
        parts = urlsplit(url)
        self.connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        self._space, self._body = space, body

    def block(self, verb: str, size: int, count: int) -> None:
        body = self._body(size) if verb == "PUT" else None
        for _ in range(count):
            self.connection.request(verb, f"/{BUCKET}/{name(verb, size)}", body=body)
            answer = self.connection.getresponse()
            assert answer.status in (200, 201, 204), answer.status
            received = 0
            while verb == "GET" and received < size:
                more = answer.readinto(self._space[received:size])
                assert more
                received += more
            answer.read()


class Ours:
    """An `S3Store`; receives into one buffer."""

    def __init__(
        self, url: str, space: memoryview, body: Callable[[int], memoryview], transport: str
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.store = S3Store(S3Location(BUCKET, endpoint=url), S3Options(transport=transport))
        self._space, self._body = space, body

    def block(self, verb: str, size: int, count: int) -> None:
        self.loop.run_until_complete(self._block(verb, size, count))

    async def _block(self, verb: str, size: int, count: int) -> None:
        key = name(verb, size)
        body = [self._body(size)]
        for _ in range(count):
            if verb == "PUT":
                await self.store.put(key, body, if_absent=False)
            elif verb == "GET":
                result = await self.store.get(key, into=lambda n: self._space[:n])
                assert result is not None
                assert result.info.size == size
            else:
                info: ObjectInfo | None = await self.store.head(key)
                assert info is not None
                assert info.size == size

    def close(self) -> None:
        self.loop.run_until_complete(self.store.aclose())
        self.loop.close()


def name(verb: str, size: int) -> str:
    return f"{'put' if verb == 'PUT' else 'get'}-{size}"


# -- the comparison ----------------------------------------------------------------------------


def compare(url: str, rounds: int) -> list[dict[str, Any]]:
    noise = memoryview(os.urandom(max(size for _, size, _ in CELLS)))
    space = memoryview(bytearray(noise.nbytes))
    floor = Floor(url, space, lambda size: noise[:size])
    sdk, direct = (Ours(url, space, lambda size: noise[:size], kind) for kind in CLIENTS[1:])
    clients: dict[str, Client] = {"floor": floor, "sdk": sdk, "direct": direct}
    for size in {size for _, size, _ in CELLS}:
        direct.loop.run_until_complete(
            direct.store.put(name("GET", size), [noise[:size]], if_absent=False)
        )
    taken: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    for turn in range(-1, rounds):
        for verb, size, count in CELLS:
            for shift in range(len(CLIENTS)):
                client = CLIENTS[(turn + shift) % len(CLIENTS)]
                repeats = count if turn >= 0 else 2  # the round before the first warms up
                seconds = measured(clients[client], verb, size, repeats)
                check(floor, verb, size, noise, space)
                if turn >= 0:
                    taken.setdefault((verb, size, client), []).append(seconds)
    sdk.close()
    direct.close()
    return [entry for verb, size, _ in CELLS for entry in row(verb, size, taken)]


def measured(client: Client, verb: str, size: int, count: int) -> tuple[float, float]:
    """CPU and wall seconds of one request."""
    wall, cpu = time.perf_counter(), time.process_time()
    client.block(verb, size, count)
    return (time.process_time() - cpu) / count, (time.perf_counter() - wall) / count


def check(floor: Floor, verb: str, size: int, noise: memoryview, space: memoryview) -> None:
    """The last body arrived whole, here or there; and the buffer is spoilt for the next one."""
    if verb == "PUT":
        floor.connection.request("GET", f"/{BUCKET}/{name(verb, size)}")
        assert floor.connection.getresponse().read() == noise[:size]
    elif verb == "GET":
        assert space[:size] == noise[:size]
        space[:size:4096] = bytes(len(range(0, size, 4096)))


def row(verb: str, size: int, taken: dict[Any, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """A row for each client: CPU seconds a GB, or microseconds a request when it is small."""
    rows = []
    floor = statistics.median(cpu for cpu, _ in taken[verb, size, "floor"])
    scale, unit = (1e9 / size, "CPU s/GB") if size >= LARGE else (1e6, "CPU us")
    for client in CLIENTS:
        cpus = [cpu for cpu, _ in taken[verb, size, client]]
        wall = statistics.median(seconds for _, seconds in taken[verb, size, client])
        rows.append(
            {
                "request": f"{verb} {size / 1e6:g} MB",
                "client": client,
                "unit": unit,
                "median": statistics.median(cpus) * scale,
                "least": min(cpus) * scale,
                "most": max(cpus) * scale,
                "times floor": statistics.median(cpus) / floor,
                "MB/s": size / wall / 1e6,
            }
        )
    return rows


def report(rows: list[dict[str, Any]], server: str, rounds: int) -> Report:
    made = Report(title="CPU time of the S3 clients", rows=rows, quick=rounds < ROUNDS)
    made.notes.append(
        f"One request at a time to {server}; medians of {rounds} rounds. The floor is "
        "`http.client` with a recycled buffer, unsigned."
    )
    for entry in rows:
        client, request = entry["client"], entry["request"]
        if client == "floor":
            continue
        if entry["unit"] == "CPU us":
            text = f"{request}, {client}: microseconds of CPU a request"
            made.at_most(text, value=entry["median"], limit=MICROSECONDS[client])
        else:
            text = f"{request}, {client}: times the floor's CPU time"
            limit = TIMES_FLOOR[request.partition(" ")[0]]
            made.at_most(text, value=entry["times floor"], limit=limit)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench")
    os.environ["AWS_CONFIG_FILE"] = os.environ["AWS_SHARED_CREDENTIALS_FILE"] = os.devnull
    rounds = 2 if options.quick else options.rounds
    with byte_server() as (kind, url):
        rows = compare(url, rounds)
    made = report(rows, kind, rounds)
    for entry in rows:
        print(*(f"{v:9.3f}" if isinstance(v, float) else f"{v:12}" for v in entry.values()))
    for target in made.targets:
        print("met" if target.met else "MISSED", target.text, f"{target.value:.2f}", target.limit)
    print(made.write("transports"))


if __name__ == "__main__":
    main()
