"""The process of an `IsolatedEncoder`: `python -m ec_s3.prewarm.encoder_process FD`.

FD is a socket to the job's process, over which the encoder is told what to do, a call at a time;
only these two processes can write to it. Runs the encoder on the main thread. Ends when it is told
to, and at once when the job's process is gone: standard input is a pipe that it holds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib import import_module
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from ec_s3.errors import ConfigError, ECS3Error
from ec_s3.prewarm.isolation import Answer

if TYPE_CHECKING:
    from ec_s3.prewarm.encoding import Encoder


def main(link: Connection) -> None:
    """Serve one encoder."""
    settings, opener = link.recv()
    try:
        encoder: Encoder = getattr(import_module(opener.module), opener.function)(settings)
    except ECS3Error as error:
        link.send(_failure(error))
        return
    link.send((Answer.DONE, (encoder.namespace, dict(encoder.facts))))
    while True:
        verb, arguments = link.recv()
        if verb == "close":
            break
        try:
            value = getattr(encoder, verb)(*arguments)
        except ECS3Error as error:
            link.send(_failure(error))
        else:
            link.send((Answer.DONE, value))
    encoder.close()


def _failure(error: ECS3Error) -> tuple[Answer, str]:
    return Answer.CONFIG if isinstance(error, ConfigError) else Answer.ERROR, str(error)


def _end_with_the_job() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_job, daemon=True).start()
    main(Connection(int(sys.argv[1])))
