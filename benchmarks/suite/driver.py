"""One system under test, in a process of its own; started by `suite.client.Client`.

Reads orders from stdin and answers on stdout, one JSON object a line. It measures its own wall and
CPU time, and compares every tensor it got with what it must be, outside of the measured time.

    python -m suite.driver SYSTEM      first line: the settings
    {"do": "put" | "get" | "contains" | "lease" | "durable", "names": [...], "callers": n}
    {"do": "forget"}                   drop what is in memory, so that the next get is cold
    {"do": "paths"}                    where the server keeps the items that were put
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
import time
import traceback
from typing import Any

import numpy as np

from suite.data import Items

MODULES = {
    "ec_s3": "suite.systems.ours",
    "ec_s3_blocking": "suite.systems.ours",
    "lmcache": "suite.systems.lmcache",
    "lmcache_ec": "suite.systems.lmcache",
    "example": "suite.systems.example",
    "aiobotocore": "suite.systems.sdk",
    "boto3": "suite.systems.sdk",
    "raw_http": "suite.systems.raw",
    "memory": "suite.systems.raw",
}


def number(name: str) -> int:
    """The item that a name stands for: `anything-7` is item 7."""
    return int(name.rpartition("-")[2])


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Driver:
    def __init__(self, system: str, settings: dict[str, Any]) -> None:
        module = importlib.import_module(MODULES[system])
        shape = tuple(settings["shape"])
        base = np.fromfile(settings["data"], dtype=np.uint16).reshape(shape)
        self.items = Items(base)
        self.system = module.SYSTEMS[system](settings)

    def measure(self, order: dict[str, Any]) -> dict[str, Any]:
        what, names = order["do"], order["names"]
        arguments: list[Any] = list(names)
        if what in ("put", "durable"):
            arguments = [
                (name, self.system.tensor(self.items.bits(number(name)))) for name in names
            ]
        gc.collect()
        gc.disable()
        cpu, start = cpu_seconds(), time.perf_counter()
        results = self.system.each(
            "put" if what == "durable" else what, arguments, order["callers"]
        )
        free = time.perf_counter() - start
        if what == "durable":
            self.system.flush()
        wall, cpu = time.perf_counter() - start, cpu_seconds() - cpu
        gc.enable()
        if what == "put":
            self.system.flush()
        wrong = [n for n, r in zip(names, results, strict=True) if not self.is_right(what, n, r)]
        return {"wall": wall, "cpu": cpu, "free": free, "wrong": wrong}

    def is_right(self, what: str, name: str, result: Any) -> bool:
        if isinstance(result, BaseException):
            print(f"{name}: {result!r}", file=sys.stderr)
            return False
        if what == "contains":
            return bool(result) == (not name.startswith("absent"))
        if what == "get" and name.startswith("absent"):
            return result is None
        if what in ("get", "get_batch") and self.system.verifies:
            return result is not None and self.items.right(number(name), self.system.bits(result))
        return bool(result)

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "forget":
            self.system.forget()
            return {}
        if order["do"] == "paths":
            return {name: self.system.path(name) for name in order["names"]}
        return self.measure(order)


def main() -> None:
    # Whatever prints to stdout meanwhile must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    driver = Driver(sys.argv[1], settings)
    answers.write("{}\n")
    for line in sys.stdin:
        answers.write(json.dumps(driver.answer(json.loads(line))) + "\n")
    driver.system.close()
    answers.flush()
    os._exit(0)  # see below


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # some systems leave threads that never end
