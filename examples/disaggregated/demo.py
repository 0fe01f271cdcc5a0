"""Disaggregated encoding on one machine: starts everything, asks once, says what happened, stops.

    make example-disaggregated

An embedded S3 server, an `ec_producer` and an `ec_consumer` vLLM server with a tiny model on the
CPU, and the proxy; all on free ports of the loopback interface. Ctrl-C stops everything.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ec_s3.testing.photographs import photographs
from ec_s3.testing.tiny_models import make_qwen2_vl
from ec_s3.testing.traffic import RecordedServer
from ec_s3.testing.vllm_process import client_environment
from ec_s3.testing.vllm_server import VLLMServer, chat_body, picture, post, text

if TYPE_CHECKING:
    from collections.abc import Iterator

PROXY = Path(__file__).with_name("proxy.py")
PREFIX = "demo"


@contextmanager
def proxy_running(producer: str, consumer: str, *arguments: str) -> Iterator[str]:
    """The proxy in a process of its own, on a free port; gives its URL."""
    command = [sys.executable, str(PROXY), "--producer", producer, "--consumer", consumer]
    with subprocess.Popen(
        [*command, "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        env=client_environment(),
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("proxy: "):
                raise RuntimeError(f"the proxy did not start: {line!r}")
            yield line.removeprefix("proxy: ").strip()
        finally:
            process.terminate()


def demonstrate(photograph: Path, workdir: Path) -> bool:
    """Run it all; whether the answers are the same and the consumer's encoder was not needed."""
    with ExitStack() as stack:
        s3 = stack.enter_context(RecordedServer())
        print(f"S3 server   {s3.url}, bucket {s3.bucket}")
        model = make_qwen2_vl(workdir / "model")
        settings = {"url": s3.location(PREFIX)}
        started = time.monotonic()
        servers = [
            stack.enter_context(
                VLLMServer(model, workdir=workdir, name=role, role=role, settings=settings)
            )
            for role in ("ec_producer", "ec_consumer")
        ]
        print("vLLM        two servers are starting; about a minute ...", flush=True)
        for server in servers:
            server.wait()
            print(f"vLLM        {server.name} {server.url}, {time.monotonic() - started:.0f} s")
        producer, consumer = servers
        proxy = stack.enter_context(proxy_running(producer.url, consumer.url))
        print(f"proxy       {proxy}\n")

        content = [picture(photograph), text("What is this?")]
        answer = post(proxy, "/v1/chat/completions", chat_body(content))
        if answer.status != 200:
            print(f"the proxy answers {answer.status}: {answer.body}")
            return False
        moved = [request.method for request in s3.served(f"{PREFIX}/") if request.moved_item]
        encoded = (producer.encoded, consumer.encoded)
        print("through the proxy, the media to the producer, metadata to the consumer")
        print(f"  images encoded   producer {encoded[0]}, consumer {encoded[1]}")
        print(f"  encoder outputs  {moved.count('PUT')} stored, {moved.count('GET')} loaded")
        print(f"  answer           {list(answer.tokens)}\n")

        # Under a name that nobody knows: not from the bucket, and not from vLLM's own caches.
        direct = consumer.chat([picture(photograph, uuid="unheard-of"), text("What is this?")])
        print("with the media, straight to the consumer")
        print(f"  images encoded   consumer {consumer.encoded - encoded[1]}")
        print(f"  answer           {list(direct.tokens)}\n")
        print("stopping ...", flush=True)
        with ThreadPoolExecutor() as pool:
            list(pool.map(VLLMServer.stop, servers))
        return answer.tokens == direct.tokens and encoded == (1, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--picture", type=Path, help="PNG or JPEG in place of the built-in one")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is stopped
    photograph = options.picture or photographs()["hopper"]
    try:
        with tempfile.TemporaryDirectory(prefix="ec_s3-disaggregated-") as workdir:
            good = demonstrate(photograph, Path(workdir))
    except KeyboardInterrupt:
        sys.exit("stopped")
    print(f"disaggregated: {'OK' if good else 'FAILED'}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
