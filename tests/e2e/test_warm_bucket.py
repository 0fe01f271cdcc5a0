"""A process with a warm bucket answers like a cold one, without its encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ec_s3.testing.lab import Lab


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("llava", "float32"),
        pytest.param("llava", "bfloat16", marks=pytest.mark.slow),
        pytest.param("qwen2-vl", "float32", marks=pytest.mark.slow),
        ("qwen2-vl", "bfloat16"),
    ],
)
def test_second_process_answers_from_the_bucket_alone(lab: Lab, model: str, dtype: str) -> None:
    cold = lab.cold(model, dtype)
    assert [answer.encoded for answer in cold.answers.values()] == [1] * len(lab.pictures)
    assert len({answer.tokens for answer in cold.answers.values()}) > len(lab.pictures) // 2
    before = len(lab.moved(cold.prefix))

    process = lab.start(model, prefix=cold.prefix, dtype=dtype)
    warm = {picture: lab.ask(process, picture) for picture in lab.pictures}
    process.finish()

    assert [answer.encoded for answer in warm.values()] == [0] * len(lab.pictures)
    assert {name: a.tokens for name, a in warm.items()} == {
        name: a.tokens for name, a in cold.answers.items()
    }
    moved = lab.moved(cold.prefix)[before:]
    assert [(r.method, r.key) for r in moved] == [("GET", key) for key in cold.keys.values()]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_one_body_per_item_whatever_the_number_of_worker_processes(lab: Lab, ranks: int) -> None:
    cold = lab.cold()
    stored, new = "china-0", "flower-0"
    prefix = f"ranks-{ranks}"
    keys = lab.copy(cold, prefix, pictures=[stored])

    process = lab.start(prefix=prefix, multiprocessing=True, tensor_parallel_size=ranks)
    loaded = lab.ask(process, stored)
    encoded = lab.ask(process, new)
    process.finish()

    assert (loaded.encoded, loaded.tokens) == (0, cold.answers[stored].tokens)
    assert (encoded.encoded, encoded.tokens) == (1, cold.answers[new].tokens)
    moved = lab.moved(prefix)
    assert [r.key for r in moved if r.method == "GET"] == [keys[stored]], moved
    assert [r.key for r in moved if r.method == "PUT" and r.key != keys[stored]] == [
        f"{prefix}/{cold.keys[new].removeprefix(f'{cold.prefix}/')}"
    ]
