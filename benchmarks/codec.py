"""Codec: what is stored, and how fast it is encoded and decoded, per core.

    python benchmarks/codec.py --data FILE --shape 6656x384

FILE holds bfloat16 activations, raw and little-endian; without it, synthetic ones are made. One
thread; CPU time of that thread, so neighbours on the machine disturb little; contenders take turns
in every round, and the median and the range over the rounds are given. MB are of tensor bytes.
Decoding covers every check of a reader: header, digests, zstd's checksums, and the merge.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from ec_s3.types import ItemMeta, TensorSpec
from ec_s3.wire import CHUNK_BYTES, decode, decode_chunk, encode, read_header

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

TOTAL_BYTES = 30 << 20
CAP = 1 << 30


def bf16_to_float(bits: npt.NDArray[np.uint16]) -> Floats:
    floats: Floats = (bits.astype(np.uint32) << 16).view(np.float32)
    return floats


def float_to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def activations(data: Path | None, shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """Rows of activations, TOTAL_BYTES as bf16; a file is repeated with its rows in new orders."""
    if data is None:
        scales = np.exp(rng.normal(0, 0.5, shape[1])).astype(np.float32)
        rows = rng.standard_normal(shape, dtype=np.float32) * scales
    else:
        rows = bf16_to_float(np.fromfile(data, dtype="<u2")).reshape(shape)
    wanted = TOTAL_BYTES // 2 // shape[1]
    tiles = [rows[rng.permutation(len(rows))] for _ in range(-(-wanted // len(rows)))]
    whole: Floats = np.concatenate(tiles)[:wanted]
    return whole


def datasets(
    data: Path | None, shape: tuple[int, int]
) -> dict[str, tuple[str, npt.NDArray[np.uint8]]]:
    """Name to dtype and bytes."""
    rng = np.random.default_rng(20)
    base = activations(data, shape, rng)
    # A bf16 file has no more mantissa than that: fill in the bits that wider types keep.
    jitter = 1 + rng.uniform(-(2**-9), 2**-9, base.shape)
    fine = (base * jitter).astype(np.float32)[: len(base) // 2]
    found: dict[str, tuple[str, npt.NDArray[np.generic]]] = {
        "activations": ("bfloat16", float_to_bf16(base)),
    }
    for sigma in (1, 2):
        scales = np.exp(rng.normal(0, sigma, shape[1])).astype(np.float32)
        found[f"channel scales, sigma {sigma}"] = ("bfloat16", float_to_bf16(base * scales))
    normal = rng.standard_normal(TOTAL_BYTES // 2, dtype=np.float32)
    found["normal noise"] = ("bfloat16", float_to_bf16(normal))
    found["random bytes"] = ("bfloat16", rng.integers(0, 256, TOTAL_BYTES, dtype=np.uint8))
    found["activations, fp16"] = ("float16", fine.astype(np.float16))
    found["activations, fp32"] = ("float32", fine)
    return {
        name: (dtype, values.reshape(-1).view(np.uint8)) for name, (dtype, values) in found.items()
    }


def contenders(
    dtype: str, raw: npt.NDArray[np.uint8]
) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """What to time, and the stored sizes as a share of the raw one."""
    itemsize = {"bfloat16": 2, "float16": 2, "float32": 4}[dtype]
    spec = TensorSpec(dtype, (len(raw) // itemsize,))
    source, target = raw.data, np.empty_like(raw)
    out = target.data
    pieces = [source[i : i + CHUNK_BYTES] for i in range(0, len(source), CHUNK_BYTES)]
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    plain = [compressor.compress(piece) for piece in pieces]

    def ours_encode() -> bytes:
        frame = encode(spec, [source], identifier="i", namespace="n", meta=ItemMeta(), created=0.0)
        return b"".join(frame.parts)

    stored = ours_encode()

    def ours_decode() -> None:
        header = read_header(stored, max_tensor_bytes=CAP)
        view = memoryview(stored)
        for index in range(len(header.chunks)):
            offset, size = header.chunk_range(index)
            start, count = header.chunk_tensor_range(index)
            decode_chunk(header, index, view[offset : offset + size], (out[start : start + count],))

    def plain_recycled() -> None:
        for piece, frame in zip(pieces, plain, strict=True):
            decompressor.stream_reader(frame).readinto(out[: len(piece)])

    ours_decode()
    if target.tobytes() != raw.tobytes():
        sys.exit("the decoded tensor differs from the encoded one")
    timed: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(target, raw),
        "zstd-1 encode": lambda: [compressor.compress(piece) for piece in pieces],
        "ec_s3 encode": ours_encode,
        "zstd-1 decode": lambda: [decompressor.decompress(frame) for frame in plain],
        "zstd-1 decode, recycled memory": plain_recycled,
        "ec_s3 decode, recycled memory": ours_decode,
        "ec_s3 decode, fresh memory": lambda: decode(stored, max_tensor_bytes=CAP),
    }
    sizes = {
        "ec_s3": len(stored) / len(raw),
        "zstd-1": sum(map(len, plain)) / len(raw),
    }
    return timed, sizes


def measure(
    timed: dict[str, Callable[[], object]], nbytes: int, rounds: int
) -> dict[str, dict[str, float]]:
    rates: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, call in timed.items():
            started = time.thread_time()
            call()
            rates[name].append(nbytes / 1e6 / (time.thread_time() - started))
    return {
        name: {"median": statistics.median(r), "min": min(r), "max": max(r)}
        for name, r in rates.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Stored size and speed of the codec.")
    parser.add_argument("--data", type=Path, help="raw little-endian bfloat16 activations")
    parser.add_argument("--shape", default="6656x384", help="rows x channels of the data")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path("build/bench/codec.json"))
    arguments = parser.parse_args()
    rows, channels = (int(part) for part in arguments.shape.split("x"))
    results: dict[str, object] = {}
    for name, (dtype, raw) in datasets(arguments.data, (rows, channels)).items():
        timed, sizes = contenders(dtype, raw)
        rates = measure(timed, len(raw), arguments.rounds)
        ratio = rates["ec_s3 decode, recycled memory"]["median"] / rates["zstd-1 decode"]["median"]
        results[name] = {"dtype": dtype, "stored": sizes, "MB/s": rates, "decode_ratio": ratio}
        print(f"\n{name} ({dtype}, {len(raw) / 1e6:.0f} MB)")
        print(f"  stored: ec_s3 {sizes['ec_s3']:.3f}, zstd-1 {sizes['zstd-1']:.3f}")
        for contender, rate in rates.items():
            spread = f"{rate['min']:.0f} to {rate['max']:.0f}"
            print(f"  {contender:32}{rate['median']:8.0f} MB/s   ({spread})")
        print(f"  decode against zstd-1: {ratio:.2f} times as fast")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    facts = {"machine": platform.machine(), "zstd": ".".join(map(str, zstandard.ZSTD_VERSION))}
    source = "synthetic" if arguments.data is None else arguments.data.name
    report = {"data": source, "rounds": arguments.rounds, **facts, "results": results}
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
