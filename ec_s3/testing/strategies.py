"""Hypothesis strategies for what ec_s3 stores: identifiers, specs, tensor bytes and their cuts.

For property tests, also those of other hosts of the engine. Needs the `test` extra. Must never
draw what the library refuses by contract: every value is valid input.
"""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from ec_s3.types import DTYPE_BYTES, MAX_RANK, ItemMeta, TensorSpec

MAX_ELEMENTS = 4096
"""Most elements of a drawn tensor: enough for every code path but several chunks."""


def identifiers() -> st.SearchStrategy[str]:
    """Any string: every plane, lone surrogates, NUL, empty, and forms seen in the wild."""
    anything = st.text(
        st.characters(exclude_categories=()),  # the default leaves surrogates out
        max_size=200,
    )
    digests = st.text("0123456789abcdef", min_size=64, max_size=64)
    local = st.builds("chatcmpl-{}-image-{}".format, digests, st.integers(0, 9))
    paths = st.sampled_from(["../../x", "x/y", "x?y#z", "/", ".", "", "\x00", "\ud83d\ude00"])
    return st.one_of(anything, digests, local, paths)


@st.composite
def specs(draw: st.DrawFn) -> TensorSpec:
    """Any dtype and rank, empty dimensions included."""
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    room = MAX_ELEMENTS
    shape: list[int] = []
    for _ in range(draw(st.integers(0, MAX_RANK))):
        size = draw(st.integers(0, min(room, 64)))
        shape.append(size)
        room //= max(size, 1)
    return TensorSpec(dtype, tuple(shape))


@st.composite
def payloads(draw: st.DrawFn, spec: TensorSpec) -> bytes:
    """Bytes of a tensor: any bit patterns, some of which compress."""
    nbytes = spec.nbytes
    pattern = draw(st.binary(min_size=1, max_size=64))
    if draw(st.booleans()):
        return (pattern * (nbytes // len(pattern) + 1))[:nbytes]
    return draw(st.randoms(use_true_random=False)).randbytes(nbytes)


@st.composite
def cuts(draw: st.DrawFn, payload: bytes) -> list[memoryview]:
    """The payload as consecutive runs, cut anywhere, some empty."""
    positions = draw(st.lists(st.integers(0, len(payload)), max_size=5))
    edges = [0, *sorted(positions), len(payload)]
    view = memoryview(payload)
    return [view[a:b] for a, b in itertools.pairwise(edges)]


def metas() -> st.SearchStrategy[ItemMeta]:
    """Metadata as it comes back from JSON."""
    seconds = st.none() | st.floats(0, 1e6)
    leaves = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text()
    )
    names = st.text(max_size=10)
    values = st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
        max_leaves=8,
    )
    placeholder = st.dictionaries(names, values, max_size=4)
    digests = st.just("") | st.text("0123456789abcdef", min_size=64, max_size=64)
    return st.builds(
        ItemMeta, encode_seconds=seconds, placeholder=placeholder, input_digest=digests
    )
