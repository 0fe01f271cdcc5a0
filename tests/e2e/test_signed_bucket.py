"""Somebody else can write to the bucket: with a signing key no answer changes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ec_s3 import wire
from ec_s3.signing import parse_keys

if TYPE_CHECKING:
    from pathlib import Path

    from ec_s3.signing import Keyring
    from ec_s3.testing.lab import Lab

_CAP = 1 << 20
OURS, NEXT, THEIRS = (
    f"{name}:{digit * 64}" for name, digit in zip(("ours", "next", "theirs"), "123", strict=True)
)


def test_poisoned_objects_are_encoded_again_and_replaced_by_signed_ones(
    lab: Lab, tmp_path: Path
) -> None:
    cold = lab.cold()
    prefix = "signed"
    poison = {"china-0": None, "flower-3": parse_keys(THEIRS)}
    keys = lab.copy(cold, prefix, pictures=poison)
    for picture, keyring in poison.items():
        lab.replace(
            keys[picture], _poisoned(lab, cold.keys[picture], cold.keys["hopper-0"], keyring)
        )
    file = tmp_path / "keys"
    file.write_text(OURS)
    settings = {"signing_key_file": str(file), "engine": "process"}

    process = lab.start(prefix=prefix, settings=settings)
    answers = {picture: lab.ask(process, picture) for picture in poison}
    process.finish()
    assert {name: answer.encoded for name, answer in answers.items()} == dict.fromkeys(poison, 1)
    assert {name: answer.tokens for name, answer in answers.items()} == {
        name: cold.answers[name].tokens for name in poison
    }
    for picture, key in keys.items():
        header, tensor = wire.decode(lab.read(key), max_tensor_bytes=_CAP, keyring=parse_keys(OURS))
        original, expected = wire.decode(lab.read(cold.keys[picture]), max_tensor_bytes=_CAP)
        assert tensor == expected
        # Another process has prepared the same picture: its inputs have the same digest.
        assert header.meta.input_digest == original.meta.input_digest != ""

    file.write_text(f"{NEXT}\n{OURS}\n")
    process = lab.start(prefix=prefix, settings=settings)
    again = {picture: lab.ask(process, picture) for picture in poison}
    process.finish()
    assert {name: answer.encoded for name, answer in again.items()} == dict.fromkeys(poison, 0)
    assert {name: answer.tokens for name, answer in again.items()} == {
        name: cold.answers[name].tokens for name in poison
    }


def _poisoned(lab: Lab, key: str, other: str, keyring: Keyring | None) -> bytes:
    """An object that is valid for one item but for its signature, with the tensor of another."""
    header, _ = wire.decode(lab.read(key), max_tensor_bytes=_CAP)
    _, tensor = wire.decode(lab.read(other), max_tensor_bytes=_CAP)
    frame = wire.encode(
        header.spec,
        [memoryview(tensor)],
        identifier=header.identifier,
        namespace=header.namespace,
        meta=header.meta,
        created=time.time(),
        keyring=keyring,
    )
    return b"".join(frame.parts)
