"""What a client's `ec_transfer_params` may do: opt out of being stored, and nothing else."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_s3.connector.params import Params, read_params

_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("store"), inner),
    max_leaves=20,
)


def request(value: Any) -> Any:
    return SimpleNamespace(ec_transfer_params=value)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [None, {}, {"store": True}, {"a": {"metadata": {"x": [1]}}}])
def test_request_without_a_wish_is_stored(value: Any) -> None:
    assert read_params(request(value)) == Params(store=True)


def test_request_of_a_vllm_that_knows_no_params_is_stored() -> None:
    assert read_params(SimpleNamespace()) == Params(store=True)


def test_client_opts_out_of_being_stored() -> None:
    assert read_params(request({"store": False})) == Params(store=False)
    assert read_params(request({"store": False, "hash": {"item_indices": [0]}})).store is False


@pytest.mark.parametrize(
    "value",
    [
        [],
        [{"store": False}],
        "store=false",
        b"\xff",
        0,
        float("nan"),
        float("inf"),
        False,
        {"store": None},
        {"store": "false"},
        {"store": 0},
        {"store": float("nan")},
        {"store": {"store": False}},
        {"store": [False]},
        {"store": "x" * (1 << 20)},
        {"store": nested(100_000)},
        nested(100_000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_understood_changes_nothing(value: Any) -> None:
    assert read_params(request(value)) == Params(store=True, malformed=True)


@given(_junk)
def test_no_value_raises(value: Any) -> None:
    assert isinstance(read_params(request(value)).store, bool)


@given(st.dictionaries(st.text().filter(lambda name: name != "store"), _junk))
def test_published_entries_sent_back_are_no_wish(value: dict[str, Any]) -> None:
    assert read_params(request(value)) == Params()


def test_item_is_bound_to_the_digest_that_came_with_it() -> None:
    entries = {"a": {"input_digest": "5a" * 32, "item_indices": [0]}, "store": False}
    params = read_params(request(entries))
    assert params.digest("a") == "5a" * 32
    assert (params.digest("b"), params.store) == ("", False)


@pytest.mark.parametrize(
    "entry",
    [None, [], "5a" * 32, {}, {"input_digest": None}, {"input_digest": ["5a" * 32]},
     {"input_digest": "5A" * 32}, {"input_digest": "5a" * 31}, {"input_digest": "5a" * 32 + "\n"}],
)  # fmt: skip
def test_digest_that_is_none_binds_to_nothing(entry: Any) -> None:
    assert read_params(request({"a": entry})).digest("a") == ""
    assert read_params(request([entry])).digest("a") == ""


@given(_junk, st.text())
def test_no_value_makes_a_digest_raise(value: Any, name: str) -> None:
    assert isinstance(read_params(request(value)).digest(name), str)


def test_params_are_read_without_looking_at_the_rest() -> None:
    large = {str(number): json.dumps(number) for number in range(100_000)}
    assert read_params(request({**large, "store": False})).store is False
