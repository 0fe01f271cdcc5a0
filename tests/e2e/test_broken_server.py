"""vLLM answers, and rightly, whatever the S3 server does, and hits again when it is back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ec_s3.testing.faults import Fault, FaultServer

if TYPE_CHECKING:
    from ec_s3.testing.lab import Answer, Lab
    from ec_s3.testing.vllm_process import VLLMProcess

_RECOVERY_SECONDS = 60.0
_HASTY = {"connect_timeout": "2s", "read_timeout": "2s", "fetch_timeout": "1s"}


def test_answers_stay_right_while_the_server_fails_and_hits_return(lab: Lab) -> None:
    cold = lab.cold()
    prefix = "broken"
    keys = lab.copy(cold, prefix, pictures=lab.pictures)
    faults = {
        "china-0": Fault(status=403),
        "china-1": Fault(status=500),
        "china-2": Fault(hang=True),
        "china-3": Fault(method="GET", cut_at=100),
    }
    with FaultServer(lab.server.url) as proxy:
        process = lab.start(prefix=prefix, endpoint=proxy.url, settings=_HASTY)
        broken = {}
        for picture, fault in faults.items():
            proxy.clear()
            proxy.add(fault)
            broken[picture] = lab.ask(process, picture)
        proxy.clear()
        proxy.refuse()
        broken["flower-0"] = lab.ask(process, "flower-0")
        proxy.accept()
        recovered = _ask_until_loaded(lab, process, [p for p in lab.pictures if p not in broken])
        process.finish()

    assert {name: a.tokens for name, a in broken.items()} == {
        name: cold.answers[name].tokens for name in broken
    }
    assert {name: a.encoded for name, a in broken.items()} == dict.fromkeys(broken, 1)
    for picture, answer in recovered.items():
        assert answer.tokens == cold.answers[picture].tokens
    assert list(recovered.values())[-1].encoded == 0
    assert all(lab.read(key) == lab.read(cold.keys[name]) for name, key in keys.items())


def _ask_until_loaded(lab: Lab, process: VLLMProcess, pictures: list[str]) -> dict[str, Answer]:
    """Ask about one picture after another until the encoder is not needed, with pauses."""
    answers = {}
    pause = _RECOVERY_SECONDS / len(pictures)
    for picture in pictures:
        answers[picture] = lab.ask(process, picture)
        if answers[picture].encoded == 0:
            break
        time.sleep(pause)
    return answers
