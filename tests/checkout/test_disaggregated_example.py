"""The proxy of examples/disaggregated, between stand-ins for the two servers."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from ec_s3.keys import Namespace
from ec_s3.lookup import find_header
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import ItemMeta, TensorSpec
from ec_s3.wire import encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

Json = dict[str, Any]

EXAMPLE = Path(__file__).parents[2] / "examples" / "disaggregated"
CHAT = "/v1/chat/completions"
GRID = {"image_grid_thw": [1, 4, 4]}
TEXT = {"type": "text", "text": "what is this?"}
ROLE = b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
TOKEN = b'data: {"choices": [{"delta": {"content": "data: {\\"error\\""}}]}\n\n'
ERROR = b'data: {"error": {"code": 500}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import proxy

    yield proxy
    for name in ("proxy", "rewrite"):
        sys.modules.pop(name, None)


def picture(data: str = "pixels", **more: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}, **more}


def known(identifier: str) -> Json:
    return {"type": "image_embeds", "image_embeds": GRID, "uuid": identifier}


def entry(*indices: int, modality: str = "image") -> Json:
    return {"modality": modality, "item_indices": list(indices), "metadata": GRID}


def body(*content: Json, **more: Any) -> Json:
    return {"model": "m", "messages": [{"role": "user", "content": [*content, TEXT]}], **more}


@dataclass
class Server:
    """Answers every request alike and remembers it."""

    status: int = 200
    answer: Json = field(default_factory=dict)
    events: tuple[bytes, ...] = ()
    refuse_metadata: bool = False
    hangs_up: bool = False
    seen: list[Json] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.paths.append(request.path_qs)
        self.seen.append(json.loads(raw) if raw.startswith(b"{") else {"raw": raw.decode()})
        without_media = "image_embeds" in raw.decode()
        refused = self.refuse_metadata and without_media
        if refused and self.hangs_up:
            return await hang_up(request)
        if not self.events:
            return web.json_response(self.answer, status=500 if refused else self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in (ROLE, ERROR, DONE) if refused else self.events:
            await response.write(event)
        return response

    @property
    def contents(self) -> list[list[Json]]:
        return [seen["messages"][0]["content"] for seen in self.seen]


async def start(stack: AsyncExitStack, runner: web.AppRunner) -> str:
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def post(self, request: Any, path: str = CHAT) -> tuple[int, bytes]:
        data = request if isinstance(request, bytes) else json.dumps(request).encode()
        async with self.session.post(self.url + path, data=data) as answer:
            return answer.status, await answer.read()


@asynccontextmanager
async def running(
    example: Any, producer: Server | None, consumer: Server | None, **more: Any
) -> AsyncIterator[Client]:
    async with AsyncExitStack() as stack:
        urls = []
        for server in (producer, consumer):
            app = web.Application()
            if server is not None:
                app.router.add_route("*", "/{path:.*}", server.handle)
            url = await start(stack, web.AppRunner(app, handler_cancellation=True))
            urls.append(url if server is not None else "http://127.0.0.1:1")
        session = await stack.enter_async_context(aiohttp.ClientSession())
        proxy = example.Proxy(session, producer=urls[0], consumer=urls[1], **more)
        url = await start(stack, example.runner_of(proxy))
        yield Client(session, url)


async def test_consumer_gets_metadata_in_place_of_the_media(example: Any) -> None:
    producer = Server(answer={"ec_transfer_params": {"b": entry(1), "a": entry(0, 2)}})
    consumer = Server(answer={"choices": []})
    wishes = {"store": True}
    request = body(
        picture("1"), picture("2"), picture("1"), max_tokens=9, ec_transfer_params=wishes
    )
    async with running(example, producer, consumer) as client:
        assert await client.post(request) == (200, b'{"choices": []}')
    assert producer.contents == [request["messages"][0]["content"]]
    assert (producer.seen[0]["stream"], producer.seen[0]["max_tokens"]) == (False, 1)
    assert consumer.contents == [[known("a"), known("b"), known("a"), TEXT]]
    published = producer.answer["ec_transfer_params"]
    assert {**consumer.seen[0], "messages": 0} == {
        **request,
        "messages": 0,
        "ec_transfer_params": {"store": True, **published},
    }


async def test_producer_is_asked_for_nothing_that_the_answer_alone_is_about(example: Any) -> None:
    """vLLM refuses a choice among tools without tools, and more tokens at least than at most."""
    producer = Server(answer={"ec_transfer_params": {"a": entry(0)}})
    consumer = Server(answer={"choices": [1]})
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked = {"tools": [tool], "tool_choice": "auto", "min_tokens": 8, "max_tokens": 64}
    async with running(example, producer, consumer) as client:
        await client.post(body(picture(), **asked))
    assert producer.seen[0].keys().isdisjoint({"tools", "tool_choice", "min_tokens"})
    assert producer.seen[0]["max_tokens"] == 1
    assert asked.items() <= consumer.seen[0].items()


async def test_producer_names_the_media_by_their_content(example: Any) -> None:
    producer = Server(answer={"ec_transfer_params": {"hash": entry(0)}})
    consumer = Server()
    async with running(example, producer, consumer) as client:
        await client.post(body(picture(uuid="../../x")))
    assert producer.contents == [[picture(), TEXT]]
    assert consumer.contents == [[known("hash"), TEXT]]


@pytest.mark.parametrize(
    "published",
    [None, {}, {"a": entry(0)}, {"a": entry(0), "b": {"modality": "image"}}, {"a": {}}],
    ids=["nothing", "empty", "one of two", "without place", "without anything"],
)
async def test_consumer_gets_the_media_unless_all_items_were_published(
    example: Any, published: Json | None
) -> None:
    producer = Server(answer={"ec_transfer_params": published})
    consumer = Server()
    request = body(picture("1"), picture("2"))
    async with running(example, producer, consumer) as client:
        await client.post(request)
    assert consumer.seen == [request]


async def test_modalities_are_replaced_apart(example: Any) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}
    producer = Server(answer={"ec_transfer_params": {"a": entry(0), "c": entry(2)}})
    consumer = Server()
    async with running(example, producer, consumer) as client:
        await client.post(body(picture("1"), sound, picture("2")))
    assert consumer.contents == [[known("a"), sound, known("c"), TEXT]]


@pytest.mark.parametrize("status", [400, 500])
async def test_consumer_gets_the_media_when_the_producer_fails(example: Any, status: int) -> None:
    consumer = Server(answer={"choices": []})
    request = body(picture())
    async with running(example, Server(status=status), consumer) as client:
        assert (await client.post(request))[0] == 200
    async with running(example, None, consumer) as client:
        assert (await client.post(request))[0] == 200
    assert consumer.seen == [request, request]


@pytest.mark.parametrize("hangs_up", [False, True], ids=["refuses", "hangs up"])
@pytest.mark.parametrize("events", [(), (ROLE, TOKEN, DONE)], ids=["whole", "streamed"])
async def test_consumer_gets_the_media_when_it_cannot_do_without(
    example: Any, events: tuple[bytes, ...], *, hangs_up: bool
) -> None:
    producer = Server(answer={"ec_transfer_params": {"a": entry(0)}})
    how: Json = {"refuse_metadata": True, "hangs_up": hangs_up}
    consumer = Server(answer={"choices": [1]}, events=events, **how)
    request = body(picture(), stream=bool(events))
    async with running(example, producer, consumer) as client:
        answer = await client.post(request)
    assert answer == (200, b"".join(events) or b'{"choices": [1]}')
    assert consumer.contents[0] == [known("a"), TEXT]
    assert consumer.seen[1:] == [request]


def stream_until(gate: asyncio.Event) -> Any:
    async def consumer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(ROLE + TOKEN)
        await gate.wait()
        await response.write(DONE)
        return response

    return consumer


async def test_tokens_are_passed_on_as_they_come(example: Any) -> None:
    producer = Server(answer={"ec_transfer_params": {"a": entry(0)}})
    gate = asyncio.Event()
    server = Server()
    server.handle = stream_until(gate)  # type: ignore[method-assign]  # one that waits
    async with (
        running(example, producer, server) as client,
        client.session.post(client.url + CHAT, json=body(picture(), stream=True)) as answer,
    ):
        assert await answer.content.readexactly(len(ROLE + TOKEN)) == ROLE + TOKEN
        gate.set()
        assert await answer.read() == DONE


async def no_more_taken(url: str) -> None:
    with suppress(aiohttp.ClientConnectorError):
        while True:
            async with aiohttp.ClientSession() as session, session.get(f"{url}/health"):
                pass


async def ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def test_proxy_that_is_told_to_end_finishes_what_is_under_way() -> None:
    gate = asyncio.Event()
    async with AsyncExitStack() as stack:
        app = web.Application()
        app.router.add_post(CHAT, stream_until(gate))
        upstream = await start(stack, web.AppRunner(app))
        command = ["proxy.py", f"--producer={upstream}", f"--consumer={upstream}", "--port=0"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=EXAMPLE, stdout=asyncio.subprocess.PIPE
        )
        stack.push_async_callback(ended, process)
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        url = line.decode().removeprefix("proxy: ").strip()
        session = await stack.enter_async_context(aiohttp.ClientSession())
        async with session.post(url + CHAT, json=body(stream=True)) as answer:
            assert await answer.content.readexactly(len(ROLE + TOKEN)) == ROLE + TOKEN
            process.terminate()
            await asyncio.wait_for(no_more_taken(url), 30)
            gate.set()
            assert await answer.read() == DONE
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_client_that_hangs_up_ends_its_request_upstream(example: Any) -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    async def consumer(_: web.Request) -> web.StreamResponse:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError("unreachable")

    server = Server()
    server.handle = consumer  # type: ignore[method-assign,assignment]  # one that never answers
    async with running(example, Server(), server) as client:
        request = asyncio.create_task(client.post(body()))
        await asyncio.wait_for(asked.wait(), 10)
        request.cancel()
        await asyncio.wait_for(ended.wait(), 10)


async def test_errors_of_the_consumer_are_passed_on(example: Any) -> None:
    consumer = Server(status=422, answer={"error": {"message": "no such model"}})
    async with running(example, Server(), consumer) as client:
        assert await client.post(body()) == (422, b'{"error": {"message": "no such model"}}')
        assert (await client.post(body(picture())))[0] == 422
        assert (await client.post(b"not json"))[0] == 422
    assert consumer.seen[-1] == {"raw": "not json"}


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize("there", [False, True], ids=["absent", "ends before it answers"])
async def test_client_is_told_when_there_is_no_consumer(example: Any, *, there: bool) -> None:
    consumer = Server()
    consumer.handle = hang_up  # type: ignore[method-assign]  # no answer at all
    async with running(example, Server(), consumer if there else None) as client:
        status, answer = await client.post(body())
    assert status == 502
    assert json.loads(answer)["error"]["type"] == "BadGateway"


@pytest.mark.parametrize(
    "request_",
    [
        body(),
        body(picture(), mm_processor_kwargs={"max_pixels": 4}),
        body(picture(), ec_transfer_params=[1]),
        {},
        {"messages": 1},
    ],
    ids=["text", "other processing", "malformed params", "empty", "malformed"],
)
async def test_requests_without_media_to_move_do_not_reach_the_producer(
    example: Any, request_: Json
) -> None:
    producer, consumer = Server(), Server()
    async with running(example, producer, consumer) as client:
        await client.post(request_)
        await client.post(request_, path="/v1/completions?x=1")
    assert (producer.seen, consumer.seen) == ([], [request_, request_])
    assert consumer.paths == [CHAT, "/v1/completions?x=1"]


NAMESPACE = Namespace(model="m", dtype="float32")


async def store_with(identifier: str, placeholder: Json) -> MemoryStore:
    spec = TensorSpec("float32", (4, 2))
    frame = encode(
        spec,
        [memoryview(bytes(spec.nbytes))],
        identifier=identifier,
        namespace=NAMESPACE.id,
        meta=ItemMeta(placeholder=placeholder),
        created=0.0,
    )
    store = MemoryStore()
    await store.put(NAMESPACE.object_key(identifier), frame.parts)
    return store


async def test_item_that_is_only_named_is_laid_out_from_the_bucket(example: Any) -> None:
    store = await store_with("old", {"modality": "image", "metadata": GRID})
    producer = Server(answer={"ec_transfer_params": {"new": entry(0)}})
    consumer = Server()
    lookup = example.placeholders(store, NAMESPACE.id)
    named = {"type": "image_url", "image_url": None, "uuid": "old"}
    async with running(example, producer, consumer, lookup=lookup) as client:
        await client.post(body(named, picture()))
        await client.post(body(named))
        await client.post(body(named, cache_salt="tenant"))
        await client.post(body({**named, "uuid": "unknown"}))
    assert producer.contents == [[picture(), TEXT]]
    assert consumer.contents == [
        [known("old"), known("new"), TEXT],
        [known("old"), TEXT],
        [named, TEXT],
        [{**named, "uuid": "unknown"}, TEXT],
    ]


async def test_header_is_found_whatever_its_size() -> None:
    placeholder = {"modality": "video", "metadata": {"timestamps": [0.123456789] * 4000}}
    store = await store_with("../../x", placeholder)
    header = await find_header(store, namespace=NAMESPACE.id, identifier="../../x")
    assert header is not None
    assert header.meta.placeholder == placeholder
    assert await find_header(store, namespace=NAMESPACE.id, identifier="other") is None
