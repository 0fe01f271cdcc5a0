"""Engines of several processes, several engines on one host: the bucket sees one copy of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ec_s3.testing.lab import Lab


def check_one_copy(lab: Lab, model: str, prefix: str, **job: Any) -> None:
    """Load one item and encode another; the bucket sees one body of each."""
    cold = lab.cold(model)
    stored, new = "china-0", "flower-0"
    keys = lab.copy(cold, prefix, pictures=[stored])

    process = lab.start(model, prefix=prefix, multiprocessing=True, **job)
    loaded = lab.ask(process, stored)
    encoded = lab.ask(process, new)
    process.finish()

    assert (loaded.encoded, loaded.tokens) == (0, cold.answers[stored].tokens)
    assert (encoded.encoded, encoded.tokens) == (1, cold.answers[new].tokens)
    moved = lab.moved(prefix)
    assert [r.key for r in moved if r.method == "GET"] == [keys[stored]]
    assert [r.key for r in moved if r.method == "PUT" and r.key != keys[stored]] == [
        f"{prefix}/{cold.keys[new].removeprefix(f'{cold.prefix}/')}"
    ]


@pytest.mark.slow
def test_encoder_that_shares_out_its_items_among_ranks_moves_one_body_per_item(lab: Lab) -> None:
    check_one_copy(
        lab,
        "qwen2-vl",
        "encoder-data-parallel",
        tensor_parallel_size=2,
        llm={"mm_encoder_tp_mode": "data"},
    )


@pytest.mark.slow
def test_encoder_that_is_split_among_ranks_moves_one_body_per_item(lab: Lab) -> None:
    check_one_copy(
        lab,
        "qwen2-vl",
        "encoder-tensor-parallel",
        tensor_parallel_size=2,
        llm={"mm_encoder_tp_mode": "weights"},
    )


@pytest.mark.slow
def test_workers_that_are_spawned_share_the_host_memory_like_forked_ones(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    check_one_copy(lab, "llava", "spawned", tensor_parallel_size=2)


@pytest.mark.slow
def test_engines_of_one_name_share_the_bucket_and_outlive_each_other(lab: Lab) -> None:
    cold = lab.cold()
    prefix, name = "one-name", {"engine_id": "engine"}
    first = lab.start(prefix=prefix, transfer=name)
    second = lab.start(prefix=prefix, transfer=name)

    encoded = lab.ask(first, "china-0")
    (key,) = lab.wait_for_uploads(prefix, 1)
    loaded = lab.ask(second, "china-0")
    crossed = {
        picture: lab.ask(process, picture)
        for process, picture in ((second, "china-1"), (first, "flower-0"))
    }
    lab.wait_for_uploads(prefix, 3)
    first.kill()
    alone = {picture: lab.ask(second, picture) for picture in ("flower-0", "hopper-0", "china-0")}
    second.finish()

    assert (encoded.encoded, loaded.encoded) == (1, 0)
    assert next(r.key for r in lab.moved(prefix) if r.method == "GET") == key
    assert {name: a.encoded for name, a in crossed.items()} == {"china-1": 1, "flower-0": 1}
    assert {name: a.encoded for name, a in alone.items()} == {
        "flower-0": 0,
        "hopper-0": 1,
        "china-0": 0,
    }
    answers = {"china-0": loaded, **crossed, **alone}
    assert {name: a.tokens for name, a in answers.items()} == {
        name: cold.answers[name].tokens for name in answers
    }
