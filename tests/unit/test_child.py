"""What goes between the two processes of a `ProcessPort`; the processes: tests/conformance."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from ec_s3.child import _dump
from ec_s3.config import ECConfig
from ec_s3.tickets import Absent, Granted, Present, Ready, pack_event, unpack_event
from ec_s3.types import DTYPE_BYTES, Extent, ItemMeta, MissReason, TensorSpec

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from ec_s3.tickets import Event

_tickets = st.integers(0, 1 << 53)
_extents = st.lists(
    st.builds(Extent, st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=50
).map(tuple)
_specs = st.builds(
    TensorSpec,
    st.sampled_from(list(DTYPE_BYTES)),
    st.lists(st.integers(0, 9), max_size=8).map(tuple),
)
_metas = st.builds(
    ItemMeta,
    st.none() | st.floats(0, 1e6),
    st.dictionaries(st.text(), st.lists(st.integers())),
    st.sampled_from(["", "5a" * 32]),
)
_events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Ready, _tickets, _specs, _extents, _metas),
    st.builds(Absent, _tickets, st.sampled_from(MissReason), st.none() | _extents),
    st.builds(Present, _tickets),
    st.builds(Granted, _tickets, st.none() | _extents),
)


@given(_events)
def test_every_event_arrives_as_it_was(event: Event) -> None:
    assert unpack_event(json.loads(json.dumps(pack_event(event)))) == event


def test_settings_arrive_as_they_were_whatever_else_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ECConfig.from_mapping(
        {
            "url": "s3://bucket/prefix?region=eu-west-1",
            "max_local_cpu_size": "3GiB",
            "local_disk": str(tmp_path),
            "max_local_disk_size": "5GiB",
            "upload_rate": "50MB/s",
            "flush_timeout": "1.5s",
            "negative_ttl": "2min",
            "second_sight": True,
            "tags": {"team": "vision"},
            "salt": "not to be seen",
            "signing_key": f"a:{'1' * 64}",
        }
    )
    dumped = json.dumps(_dump(config))
    assert "not to be seen" not in dumped
    monkeypatch.setenv("EC_S3_FLUSH_TIMEOUT", "77s")
    monkeypatch.setenv("EC_S3_MAX_FETCHES", "3")
    monkeypatch.setenv("EC_S3_SSE", "AES256")
    received = ECConfig.from_mapping(json.loads(dumped))
    assert received.model_dump(exclude={"salt"}) == config.model_dump(exclude={"salt"})
