"""Channel: whole messages, in order, without ever making the sender wait."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from ec_s3 import channel as channel_module
from ec_s3.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Ends = tuple[Channel, Channel]
BIG = "x" * (1 << 20)  # more than a socket takes at once


def until(done: Callable[[], object]) -> None:
    give_up = time.monotonic() + 10
    while not done():
        assert time.monotonic() < give_up, "it never happened"
        time.sleep(0.005)


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = (Channel(sock, name="test") for sock in socket.socketpair())
    yield one, other
    one.close()
    other.close()


@pytest.mark.parametrize(
    "text", ["", "a\0b", "\N{SNOWMAN}", "\ud800", "\ud83d\ude00", "\N{GRINNING FACE}", BIG]
)
def test_any_text_arrives_as_it_was(ends: Ends, text: str) -> None:
    ends[0].send({"text": text})
    assert ends[1].receive() == {"text": text}


def test_messages_nobody_reads_are_kept_and_arrive_in_order(ends: Ends) -> None:
    for number in range(20):  # returns although nobody reads
        ends[0].send({"number": number, "text": BIG[: number % 3 * 300_000]})
    assert not ends[0].drain(0.0)
    received: list[Any] = [ends[1].receive() for _ in range(20)]
    assert [message["number"] for message in received] == list(range(20))
    assert ends[0].drain(10.0)


def test_threads_that_send_at_once_do_not_mix_their_messages(ends: Ends) -> None:
    def send(who: int) -> None:
        for number in range(100):
            ends[0].send({"who": who, "number": number, "text": "x" * 5000})

    threads = [threading.Thread(target=send, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    received: list[Any] = [ends[1].receive() for _ in range(400)]
    for thread in threads:
        thread.join()
    for who in range(4):
        assert [m["number"] for m in received if m["who"] == who] == list(range(100))


def test_peer_that_never_reads_breaks_the_channel_at_the_bound(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "MAX_BACKLOG", 3 << 20)
    for _ in range(10):
        ends[0].send({"text": BIG})
    assert ends[0].broken
    assert ends[0].receive() is None
    ends[0].send({"text": "dropped"})
    assert not ends[0].drain(0.0)


@pytest.mark.parametrize("waiting", [False, True])
def test_end_of_the_peer_breaks_the_channel(ends: Ends, waiting: bool) -> None:
    if waiting:
        ends[0].send({"text": BIG})
    ends[1].close()
    assert ends[0].receive() is None
    ends[0].send({})
    until(lambda: ends[0].broken)


def test_what_the_peer_said_before_its_end_can_still_be_read(ends: Ends) -> None:
    ends[1].send({"last": "words"})
    assert ends[1].drain(10.0)
    ends[1].close()
    ends[0].send({})
    assert ends[0].broken
    assert ends[0].receive() == {"last": "words"}
    assert ends[0].receive() is None


def test_end_that_stops_receiving_can_still_send(ends: Ends) -> None:
    ends[0].send({"number": 1})
    ends[1].stop_receiving()
    assert ends[1].receive() == {"number": 1}
    assert ends[1].receive() is None
    ends[0].send({"number": 2})
    assert ends[0].broken
    ends[1].send({"number": 3})
    assert ends[0].receive() == {"number": 3}


def test_hanging_up_wakes_whoever_receives(ends: Ends) -> None:
    threading.Timer(0.05, ends[0].hang_up).start()
    assert ends[0].receive() is None


def test_closing_is_idempotent_and_leaves_nothing(ends: Ends) -> None:
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        one, other = (Channel(sock, name="test") for sock in socket.socketpair())
        one.send({"text": BIG})
        one.close()
        one.close()
        one.send({})
        other.close()
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= fds


def test_what_has_come_is_taken_without_waiting_whole_messages_only(ends: Ends) -> None:
    one, other = ends
    assert other.receive_ready() == []
    for number in range(3):
        one.send({"number": number, "text": BIG if number == 2 else ""})
    other.wait_ready(10.0)
    taken: list[Any] = []
    while len(taken) < 3:
        taken += other.receive_ready()
        other.wait_ready(0.1)
    assert [message["number"] for message in taken] == [0, 1, 2]
    assert taken[2]["text"] == BIG
    assert not other.ended


def test_messages_before_the_end_are_taken_and_then_the_end_is_known(ends: Ends) -> None:
    ends[0].send({"last": 1})
    ends[0].close()
    ends[1].wait_ready(10.0)
    assert ends[1].receive_ready() == [{"last": 1}]
    ends[1].wait_ready(10.0)
    assert ends[1].receive_ready() == []
    assert ends[1].ended
    ends[1].wait_ready(10.0)  # returns at once
