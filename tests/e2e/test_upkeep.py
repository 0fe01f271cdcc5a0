"""Day-by-day life of a server's cache: it starts warm, and is audited while it serves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ec_s3.testing.vllm_process import prompt
from ec_s3.wire import decode, encode

if TYPE_CHECKING:
    from ec_s3.testing.lab import Lab
    from ec_s3.testing.vllm_process import VLLMProcess

_SECONDS = 60.0
_MAX_TENSOR_BYTES = 1 << 24


def counted(process: VLLMProcess, name: str, outcome: str) -> float:
    """A counter's value, as vLLM has reported it in its last steps."""
    return sum(
        value
        for series, value in process.metrics().items()
        if series.startswith(f"vllm:ec_s3_{name}_total{{") and f'outcome="{outcome}"' in series
    )


def until_counted(process: VLLMProcess, name: str, outcome: str, value: int) -> None:
    """Wait until a counter has a value; it is reported in steps."""
    give_up = time.monotonic() + _SECONDS
    while (found := counted(process, name, outcome)) != value:
        assert time.monotonic() < give_up, f"{name} {outcome}: {found}"
        process.generate([prompt(text="hello")])


def negated(body: bytes) -> bytes:
    """The object of another encoder, as valid as this one: every number has the other sign."""
    header, tensor = decode(body, max_tensor_bytes=_MAX_TENSOR_BYTES)
    for i in range(3, len(tensor), 4):  # the sign of a little-endian float32
        tensor[i] ^= 0x80
    frame = encode(
        header.spec,
        [memoryview(tensor)],
        identifier=header.identifier,
        namespace=header.namespace,
        meta=header.meta,
        created=header.created,
    )
    return b"".join(frame.parts)


def test_started_warm_and_audited_it_gives_the_same_answers(lab: Lab) -> None:
    cold = lab.cold()
    prefix = "upkeep"
    warm, audited, drifted = ["china-0", "china-1"], "flower-0", "flower-1"
    lab.copy(cold, prefix, pictures=warm)
    process = lab.start(prefix=prefix, settings={"warm_start": "32MiB"})
    until_counted(process, "warm_start_items", "loaded", len(warm))
    before = len(lab.moved(prefix))
    for picture in warm:
        answer = lab.ask(process, picture)
        assert (answer.encoded, answer.tokens) == (0, cold.answers[picture].tokens)
    assert len(lab.moved(prefix)) == before, "nothing is fetched for a request"
    process.finish()

    keys = lab.copy(cold, prefix, pictures=[audited, drifted])
    body = negated(lab.read(keys[drifted]))
    lab.replace(keys[drifted], body)
    before = len(lab.moved(prefix))
    process = lab.start(prefix=prefix, settings={"audit_fraction": 1})
    for picture in (audited, drifted):
        answer = lab.ask(process, picture)
        assert (answer.encoded, answer.tokens) == (1, cold.answers[picture].tokens)
    until_counted(process, "audits", "same", 1)
    until_counted(process, "audits", "different", 1)
    process.finish()
    assert "an audited item is not what the encoder makes of it now" in process.log.read_text()
    assert {r.method for r in lab.moved(prefix)[before:]} == {"GET"}, "nothing is written"
    assert lab.read(keys[drifted]) == body
