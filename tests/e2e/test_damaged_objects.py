"""Whatever lies in the bucket, an answer is right; and the comparison would notice a wrong one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ec_s3 import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from ec_s3.testing.lab import Lab

_CAP = 1 << 20


def test_damaged_objects_are_encoded_again_and_repaired(lab: Lab) -> None:
    cold = lab.cold()
    prefix = "damaged"
    damages: dict[str, Callable[[bytes], bytes | None]] = {
        "china-0": lambda _: None,
        "china-1": lambda body: body[:-7],
        "china-2": lambda body: body[:-20] + bytes([body[-20] ^ 1]) + body[-19:],
        "china-3": lambda _: b"",
        "flower-0": lambda _: b"<html>not what you asked for</html>",
        "flower-1": lambda _: lab.read(cold.keys["hopper-3"]),
    }
    intact, swapped, source = "flower-2", "flower-3", "hopper-0"
    keys = lab.copy(cold, prefix, pictures=[*damages, intact, swapped])
    for picture, damage in damages.items():
        lab.replace(keys[picture], damage(lab.read(keys[picture])))
    lab.replace(keys[swapped], _with_tensor_of(lab, cold.keys[swapped], cold.keys[source]))

    process = lab.start(prefix=prefix)
    damaged = {picture: lab.ask(process, picture) for picture in damages}
    healthy = lab.ask(process, intact)
    fooled = lab.ask(process, swapped)
    process.finish()

    assert {name: a.encoded for name, a in damaged.items()} == dict.fromkeys(damages, 1)
    assert {name: a.tokens for name, a in damaged.items()} == {
        name: cold.answers[name].tokens for name in damages
    }
    assert (healthy.encoded, healthy.tokens) == (0, cold.answers[intact].tokens)
    # The control: a tensor that no check can tell from the right one shows in the answer.
    assert cold.answers[source].tokens != cold.answers[swapped].tokens
    assert (fooled.encoded, fooled.tokens) == (0, cold.answers[source].tokens)
    for picture in damages:
        header, tensor = wire.decode(lab.read(keys[picture]), max_tensor_bytes=_CAP)
        original = wire.decode(lab.read(cold.keys[picture]), max_tensor_bytes=_CAP)
        assert (header.identifier, tensor) == (original[0].identifier, original[1])


def _with_tensor_of(lab: Lab, key: str, other: str) -> bytes:
    """An object that is valid for one item and holds the tensor of another."""
    header, _ = wire.decode(lab.read(key), max_tensor_bytes=_CAP)
    _, tensor = wire.decode(lab.read(other), max_tensor_bytes=_CAP)
    frame = wire.encode(
        header.spec,
        [memoryview(tensor)],
        identifier=header.identifier,
        namespace=header.namespace,
        meta=header.meta,
        created=time.time(),
    )
    return b"".join(bytes(part) for part in frame.parts)
