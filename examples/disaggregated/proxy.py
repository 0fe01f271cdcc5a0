"""A proxy for disaggregated encoding: media go to a producer, the rest of a request to a consumer.

    python proxy.py --producer http://host:8001 --consumer http://host:8002 --port 8000

For each chat completion with media it

1. sends the media to the `ec_producer` server, which encodes them, stores the result in the bucket
   and answers with `ec_transfer_params`: each item's identifier and its layout (grid, counts);
2. puts identifier and layout in the place of the media and sends the request to the `ec_consumer`
   server, which loads the encoder outputs from the bucket; the answer is streamed back.

Whenever the second request cannot be made (nothing was published, or not for all items of a kind)
or fails, the consumer gets the request as it came: it encodes the media itself. Everything else,
errors included, is passed on as it is.

With `--bucket` and `--namespace` a part that names its item and carries nothing
(`{"type": "image_url", "image_url": null, "uuid": ...}`) is laid out from what the stored object
says about itself, so that a client need not send a picture again that it has sent before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web
from rewrite import for_consumer, for_producer, match, media_parts

from ec_s3.config import ECConfig
from ec_s3.connector.published import content_part
from ec_s3.errors import ConfigError, ECS3Error
from ec_s3.lookup import find_header
from ec_s3.remote import open_store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Json = dict[str, Any]
    Lookup = Callable[[str], Awaitable[Json | None]]

logger = logging.getLogger("proxy")

CHAT = "/v1/chat/completions"
# With these vLLM hashes an identifier once more, so the consumer would look for another item.
HASHED = ("mm_processor_kwargs", "media_io_kwargs")
HOP = {"host", "content-length", "transfer-encoding", "connection", "keep-alive", "accept-encoding"}
# A body is in memory some six times over for a moment.
MAX_BODY = 1 << 28
LOOKUP_SECONDS = 5.0
# For requests under way when the proxy is told to end.
DRAIN_SECONDS = 60.0
NO_ANSWER = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)
TIMEOUT = aiohttp.ClientTimeout(total=None, connect=10, sock_read=600)


class Proxy:
    """Passes requests on; one event loop."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        producer: str,
        consumer: str,
        lookup: Lookup | None = None,
    ) -> None:
        self._session = session
        self._producer = producer.rstrip("/")
        self._consumer = consumer.rstrip("/")
        self._lookup = lookup

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat completion, without its media where possible."""
        raw = await request.read()
        rewritten = await self._rewrite(raw, request)
        if rewritten is not None:
            answer = await self._try(request, rewritten)
            if answer is not None:
                return answer
        return await self._pass_on(request, raw)

    async def other(self, request: web.Request) -> web.StreamResponse:
        """Pass any other request on to the consumer."""
        return await self._pass_on(request, await request.read())

    async def _rewrite(self, raw: bytes, request: web.Request) -> bytes | None:
        """The body without media; None when it must go to the consumer as it is."""
        try:
            body = json.loads(raw)
            parts = media_parts(body)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None  # the consumer will say what is wrong with it
        malformed = not isinstance(body.get("ec_transfer_params") or {}, dict)
        if not parts or malformed or any(body.get(name) for name in HASHED):
            return None
        carried = [part for part in parts if not part.empty]
        published = await self._encode(for_producer(body, parts), request) if carried else {}
        of_carried = iter(match(carried, published))
        salted = bool(body.get("cache_salt"))
        substitutes = [
            await self._look_up(part.uuid, salted=salted) if part.empty else next(of_carried)
            for part in parts
        ]
        rewritten = for_consumer(body, parts, substitutes, published)
        return None if rewritten is None else json.dumps(rewritten).encode()

    async def _encode(self, body: Json, request: web.Request) -> Mapping[str, Json]:
        """Let the producer encode; what it published, empty whenever that did not work."""
        try:
            async with self._session.post(
                self._producer + CHAT, json=body, headers=_headers(request.headers)
            ) as answer:
                if answer.status != 200:
                    logger.warning("the producer answers %d; sending the media on", answer.status)
                    return {}
                published = (await answer.json()).get("ec_transfer_params")
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.warning("the producer does not answer (%s); sending the media on", error)
            return {}
        return published or {}

    async def _look_up(self, uuid: str | None, *, salted: bool) -> Json | None:
        if self._lookup is None or not isinstance(uuid, str) or salted:
            return None
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                return await self._lookup(uuid)
        except (ECS3Error, TimeoutError) as error:
            logger.warning("the bucket does not say what an item looks like: %s", error)
            return None

    async def _try(self, request: web.Request, body: bytes) -> web.StreamResponse | None:
        """Answer with the metadata-only request, None when it fails before its first token."""
        async with AsyncExitStack() as stack:
            try:
                answer = await stack.enter_async_context(self._send(request, body))
            except NO_ANSWER as error:
                logger.warning("no answer to a request without media (%s); sending them", error)
                return None
            head: bytes | None = b""
            if answer.status == 200 and answer.content_type == "text/event-stream":
                head = await _opening(answer)
            if answer.status >= 400 or head is None:
                logger.warning("the consumer cannot do without the media; sending them")
                return None
            return await _relay(request, answer, head)

    async def _pass_on(self, request: web.Request, body: bytes) -> web.StreamResponse:
        async with self._send(request, body) as answer:
            return await _relay(request, answer, b"")

    def _send(self, request: web.Request, body: bytes) -> Any:
        return self._session.request(
            request.method,
            self._consumer + request.path_qs,
            data=body,
            headers=_headers(request.headers),
        )


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in HOP}


async def _opening(answer: aiohttp.ClientResponse) -> bytes | None:
    """The first two events of a stream, of which the first only names the role.

    None when one of them is an error.
    """
    seen = b""
    async for piece in answer.content.iter_any():
        seen += piece
        if b'data: {"error"' in seen:
            return None
        if seen.count(b"\n\n") >= 2:
            break
    return seen


async def _relay(
    request: web.Request, answer: aiohttp.ClientResponse, head: bytes
) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=_headers(answer.headers))
    await response.prepare(request)
    await response.write(head)
    async for piece in answer.content.iter_any():
        await response.write(piece)
    await response.write_eof()
    return response


@web.middleware
async def _no_upstream(request: web.Request, handler: Any) -> web.StreamResponse:
    """Say in the API's own form that the consumer cannot be reached."""
    try:
        answer: web.StreamResponse = await handler(request)
    except NO_ANSWER as error:
        message = {"message": f"no consumer: {error}", "type": "BadGateway", "code": 502}
        return web.json_response({"error": message}, status=502)
    return answer


def application(proxy: Proxy) -> web.Application:
    """The routes."""
    app = web.Application(client_max_size=MAX_BODY, middlewares=[_no_upstream])
    app.router.add_post(CHAT, proxy.chat)
    app.router.add_route("*", "/{path:.*}", proxy.other)
    return app


def runner_of(proxy: Proxy) -> web.AppRunner:
    """What serves the routes; a client that hangs up ends its requests upstream, too."""
    return web.AppRunner(
        application(proxy),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=DRAIN_SECONDS,
    )


def placeholders(store: Any, namespace: str) -> Lookup:
    """A look-up of parts by identifier, from the headers of stored objects."""

    async def look_up(uuid: str) -> Json | None:
        header = await find_header(store, namespace=namespace, identifier=uuid)
        return None if header is None else content_part(uuid, header.meta.placeholder)

    return look_up


async def serve(options: argparse.Namespace) -> None:
    """Serve until cancelled, or told to end by SIGTERM: what is under way is finished first."""
    told = asyncio.Event()
    # The first process of a container would not even end without a handler.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=TIMEOUT))
        lookup = None
        if options.bucket:
            store = open_store(ECConfig.from_mapping({"url": options.bucket}))
            assert store is not None  # it has a URL
            stack.push_async_callback(store.aclose)
            lookup = placeholders(store, options.namespace)
        proxy = Proxy(session, producer=options.producer, consumer=options.consumer, lookup=lookup)
        runner = runner_of(proxy)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, options.host, options.port)
        await site.start()
        host, port = runner.addresses[0][:2]
        print(f"proxy: http://{host}:{port}", flush=True)
        await told.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--producer", required=True, help="URL of the ec_producer server")
    parser.add_argument("--consumer", required=True, help="URL of the ec_consumer server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one")
    parser.add_argument("--bucket", help="URL of the servers' bucket, to look known items up")
    parser.add_argument("--namespace", help="the servers' namespace, as they log it")
    options = parser.parse_args()
    if bool(options.bucket) != bool(options.namespace):
        parser.error("--bucket and --namespace go together")
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    try:
        asyncio.run(serve(options))
    except KeyboardInterrupt:
        pass
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
