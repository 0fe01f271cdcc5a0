"""The control document: strictness, edits that lose nothing, a poll that keeps what it knows."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_s3.control import (
    MAX_CONTROL_BYTES,
    MAX_DELETED,
    Control,
    control_poll,
    edit,
    load,
    parse_control,
)
from ec_s3.errors import (
    CapacityError,
    ControlError,
    RemoteChangedError,
    RemoteDeniedError,
    RemoteUnavailableError,
)
from ec_s3.metrics import Stats
from ec_s3.testing.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ec_s3.store import Buffer
    from ec_s3.types import PutOutcome

KEY = "v1/model-0123456789abcdef/control.json"
DIGEST = "ab" * 32
OTHER = "cd" * 32

_digests = st.text("0123456789abcdef", min_size=64, max_size=64)
_times = st.floats(0, 1e10)


@given(
    st.booleans(), _times, st.dictionaries(_digests, _times, max_size=5), st.sampled_from([0, 1])
)
def test_what_was_packed_is_read(
    enabled: bool, valid_after: float, deleted: dict[str, float], extra: int
) -> None:
    control = Control(enabled=enabled, valid_after=valid_after + extra, deleted=deleted)
    assert parse_control(control.pack()) == control


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_whatever_lies_there_is_a_document_or_an_error(body: bytes) -> None:
    try:
        control = parse_control(body)
    except ControlError:
        return
    assert parse_control(control.pack()) == control


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"enabled": True},
        {"version": 2},
        {"version": 1, "enable": False},
        {"version": 1, "enabled": 0},
        {"version": 1, "enabled": "false"},
        {"version": 1, "valid_after": "2026-01-01"},
        {"version": 1, "valid_after": True},
        {"version": 1, "valid_after": -1},
        {"version": 1, "valid_after": 1_700_000_000_000},
        {"version": 1, "deleted": [DIGEST]},
        {"version": 1, "deleted": {"ab": 1.0}},
        {"version": 1, "deleted": {DIGEST.upper(): 1.0}},
        {"version": 1, "deleted": {DIGEST: None}},
        {"version": 1, "deleted": {f"{i:064x}": 1 for i in range(MAX_DELETED + 1)}},
    ],
)
def test_a_document_that_is_not_to_the_letter_is_refused(document: object) -> None:
    with pytest.raises(ControlError):
        parse_control(json.dumps(document).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"{" * 100_000,
        b'{"version": 1, "valid_after": NaN}',
        b'{"version": 1, "valid_after": 1e999}',
        b'{"version": 1, "enabled": true, "enabled": false}',
    ],
)
def test_bytes_that_are_no_json_are_refused(body: bytes) -> None:
    with pytest.raises(ControlError):
        parse_control(body)


def test_a_full_document_fits_its_own_size_limit() -> None:
    deleted = {f"{i:064x}": 1_700_000_000.123456 + i for i in range(MAX_DELETED)}
    body = Control(deleted=deleted).pack()
    assert len(body) < MAX_CONTROL_BYTES
    assert len(parse_control(body).deleted) == MAX_DELETED
    with pytest.raises(CapacityError, match="wait for some to expire"):
        Control(deleted=deleted).with_deleted([DIGEST], until=9e9, now=0)


def test_what_has_expired_makes_room_and_the_longer_time_holds() -> None:
    control = Control().with_deleted([DIGEST], until=100, now=0)
    assert control.deletes(DIGEST, now=99)
    assert not control.deletes(DIGEST, now=100)
    assert not control.deletes(OTHER, now=0)
    shorter = control.with_deleted([DIGEST, OTHER], until=50, now=10)
    assert shorter.deleted == {DIGEST: 100, OTHER: 50}
    assert control.with_deleted([OTHER], until=300, now=200).deleted == {OTHER: 300}


# -- edits ---------------------------------------------------------------------------------------


async def test_of_many_who_edit_at_once_none_is_lost() -> None:
    store = MemoryStore()
    digests = [f"{i:064x}" for i in range(5)]

    async def add(digest: str) -> None:
        await edit(store, KEY, lambda c: c.with_deleted([digest], until=9e9, now=0))

    await asyncio.gather(*map(add, digests), edit(store, KEY, lambda c: replace(c, enabled=False)))
    control = await load(store, KEY)
    assert control is not None
    assert (set(control.deleted), control.enabled) == (set(digests), False)


async def test_an_edit_that_changes_nothing_writes_nothing() -> None:
    store = MemoryStore()
    first = await edit(store, KEY, lambda c: replace(c, valid_after=5.0))
    puts = store.calls["put"]
    assert await edit(store, KEY, lambda c: replace(c, valid_after=5.0)) == first
    assert store.calls["put"] == puts


async def test_whoever_never_gets_his_turn_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(MemoryStore):
        async def put(
            self,
            key: str,
            parts: Sequence[Buffer],
            *,
            if_absent: bool = True,
            if_match: str | None = None,
        ) -> PutOutcome:
            await super().put(key, [Control(valid_after=len(self.calls)).pack()], if_absent=False)
            return await super().put(key, parts, if_absent=if_absent, if_match=if_match)

    monkeypatch.setattr("ec_s3.control.random.random", lambda: 0.0)
    with pytest.raises(RemoteChangedError):
        await edit(Busy(), KEY, lambda c: replace(c, enabled=False))


async def test_what_is_no_document_is_not_overwritten() -> None:
    store = MemoryStore()
    store.objects[KEY] = b"precious"
    with pytest.raises(ControlError):
        await edit(store, KEY, lambda c: replace(c, enabled=False))
    assert store.objects[KEY] == b"precious"
    with pytest.raises(ControlError):
        await load(store, KEY)
    assert await load(store, KEY.replace("0", "1")) is None


# -- the poll ------------------------------------------------------------------------------------


class Rig:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.error: Exception | None = None
        self.key = KEY
        self.obeyed: list[Control] = []
        self.stats = Stats()
        self.poll = control_poll(
            self.store, key=lambda: self.key, obey=self.obey, stats=self.stats, period=0.001
        )

    async def obey(self, control: Control) -> None:
        if self.error is not None:
            raise self.error
        self.obeyed.append(control)

    async def write(self, body: bytes) -> None:
        await self.store.put(self.key, [body], if_absent=False)

    async def ask(self) -> str:
        before = self.stats.snapshot()
        await self.poll.look()
        after = self.stats.snapshot()
        [outcome] = [
            name.removeprefix("control_polls_")
            for name, value in after.items()
            if name.startswith("control_polls_") and value > before[name]
        ]
        return outcome


async def test_only_what_is_new_is_read_and_obeyed() -> None:
    rig = Rig()
    assert await rig.ask() == "absent"
    await rig.write(Control(enabled=False).pack())
    assert await rig.ask() == "changed"
    assert [await rig.ask() for _ in range(3)] == ["unchanged"] * 3
    await rig.write(Control().pack())
    assert await rig.ask() == "changed"
    assert rig.obeyed == [Control(enabled=False), Control()]


async def test_absent_malformed_or_unreachable_keeps_what_was_said_last(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    await rig.write(Control(enabled=False).pack())
    assert await rig.ask() == "changed"
    await rig.write(b"{}")
    assert [await rig.ask(), await rig.ask()] == ["malformed", "unchanged"]
    await rig.write(b"x" * (MAX_CONTROL_BYTES + 1))
    assert await rig.ask() == "malformed"
    assert len([r for r in caplog.records if "what was said last holds" in r.message]) == 1
    await rig.store.delete([KEY])
    assert await rig.ask() == "absent"
    for error in (
        RemoteUnavailableError("down", operation="get"),
        RemoteDeniedError("no", operation="get"),
        TimeoutError(),
    ):
        with monkeypatch.context() as patch:

            async def fail(*_: object, error: Exception = error) -> None:
                raise error

            patch.setattr(rig.store, "_enter", fail)
            assert await rig.ask() == "failed"
    assert rig.obeyed == [Control(enabled=False)]
    await rig.write(Control().pack())
    assert await rig.ask() == "changed"


async def test_what_could_not_be_obeyed_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.error = LookupError("a bug")
    await rig.write(Control(enabled=False).pack())
    assert await rig.ask() == "failed"
    assert rig.stats.snapshot()["errors_control"] == 1
    assert "a bug" in caplog.text
    rig.error = None
    assert await rig.ask() == "changed"


async def test_another_namespace_has_a_document_of_its_own() -> None:
    rig = Rig()
    await rig.write(Control(enabled=False).pack())
    assert await rig.ask() == "changed"
    rig.key = KEY.replace("0", "1")
    assert await rig.ask() == "absent"
    await rig.write(Control(valid_after=7.0).pack())
    assert await rig.ask() == "changed"
    assert rig.obeyed[-1] == Control(valid_after=7.0)


async def test_it_asks_again_and_again_and_at_once_when_hurried() -> None:
    rig = Rig()
    task = asyncio.create_task(rig.poll.run())
    async with asyncio.timeout(20):
        while rig.stats.snapshot()["control_polls_absent"] < 3:  # noqa: ASYNC110  it tells nobody
            await asyncio.sleep(0.001)
    task.cancel()
    slow = control_poll(rig.store, key=lambda: KEY, obey=rig.obey, stats=rig.stats, period=3600)
    task = asyncio.create_task(slow.run())
    before = rig.stats.snapshot()["control_polls_absent"]
    async with asyncio.timeout(20):
        while rig.stats.snapshot()["control_polls_absent"] < before + 3:
            slow.hurry()
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
