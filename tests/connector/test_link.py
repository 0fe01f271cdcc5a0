"""Hub and ranks: one slab for all of them, and who may have it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from ec_s3.connector import packets
from ec_s3.connector.link import Answer, RankHub, RankLink, socket_name
from ec_s3.pages import Slab
from ec_s3.types import Extent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_SECONDS = 10.0
_PAGE = 256 << 10
_HELLO = b'{"kind": "hello", "rank": 0}'


def until(done: Callable[[], object]) -> None:
    give_up = time.monotonic() + _SECONDS
    while not done():
        assert time.monotonic() < give_up, "it never happened"
        time.sleep(0.005)


def refuse(what: str, argument: str) -> None:
    raise AssertionError(f"nobody asks for {what} {argument}")


class Ranks:
    """A hub, and whatever a test connects to it."""

    def __init__(self, slab: Slab, *, world: int, name: str) -> None:
        self.answers: list[Answer] = []
        self.maps: list[tuple[int, Slab, str]] = []
        self.name = name
        self.hub = RankHub(
            name,
            nonce="n1",
            slab=slab,
            world=world,
            on_answer=self.answers.append,
            on_request=refuse,
        )
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


def knock(ranks: Ranks, *messages: bytes) -> socket.socket:
    """A connection to the hub, and what is said on it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(_SECONDS)
    sock.connect(f"\0{ranks.hub.address}")
    for message in messages:
        sock.send(message)
    return sock


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
        links[number % 2].answer("loaded", number, nonce="n1", done=bool(number % 3))
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

    hub = RankHub(name, nonce="n", slab=slab, world=1, on_answer=fail_once, on_request=refuse)
    mapped: list[Slab] = []
    rank = RankLink(name, rank=0, prepare=lambda theirs, _: mapped.append(theirs))
    until(lambda: hub.ready)
    rank.answer("saved", 1, nonce="n", done=True)
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


def test_rank_number_is_taken_once_and_the_second_maps_nothing(ranks: Ranks) -> None:
    ranks.join(0)
    until(lambda: any(a.kind == "mapped" for a in ranks.answers))
    ranks.join(0)
    ranks.join(7)
    time.sleep(0.2)
    assert len(ranks.maps) == 1
    assert not ranks.hub.ready
    ranks.join(1)
    until(lambda: ranks.hub.ready)


def test_rank_that_ends_before_it_has_mapped_may_come_again(ranks: Ranks) -> None:
    sock = knock(ranks, _HELLO)
    assert sock.recv(1000)
    sock.close()
    ranks.join(0)
    ranks.join(1)
    until(lambda: ranks.hub.ready)


def test_ranks_wait_for_a_hub_that_comes_later(slab: Slab, name: str) -> None:
    found: list[Slab] = []
    early = RankLink(name, rank=0, prepare=lambda mapped, _: found.append(mapped))
    time.sleep(0.1)
    hub = RankHub(name, nonce="n", slab=slab, world=1, on_answer=lambda _: None, on_request=refuse)
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
    time.sleep(0.1)
    assert not second.hub.ready
    lost.redirect(second.hub.address)
    until(lambda: second.hub.ready)
    assert first.hub.ready
    second.close()
    first.close()


def test_rank_that_is_sent_elsewhere_while_it_maps_goes_there(slab: Slab, name: str) -> None:
    wrong, right = (Ranks(slab, world=1, name=name) for _ in range(2))
    mapping, go_on = threading.Event(), threading.Event()

    def prepare(mapped: Slab, _: str) -> None:
        mapped.close()
        mapping.set()
        go_on.wait(_SECONDS)

    link = RankLink(wrong.hub.address, rank=0, prepare=prepare)
    assert mapping.wait(_SECONDS)
    link.redirect(right.hub.address)
    go_on.set()
    until(lambda: right.hub.ready)
    link.close()
    for ranks in (wrong, right):
        ranks.close()


def test_answers_about_another_slab_do_not_count(ranks: Ranks) -> None:
    first = ranks.join(0)
    ranks.join(1)
    until(lambda: ranks.hub.ready)
    first.answer("loaded", 1, nonce="another", done=True)
    first.answer("loaded", 2, nonce="n1", done=True)
    until(lambda: Answer(0, "loaded", 2, True) in ranks.answers)
    assert [a.number for a in ranks.answers if a.kind == "loaded"] == [2]
    assert ranks.hub.ready


def test_answers_nobody_can_take_are_lost_but_do_not_block(name: str) -> None:
    link = RankLink(name, rank=0, prepare=lambda slab, _: slab.close())
    for number in range(1000):
        link.answer("loaded", number, nonce="n1", done=True)
    link.close()


def test_answers_given_before_the_end_still_arrive(ranks: Ranks) -> None:
    first = ranks.join(0)
    ranks.join(1)
    until(lambda: ranks.hub.ready)
    for number in range(300):
        first.answer("saved", number, nonce="n1", done=True)
    first.close()
    until(lambda: Answer(0, "gone") in ranks.answers)
    numbers = [a.number for a in ranks.answers if a.kind == "saved"]
    assert numbers == list(range(300))


def test_hub_that_does_not_read_holds_up_nobody(slab: Slab, name: str) -> None:
    go_on = threading.Event()
    answers: list[Answer] = []

    def slow(answer: Answer) -> None:
        if answer.kind == "loaded":
            go_on.wait(_SECONDS)
        answers.append(answer)

    hub = RankHub(name, nonce="n", slab=slab, world=1, on_answer=slow, on_request=refuse)
    link = RankLink(name, rank=0, prepare=lambda mapped, _: mapped.close())
    until(lambda: hub.ready)
    for number in range(5000):  # many more than the socket holds
        link.answer("loaded", number, nonce="n", done=True)
    assert hub.ready
    go_on.set()
    until(lambda: len(answers) == 5001)
    assert [a.number for a in answers[1:]] == list(range(5000))
    link.close()
    hub.close()


def test_other_users_and_other_process_trees_get_nothing(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, uid in ((os.getpid(), os.getuid() + 1), (1, os.getuid()), (0, os.getuid())):
        monkeypatch.setattr(packets, "peer", lambda _, found=(pid, uid): found)
        sock = knock(ranks)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.send(_HELLO)
            assert sock.recv(1000) == b""
        sock.close()


def test_rank_trusts_only_its_own_user(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    real = packets.peer

    def peer(sock: socket.socket) -> tuple[int, int]:
        pid, uid = real(sock)
        return pid, uid + (threading.current_thread().name == "ec_s3-link")

    monkeypatch.setattr(packets, "peer", peer)
    ranks.join(0)
    time.sleep(0.2)
    assert not ranks.maps
    monkeypatch.setattr(packets, "peer", real)
    until(lambda: ranks.maps)


def test_processes_are_told_apart_by_their_ancestors() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    pid = "import os; print(os.getpid(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script, pid], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert packets.is_ours(os.getpid())
        assert packets.is_ours(child.pid)
        assert packets.is_ours(grandchild)
        assert not packets.is_ours(os.getppid())
        assert not packets.is_ours(1)
        assert not packets.is_ours(0)
        child.communicate(b"\n")


@pytest.mark.parametrize(
    "messages",
    [
        [b"not json"],
        [b"\xff\xfe"],
        [b"[1]"],
        [b'{"kind": "hello"}'],
        [b'{"kind": "hello", "rank": "0"}'],
        [b'{"kind": "hello", "rank": true}'],
        [b'{"kind": "hello", "rank": -1}'],
        [b'{"kind": "hello", "rank": 2}'],
        [b'{"kind": "mapped", "nonce": "n1"}'],
        [b'{"kind": "saved", "number": 1, "done": true, "nonce": "n1"}'],
        [_HELLO, _HELLO],
        [_HELLO, b'{"kind": "mapped", "nonce": "other"}'],
        [_HELLO, b'{"kind": "loaded", "number": 1, "nonce": "n1"}'],
    ],
)
def test_garbage_costs_only_its_own_connection(ranks: Ranks, messages: list[bytes]) -> None:
    sock = knock(ranks, *messages)
    if len(messages) == 2:
        assert sock.recv(1000)
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(1000) == b""
    sock.close()
    assert ranks.answers == []
    ranks.join(0)
    ranks.join(1)
    until(lambda: ranks.hub.ready)


@pytest.mark.parametrize(
    "message",
    [
        b'{"kind": "loaded", "number": "1", "nonce": "n1"}',
        b'{"kind": "loaded", "nonce": "n1"}',
        b'{"kind": "gone", "nonce": "n1"}',
        b'{"kind": "mapped", "nonce": "n1"}',
        b"",
    ],
)
def test_mapped_rank_that_talks_garbage_is_gone(ranks: Ranks, message: bytes) -> None:
    sock = knock(ranks, _HELLO)
    assert sock.recv(1000)
    sock.send(b'{"kind": "mapped", "nonce": "n1"}')
    ranks.join(1)
    until(lambda: ranks.hub.ready)
    sock.send(message)
    until(lambda: Answer(0, "gone") in ranks.answers)
    assert not ranks.hub.ready
    sock.close()


@pytest.mark.parametrize("error", [RuntimeError("no memory here"), OSError(12, "no memory here")])
def test_rank_that_cannot_map_stays_off_and_says_so(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    calls = []

    def broken(slab: Slab, _: str) -> None:
        slab.close()
        calls.append(1)
        raise error

    ranks.links.append(RankLink(ranks.name, rank=0, prepare=broken))
    until(lambda: "cannot map" in caplog.text)
    assert "no memory here" in caplog.text
    ranks.join(1)
    until(lambda: ranks.maps)
    assert not ranks.hub.ready
    assert calls == [1]


@pytest.mark.parametrize(
    ("hello", "fds"), [(b"garbage", 1), (b'{"nonce": "n", "nbytes": 5}', 0), (b"", 0)]
)
def test_hub_that_hands_over_no_memory_is_asked_again(
    slab: Slab, name: str, hello: bytes, fds: int
) -> None:
    found: list[Slab] = []
    link = RankLink(name, rank=0, prepare=lambda mapped, _: found.append(mapped))
    impostor, _ = packets.listen(name)
    impostor.settimeout(_SECONDS)
    before = len(os.listdir("/proc/self/fd"))
    sock, _ = impostor.accept()
    socket.send_fds(sock, [hello], [slab.fd] * fds)
    sock.close()
    impostor.close()
    hub = RankHub(name, nonce="n", slab=slab, world=1, on_answer=lambda _: None, on_request=refuse)
    until(lambda: hub.ready)
    link.close()
    hub.close()
    found[0].close()
    assert len(os.listdir("/proc/self/fd")) < before


def test_hub_that_hands_over_something_else_turns_the_rank_off(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    impostor, _ = packets.listen(name)
    impostor.settimeout(_SECONDS)
    link = RankLink(name, rank=0, prepare=lambda slab, _: slab.close())
    sock, _ = impostor.accept()
    with (tmp_path / "file").open("w") as file:
        socket.send_fds(sock, [b'{"nonce": "n", "nbytes": 0}'], [file.fileno()])
    until(lambda: "cannot map" in caplog.text)
    link.close()
    sock.close()
    impostor.close()


def test_closing_while_the_slab_is_being_mapped_is_quiet(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    mapping, go_on = threading.Event(), threading.Event()

    def prepare(slab: Slab, _: str) -> None:
        slab.close()
        mapping.set()
        go_on.wait(_SECONDS)
        slab.tensor()  # as closing takes the memory away

    link = RankLink(ranks.name, rank=0, prepare=prepare)
    assert mapping.wait(_SECONDS)
    threading.Timer(0.05, go_on.set).start()
    link.close()
    assert not link._thread.is_alive()
    assert caplog.text == ""


def test_forked_child_has_no_socket(ranks: Ranks) -> None:
    link = ranks.join(0)
    until(lambda: ranks.maps and link._sock)
    pid = os.fork()
    if pid == 0:
        closed = link._sock is not None and link._sock.fileno() == -1
        closed = closed and ranks.hub._listener.fileno() == -1
        closed = closed and all(sock.fileno() == -1 for sock in ranks.hub._ranks)
        os._exit(0 if closed else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_addresses_run_out_after_many(name: str) -> None:
    taken = [packets.listen(name)[0] for _ in range(100)]
    with pytest.raises(OSError, match="no free socket address"):
        packets.listen(name)
    for sock in taken:
        sock.close()


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


def test_forked_child_maps_the_memory(slab: Slab, name: str) -> None:
    slab.view(Extent(0, 5))[:] = b"hello"

    def prepare(slab: Slab, _: str) -> None:
        slab.view(Extent(5, 5))[:] = bytes(slab.view(Extent(0, 5))).upper()

    pid = os.fork()  # workers are forked before the scheduler part exists
    if pid == 0:
        RankLink(name, rank=0, prepare=prepare)
        time.sleep(60)
        os._exit(0)
    ranks = Ranks(slab, world=1, name=name)
    try:
        until(lambda: ranks.hub.ready)
        assert bytes(slab.view(Extent(5, 5))) == b"HELLO"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    until(lambda: Answer(0, "gone") in ranks.answers)
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
