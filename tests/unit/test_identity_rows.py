"""Other caches have served the wrong tensor in these situations; each must be a miss here."""

from __future__ import annotations

import hashlib

import pytest
import torch

from ec_s3 import keys
from ec_s3.blocking import ECCacheEngine
from ec_s3.config import ECConfig
from ec_s3.keys import Namespace
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import Expectation

PAGE = 256 << 10


class Fleet(MemoryStore):
    """A bucket that outlives the engines which use it."""

    async def aclose(self) -> None:
        """Stay open for the next engine."""

    def open(self, namespace: Namespace | None = None) -> ECCacheEngine:
        config = ECConfig().model_copy(update={"max_local_cpu_size": 16 * PAGE})
        return ECCacheEngine(config, namespace or Namespace(model="org/model"), store=self)

    def fill(self, items: dict[str, torch.Tensor], namespace: Namespace | None = None) -> None:
        with self.open(namespace) as engine:
            assert all(engine.put_many(items).values())
            assert engine.flush(20).complete


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def tensor(value: float, rows: int = 4) -> torch.Tensor:
    return torch.full((rows, 8), value, dtype=torch.bfloat16)


def test_item_whose_name_begins_and_ends_like_anothers_is_a_miss(fleet: Fleet) -> None:
    """LMCache#4086, sglang PR #32404: hashes cut to 16 or 64 bits."""
    digest = hashlib.sha256(b"picture").hexdigest()
    stored, asked = digest[:32] + "0" + digest[33:], digest[:32] + "1" + digest[33:]
    assert stored[:16] == asked[:16]
    assert stored[-4:] == asked[-4:]
    fleet.fill({stored: tensor(1)})
    with fleet.open() as engine:
        assert engine.get(asked) is None
        assert engine.stats()["misses_absent"] == 1
        assert torch.equal(engine.get(stored), tensor(1))  # type: ignore[arg-type]  # not None


def test_collision_of_the_digest_itself_is_a_miss_and_leaves_the_first_item_alone(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache#3301: collisions on purpose; nothing there compares the whole name on read."""
    monkeypatch.setattr(keys, "identifier_digest", lambda _: "ab" * 32)
    fleet.fill({"mine": tensor(1)})
    with fleet.open() as engine:
        assert engine.get("yours") is None
        assert engine.stats()["misses_mismatch"] == 1
    with fleet.open() as engine:
        assert torch.equal(engine.get("mine"), tensor(1))  # type: ignore[arg-type]  # not None


@pytest.mark.parametrize("rows", [137, 139, 638])
def test_item_of_other_rows_is_a_miss_and_the_stored_one_is_not_overwritten(
    fleet: Fleet, rows: int
) -> None:
    """vLLM#55547, #57696: one client uuid for two media."""
    fleet.fill({"X": tensor(1, rows=138)})
    with fleet.open() as engine:
        assert engine.get("X", expect=Expectation(rows=rows)) is None
        assert engine.stats()["misses_mismatch"] == 1
        assert engine.put("X", tensor(2, rows=rows))
        assert engine.flush(20).complete
    with fleet.open() as engine:
        assert torch.equal(engine.get("X"), tensor(1, rows=138))  # type: ignore[arg-type]  # not None


def test_tenants_who_choose_the_same_name_never_meet(fleet: Fleet) -> None:
    """vLLM#55439: uuids are global there."""
    tenants = {name: Namespace(model="org/model", salt=name) for name in ("t1", "t2", "")}
    fleet.fill({"X": tensor(1)}, tenants["t1"])
    for name in ("t2", ""):
        with fleet.open(tenants[name]) as engine:
            assert engine.get("X") is None
            assert not engine.contains("X")
    fleet.fill({"X": tensor(2)}, tenants["t2"])
    for name, value in (("t1", 1), ("t2", 2)):
        with fleet.open(tenants[name]) as engine:
            assert torch.equal(engine.get("X"), tensor(value))  # type: ignore[arg-type]  # not None


@pytest.mark.parametrize("field", ["adapter", "weight_version", "revision", "quantization"])
def test_what_other_weights_have_made_is_a_miss_after_a_restart(fleet: Fleet, field: str) -> None:
    """vLLM#44939, #44910; sglang#24794: the name stayed and the weights did not."""
    before, after = (Namespace(model="org/model", **{field: text}) for text in ("1", "2"))
    fleet.fill({"loraA:h": tensor(1)}, before)
    with fleet.open(after) as engine:
        assert engine.get("loraA:h") is None
        assert engine.put("loraA:h", tensor(2))
        assert engine.flush(20).complete
    with fleet.open(before) as engine:
        assert torch.equal(engine.get("loraA:h"), tensor(1))  # type: ignore[arg-type]  # not None
    old = [key for key in fleet.objects if key.startswith(f"{before.prefix}/")]
    new = [key for key in fleet.objects if key.startswith(f"{after.prefix}/")]
    assert len(old) == len(new) == 2, "an item and the manifest: a folder that can be removed"
    assert len(fleet.objects) == 4


def test_models_and_items_whose_names_differ_by_punctuation_share_nothing(fleet: Fleet) -> None:
    """LMCache 0.5.6 writes `_` for `/`, and `-` on disk."""
    models = ["a/b", "a_b", "a-b", "a%2Fb", "A/b"]
    names = ["x/y", "x_y", "x-y", "../x", "x?y#z", "é", " ", "x" * 2_000, ""]
    for at, model in enumerate(models):
        items = {name: tensor(at * 16 + i) for i, name in enumerate(names)}
        fleet.fill(items, Namespace(model=model))
    for at, model in enumerate(models):
        with fleet.open(Namespace(model=model)) as engine:
            for i, name in enumerate(names):
                got = engine.get(name)
                assert got is not None
                assert torch.equal(got, tensor(at * 16 + i))
    assert len(fleet.objects) == len(models) * (len(names) + 1)
    assert all(key.startswith("v1/") and ".." not in key for key in fleet.objects)


def test_first_content_stays_whatever_is_put_under_its_name_later(fleet: Fleet) -> None:
    """vLLM#57833: a stale copy won over a fresh one. Here content never changes under a name."""
    fleet.fill({"X": tensor(1)})
    with fleet.open() as holder:
        kept = holder.get("X")
        fleet.fill({"X": tensor(2)})
        assert torch.equal(holder.get("X"), kept)  # type: ignore[arg-type]  # not None
    with fleet.open() as engine:
        assert torch.equal(engine.get("X"), tensor(1))  # type: ignore[arg-type]  # not None


def test_same_item_is_found_under_every_spelling_of_a_models_path(fleet: Fleet) -> None:
    """unified-cache-management#1169: a trailing slash emptied the name there."""
    fleet.fill({"X": tensor(1)}, Namespace(model="/m/Qwen/X"))
    with fleet.open(Namespace(model="/m/Qwen/X/")) as engine:
        assert torch.equal(engine.get("X"), tensor(1))  # type: ignore[arg-type]  # not None
    with fleet.open(Namespace(model="Qwen/X")) as engine:
        assert engine.get("X") is None
