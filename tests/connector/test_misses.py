"""What a request with a new picture waits for: nothing, where that is known to be in vain."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any

import pytest
from small_engine import SmallEngine, fill, prompt, reference, until
from vllm_play import Play, feature, spec

from ec_s3.config import ECConfig
from ec_s3.indexing import list_tags, write_index
from ec_s3.keys import parse_key
from ec_s3.policy import Measured, Policy, waits
from ec_s3.port import ThreadPort, Want
from ec_s3.remote import open_store
from ec_s3.testing.faults import Fault
from ec_s3.testing.memory import MemoryStore
from ec_s3.testing.port_conformance import NAMESPACE, SPEC, config, make_slab, save

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ec_s3.pages import Slab
    from ec_s3.testing.faults import FaultServer

ITEM = r"/float32/[0-9a-f]{2}/"


# -- what decides ------------------------------------------------------------------------------


def play(measured: Measured, policy: Policy = Policy.LATENCY, **setup: Any) -> Play:
    def patience(nbytes: int, waited: float) -> bool:
        return waits(policy, measured, nbytes=nbytes, waited=waited)

    return Play(patience=patience, **setup)


NBYTES = spec(4).nbytes
IN_VAIN = Measured(encode_per_byte=0.1 / NBYTES, lookup=0.02, present=0.1)
WORTH_IT = Measured(encode_per_byte=0.1 / NBYTES, lookup=0.02, present=0.9)


def test_item_that_is_not_worth_a_look_up_is_encoded_at_once_and_saved() -> None:
    it = play(IN_VAIN)
    request = it.request(feature())
    assert it.scheduler.ensure(request, 0)
    assert not it.scheduler.has("a")
    assert [want.identifier for want in it.port.history] == ["a"], "it is looked up all the same"
    (order,) = it.encode(request).saves
    it.saved(order.ticket)
    assert [name for name, _ in it.port.filled_items] == ["a"]
    it.scheduler.finished(request)
    it.idle()
    assert not it.port.open_tickets
    assert it.stats.snapshot()["given_up_policy"] == 1


def test_item_in_host_memory_is_used_whatever_a_look_up_is_worth() -> None:
    for policy in (Policy.LATENCY, Policy.NEVER):
        it = play(IN_VAIN, policy)
        it.port.items["a"] = spec(4)
        request = it.request(feature())
        assert it.scheduler.ensure(request, 0)
        assert it.scheduler.has("a")


def test_item_that_is_likely_there_is_waited_for_no_longer_than_an_encode() -> None:
    it = play(WORTH_IT)
    request = it.request(feature())
    assert not it.scheduler.ensure(request, 0)
    it.now = 0.099
    assert not it.scheduler.ensure(request, 0)
    it.now = 0.12  # it is not looked at in every step
    assert it.scheduler.ensure(request, 0)
    assert len(it.encode(request).saves) == 1
    assert it.stats.snapshot()["deferral_seconds_policy_count"] == 1


def test_item_that_came_late_is_not_used_by_a_request_that_has_been_let_go() -> None:
    it = play(WORTH_IT)
    request = it.request(feature())
    it.scheduler.ensure(request, 0)
    it.now = 0.2
    assert it.scheduler.ensure(request, 0)
    it.port.ready(it.only_want(), spec(4))
    assert it.scheduler.ensure(request, 0)
    assert it.scheduler.has("a"), "it is there before the encoder has begun"


def test_item_that_is_being_saved_is_waited_for_rather_than_encoded_twice() -> None:
    it = play(WORTH_IT, Policy.NEVER)
    first = it.request(feature(), name="first")
    assert it.scheduler.ensure(first, 0)
    (order,) = it.encode(first).saves
    it.scheduler.finished(first)
    it.idle(tokens=1, free_encoder_mm_hashes=["a"])
    second = it.request(feature(), name="second")
    assert not it.scheduler.ensure(second, 0)
    it.saved(order.ticket)
    it.port.ready(max(it.port.wants), spec(4))
    assert it.scheduler.ensure(second, 0)
    assert it.scheduler.has("a")


@pytest.mark.parametrize("room", [True, False])
def test_engine_in_another_process_is_given_a_step_to_grant_the_pages(*, room: bool) -> None:
    it = play(IN_VAIN, Policy.NEVER)
    it.port.slow = True
    it.port.room = room
    request = it.request(feature())
    for _ in range(2):
        assert not it.scheduler.ensure(request, 0)
    it.port.deliver()
    assert it.scheduler.ensure(request, 0)
    assert len(it.encode(request).saves) == room


def test_request_without_media_waits_whatever_the_policy() -> None:
    it = play(IN_VAIN, Policy.NEVER)
    request = it.request(feature(media=False))
    assert not it.scheduler.ensure(request, 0)
    it.now = 5.0
    assert not it.scheduler.ensure(request, 0)
    assert it.port.history[0].fresh
    it.port.ready(it.only_want(), spec(4))
    assert it.scheduler.ensure(request, 0)
    assert it.scheduler.has("a")


# -- the index at the port ---------------------------------------------------------------------


_tickets = itertools.count(1)


class Server:
    """An engine behind its port, on a bucket in memory."""

    def __init__(self, slab: Slab, **settings: object) -> None:
        self.store = MemoryStore()
        self._slab, self._settings = slab, settings
        self.port: ThreadPort | None = None

    def index(self, *items: str, made: float | None = None) -> None:
        """Write an index of these items."""
        folder = NAMESPACE.prefix.rpartition("/")[2]

        async def write() -> None:
            for item in items:
                self.store.objects[NAMESPACE.object_key(item)] = b"whatever"
            tags = await list_tags(self.store, folder)
            await write_index(self.store, tags, namespace=NAMESPACE, made=made or time.time())
            for item in items:
                del self.store.objects[NAMESPACE.object_key(item)]

        asyncio.run(write())

    def start(self, *, reads: bool = True) -> None:
        self.port = ThreadPort(
            config(None, **self._settings), NAMESPACE, self._slab, store=self.store
        )
        if reads:
            self.until("index_polls|loaded", 1)
        self.store.calls.clear()

    def until(self, series: str, most: float) -> None:
        assert self.port is not None
        counted = 0.0
        give_up = time.monotonic() + 20
        while counted < most:
            assert time.monotonic() < give_up, series
            counted += float(self.port.drain_stats().get(series, 0.0))  # type: ignore[arg-type]  # a counter
            time.sleep(0.002)

    def reason(self, item: str, **how: Any) -> str:
        """What is answered to a want; the ticket is given back."""
        assert self.port is not None
        ticket = next(_tickets)
        self.port.want(Want(ticket=ticket, identifier=item, **how))
        give_up = time.monotonic() + 20
        while True:
            for event in self.port.poll():
                if event.ticket == ticket:
                    self.port.release(ticket)
                    return str(getattr(event, "reason", "found"))
            assert time.monotonic() < give_up
            time.sleep(0.001)


@pytest.fixture
def slab() -> Iterator[Slab]:
    with make_slab() as slab:
        yield slab


@pytest.fixture
def servers(slab: Slab) -> Iterator[Any]:
    made: list[Server] = []

    def make(**settings: object) -> Server:
        made.append(Server(slab, **settings))
        return made[-1]

    yield make
    for server in made:
        if server.port is not None:
            server.port.close(5.0)


@pytest.mark.parametrize("policy", ["latency", "throughput"])
def test_a_thousand_items_that_the_index_lacks_cost_no_request(servers: Any, policy: str) -> None:
    server = servers(policy=policy)
    server.index("there")
    server.start()
    for number in range(1000):
        assert server.reason(f"new {number}") == "absent"
    assert server.store.calls == {}
    assert server.reason("there") == "absent", "it has been deleted since: that takes a look-up"
    assert server.store.calls == {"get": 1}


def test_absence_by_the_index_is_answered_before_the_call_returns_with_pages_to_save_into(
    servers: Any,
) -> None:
    server = servers()
    server.index()
    server.start()
    assert server.port is not None
    server.port.want(Want(ticket=1, identifier="new", save_nbytes=SPEC.nbytes))
    (event,) = server.port.poll()
    assert event.extents
    server.port.release(1)


@pytest.mark.parametrize("how", [{"fresh": True}, {"probe": True}])
def test_who_must_know_asks_the_bucket(servers: Any, how: dict[str, bool]) -> None:
    server = servers()
    server.index()
    server.start()
    for _ in range(2):
        assert server.reason("new", **how) == "absent"
    assert sum(server.store.calls.values()) >= 1
    assert server.store.calls.get("get", 0) == (2 if "fresh" in how else 0)


def test_who_must_know_is_not_told_by_somebody_else_who_need_not(
    servers: Any, tmp_path: Any
) -> None:
    for settings in ({}, {"local_disk": str(tmp_path)}):
        server = servers(**settings)
        server.index()
        server.start()
        assert server.reason("new") == "absent"
        assert server.store.calls == {}
        assert server.reason("new", fresh=True) == "absent"
        assert server.store.calls == {"get": 1}


def test_item_on_the_disk_is_found_whatever_the_index_says(
    servers: Any, slab: Slab, tmp_path: Any
) -> None:
    writer = servers(local_disk=str(tmp_path))
    writer.start(reads=False)
    save(writer.port, slab, "kept")
    writer.port.close(10.0)
    server = servers(local_disk=str(tmp_path))
    server.index()
    server.start()
    server.port._cache.tier.clear()
    assert server.reason("kept") == "found"
    assert server.reason("new") == "absent"
    assert server.store.calls == {}


@pytest.mark.parametrize(
    ("settings", "age"),
    [
        ({"policy": "always"}, 0.0),
        ({"policy": "never"}, 0.0),
        ({}, 3601.0),
        ({"index_max_age": "1m"}, 61.0),
        ({"index_max_age": 0}, 0.0),
    ],
)
def test_an_index_that_is_not_wanted_or_too_old_is_not_believed(
    servers: Any, settings: dict[str, object], age: float
) -> None:
    server = servers(**settings)
    server.index(made=time.time() - age)
    server.start(reads=settings.get("policy") is None)
    assert server.reason("new") == "absent"
    assert server.store.calls["get"] >= 1


# -- whole engines -----------------------------------------------------------------------------


def write_index_of(url: str) -> None:
    """As `ec-s3 index` does."""

    async def write() -> None:
        store = open_store(ECConfig(url=url))
        assert store is not None
        async for info in store.list("v1/"):
            if info.key.count("/") > 2:
                name = parse_key(info.key).namespace.partition("/")[0]
        tags = await list_tags(store, name)
        await write_index(store, tags, namespace=name, made=time.time())
        await store.aclose()

    asyncio.run(write())


def slow(items: Any) -> Any:
    """An encoder as slow as one may be."""
    time.sleep(0.1 * len(items))
    return [reference(item) for item in items]


@pytest.mark.usefixtures("small_engines")
def test_new_pictures_are_encoded_without_a_look_up_and_known_ones_are_fetched(
    url: str, proxy: FaultServer
) -> None:
    fill(url, "known")
    write_index_of(url)
    with SmallEngine(url=url, fetch_timeout=20) as engine:
        until(lambda: engine.stats["index_polls_loaded"], "the index")
        proxy.clear_log()
        news = [prompt(f"r{n}", f"new {n}") for n in range(4)]
        assert engine.step(*news) == news, "none waits"
        assert proxy.count("GET", ITEM) == 0
        engine.serve(prompt("r", "known"))
        assert (engine.loaded, len(engine.encoded)) == (["known"], 4)
        until(lambda: engine.stats["uploads_written"] == 4, "the uploads")
        engine.serve(*(prompt(f"again {n}", f"new {n}") for n in range(4)))
        assert len(engine.loaded) == 5, "what it has written itself is there"


@pytest.mark.usefixtures("small_engines")
def test_what_others_have_written_since_the_index_is_encoded_again_and_stored_once(
    url: str, proxy: FaultServer
) -> None:
    fill(url, "known")
    write_index_of(url)
    fill(url, "late")
    with SmallEngine(url=url, fetch_timeout=20) as engine:
        until(lambda: engine.stats["index_polls_loaded"], "the index")
        proxy.clear_log()
        engine.serve(prompt("r", "late"))
        assert engine.encoded == ["late"]
        until(lambda: engine.stats["uploads_exists"] == 1, "the put that finds it there")
        assert engine.stats["index_answers_wrong"] == 1
        engine.serve(prompt("again", "late"))
        assert engine.loaded == ["late"]


@pytest.mark.usefixtures("small_engines")
@pytest.mark.parametrize("engine_in", ["thread", "process"])
def test_with_never_nobody_waits_and_every_item_is_saved(
    url: str, proxy: FaultServer, engine_in: str
) -> None:
    proxy.add(Fault(method="GET", path=ITEM, hang=True))
    with SmallEngine(url=url, policy="never", fetch_timeout=20, engine=engine_in) as engine:
        engine.serve(prompt("a", "a"), prompt("b", "b"))
        assert engine.encoded == ["a", "b"]
        until(lambda: engine.stats["uploads_written"] == 2, "the uploads")
        assert engine.stats["given_up_policy"] == 2
        assert engine.stats["given_up_deadline"] == 0, "no look-up was waited for"
        engine.serve(prompt("again", "a"))
        assert engine.loaded == ["a"]


@pytest.mark.usefixtures("small_engines")
def test_with_never_what_was_asked_for_comes_in_for_later_requests(
    url: str, proxy: FaultServer
) -> None:
    fill(url, "a")
    proxy.add(Fault(method="GET", path=ITEM, delay=0.2))
    with SmallEngine(url=url, role="consumer", policy="never") as engine:
        engine.encoder = slow
        engine.serve(prompt("first", "a"))
        assert engine.encoded == ["a"]
        until(lambda: engine.stats["load_seconds_remote_count"] == 1, "the fetch goes on")
        engine.serve(prompt("second", "a"))
        assert engine.loaded == ["a"]


@pytest.mark.usefixtures("small_engines")
def test_latency_learns_that_look_ups_are_in_vain_and_that_they_are_not_any_more(
    url: str, proxy: FaultServer
) -> None:
    fill(url, *(f"known {n}" for n in range(12)))
    proxy.add(Fault(method="GET", path=ITEM, delay=0.02))
    with SmallEngine(url=url, policy="latency", fetch_timeout=20) as engine:
        engine.encoder = slow

        def waited(name: str) -> bool:
            engine.side.collect()
            answered = engine.step(request := prompt(name, name))
            engine.serve(*([] if answered else [request]))
            return not answered

        news = [waited(f"new {n}") for n in range(12)]
        assert news[0], "nothing is known yet"
        until(lambda: not waited(f"new {next(_tickets)}"), "it has learnt")
        known = [waited(f"known {n}") for n in range(12)]
        assert not known[0], "it takes a while to see that things have changed"
        until(lambda: engine.stats["hits_remote"] >= 1, "look-ups go on meanwhile")
