"""Disaggregated encoding over HTTP: the proxy of examples/disaggregated between two servers."""

from __future__ import annotations

import http.client
import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from ec_s3 import wire
from ec_s3.connector.published import content_part
from ec_s3.keys import KEY_VERSION, identifier_digest, parse_key
from ec_s3.testing.faults import Fault
from ec_s3.testing.vllm_server import chat_body, picture, post, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ec_s3.testing.faults import FaultServer
    from ec_s3.testing.lab import Lab
    from ec_s3.testing.vllm_server import Reply, VLLMServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "disaggregated"
CHAT = "/v1/chat/completions"
PREFIX = "http"
SECONDS = 60.0


class Split:
    """The two servers, with what a test wants to know of them."""

    def __init__(self, lab: Lab, servers: dict[str, VLLMServer], proxy: str, demo: Any) -> None:
        self.lab = lab
        self.producer = servers["ec_producer"]
        self.consumer = servers["ec_consumer"]
        self.proxy = proxy
        self.demo = demo
        self._unheard_of = itertools.count()

    def ask(self, *names: str, proxy: str = "") -> Reply:
        """Ask about pictures through the proxy."""
        content = [*(picture(self.lab.pictures[name]) for name in names), text()]
        reply = post(proxy or self.proxy, CHAT, chat_body(content))
        assert reply.status == 200, reply.body
        return reply

    def reference(self, *names: str) -> tuple[int, ...]:
        """What the consumer answers to the media themselves, under names that nobody knows."""
        parts = [
            picture(self.lab.pictures[name], uuid=f"unheard-of-{next(self._unheard_of)}")
            for name in names
        ]
        before = self.consumer.encoded
        tokens = self.consumer.chat([*parts, text()]).tokens
        assert self.consumer.encoded - before == len(names)
        return tokens

    @property
    def encoded(self) -> tuple[int, int]:
        """Pictures encoded so far by producer and consumer."""
        return self.producer.encoded, self.consumer.encoded

    def since(self, before: tuple[int, int]) -> tuple[int, int]:
        """Pictures encoded since then."""
        producer, consumer = self.encoded
        return producer - before[0], consumer - before[1]


@pytest.fixture(scope="module")
def http_split(lab: Lab, split: dict[str, VLLMServer]) -> Iterator[Split]:
    sys.path.insert(0, str(EXAMPLE))
    try:
        import demo

        with demo.proxy_running(split["ec_producer"].url, split["ec_consumer"].url) as proxy:
            yield Split(lab, split, proxy, demo)
    finally:
        sys.path.remove(str(EXAMPLE))


def published_again(producer: VLLMServer, folder: Path) -> bool:
    """Whether a producer tells of new items, after a while and a few of them."""
    deadline = time.monotonic() + SECONDS
    file = folder / "new.png"
    while time.monotonic() < deadline:
        Image.effect_noise((56, 56), 100).save(file)
        if producer.chat([picture(file), text()]).transfer is not None:
            return True
        time.sleep(0.5)
    return False


def test_answer_without_the_media_is_the_answer_with_them(http_split: Split) -> None:
    before = http_split.encoded
    one = http_split.ask("china-0")
    several = http_split.ask("flower-0", "flower-1", "flower-0")
    assert http_split.since(before) == (3, 0)
    assert one.tokens == http_split.reference("china-0")
    assert several.tokens == http_split.reference("flower-0", "flower-1", "flower-0")
    assert one.tokens != several.tokens


def test_answer_is_streamed(http_split: Split) -> None:
    before = http_split.encoded
    content = [picture(http_split.lab.pictures["china-1"]), text()]
    connection = http.client.HTTPConnection(http_split.proxy.removeprefix("http://"), timeout=120)
    body = json.dumps({**chat_body(content), "stream": True})
    connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    lines = response.read().split(b"\n\n")
    connection.close()
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    tokens = [token for e in events for token in e["choices"][0].get("token_ids") or ()]
    assert http_split.since(before) == (1, 0)
    assert tuple(tokens) == http_split.reference("china-1")


def test_item_that_is_only_named_is_answered_from_the_bucket(http_split: Split) -> None:
    lab, producer = http_split.lab, http_split.producer
    published = producer.chat([picture(lab.pictures["china-2"]), text()]).transfer
    assert published is not None
    ((identifier, entry),) = published.items()
    assert entry.keys() == {"modality", "item_indices", "metadata", "input_digest"}
    assert entry["item_indices"] == [0]

    key, header = lab.stored(PREFIX, identifier)
    assert content_part(identifier, header.meta.placeholder) == content_part(identifier, entry)
    assert header.meta.input_digest == entry["input_digest"]

    named = {"type": "image_url", "image_url": None, "uuid": identifier}
    before = http_split.encoded
    refused = http_split.consumer.chat([named, text()])
    arguments = ("--bucket", lab.server.location(PREFIX), "--namespace", parse_key(key).namespace)
    servers = (producer.url, http_split.consumer.url)
    with http_split.demo.proxy_running(*servers, *arguments) as proxy:
        reply = post(proxy, CHAT, chat_body([named, text()]))
    assert refused.status == 400, "vLLM itself asks nobody but its own processor cache"
    assert http_split.since(before) == (0, 0)
    assert reply.tokens == http_split.reference("china-2")


def test_media_stay_on_the_request_of_an_item_that_cannot_be_uploaded(
    http_split: Split, bucket_faults: FaultServer, tmp_path: Path
) -> None:
    before = http_split.encoded
    bucket_faults.add(Fault(method="PUT", status=403))
    try:
        replies = {name: http_split.ask(name) for name in ("hopper-0", "hopper-1")}
        direct = http_split.producer.chat([picture(http_split.lab.pictures["hopper-2"]), text()])
    finally:
        bucket_faults.clear()
    assert direct.transfer is None
    assert http_split.since(before) == (3, 2), "encoded in vain by one, and by the other"
    for name, reply in replies.items():
        assert reply.tokens == http_split.reference(name)
    assert published_again(http_split.producer, tmp_path)


def test_item_that_others_have_stored_under_its_name_changes_no_answer(
    http_split: Split,
) -> None:
    lab, producer = http_split.lab, http_split.producer
    victim, other = lab.pictures["china-3"], lab.pictures["hopper-3"]
    (identifier,) = content_hashes(http_split.consumer, victim)
    published = producer.chat([picture(other), text()]).transfer
    assert published is not None
    key, header = lab.stored(PREFIX, next(iter(published)))
    _, tensor = wire.decode(lab.read(f"{PREFIX}/{key}"), max_tensor_bytes=1 << 20)
    forged = wire.encode(
        header.spec,
        [memoryview(tensor)],
        identifier=identifier,
        namespace=header.namespace,
        meta=header.meta,
        created=header.created,
    )
    digest = identifier_digest(identifier)
    folder = f"{PREFIX}/v{KEY_VERSION}/{header.namespace}/{digest[:2]}"
    lab.replace(f"{folder}/{digest}", b"".join(map(bytes, forged.parts)))

    before = http_split.encoded
    reply = http_split.ask("china-3")
    assert http_split.since(before) == (0, 1), "spared by one, refused by the other"
    assert reply.tokens == http_split.reference("china-3")


def content_hashes(server: VLLMServer, *files: Path) -> list[str]:
    """The identifiers that vLLM gives to pictures."""
    content = [*map(picture, files), text()]
    rendered = server.post(f"{CHAT}/render", chat_body(content)).body
    hashes: list[str] = rendered["features"]["mm_hashes"]["image"]
    return hashes


def test_errors_reach_the_client(http_split: Split) -> None:
    assert post(http_split.proxy, CHAT, {"model": "unknown", "messages": []}).status == 404
    assert post(http_split.proxy, CHAT, {**chat_body([text()]), "n": -1}).status == 400
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert post(http_split.proxy, CHAT, chat_body([broken, text()])).status == 400
    assert http_split.producer.alive
    assert http_split.consumer.alive


@pytest.mark.slow
def test_example_runs_from_one_command() -> None:
    command = [sys.executable, str(EXAMPLE / "demo.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("disaggregated: OK\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_example_that_is_interrupted_leaves_no_process_behind(number: int) -> None:
    with subprocess.Popen(
        [sys.executable, str(EXAMPLE / "demo.py")], stdout=subprocess.PIPE, text=True
    ) as example:
        assert example.stdout is not None
        while "starting" not in example.stdout.readline():
            assert example.poll() is None
        time.sleep(10.0)  # vLLM's own children are there, or are about to be
        started = descendants(example.pid)
        assert started
        example.send_signal(number)
        example.wait(60)
    deadline = time.monotonic() + SECONDS
    while left := [pid for pid in started if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def descendants(pid: int) -> set[int]:
    """Processes below a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    below = [descendants(int(child)) for child in children]
    return set(map(int, children)).union(*below)
