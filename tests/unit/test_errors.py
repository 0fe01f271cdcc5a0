from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from ec_s3 import errors

STORES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.RemoteError)
]
OTHERS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.ECS3Error) and kind not in STORES
]


@pytest.mark.parametrize("kind", STORES)
def test_a_failure_of_a_store_says_the_same_in_another_process(
    kind: type[errors.RemoteError],
) -> None:
    error = kind("put failed: 403 from the bucket", operation="put", key="v1/x")
    error.add_note("while a job wrote")
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(back) is kind
        assert str(back) == str(error)
        assert (back.operation, back.key) == ("put", "v1/x")
        assert back.__notes__ == ["while a job wrote"]


@pytest.mark.parametrize("kind", OTHERS)
def test_every_other_error_does_so_too(kind: type[errors.ECS3Error]) -> None:
    back = pickle.loads(pickle.dumps(kind("why")))
    assert (type(back), str(back)) == (kind, "why")
