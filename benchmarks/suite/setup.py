"""What benchmarks share at their start: options, data files, the peers' environment."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from suite.client import LMCACHE_VENV
from suite.data import SHAPES, Items, make
from suite.report import out_folder

if TYPE_CHECKING:
    from suite.server import ByteServer

# LMCache's own pins ask for CUDA packages; these are what its parts import on a CPU.
LMCACHE = ("lmcache==0.5.6",)
TORCH = ("torch==2.13.0",)
ZIPNN = ("zipnn==0.5.4",)
NEEDED = tuple(
    """cryptography aiofile aiofiles aiohttp awscrt blake3 cachetools fastapi httptools httpx
    huggingface_hub msgspec numba numpy<=2.2.6 nvtx opentelemetry-api<=1.40 opentelemetry-sdk
    opentelemetry-exporter-otlp opentelemetry-exporter-prometheus<=0.61b0
    prometheus_client<=0.24.1 psutil py-cpuinfo pyyaml pyzmq grpcio protobuf<7 redis safetensors
    setuptools<81 sortedcontainers transformers uvicorn""".split()  # noqa: SIM905  readable so
)


def options(description: str) -> argparse.Namespace:
    """The options that every benchmark of the suite has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="two shapes, few rounds")
    parser.add_argument(
        "--activations",
        type=Path,
        default=os.environ.get("BENCH_ACTIVATIONS") or None,
        help="raw little-endian bf16 activations, ROWSxCHANNELS in the file's name"
        " (default: $BENCH_ACTIVATIONS, else generated)",
    )
    parser.add_argument("--no-lmcache", action="store_true", help="leave LMCache out")
    return parser.parse_args()


def shapes(args: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    """The shapes to measure, smallest first."""
    chosen = SHAPES[:2] if args.quick else SHAPES
    return tuple(sorted(chosen, key=lambda shape: shape[0] * shape[1]))


def named(shape: tuple[int, int]) -> str:
    """How a shape is called in tables."""
    return f"{shape[0]}x{shape[1]}"


def install_lmcache() -> None:
    """Make LMCache's virtual environment, unless it is there; takes minutes."""
    out_folder()
    stamp = LMCACHE_VENV / ".complete"
    LMCACHE_VENV.parent.mkdir(parents=True, exist_ok=True)
    with (LMCACHE_VENV.parent / "lmcache.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists():
            return
        print("installing LMCache into", LMCACHE_VENV, file=sys.stderr, flush=True)
        python = LMCACHE_VENV / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(LMCACHE_VENV)], check=True)
        pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check", "install"]
        index = os.environ.get("TORCH_INDEX")
        subprocess.run([*pip, *(["--extra-index-url", index] if index else []), *TORCH], check=True)
        subprocess.run([*pip, "--no-deps", *LMCACHE], check=True)
        subprocess.run([*pip, *NEEDED], check=True)
        stamp.touch()


def install_zipnn() -> bool:
    """Add ZipNN to the same environment; False where it cannot be had, or not be compiled."""
    install_lmcache()
    python = str(LMCACHE_VENV / "bin" / "python")
    there = subprocess.run([python, "-c", "import zipnn"], capture_output=True, check=False)
    if not there.returncode:
        return True
    pip = [python, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-deps"]
    return not subprocess.run([*pip, *ZIPNN], check=False).returncode


@dataclass(frozen=True, slots=True)
class Stage:
    """A folder in memory with the data of one shape, and what drivers are opened with."""

    folder: Path
    items: Items
    settings: dict[str, Any]

    @classmethod
    def set_up(
        cls,
        shape: tuple[int, int],
        kind: str,
        *,
        server: ByteServer | None,
        source: Path | None = None,
        memory: int = 1 << 30,
    ) -> Self:
        """Make the data; drivers read it from the folder."""
        folder = Path(tempfile.mkdtemp(prefix="ec_s3-bench-", dir=memory_folder()))
        base = make(kind, shape, source=source)
        path = folder / "base.bin"
        base.tofile(path)
        settings = {
            "shape": shape,
            "data": str(path),
            "memory": memory,
            "port": 0 if server is None else server.port,
            "endpoint": "" if server is None else server.endpoint,
        }
        return cls(folder, Items(base), settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def memory_folder() -> str:
    """A file system in memory, where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
