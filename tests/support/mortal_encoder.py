"""Encoders that kill their own process, for `IsolatedEncoder`: what its child opens by name."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ec_s3.errors import ConfigError, ECS3Error
from ec_s3.keys import Namespace
from ec_s3.testing.encoder import PlayedEncoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ec_s3.prewarm.encoding import Encoder, EncoderSettings, Failed, Identified, MediaItem

SPACE = Namespace(model="org/model", dtype="float32")


class MortalEncoder(PlayedEncoder):
    """Dies of files that are called so."""

    def identify(
        self, items: Sequence[MediaItem], data: Sequence[bytes | Path]
    ) -> list[Identified | Failed]:
        if any("kills-decoder" in item.uri for item in items):
            os.kill(os.getpid(), signal.SIGSEGV)
        for item in items:
            if "hangs-decoder" in item.uri:
                Path(item.uri).with_suffix(".hangs").touch()
                threading.Event().wait()
        return super().identify(items, data)

    def encode(self, items: Sequence[Identified]) -> list[Identified | Failed]:
        if any("kills-encoder" in one.item.uri for one in items):
            os.kill(os.getpid(), signal.SIGKILL)
        if any("not-encoded" in one.item.uri for one in items):
            raise ECS3Error("vLLM has failed")
        return super().encode(items)


def open_mortal(settings: EncoderSettings) -> MortalEncoder:
    return MortalEncoder(settings.connector, SPACE, facts={"model_argument": settings.model})


def open_mortal_vllm(settings: EncoderSettings) -> Encoder:
    """Real vLLM, whose process dies of files that are called so."""
    from ec_s3.connector.encoder import open_encoder

    encoder = open_encoder(settings)
    encode = encoder.encode

    def dying(items: Sequence[Identified]) -> list[Identified | Failed]:
        if any("kills-encoder" in one.item.uri for one in items):
            os.kill(os.getpid(), signal.SIGSEGV)
        return encode(items)

    encoder.encode = dying  # type: ignore[method-assign]  # a crash, as a kernel or decoder has it
    return encoder


def open_none(settings: EncoderSettings) -> MortalEncoder:
    raise ConfigError(f"no model {settings.model}")


def open_and_die(settings: EncoderSettings) -> MortalEncoder:
    raise RuntimeError(f"a bug with {settings.model}")
