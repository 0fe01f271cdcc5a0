"""Every role in every layout answers rightly and in time, whatever the bucket does."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from matrix_bench import CAP, GRACE_SECONDS, LAYOUTS, ROLES, Ask
from matrix_failures import FAILURES, ITEM, Failure
from matrix_table import column

from ec_s3 import wire
from ec_s3.testing.census import group_processes, named_like, rank_sockets, slab_users
from ec_s3.testing.faults import Fault
from ec_s3.testing.vllm_process import VLLMProcessError, known_image, prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from matrix_bench import Bench, Engine, Item

_GRID = {"image_grid_thw": [1, 8, 8]}
_SETTLE_SECONDS = 30.0
_END_SECONDS = 60.0
_POOL_THREADS = 4  # that bounded pools may have started since; a leak is one per failure


def _cells(*names: str) -> list[Any]:
    """One parameter set per role and layout, and in front of each engine's the named rows."""
    return [
        pytest.param(layout, role, name, id=f"{layout}-{role}-{name}".replace(" ", "_"))
        for layout in LAYOUTS
        for role in ROLES
        for name in names
    ]


def _mixed_load(engine: Engine, cell: str) -> tuple[list[Ask], list[Item], list[Item]]:
    """The load, what of it lies in the bucket only, and what is new."""
    item = engine.reference.item
    stored = [item(f"{cell}-stored-{n}") for n in range(2)]
    new = [item(f"{cell}-new-{n}") for n in range(2)]
    kept, bare = item("kept"), item(f"{cell}-bare")
    engine.store(*stored, bare, kept)
    before = engine.run([engine.ask(kept)], timed=False)
    assert not before.wrong
    asks = [
        engine.ask(text="tell me a long story", max_tokens=120),
        engine.ask(stored[0]),
        engine.ask(stored[1]),
        engine.ask(new[0]),
        engine.ask(new[0]),
        engine.ask(new[1], stored[0]),
        engine.ask(kept),
        engine.ask(text="hello"),
    ]
    if engine.loads:
        asks.insert(3, engine.ask_bare(bare))
    return asks, [*stored, bare], new


def _failure_cell(engine: Engine, failure: Failure, figures: dict[str, Any]) -> None:
    for attempt in ("", " again"):  # a busy machine may be late once
        asks, stored, _ = _mixed_load(engine, failure.name.replace("/", " ") + attempt)
        with failure.make(engine, stored):
            loaded = engine.run(asks)
        late = engine.lateness(loaded.seconds)
        if late <= GRACE_SECONDS:
            break
        figures["note"] = f"late by {late:.2f} s at first"
    figures |= {"requests": len(asks), "late": round(late, 2)}
    assert not loaded.wrong
    if failure.blind and engine.loads:
        assert loaded.encoded == 4, "nothing failed: the stored pictures were not encoded again"
    took, wrong = engine.recover(failure.name)
    assert not wrong
    figures["recovery"] = round(took, 2)


def _dead_from_start(engine: Engine, figures: dict[str, Any]) -> None:
    assert not engine.started
    item = engine.reference.item("early")
    asks = [engine.ask(text="hello"), engine.ask(item), engine.ask(item)]
    engine.proxy.refuse()
    try:
        loaded = engine.run(asks, timed=False)
    finally:
        engine.proxy.accept()
    figures["requests"] = len(asks)
    assert not loaded.wrong
    took, wrong = engine.recover("the dead bucket")
    assert not wrong
    figures["recovery"] = round(took, 2)


def _fault_free(engine: Engine, figures: dict[str, Any]) -> None:
    """Model time, and what the engine's processes hold when nothing has gone wrong yet."""
    worst: dict[str, float] = {}
    encoded = []
    for number in range(8):
        if number > 2 and 2 in encoded:  # what is left of the engine before may still be ending
            break
        asks, *_ = _mixed_load(engine, f"fault-free {number}")
        loaded = engine.run(asks)
        assert not loaded.wrong
        encoded.append(loaded.encoded)
        if number:  # the first load may still compile something
            worst = {k: max(v, worst.get(k, 0.0)) for k, v in loaded.seconds.items()}
    engine.base = worst
    _crowd(engine)
    figures["note"] = str({kind: round(value, 3) for kind, value in worst.items()})
    figures["requests"] = len(encoded) * len(asks)
    assert 2 in encoded, f"the stored pictures were encoded again: {encoded}"


def _crowd(engine: Engine) -> None:
    """Enough at once that every pool has all its threads, before these are counted."""
    crowd = [engine.reference.item(f"crowd-{n}") for n in range(16)]
    engine.store(*crowd[:8])
    engine.proxy.add(Fault(path=ITEM, delay=0.1))
    loaded = engine.run([engine.ask(item) for item in crowd])
    assert not loaded.wrong
    assert not (engine.saves and engine.wait_stored(*crowd))
    engine.proxy.clear()
    engine.census = engine.count()


def _aborts(engine: Engine, figures: dict[str, Any]) -> None:
    """Requests end while deferred (never answered), and at many moments of a load and a save."""
    aborted = 0
    for pause, fault in (
        (0.05, Fault(path=ITEM, hang=True)),
        (0.004, Fault(path=ITEM, delay=0.03)),
    ):
        for repeat in range(2):
            asks = [engine.ask(text="tell me a long story", max_tokens=300)]
            for number in range(6):
                for kind in ("stored", "new"):
                    item = engine.reference.item(f"abort {pause} {repeat}-{kind}-{number}")
                    if kind == "stored":
                        engine.store(item)
                    ask = engine.ask(item)
                    ask.prompt["abort_after"] = pause * number
                    asks.append(ask)
            engine.proxy.add(fault)
            loaded = engine.run(asks, timed=False)
            engine.proxy.clear()
            assert not loaded.wrong
            aborted += loaded.reasons.count("abort")
    figures["requests"] = aborted
    figures["note"] = f"{aborted} aborted"
    assert aborted >= 12 or not engine.loads  # a producer's requests may be over by then
    took, wrong = engine.recover("aborts")
    figures["recovery"] = round(took, 2)
    assert not wrong


def _unknown_uuid(engine: Engine, figures: dict[str, Any]) -> None:
    """It fails alone, within its deadline; the others do not notice."""
    nobody = [
        Ask(kind="bare", prompt=prompt(known_image(name, _GRID)), tokens=())
        for name in ("nobody-knows-this", "../../etc/passwd", "0" * 64)
    ]
    item = engine.reference.item("beside-unknown")
    asks = [engine.ask(text="hello"), *nobody, engine.ask(item)]
    loaded = engine.run(asks)
    figures["requests"] = len(asks)
    figures["late"] = round(engine.lateness(loaded.seconds), 2)
    assert not loaded.wrong
    assert loaded.reasons[1:4] == ["error"] * 3


def _idle_uploads(engine: Engine, figures: dict[str, Any]) -> None:
    """Uploads that are slower than the requests finish although no step is made any more."""
    new = [engine.reference.item(f"idle-{n}") for n in range(4)]
    engine.proxy.add(Fault(method="PUT", path=ITEM, delay=0.5))
    loaded = engine.run([engine.ask(item) for item in new], timed=False)
    assert not loaded.wrong
    early = engine.lab.server.items(engine.prefix)
    missing = engine.wait_stored(*new)
    engine.proxy.clear()
    figures["requests"] = len(new)
    figures["note"] = f"{sum(engine.key(i) in early for i in new)} of 4 stored by the last answer"
    assert not missing


def _nothing_leaked(engine: Engine, figures: dict[str, Any]) -> None:
    """Back to what it held before the failures; nothing unexpected was caught."""
    before = engine.census
    assert before is not None
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        metrics, now = engine.metrics(), engine.count()
        held = {
            name: metrics.get(name, 0.0)
            for name in ("local_bytes leased", "local_bytes reserved", "deferred_requests")
        }
        leaks = {
            "threads": now.threads - before.threads - _POOL_THREADS,
            "descriptors": now.descriptors - before.descriptors,
            "sockets": now.sockets - before.sockets,
            "slabs": now.slabs - 1,
            "processes": len(now.processes) - len(before.processes),
            **held,
        }
        if not any(value > 0 for value in leaks.values()) or time.monotonic() > deadline:
            break
        time.sleep(2.0)
    figures["note"] = f"{now.threads} threads, {now.descriptors} descriptors"
    assert {name: value for name, value in leaks.items() if value > 0} == {}
    assert metrics.get("errors_total", 0.0) == 0, "an unexpected exception was caught"
    assert "Traceback" not in engine.process.log.read_text(errors="replace")


def _right_objects(engine: Engine, figures: dict[str, Any]) -> None:
    """Whatever this engine has written is what the reference has written."""
    compared = 0
    for key in engine.lab.server.items(engine.prefix):
        item = engine.reference.by_key(key.removeprefix(f"{engine.prefix}/"))
        assert item is not None, f"nobody knows {key}"
        body = engine.lab.read(key)
        if body == item.body or key in engine.damaged:
            continue
        header, tensor = wire.decode(body, max_tensor_bytes=CAP)
        wanted, right = wire.decode(item.body, max_tensor_bytes=CAP)
        assert (header.identifier, header.spec) == (wanted.identifier, wanted.spec)
        assert _close(tensor, right), f"{item.name}: another tensor"
        compared += 1
    figures["note"] = f"{compared} objects written"
    assert compared or not engine.saves


def _close(first: bytes | bytearray, second: bytes | bytearray) -> bool:
    import torch

    a, b = (torch.frombuffer(bytearray(data), dtype=torch.float32) for data in (first, second))
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3)


def _killed(engine: Engine, figures: dict[str, Any]) -> None:
    """SIGKILL in the middle of uploads: of the process, its engine core, or one of two ranks."""
    items = [engine.reference.item(f"killed-{n}") for n in range(3)]
    engine.proxy.add(Fault(method="PUT", path=ITEM, hang=True))
    loaded = engine.run([engine.ask(item) for item in items], timed=False)
    assert not loaded.wrong
    group = engine.process.pid
    everyone, sockets = set(group_processes(group)), rank_sockets(group)
    assert everyone & slab_users()
    assert sockets
    pattern = {"separate": "VLLM::EngineCore", "TP=2": "VLLM::Worker"}.get(engine.layout)
    victim = group if pattern is None else named_like(group, pattern)[-1]
    os.kill(victim, signal.SIGKILL)
    # Whoever uses the memory ends by itself. vLLM's offline client may not notice; it is killed.
    deadline = time.monotonic() + _END_SECONDS
    while (everyone & slab_users() or sockets & rank_sockets()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not everyone & slab_users(), "host memory outlived the kill"
    assert not sockets & rank_sockets()
    engine.forget()
    engine.proxy.clear()
    figures["note"] = f"{len(everyone)} processes"
    assert not everyone & set(group_processes(group))
    uploads = engine.lab.unfinished_uploads(engine.prefix)
    assert uploads == []
    stored = engine.lab.server.items(engine.prefix)
    assert not [item.name for item in items if engine.key(item) in stored]


_ROWS: dict[str, tuple[Callable[[Engine, dict[str, Any]], None], Callable[[Engine], bool]]] = {
    "dead from the start": (_dead_from_start, lambda _: True),
    "none": (_fault_free, lambda _: True),
}
for _failure in FAILURES:
    _ROWS[_failure.name] = (
        lambda engine, figures, failure=_failure: _failure_cell(engine, failure, figures),  # type: ignore[misc]
        lambda engine, failure=_failure: engine.saves or not failure.saves,  # type: ignore[misc]
    )
_ROWS |= {
    "requests aborted while deferred, loading, saving": (_aborts, lambda _: True),
    "unknown uuids without media": (_unknown_uuid, lambda engine: engine.loads),
    "idle with saves and uploads pending": (_idle_uploads, lambda engine: engine.saves),
    "leaks: threads, files, sockets, memory, leases": (_nothing_leaked, lambda _: True),
    "objects written": (_right_objects, lambda _: True),
    "SIGKILL during uploads": (_killed, lambda _: True),
}


@pytest.mark.parametrize(("layout", "role", "row"), _cells(*_ROWS))
def test_every_engine_survives(
    bench: Bench, record: Callable[..., Any], layout: str, role: str, row: str
) -> None:
    engine = bench.engine(role, layout)
    run, concerns = _ROWS[row]
    if not concerns(engine):
        return
    with record(row, column(role, layout)) as figures:
        if row not in ("dead from the start", "none") and not engine.base:
            _fault_free(engine, {})  # only some rows were chosen
        try:
            run(engine, figures)
        except VLLMProcessError:
            engine.forget()
            engine.base = {}
            engine.census = None
            raise
