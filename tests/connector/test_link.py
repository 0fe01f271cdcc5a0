"""Hub and ranks: one slab for all of them, and who may have it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from ec_s3.connector import link
from ec_s3.connector.link import Answer, RankHub, RankLink, socket_name
from ec_s3.pages import Slab
from ec_s3.types import Extent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SECONDS = 10.0
_PAGE = 256 << 10


def until(done: Callable[[], object]) -> None:
    give_up = time.monotonic() + _SECONDS
    while not done():
        assert time.monotonic() < give_up, "it never happened"
        time.sleep(0.005)


class Ranks:
    """A hub, and whatever a test connects to it."""

    def __init__(self, slab: Slab, *, world: int, name: str) -> None:
        self.answers: list[Answer] = []
        self.maps: list[tuple[int, Slab, str]] = []
        self.name = name
        self.hub = RankHub(name, nonce="n1", slab=slab, world=world, on_answer=self.answers.append)
        self.links: list[RankLink] = []

    def join(self, rank: int, *, name: str | None = None) -> RankLink:
        def prepare(slab: Slab, nonce: str) -> None:
            self.maps.append((rank, slab, nonce))

        self.links.append(RankLink(name or self.name, rank=rank, prepare=prepare))
        return self.links[-1]

    def close(self) -> None:
        for one in self.links:
            one.close()
        self.hub.close()
        for _, slab, _ in self.maps:
            slab.close()


@pytest.fixture
def name() -> str:
    return socket_name("test", os.getpid(), time.monotonic_ns())


@pytest.fixture
def slab() -> Iterator[Slab]:
    with Slab.create(4 * _PAGE) as slab:
        slab.populate()
        yield slab


@pytest.fixture
def ranks(slab: Slab, name: str) -> Iterator[Ranks]:
    ranks = Ranks(slab, world=2, name=name)
    yield ranks
    ranks.close()


def test_ready_only_when_every_rank_has_mapped_the_same_memory(ranks: Ranks, slab: Slab) -> None:
    ranks.join(0)
    until(lambda: len(ranks.maps) == 1)
    assert not ranks.hub.ready
    ranks.join(1)
    until(lambda: ranks.hub.ready)
    slab.view(Extent(_PAGE, 5))[:] = b"hello"
    for _, mapped, nonce in ranks.maps:
        assert bytes(mapped.view(Extent(_PAGE, 5))) == b"hello"
        assert nonce == "n1"
    assert sorted(a.rank for a in ranks.answers if a.kind == "mapped") == [0, 1]


def test_answers_arrive_in_order_exactly_once_also_in_bursts(ranks: Ranks) -> None:
    links = [ranks.join(0), ranks.join(1)]
    until(lambda: ranks.hub.ready)
    for number in range(1000):
        links[number % 2].answer("loaded", number, done=bool(number % 3))
    until(lambda: len(ranks.answers) == 1002)
    for rank in (0, 1):
        mine = [a for a in ranks.answers if a.rank == rank and a.kind == "loaded"]
        assert [a.number for a in mine] == list(range(rank, 1000, 2))
        assert all(a.done == bool(a.number % 3) for a in mine)


def test_listener_that_fails_does_not_end_the_hub(
    slab: Slab, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Answer] = []

    def fail_once(answer: Answer) -> None:
        seen.append(answer)
        if len(seen) == 1:
            raise IndexError("a bug")

    hub = RankHub(name, nonce="n", slab=slab, world=1, on_answer=fail_once)
    mapped: list[Slab] = []
    rank = RankLink(name, rank=0, prepare=lambda theirs, _: mapped.append(theirs))
    until(lambda: hub.ready)
    rank.answer("saved", 1, done=True)
    until(lambda: len(seen) == 2)
    assert caplog.text.count("Traceback") == 1
    rank.close()
    hub.close()
    mapped[0].close()


def test_rank_that_hangs_up_ends_readiness_for_ever(ranks: Ranks) -> None:
    first = ranks.join(0)
    ranks.join(1)
    until(lambda: ranks.hub.ready)
    first.close()
    until(lambda: Answer(0, "gone") in ranks.answers)
    assert not ranks.hub.ready
    ranks.join(0)
    time.sleep(0.2)
    assert not ranks.hub.ready


def test_rank_number_is_taken_once(ranks: Ranks) -> None:
    ranks.join(0)
    until(lambda: any(a.kind == "mapped" for a in ranks.answers))
    ranks.join(0)
    until(lambda: len(ranks.maps) >= 2)
    assert not ranks.hub.ready
    ranks.join(1)
    until(lambda: ranks.hub.ready)


def test_ranks_wait_for_a_hub_that_comes_later(slab: Slab, name: str) -> None:
    found: list[Slab] = []
    early = RankLink(name, rank=0, prepare=lambda mapped, _: found.append(mapped))
    time.sleep(0.1)
    hub = RankHub(name, nonce="n", slab=slab, world=1, on_answer=lambda _: None)
    until(lambda: hub.ready)
    early.close()
    hub.close()
    found[0].close()


def test_two_engines_of_one_name_find_their_own_ranks(slab: Slab, name: str) -> None:
    first = Ranks(slab, world=1, name=name)
    second = Ranks(slab, world=1, name=name)
    assert second.hub.address != first.hub.address
    first.join(0)
    until(lambda: first.hub.ready)
    lost = second.join(0)  # finds the first engine's hub, which has its rank 0 already
    until(lambda: len(second.maps) >= 1)
    assert not second.hub.ready
    lost.redirect(second.hub.address)
    until(lambda: second.hub.ready)
    assert first.hub.ready
    second.close()
    first.close()


def test_other_users_and_other_process_trees_get_nothing(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = link._peer
    monkeypatch.setattr(link, "_peer", lambda sock: (real(sock)[0], os.getuid() + 1))
    ranks.join(0)
    time.sleep(0.2)
    assert not ranks.maps
    monkeypatch.setattr(link, "_peer", lambda sock: (1, os.getuid()))
    time.sleep(0.3)
    assert not ranks.maps
    monkeypatch.setattr(link, "_peer", real)
    until(lambda: ranks.maps)


def test_garbage_costs_only_its_own_connection(ranks: Ranks) -> None:
    for message in (b"not json", b"[1]", b'{"kind": "mapped", "rank": 0, "nonce": "other"}'):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(_SECONDS)
        sock.connect(f"\0{ranks.hub.address}")
        assert sock.recv(1000)
        sock.send(message)
        assert sock.recv(1000) == b""
        sock.close()
    ranks.join(0)
    ranks.join(1)
    until(lambda: ranks.hub.ready)


def test_rank_that_cannot_map_stays_off_and_says_so(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(slab: Slab, _: str) -> None:
        slab.close()
        raise RuntimeError("no memory here")

    ranks.links.append(RankLink(ranks.name, rank=0, prepare=broken))
    until(lambda: "cannot map" in caplog.text)
    ranks.join(1)
    until(lambda: ranks.maps)
    assert not ranks.hub.ready


def test_child_process_maps_the_memory_and_its_end_is_noticed(slab: Slab, name: str) -> None:
    ranks = Ranks(slab, world=1, name=name)
    slab.view(Extent(0, 5))[:] = b"hello"
    script = (
        "import sys, time\n"
        "from ec_s3.connector.link import RankLink\n"
        "from ec_s3.types import Extent\n"
        "def prepare(slab, nonce):\n"
        "    slab.view(Extent(5, 5))[:] = bytes(slab.view(Extent(0, 5))).upper()\n"
        "RankLink(sys.argv[1], rank=0, prepare=prepare)\n"
        "time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, name])
    try:
        until(lambda: ranks.hub.ready)
        assert bytes(slab.view(Extent(5, 5))) == b"HELLO"
        child.kill()
        until(lambda: Answer(0, "gone") in ranks.answers)
    finally:
        child.kill()
        child.wait()
        ranks.close()


def test_nothing_is_left_after_closing(slab: Slab) -> None:
    def once(i: int) -> None:
        ranks = Ranks(slab, world=1, name=socket_name("leak", os.getpid(), i, time.time_ns()))
        ranks.join(0)
        until(lambda: ranks.hub.ready)
        ranks.close()

    once(0)
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for i in range(5):
        once(i + 1)
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= fds
