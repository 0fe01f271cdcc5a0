"""The interface of a system under test, and the two ways in which its callers run."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

CALLERS = 16


class System:
    """A system. Subclasses have `put((name, tensor))`, `get(name)`, `contains(name)`.

    Args:
        settings: `endpoint`, `port`, `shape`, `folder`, ... as the benchmark gave them.

    Attributes:
        verifies: whether what `get` returns is the item's tensor, and not just its stored bytes.
    """

    verifies = True

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.shape: tuple[int, int] = tuple(settings["shape"])

    def each(self, what: str, arguments: Sequence[Any], callers: int) -> list[Any]:
        """Do `what` for all arguments with this many callers at a time; results or exceptions."""
        raise NotImplementedError

    def tensor(self, bits: npt.NDArray[np.uint16]) -> Any:
        """What `put` takes."""
        import torch

        return torch.from_numpy(bits.view("int16")).view(torch.bfloat16)

    def bits(self, result: Any) -> npt.NDArray[np.uint16]:
        """The bits of what `get` returned."""
        import torch

        array: npt.NDArray[np.uint16] = result.view(torch.int16).numpy().view("uint16")
        return array

    def flush(self) -> None:
        """Wait until everything that was put is durable."""

    def forget(self) -> None:
        """Drop what is remembered in memory."""

    def path(self, name: str) -> str:
        """Where the server keeps the item."""
        raise NotImplementedError

    def close(self) -> None: ...


class ThreadSystem(System):
    """Callers are threads, kept between measurements."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._threads = ThreadPoolExecutor(CALLERS)
        list(self._threads.map(lambda _: threading.Event().wait(0.01), range(CALLERS)))

    def each(self, what: str, arguments: Sequence[Any], callers: int) -> list[Any]:
        call = getattr(self, what)

        def guarded(argument: Any) -> Any:
            try:
                return call(argument)
            except Exception as error:
                return error

        if what == "get_batch":
            return list(call(list(arguments)))
        if callers == 1:
            return [guarded(argument) for argument in arguments]
        results: list[Any] = [None] * len(arguments)
        turn = iter(range(len(arguments)))  # next() on it is atomic

        def caller(_: int) -> None:
            for at in turn:
                results[at] = guarded(arguments[at])

        list(self._threads.map(caller, range(callers)))
        return results


class AsyncSystem(System):
    """Callers are tasks on one event loop."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.loop = asyncio.new_event_loop()

    def each(self, what: str, arguments: Sequence[Any], callers: int) -> list[Any]:
        call = getattr(self, what)
        results: list[Any] = [None] * len(arguments)
        turn = iter(range(len(arguments)))

        async def caller() -> None:
            for at in turn:
                try:
                    results[at] = await call(arguments[at])
                except Exception as error:
                    results[at] = error

        async def run() -> None:
            await asyncio.gather(*(caller() for _ in range(callers)))

        self.loop.run_until_complete(run())
        return results
