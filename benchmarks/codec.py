"""Codec: what is stored, and how fast it is encoded and decoded, per core.

    python benchmarks/codec.py [--quick] [--activations FILE]      1 minute; quick: 30 s

One thread; CPU time of that thread, so that neighbours on the machine disturb little; contenders
take turns in every round; medians. MB are of tensor bytes. Decoding covers every check of a reader:
header, digests, zstd's own checksums, and the merge of the planes, into memory that is used again,
as the host tier's is. "zstd-1" is one frame per MiB of the tensor as it lies in memory, with no
check at all, by `decompress()`. "stored" is an object with nothing compressed: what incompressible
bytes are held against. ZipNN's Huffman coder is a reference: it checks nothing, is no dependency,
and runs in a process of its own right after the others, where it can be built.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np
import zstandard
from suite.client import LMCACHE_VENV, environment
from suite.data import make, to_bf16
from suite.report import Report, explanation
from suite.setup import install_zipnn, options

from ec_s3.compress import STORE
from ec_s3.types import ItemMeta, TensorSpec
from ec_s3.wire import CHUNK_BYTES, decode_chunk, encode, read_header

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

    from ec_s3.wire import Buffer

    Bytes = npt.NDArray[np.uint8]
    Parts = tuple[Buffer, ...]

TOTAL_BYTES = 30 << 20
CHANNELS = 384
SHAPE = (TOTAL_BYTES // 2 // CHANNELS, CHANNELS)
CAP = 1 << 30


def datasets(source: Path | None) -> dict[str, tuple[str, Bytes]]:
    """Name to dtype and bytes."""
    random = np.random.default_rng(20)
    base = make("activations", SHAPE, source=source)
    floats = (base.astype(np.uint32) << 16).view(np.float32)
    # A bf16 file has no more mantissa than that: fill in the bits that wider types keep.
    jitter = 1 + random.uniform(-(2**-9), 2**-9, floats.shape)
    fine = (floats * jitter).astype(np.float32)[: len(floats) // 2]
    found: dict[str, tuple[str, npt.NDArray[np.generic]]] = {"activations": ("bfloat16", base)}
    for sigma in (1, 2):
        scales = np.exp(random.normal(0, sigma, CHANNELS)).astype(np.float32)
        found[f"channel scales, sigma {sigma}"] = ("bfloat16", to_bf16(floats * scales))
    found["normal noise"] = ("bfloat16", to_bf16(random.standard_normal(SHAPE, dtype=np.float32)))
    found["incompressible"] = ("bfloat16", make("noise", SHAPE))
    found["activations, fp16"] = ("float16", fine.astype(np.float16))
    found["activations, fp32"] = ("float32", fine)
    return {
        name: (dtype, values.reshape(-1).view(np.uint8)) for name, (dtype, values) in found.items()
    }


class Contenders:
    """What is timed on one set of data."""

    def __init__(self, dtype: str, raw: Bytes) -> None:
        itemsize = {"bfloat16": 2, "float16": 2, "float32": 4}[dtype]
        self._spec = TensorSpec(dtype, (len(raw) // itemsize,))
        self.raw = raw
        self.nbytes = len(raw)
        self._target = np.empty_like(raw)
        self._pieces = [raw[i : i + CHUNK_BYTES].data for i in range(0, len(raw), CHUNK_BYTES)]
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor()
        self._plain = self.plain_encode()
        self._ours = b"".join(self.encode())
        self._as_is = b"".join(self.as_is_encode())
        self.stored = len(self._ours) / len(raw)
        self.plain_stored = sum(map(len, self._plain)) / len(raw)
        self.decode()
        if self._target.tobytes() != raw.tobytes():
            sys.exit("the decoded tensor differs from the encoded one")

    def calls(self) -> dict[str, Callable[[], object]]:
        return {
            "encode": self.encode,
            "decode": self.decode,
            "zstd-1 encode": self.plain_encode,
            "zstd-1 decode": self.plain_decode,
            "zstd-1 decode, recycled memory": self.plain_decode_recycled,
            "stored encode": self.as_is_encode,
            "stored decode": self.as_is_decode,
            "copy": lambda: np.copyto(self._target, self.raw),
        }

    def encode(self) -> Parts:
        return self._encode(self._spec, level=1)

    def _encode(self, spec: TensorSpec, *, level: int) -> Parts:
        return encode(
            spec,
            [self.raw.data],
            identifier="i",
            namespace="n",
            meta=ItemMeta(),
            created=0.0,
            level=level,
        ).parts

    def decode(self) -> None:
        self._decode(self._ours)

    def _decode(self, stored: bytes) -> None:
        header = read_header(stored, max_tensor_bytes=CAP)
        view, out = memoryview(stored), self._target.data
        for index in range(len(header.chunks)):
            offset, size = header.chunk_range(index)
            start, count = header.chunk_tensor_range(index)
            outs = (out[start : start + count],)
            decode_chunk(header, index, view[offset : offset + size], outs)

    def plain_encode(self) -> list[bytes]:
        return [self._compressor.compress(piece) for piece in self._pieces]

    def plain_decode(self) -> None:
        for frame in self._plain:
            self._decompressor.decompress(frame)

    def plain_decode_recycled(self) -> None:
        out, at = self._target.data, 0
        for frame in self._plain:
            at += self._decompressor.stream_reader(frame).readinto(out[at : at + CHUNK_BYTES])

    def as_is_encode(self) -> Parts:
        return self._encode(TensorSpec("uint8", (len(self.raw),)), level=STORE)

    def as_is_decode(self) -> None:
        self._decode(self._as_is)


def measure(data: dict[str, Contenders], *, rounds: int) -> dict[str, dict[str, float]]:
    """Median MB per CPU second, by data and contender."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(-1, rounds):
        for name, contenders in data.items():
            for what, call in contenders.calls().items():
                started = time.thread_time()
                call()
                if turn >= 0:
                    seconds.setdefault((name, what), []).append(time.thread_time() - started)
    rates: dict[str, dict[str, float]] = {name: {} for name in data}
    for (name, what), times in seconds.items():
        rates[name][what] = data[name].nbytes / 1e6 / statistics.median(times)
    return rates


def zipnn(raw: Bytes, *, rounds: int) -> dict[str, float]:
    """What ZipNN makes of bf16 numbers; empty where it cannot be installed."""
    if not install_zipnn():
        return {}
    python = str(LMCACHE_VENV / "bin" / "python")
    with tempfile.NamedTemporaryFile() as file:
        raw.tofile(file.name)
        done = subprocess.run(
            [python, "-m", "suite.zipnn_reference", file.name, str(rounds)],
            stdout=subprocess.PIPE,
            check=True,
            cwd="/",
            env=environment(),
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def report_of(
    data: dict[str, Contenders], rates: dict[str, dict[str, float]], *, quick: bool
) -> Report:
    report = Report(title="The codec, per core", quick=quick)
    report.notes.append(explanation(__doc__))
    for name, contenders in data.items():
        speed = rates[name]
        report.rows.append(
            {
                "data": name,
                "stored": contenders.stored,
                "zstd-1 stored": contenders.plain_stored,
                **{f"{what}, MB/s": rate for what, rate in speed.items()},
                "decode / zstd-1": speed["decode"] / speed["zstd-1 decode"],
            }
        )
    report.notes.append(
        "fp16 decodes at less than the speed of zstd-1, which stores most of such data as it is: "
        "the low bytes are mantissa, shrink by 2.5 %, and take two fifths of the time."
    )
    main = rates["activations"]
    report.at_most(
        "stored bytes of activations, share of raw", value=data["activations"].stored, limit=0.70
    )
    ratio = main["decode"] / main["zstd-1 decode"]
    report.at_least("decoding activations, times zstd-1", value=ratio, limit=1.3)
    report.at_least(
        "decoding activations, times zstd-1: the stretch",
        value=ratio,
        limit=1.6,
        note="What is left of a decode: half is zstd's Huffman decoder and its checksum, a fifth"
        " BLAKE3, a fifth the merge, which has two passes of NumPy, the shortest way without code"
        " of our own. Smaller hash tables leave zstd no matches to copy any more.",
    )
    noise = rates["incompressible"]
    for what in ("encode", "decode"):
        report.at_most(
            f"incompressible data: {what} costs at most 5 % more than storing as it is",
            value=100 * (noise[f"stored {what}"] / noise[what] - 1),
            limit=5.0,
        )
    return report


def main() -> None:
    arguments = options(__doc__ or "")
    data = {name: Contenders(*found) for name, found in datasets(arguments.activations).items()}
    rounds = 5 if arguments.quick else 15
    rates = measure(data, rounds=rounds)
    report = report_of(data, rates, quick=arguments.quick)
    reference = zipnn(data["activations"].raw, rounds=rounds)
    if reference:
        row = dict.fromkeys(report.rows[0], "") | {"data": "activations, by ZipNN"} | reference
        ratio = reference["decode, MB/s"] / rates["activations"]["zstd-1 decode"]
        report.rows.append(row | {"decode / zstd-1": ratio})
    else:
        report.notes.append("ZipNN could not be installed here.")
    for row in report.rows:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    for target in report.targets:
        print(target)
    print(report.write("codec"))


if __name__ == "__main__":
    main()
