"""The fault server counts what it did, and throws the same dice for the same seed."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

from ec_s3.testing.faults import Fault, FaultServer


def _statuses(proxy: FaultServer, number: int) -> list[int]:
    parts = urlsplit(proxy.url)
    assert parts.hostname is not None
    statuses = []
    for _ in range(number):
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
        connection.request("GET", "/bucket/key")
        statuses.append(connection.getresponse().status)
        connection.close()
    return statuses


def _rolled(seed: int) -> list[int]:
    with FaultServer(seed=seed) as proxy:
        proxy.add(Fault(status=503, chance=0.5))
        return _statuses(proxy, 40)


def test_a_fault_by_chance_happens_now_and_then_and_again_with_its_seed() -> None:
    first = _rolled(3)
    assert {503, 404} == set(first)
    assert first == _rolled(3)
    assert first != _rolled(4)


def test_a_fault_counts_how_often_it_was_met() -> None:
    with FaultServer() as proxy:
        fault = Fault(status=500, times=2, skip=1)
        proxy.add(fault, Fault(method="PUT", status=403))
        assert _statuses(proxy, 4) == [404, 500, 500, 404]
        assert fault.met == 2


def test_bodies_on_their_way_to_the_server_can_be_damaged_and_keep_their_framing() -> None:
    with FaultServer() as upstream, FaultServer(upstream.url) as proxy:
        proxy.add(Fault(flip_sent_at=1, times=1))
        parts = urlsplit(proxy.url)
        assert parts.hostname is not None
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
        for body in (b"abc", iter([b"ab", b"c"]), iter([])):
            connection.request("PUT", "/bucket/key", body=body)
            assert connection.getresponse().read()
        connection.close()
        assert [request.nbytes for request in upstream.log] == [3, 3, 0]
        framing = [request.header("transfer-encoding") for request in upstream.log]
        assert framing == ["", "chunked", "chunked"]


def test_a_cleared_log_keeps_the_script() -> None:
    with FaultServer() as proxy:
        proxy.add(Fault(status=503))
        _statuses(proxy, 1)
        proxy.clear_log()
        assert proxy.count() == 0
        assert _statuses(proxy, 1) == [503]
