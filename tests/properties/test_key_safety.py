"""What becomes a key of the bucket, whatever users and clients call their things.

Some servers keep keys as file names, others stumble over what a URL or a signature escapes, and
some cannot hold a key and its folder at once.
"""

from __future__ import annotations

import asyncio
import re
from itertools import permutations
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ec_s3.errors import ConfigError, InvalidKeyError, RemoteError
from ec_s3.keys import Namespace
from ec_s3.s3 import S3Store
from ec_s3.testing.conformance import buffer
from ec_s3.testing.faults import FaultServer
from ec_s3.testing.strategies import identifiers
from ec_s3.types import DTYPE_BYTES
from ec_s3.url import S3Location, S3Options, parse_url

if TYPE_CHECKING:
    from collections.abc import Iterator

SEGMENT = r"[A-Za-z0-9_=-][A-Za-z0-9_.=-]{0,254}"
PLAIN = re.compile(rf"{SEGMENT}(?:/{SEGMENT})*")
FIELDS = ["revision", "encoder_config", "quantization", "weight_version", "adapter", "salt"]
HOSTILE = [
    "..",
    "../../etc/passwd",
    "a//b",
    "a/../b",
    "/v1/x/namespace.json",
    "org/model/bfloat16",
    "namespace.json",
    "index.bin",
    ".hidden",
    "m" * 900,
    "a b+c%2Fd?e#f",
    "x\\y\x00\n\r",
    "模型/视觉",
    "\ud800",
    "-._-",
    "=&;$@,:",
]

texts = st.sampled_from(HOSTILE) | identifiers()
models = texts.filter(lambda text: any(not c.isspace() and c != "/" for c in text))
namespaces = st.builds(
    Namespace,
    model=models,
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    **dict.fromkeys(FIELDS, texts),
)


def written_keys(namespace: Namespace, name: str, probe: str) -> set[str]:
    """Every key that is ever written for an item of this name: by servers, jobs and `doctor`."""
    return {
        namespace.object_key(name),
        namespace.manifest_key,
        namespace.control_key,
        namespace.index_key,
        f"doctor/{probe}",
        f"doctor/{probe}.d/absent",
    }


@settings(deadline=None)
@given(
    spaces=st.lists(namespaces, min_size=1, max_size=4),
    names=st.lists(texts, min_size=1, max_size=4),
    probes=st.lists(st.from_regex(r"[0-9a-f]{32}", fullmatch=True), min_size=1, max_size=2),
)
def test_no_key_is_the_folder_of_another(
    spaces: list[Namespace], names: list[str], probes: list[str]
) -> None:
    keys = {
        key
        for space in spaces
        for name in names
        for probe in probes
        for key in written_keys(space, name, probe)
    }
    assert not [pair for pair in permutations(keys, 2) if pair[1].startswith(f"{pair[0]}/")]


@settings(deadline=None)
@given(left=namespaces, right=namespaces)
def test_two_namespaces_have_one_folder_or_none_is_within_the_other(
    left: Namespace, right: Namespace
) -> None:
    assert left.prefix == right.prefix or not left.prefix.startswith(f"{right.prefix}/")
    assert left.prefix == right.prefix or not right.prefix.startswith(f"{left.prefix}/")


@settings(deadline=None)
@given(text=texts)
def test_an_odd_prefix_is_refused_by_the_url_and_any_other_is_plain(text: str) -> None:
    try:
        location = parse_url(f"s3://bucket/{quote(text, errors='surrogatepass')}")
    except ConfigError:
        return
    assert isinstance(location, S3Location)
    key = location.object_key(Namespace(model="m").object_key("k"))
    assert PLAIN.fullmatch(key)
    assert len(key) < 1024


class Wire:
    """A server that holds nothing and takes nothing, and a store of each transport on it."""

    def __init__(self, proxy: FaultServer) -> None:
        self.proxy = proxy
        self.runner = asyncio.Runner()
        self.stores = [
            S3Store(S3Location("bucket", "team=a/cache", proxy.url), S3Options(transport=transport))
            for transport in ("sdk", "direct")
        ]

    def paths(self, key: str) -> list[str]:
        """The paths that arrive when every store reads, describes, writes and deletes a key."""
        self.proxy.clear_log()
        return self.runner.run(self._paths(key))

    async def _paths(self, key: str) -> list[str]:
        for store in self.stores:
            for call in (
                store.get(key, into=buffer),
                store.head(key),
                store.put(key, [b"x"]),
                store.delete([key]),
            ):
                try:
                    await call
                except (InvalidKeyError, RemoteError):
                    continue
        return [request.path for request in self.proxy.log]

    async def aclose(self) -> None:
        for store in self.stores:
            await store.aclose()


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    with FaultServer() as proxy:
        wire = Wire(proxy)
        yield wire
        wire.runner.run(wire.aclose())
        wire.runner.close()


def is_plain(path: str) -> bool:
    """Whether a request's path is the bucket and a plain key, in no other spelling."""
    spelt = path.replace("%3D", "=")  # the SDK escapes it, servers agree on it
    return (
        re.fullmatch(rf"/bucket/{PLAIN.pattern}", spelt) is not None
        and max(len(part) for part in spelt.split("/")) <= 255
        and len(spelt) < 1024
    )


@settings(deadline=None, max_examples=25)
@given(namespace=namespaces, name=texts)
@example(namespace=Namespace(model="m" * 900, adapter="a//b", salt="../../"), name="x//y")
@example(namespace=Namespace(model="模型//../x y+%2F"), name="\x00")
def test_only_plain_paths_reach_a_server_whatever_things_are_called(
    wire: Wire, namespace: Namespace, name: str
) -> None:
    for key in (namespace.object_key(name), namespace.manifest_key, namespace.control_key):
        paths = wire.paths(key)
        assert len(paths) >= 8
        assert [path for path in paths if not is_plain(path)] == []


@settings(deadline=None, max_examples=100)
@given(key=texts)
@example(key="k" * 900)
@example(key="a//b")
@example(key="a b")
@example(key="a+b")
@example(key="a%2Fb")
def test_a_key_that_is_not_plain_is_refused_before_anything_is_sent(wire: Wire, key: str) -> None:
    paths = wire.paths(key)
    assert [path for path in paths if not is_plain(path)] == []
    assert bool(paths) == (PLAIN.fullmatch(key) is not None and len(key) < 1024)
