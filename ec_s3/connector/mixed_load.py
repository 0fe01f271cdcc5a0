"""One mixed load: requests that overlap, each with its own length, and some aborted on the way.

The part of `ec_s3.connector.offline` that the fault matrix and the soak drive. Runs in the offline
job's process on its main thread, which steps the engine itself, so that it can time every request
and abort one between two steps. Must never import vLLM: the engine is passed in.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request as vLLM takes it.

    Attributes:
        messages: the conversation.
        params: `vllm.SamplingParams`, used by this request only.
        abort_after: seconds after which it is aborted, None for never.
    """

    messages: list[dict[str, Any]]
    params: Any
    abort_after: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a request.

    Attributes:
        token_ids: generated tokens; empty for one that failed or was aborted.
        finish_reason: vLLM's, `error` for one that failed, `abort` for an aborted one.
        seconds: from when the engine could first see it to its end.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    seconds: float


class MixedLoad:
    """Runs loads on one `vllm.LLM`; not thread-safe.

    Args:
        llm: the engine's front end.
        in_process: the engine makes no step but the caller's, so nothing waits before the first.
    """

    def __init__(
        self, llm: Any, *, in_process: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._llm = llm
        self._in_process = in_process
        self._clock = clock

    def run(self, requests: Sequence[LoadRequest]) -> list[Outcome]:
        """Add all requests and step until each has ended; outcomes in the order of the requests.

        A deferred request with nothing beside it makes no output in an engine of its own process,
        and is aborted only with the next one: put a long text request into the load.
        """
        engine = self._llm.llm_engine
        added: dict[str, float] = {}
        aborts: dict[str, float] = {}
        for request in requests:
            (name,) = self._llm.enqueue_chat([request.messages], request.params, use_tqdm=False)
            added[name] = self._clock()
            if request.abort_after is not None:
                aborts[name] = request.abort_after
        begun = self._clock()
        outcomes: dict[str, Outcome] = {}
        numbers = {name.partition("-")[0]: name for name in added}

        def started(name: str) -> float:
            return begun if self._in_process else added[name]

        while engine.has_unfinished_requests():
            for name in [n for n, after in aborts.items() if self._clock() >= started(n) + after]:
                del aborts[name]
                if name not in outcomes:
                    engine.abort_request([name], internal=True)
                    seconds = self._clock() - started(name)
                    outcomes[name] = Outcome(token_ids=(), finish_reason="abort", seconds=seconds)
            for output in engine.step():
                name = numbers.get(output.request_id)
                if output.finished and name is not None and name not in outcomes:
                    completion = output.outputs[0]
                    outcomes[name] = Outcome(
                        token_ids=tuple(completion.token_ids),
                        finish_reason=str(completion.finish_reason),
                        seconds=self._clock() - started(name),
                    )
        lost = Outcome(token_ids=(), finish_reason="lost", seconds=self._clock() - begun)
        return [outcomes.get(name, lost) for name in added]
