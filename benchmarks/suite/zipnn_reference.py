"""ZipNN on one file of bf16 numbers, in the peers' virtual environment: a reference for the codec.

    python -m suite.zipnn_reference FILE ROUNDS      prints a JSON object

One thread; medians of CPU time. Imports nothing of this folder, which that environment need not
be able to import.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from zipnn import ZipNN

if TYPE_CHECKING:
    from collections.abc import Callable


def rate(call: Callable[[], object], nbytes: int, rounds: int) -> float:
    """Median MB per CPU second, after a call that warms up."""
    seconds = []
    for _ in range(rounds + 1):
        begun = time.process_time()
        call()
        seconds.append(time.process_time() - begun)
    return nbytes / 1e6 / statistics.median(seconds[1:])


def main() -> None:
    raw, rounds = Path(sys.argv[1]).read_bytes(), int(sys.argv[2])
    codec = ZipNN(bytearray_dtype="bfloat16", threads=1)
    stored = bytes(codec.compress(bytearray(raw)))  # it works in place
    if bytes(codec.decompress(stored)) != raw:
        sys.exit("ZipNN's tensor differs from the one it was given")
    found = {
        "stored": len(stored) / len(raw),
        "encode, MB/s": rate(lambda: codec.compress(bytearray(raw)), len(raw), rounds),
        "decode, MB/s": rate(lambda: codec.decompress(stored), len(raw), rounds),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
