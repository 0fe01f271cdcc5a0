"""The limits: an unsigned HTTP GET into a recycled buffer, and a copy in memory."""

from __future__ import annotations

import threading
from http.client import HTTPConnection, HTTPResponse
from typing import TYPE_CHECKING, Any

from suite.systems.base import ThreadSystem

if TYPE_CHECKING:
    import torch


class RawHttp(ThreadSystem):
    """`http.client`, the body read into a recycled buffer; names are the server's paths."""

    verifies = False  # the bytes as they are stored

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._mine = threading.local()

    def _answer(self, method: str, path: str) -> HTTPResponse:
        """The answer on this thread's connection; its body is still to be read."""
        mine = self._mine
        if not hasattr(mine, "connection"):
            mine.connection = HTTPConnection("127.0.0.1", self.settings["port"], timeout=60)
            mine.buffer = bytearray()
        mine.connection.request(method, path)
        answer: HTTPResponse = mine.connection.getresponse()
        return answer

    def get(self, path: str) -> bool:
        answer, mine = self._answer("GET", path), self._mine
        length = int(answer.headers["Content-Length"])
        if len(mine.buffer) < length:
            mine.buffer = bytearray(length)
        view, at = memoryview(mine.buffer)[:length], 0
        while at < length:
            got = answer.readinto(view[at:])
            if not got:
                return False
            at += got
        answer.read()
        return answer.status == 200

    def contains(self, path: str) -> bool:
        answer = self._answer("HEAD", path)
        answer.read()
        return answer.status == 200


class Memory(ThreadSystem):
    """What a cache in memory cannot beat: `get` copies into a new tensor, `put` into a used one."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._slots: dict[str, torch.Tensor] = {}

    def put(self, item: tuple[str, torch.Tensor]) -> bool:
        name, tensor = item[0].rpartition("-")[2], item[1]
        slot = self._slots.get(name)
        if slot is None:
            self._slots[name] = tensor.clone()
        else:
            slot.copy_(tensor)
        return True

    def get(self, name: str) -> torch.Tensor:
        return self._slots[name.rpartition("-")[2]].clone()


SYSTEMS = {"raw_http": RawHttp, "memory": Memory}
