"""The failures of the matrix: how each is made to happen, and how it ends.

A failure is a generator function: it makes its failure, yields while the load runs, and undoes it.
Everything here happens outside the engine: at the fault server, in the bucket, or to a process.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matrix_bench import CAP, Engine, Item

from ec_s3 import wire
from ec_s3.testing.faults import Fault
from ec_s3.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

ITEM = r"/v1/[^?]*/[0-9a-f]{2}/[0-9a-f]{64}"
"""Paths of encoder outputs; the control object and the manifest are left alone."""

_VERSION_AT = 16
_UPLOAD_SECONDS = 10.0

Make = Callable[[Engine, list[Item]], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Failure:
    """One row of the table.

    Attributes:
        name: what fails.
        make: a context manager around the load; its items lie in the bucket.
        blind: nothing that lies in the bucket can be loaded.
        saves: only engines that save can meet it.
    """

    name: str
    make: Make
    blind: bool = False
    saves: bool = False


def scripted(*, heads: bool = True, **fault: Any) -> Make:
    """A failure of the server, for as long as the load runs; it must be met.

    Args:
        heads: an engine that only looks whether an item is there meets it, too.
        **fault: see `Fault`.
    """

    @contextmanager
    def make(engine: Engine, stored: list[Item]) -> Iterator[None]:
        script = Fault(**fault)
        engine.proxy.add(script)
        try:
            yield
            deadline = time.monotonic() + _UPLOAD_SECONDS
            while script.method == "PUT" and not script.met and time.monotonic() < deadline:
                time.sleep(0.05)  # uploads come after the answers
        finally:
            engine.proxy.clear()
        assert script.met or not (heads or engine.loads), "the fault was never met"

    return make


def replaced(change: Callable[[Engine, Item], bytes | None]) -> Make:
    """Something else lies under the stored items' keys."""

    @contextmanager
    def make(engine: Engine, stored: list[Item]) -> Iterator[None]:
        for item in stored:
            engine.damage(item, change(engine, item))
        yield

    return make


@contextmanager
def dead(engine: Engine, stored: list[Item]) -> Iterator[None]:
    engine.proxy.refuse()
    try:
        yield
    finally:
        engine.proxy.accept()


@contextmanager
def flapping(engine: Engine, stored: list[Item]) -> Iterator[None]:
    """The server goes away and comes back while the load runs."""
    stop = threading.Event()

    def flap() -> None:
        while not stop.wait(0.15):
            engine.proxy.refuse()
            stop.wait(0.15)
            engine.proxy.accept()

    thread = threading.Thread(target=flap)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def lost(engine: Engine, stored: list[Item]) -> Iterator[None]:
    """The objects are deleted while their reads are on their way."""
    engine.proxy.add(Fault(path=ITEM, delay=0.7))
    engine.proxy.clear_log()

    def delete() -> None:
        deadline = time.monotonic() + _UPLOAD_SECONDS
        while not engine.proxy.count(path=ITEM) and time.monotonic() < deadline:
            time.sleep(0.01)
        for item in stored:
            engine.lab.replace(engine.key(item), None)

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        engine.proxy.clear()


def reencoded(*, dtype: str = "", rows: int = 0, identifier: str = "") -> Make:
    """A whole, valid object that is not what its key says."""

    def change(engine: Engine, item: Item) -> bytes:
        header, tensor = wire.decode(item.body, max_tensor_bytes=CAP)
        shape = header.spec.shape
        data = bytes(tensor)
        if rows:
            shape = (rows, shape[1])
            data = (data * 2)[: rows * len(data) // header.spec.shape[0]]
        if dtype == "bfloat16":
            data = data[: len(data) // 2]
        frame = wire.encode(
            TensorSpec(dtype or header.spec.dtype, shape),
            [memoryview(data)],
            identifier=identifier or header.identifier,
            namespace=header.namespace,
            meta=header.meta,
            created=time.time(),
        )
        return b"".join(bytes(part) for part in frame.parts)

    return replaced(change)


def _foreign(engine: Engine, item: Item) -> bytes:
    return engine.reference.item("foreign").body


def _version(number: int) -> Callable[[Engine, Item], bytes]:
    def change(engine: Engine, item: Item) -> bytes:
        body = bytearray(item.body)
        struct.pack_into("<I", body, _VERSION_AT, number)
        return bytes(body)

    return change


def _flipped(engine: Engine, item: Item) -> bytes:
    body = bytearray(item.body)
    body[-40] ^= 1
    return bytes(body)


def _refuses_features() -> Make:
    """Stores without checksums and multipart uploads: nothing is sent that they refuse."""

    @contextmanager
    def make(engine: Engine, stored: list[Item]) -> Iterator[None]:
        engine.proxy.add(
            Fault(header="(?i)x-amz-(sdk-)?checksum", status=400),
            Fault(path=r"[?&]uploads", status=501),
        )
        try:
            yield
        finally:
            engine.proxy.clear()

    return make


_BODY: dict[str, Any] = {"heads": False, "method": "GET", "path": ITEM}

FAILURES = (
    Failure("slow: 300 ms a request", scripted(delay=0.3)),
    Failure("slow: 4 kB/s", scripted(**_BODY, rate=4000)),
    Failure("refuses connections", dead, blind=True),
    Failure("dies and comes back, again and again", flapping),
    Failure("denies (403)", scripted(status=403), blind=True),
    Failure("throttles (503)", scripted(status=503), blind=True),
    Failure("throttles (503, Retry-After)", scripted(status=503, retry_after=2), blind=True),
    Failure("fails (500)", scripted(status=500), blind=True),
    Failure("never answers", scripted(hang=True), blind=True),
    Failure("stops within a body", scripted(**_BODY, stall_at=900), blind=True),
    # A read goes on where it broke off, so that a patient request may get its picture.
    Failure("cuts bodies", scripted(**_BODY, cut_at=900)),
    Failure("resets within a body", scripted(**_BODY, cut_at=900, reset=True)),
    Failure("sends extra bytes", scripted(path=ITEM, extra=b"HTTP/1.1 200 OK\r\n")),
    Failure("flips a byte on the way", scripted(**_BODY, flip_at=2000), blind=True),
    Failure("drops kept-alive connections", scripted(close=True)),
    Failure("drops the responses to PUTs", scripted(method="PUT", drop_response=True), saves=True),
    Failure("refuses checksums and multipart", _refuses_features(), saves=True),
    Failure("answers 404", scripted(path=ITEM, status=404), blind=True),
    Failure("loses objects between look-up and load", lost, blind=True),
    Failure("lies: bytes of another item", replaced(_foreign), blind=True),
    Failure("lies: another identifier", reencoded(identifier="0" * 64), blind=True),
    Failure("lies: another dtype", reencoded(dtype="bfloat16"), blind=True),
    Failure("lies: too few rows", reencoded(rows=15), blind=True),
    Failure("lies: too many rows", reencoded(rows=20), blind=True),
    Failure("lies: older format", replaced(_version(0)), blind=True),
    Failure("lies: future format", replaced(_version(99)), blind=True),
    Failure("lies: a flipped bit", replaced(_flipped), blind=True),
    Failure("lies: a cut object", replaced(lambda engine, item: item.body[:-9]), blind=True),
    Failure("lies: trailing bytes", replaced(lambda engine, item: item.body + b"more"), blind=True),
    Failure("lies: an empty object", replaced(lambda engine, item: b""), blind=True),
    Failure("lies: an error page", replaced(lambda engine, item: b"<html>no</html>"), blind=True),
)
"""Rows that send the mixed load while something at the bucket is wrong."""
