from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from ec_s3.keys import Namespace, is_request_local, looks_like_content_hash, parse_key
from ec_s3.testing.strategies import identifiers
from ec_s3.types import DTYPE_BYTES

models = identifiers().filter(lambda text: any(not c.isspace() and c != "/" for c in text))
FIELDS = ["revision", "encoder_config", "quantization", "weight_version", "adapter", "salt"]
namespaces = st.builds(
    Namespace,
    model=models,
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    **{name: identifiers() for name in FIELDS},
)


@settings(deadline=None)
@given(namespace=namespaces, identifier=identifiers())
def test_any_key_is_short_ascii_and_parses_back(namespace: Namespace, identifier: str) -> None:
    key = namespace.object_key(identifier)
    parsed = parse_key(key)
    assert key.isascii()
    assert len(key) < 1024
    assert (parsed.slug, parsed.fingerprint) == (namespace.slug, namespace.fingerprint)
    assert parsed.dtype == namespace.dtype
    assert f"{parsed.slug}-{parsed.fingerprint}/{parsed.dtype}" == namespace.id


@settings(deadline=None)
@given(left=namespaces, right=namespaces, identifier=identifiers(), other=identifiers())
def test_keys_are_equal_exactly_when_everything_is(
    left: Namespace, right: Namespace, identifier: str, other: str
) -> None:
    same = left == right and identifier == other
    assert (left.object_key(identifier) == right.object_key(other)) == same


@settings(deadline=None)
@given(
    namespace=namespaces,
    names=st.lists(st.sampled_from(FIELDS), min_size=2, max_size=2, unique=True),
)
def test_moving_a_value_to_another_field_changes_the_fingerprint(
    namespace: Namespace, names: list[str]
) -> None:
    first, second = names
    values = {n: getattr(namespace, n) for n in FIELDS}
    swapped = {**values, first: values[second], second: values[first]}
    other = Namespace(model=namespace.model, dtype=namespace.dtype, **swapped)
    assert (other.fingerprint == namespace.fingerprint) == (other == namespace)


@settings(deadline=None)
@given(namespace=namespaces)
def test_normalisation_is_idempotent_and_the_manifest_can_be_written(namespace: Namespace) -> None:
    again = Namespace(model=namespace.model, dtype=namespace.dtype)
    assert again.model == namespace.model
    assert namespace.manifest().startswith(b"{")


@given(content=st.binary(), adapter=st.none() | st.text(min_size=1))
def test_every_hash_looks_like_one_and_is_not_local_to_a_request(
    content: bytes, adapter: str | None
) -> None:
    for name in ("sha256", "blake2s", "sha512"):
        identifier = hashlib.new(name, content).hexdigest()
        if adapter is not None:
            identifier = f"{adapter}:{identifier}"
        assert looks_like_content_hash(identifier)
        assert not is_request_local(identifier)


@given(st.uuids().map(str) | st.text(max_size=63) | st.from_regex(r"[^:]{65,127}", fullmatch=True))
def test_what_is_no_hash_of_a_known_length_does_not_look_like_one(identifier: str) -> None:
    assert not looks_like_content_hash(identifier)
