"""Record what two vLLM servers say about themselves while a bucket fills, fails and comes back.

    python tools/dashboard/dashboard_recording.py tools/dashboard/recording.jsonl.gz

Real vLLM with a tiny model on the CPU, two servers and one bucket, which a fault server makes slow
and, for a while, fail. Takes some six minutes. Each line of the recording is one scrape: seconds
since the beginning, the server, and the samples of `vllm:ec_s3_...` that changed since the last.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from promql import Recording

from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.testing.pictures import make_pictures
from ec_s3.testing.tiny_models import make_qwen2_vl
from ec_s3.testing.traffic import RecordedServer
from ec_s3.testing.vllm_server import VLLMServer, picture, text

if TYPE_CHECKING:
    from collections.abc import Sequence

PREFIX = "vllm:ec_s3_"
SCRAPE_SECONDS = 2.0
PHASE_SECONDS = 50.0
LATENCY = 0.02
"""Seconds that every answer of the bucket takes at least."""

PHASES = (
    "one server, new pictures",
    "the same pictures again",
    "a second server joins",
    "the bucket is out of reach",
    "the bucket is back",
)


class Scraper:
    """Reads the pages of metrics, on a thread of its own."""

    def __init__(self, servers: Sequence[VLLMServer], began: float) -> None:
        self.lines: list[str] = []
        self._servers = servers
        self._began = began
        self._last: dict[tuple[str, str], str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._stop.wait(SCRAPE_SECONDS):
            for server in self._servers:
                now = time.monotonic() - self._began
                page = str(server.get("/metrics").body)
                self.lines.append(self._scrape(now, server.name, page))

    def _scrape(self, now: float, server: str, page: str) -> str:
        changed = {}
        for line in page.splitlines():
            name, _, value = line.rpartition(" ")
            if not line.startswith(PREFIX) or "_created" in name:
                continue
            if self._last.get((server, name)) != value:
                self._last[server, name] = value
                changed[name] = float(value)
        return json.dumps({"time": round(now, 1), "server": server, "samples": changed})


def load(path: Path) -> Recording:
    """A recording, with what did not change filled in again."""
    recording = Recording()
    known: dict[str, dict[str, float]] = {}
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        scrape = json.loads(line)
        samples = known.setdefault(scrape["server"], {})
        samples.update(scrape["samples"])
        for name, value in samples.items():
            metric, _, rest = name.partition("{")
            pairs = (pair.partition("=") for pair in rest.rstrip("}").split(","))
            labels = {key: quoted.strip('"') for key, _, quoted in pairs}
            labels["instance"] = scrape["server"]
            recording.add(scrape["time"], metric, labels, value)
    return recording


def drive(servers: Sequence[VLLMServer], proxy: FaultServer, pictures: Sequence[Path]) -> None:
    """The phases, one after the other, one request at a time."""
    dice = random.Random(1)  # noqa: S311  # which picture is asked for next
    new = iter(pictures)
    seen = [next(new) for _ in range(3)]
    for phase in PHASES:
        sys.stderr.write(f"{phase}\n")
        proxy.clear()
        proxy.add(Fault(refuse=True) if phase == PHASES[3] else Fault(delay=LATENCY))
        asked = servers[:1] if phase in PHASES[:2] else servers
        until = time.monotonic() + PHASE_SECONDS
        while time.monotonic() < until:
            if phase != PHASES[1] and dice.random() < (0.8 if phase == PHASES[0] else 0.15):
                seen.append(next(new, seen[0]))
                chosen = seen[-1]
            else:
                chosen = dice.choice(seen)
            content = [picture(chosen), text("What is this?")]
            dice.choice(asked).chat(content)
            time.sleep(0.1)


def record(target: Path) -> None:
    """Start everything, drive it, stop it, write the recording."""
    with tempfile.TemporaryDirectory() as name, RecordedServer() as s3:
        folder = Path(name)
        model = make_qwen2_vl(folder / "model", dtype="bfloat16")
        (folder / "pictures").mkdir()
        pictures = make_pictures(folder / "pictures", 200)
        with FaultServer(s3.url) as proxy:
            settings = {
                "url": s3.location("cache").replace(s3.url, proxy.url),
                "max_local_cpu_size": "8MiB",
                "fetch_timeout": "2s",
            }
            servers = [
                VLLMServer(
                    model,
                    workdir=folder,
                    name=name,
                    role="ec_both",
                    settings=settings,
                    dtype="bfloat16",
                    arguments=("--max-num-batched-tokens", "64"),
                )
                for name in ("server-a", "server-b")
            ]
            try:
                for server in servers:
                    server.wait()
                scraper = Scraper(servers, time.monotonic())
                with scraper:
                    drive(servers, proxy, pictures)
            finally:
                for server in servers:
                    server.kill()
    target.write_bytes(gzip.compress("\n".join(scraper.lines).encode(), 9, mtime=0))


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description="Record the metrics of two vLLM servers.")
    parser.add_argument("target", type=Path)
    record(parser.parse_args().target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
