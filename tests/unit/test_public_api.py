"""The names that the package promises."""

from __future__ import annotations

import pytest

import ec_s3


@pytest.mark.parametrize("name", ec_s3.__all__)
def test_every_promised_name_exists(name: str) -> None:
    assert getattr(ec_s3, name) is not None


def test_the_list_is_sorted_and_complete() -> None:
    assert ec_s3.__all__ == sorted(ec_s3.__all__)
    assert set(ec_s3.__all__) == {*ec_s3._HOMES, "__version__"}


def test_a_name_is_the_one_of_its_home() -> None:
    from ec_s3.blocking import ECCacheEngine
    from ec_s3.engine import EncoderCache

    assert ec_s3.ECCacheEngine is ECCacheEngine
    assert ec_s3.EncoderCache is EncoderCache


def test_other_names_are_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        ec_s3.no_such_name  # noqa: B018  # the access is the test
