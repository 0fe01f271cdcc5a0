"""Signed objects through both ports: the engine's own process gets the keys, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from ec_s3.child import ProcessPort
from ec_s3.config import ECConfig
from ec_s3.metrics import Stats
from ec_s3.pages import Slab
from ec_s3.port import Absent, EnginePort, Ready, ThreadPort
from ec_s3.testing.port_conformance import META, NAMESPACE, SPEC, config, make_slab, save, want
from ec_s3.types import MissReason

if TYPE_CHECKING:
    from pathlib import Path

A, B = (f"{name}:{digit * 64}" for name, digit in zip("ab", "12", strict=True))
OpenPort = Callable[[ECConfig, Slab], EnginePort]


@pytest.fixture(params=[ThreadPort, ProcessPort])
def open_port(request: pytest.FixtureRequest) -> OpenPort:
    return lambda config, slab: request.param(config, NAMESPACE, slab)


def test_signed_item_is_read_with_its_key_and_a_miss_without(
    open_port: OpenPort, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/bucket"
    keys = tmp_path / "keys"
    with make_slab() as slab:
        writer = open_port(config(url, signing_key=A), slab)
        save(writer, slab, "item")
        assert writer.close(10.0).complete
    keys.write_text(f"{B}\n{A}\n")
    with make_slab() as slab:
        reader = open_port(config(url, signing_key_file=keys), slab)
        found = want(reader, "item")
        assert isinstance(found, Ready)
        assert found.meta == META
        reader.close(0.0)
    keys.write_text(B)
    with make_slab() as slab:
        reader = open_port(config(url, signing_key_file=keys), slab)
        missed = want(reader, "item", save=SPEC.nbytes)
        assert isinstance(missed, Absent)
        assert missed.reason is MissReason.UNSIGNED
        assert missed.extents
        assert counted(reader, "misses_unsigned") == 1
        reader.close(0.0)


def counted(port: EnginePort, name: str) -> float:
    """A counter of the engine, whose child reports once a second."""
    stats = Stats()
    give_up = time.monotonic() + 20.0
    while not stats.snapshot().get(name):
        assert time.monotonic() < give_up, f"{name} is not counted"
        time.sleep(0.05)
        stats.merge(port.drain_stats())
    return stats.snapshot()[name]
