from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import pickle
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

import ec_s3
from ec_s3.errors import ConfigError, InvalidKeyError
from ec_s3.keys import (
    Namespace,
    ParsedKey,
    is_request_local,
    looks_like_content_hash,
    parse_key,
)

ODD_IDENTIFIERS = [
    "",
    " ",
    "x/y",
    "../../x",
    "x?y#z",
    "é",
    "e\u0301",
    "\x00",
    "a\x00",
    "\ud800",
    "\ud83d\ude00",
    "\U0001f600",
    "a" * 2_000,
    "\U0010ffff" * 10_000,
    "line\nbreak",
    "../namespace.json",
]


@pytest.fixture
def namespace() -> Namespace:
    return Namespace(model="org/model", revision="r1")


def test_models_that_differ_only_in_separators_or_case_never_share_a_folder() -> None:
    models = ["a/b", "a_b", "a-b", "a%2Fb", "A/b", "a//b", "a b"]
    assert len({Namespace(model=m).prefix for m in models}) == len(models)
    assert len({Namespace(model=m).fingerprint for m in models}) == len(models)


def test_white_space_and_trailing_slashes_do_not_make_another_model() -> None:
    spellings = ["/m/Qwen/X", "/m/Qwen/X/", " /m/Qwen/X// ", "/m/Qwen/X/ /\n"]
    assert len({Namespace(model=m) for m in spellings}) == 1
    assert Namespace(model="/m/Qwen/X").prefix != Namespace(model="Qwen/X").prefix


@pytest.mark.parametrize("model", ["", " ", "/", "//", " / / ", "\n"])
def test_empty_identity_is_an_error_that_names_the_setting(model: str) -> None:
    with pytest.raises(ConfigError, match="model="):
        Namespace(model=model)


def test_unknown_dtype_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        Namespace(model="m", dtype="complex64")


FINGERPRINTED = [
    "revision",
    "encoder_config",
    "quantization",
    "weight_version",
    "adapter",
    "hash_scheme",
    "salt",
]


def test_every_field_but_dtype_separates_namespaces(namespace: Namespace) -> None:
    others = [dataclasses.replace(namespace, **{name: "other"}) for name in FINGERPRINTED]
    others.append(dataclasses.replace(namespace, model="org/other"))
    keys = {n.object_key("x") for n in [namespace, *others]}
    fields = {f.name for f in dataclasses.fields(Namespace) if f.init}
    assert len(keys) == len(FINGERPRINTED) + 2
    assert fields == {*FINGERPRINTED, "model", "dtype"}


def test_the_same_value_in_another_field_is_another_namespace() -> None:
    assert len({Namespace(model="m", **{name: "v"}).fingerprint for name in FINGERPRINTED}) == len(
        FINGERPRINTED
    )
    split = Namespace(model="m", revision="a", encoder_config="b")
    joined = Namespace(model="m", revision="ab")
    assert split.fingerprint != joined.fingerprint


def test_dtype_is_in_the_path_and_not_in_the_fingerprint(namespace: Namespace) -> None:
    half = dataclasses.replace(namespace, dtype="float16")
    assert half.fingerprint == namespace.fingerprint
    assert half.id != namespace.id
    assert half.object_key("x") != namespace.object_key("x")
    assert half.manifest_key == namespace.manifest_key


def test_salts_separate_tenants_and_never_leave_the_process() -> None:
    salts = ["", "s3cr3t-1", "s3cr3t-2", "s3cr3t-1\x00", "s" * 65, "s" * 66]
    spaces = [Namespace(model="m", salt=s) for s in salts]
    assert len({n.object_key("same uuid") for n in spaces}) == len(salts)
    secret = spaces[1]
    public = repr(secret) + secret.object_key("x") + secret.id + secret.manifest().decode()
    assert "s3cr3t" not in public


def test_long_salt_is_not_equivalent_to_its_own_hash() -> None:
    long = "s" * 65
    digest = hashlib.sha256(long.encode()).digest().decode("latin-1")
    assert Namespace(model="m", salt=long) != Namespace(model="m", salt=digest)
    assert Namespace(model="m", salt=long).prefix != Namespace(model="m", salt=digest).prefix


def test_manifest_tells_an_operator_what_the_fingerprint_covers(namespace: Namespace) -> None:
    namespace = dataclasses.replace(namespace, hash_scheme="0123")
    body = json.loads(namespace.manifest({"model_argument": "/models/x"}))
    canonical = json.dumps(body["namespace"], sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(canonical.encode()).hexdigest()[:16] == body["fingerprint"]
    assert body["fingerprint"] == namespace.fingerprint
    assert {*FINGERPRINTED, "model"} <= body["namespace"].keys()
    assert body["extra"] == {"model_argument": "/models/x"}


@pytest.mark.parametrize("value", [float("nan"), object(), b"bytes"])
def test_manifest_refuses_facts_that_are_no_json(namespace: Namespace, value: object) -> None:
    with pytest.raises(ValueError):
        namespace.manifest({"fact": value})


@pytest.mark.parametrize("identifier", ODD_IDENTIFIERS, ids=lambda i: ascii(i)[:20])
def test_any_identifier_has_a_short_ascii_key_inside_the_prefix(
    namespace: Namespace, identifier: str
) -> None:
    key = namespace.object_key(identifier)
    assert key.isascii()
    assert len(key) < 1024
    assert ".." not in key
    assert key.startswith(f"{namespace.prefix}/bfloat16/")
    digest = key.rsplit("/", 1)[1]
    assert parse_key(key) == ParsedKey("org-model", namespace.fingerprint, "bfloat16", digest)


@pytest.mark.parametrize(
    ("model", "slug"),
    [
        ("org/Model-7B.v1_x", "org-Model-7B.v1_x"),
        ("../..", "model"),
        ("模型", "model"),
        ("/m/x", "m-x"),
        ("x" * 63 + "/y", "x" * 63),
        ("x" * 300, "x" * 64),
        ("a\ud800b", "a-b"),
    ],
)
def test_slug_is_readable_capped_and_harmless(model: str, slug: str) -> None:
    namespace = Namespace(model=model)
    assert namespace.slug == slug
    assert parse_key(namespace.object_key("x")).slug == slug


def test_no_key_is_the_folder_of_another(namespace: Namespace) -> None:
    keys = [
        namespace.manifest_key,
        namespace.control_key,
        *(namespace.object_key(i) for i in ODD_IDENTIFIERS),
    ]
    assert not any(b.startswith(a + "/") for a, b in itertools.permutations(keys, 2))


def test_two_hundred_thousand_identifiers_have_distinct_keys(namespace: Namespace) -> None:
    hexes = (hashlib.blake2s(b"%d" % n).hexdigest() for n in range(50_000))
    uuids = (str(uuid.UUID(int=n * 0x9E3779B97F4A7C15)) for n in range(50_000))
    requests = (f"chatcmpl-{n:016x}-image-0" for n in range(50_000))
    scripts = (f"картинка-{chr(0x4E00 + n % 5_000)}-{n}" for n in range(50_000))
    found = [namespace.object_key(i) for i in itertools.chain(hexes, uuids, requests, scripts)]
    assert len(set(found)) == len(found) == 200_000


def test_identifiers_equal_at_both_ends_have_distinct_keys(namespace: Namespace) -> None:
    start, end = "0123456789abcdef", "fedc"
    assert namespace.object_key(f"{start}1{end}") != namespace.object_key(f"{start}2{end}")


def test_lone_surrogates_are_not_the_character_they_would_join_to(namespace: Namespace) -> None:
    assert namespace.object_key("\ud83d\ude00") != namespace.object_key("\U0001f600")


KEYS_OF_A_PROCESS = """
import sys
from ec_s3.keys import Namespace
namespace = Namespace(model="org/model", salt="s", adapter="a")
print(*[namespace.object_key(f"id-{n}") for n in range(100)], sep="\\n")
assert "torch" not in sys.modules
"""


def test_keys_are_the_same_in_every_process() -> None:
    outputs = set()
    for seed in ("0", "1", "random"):
        root = str(Path(ec_s3.__file__).parents[1])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root}
        command = [sys.executable, "-c", KEYS_OF_A_PROCESS]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    here = Namespace(model="org/model", salt="s", adapter="a")
    assert outputs.pop().split() == [here.object_key(f"id-{n}") for n in range(100)]


def test_namespace_survives_pickling(namespace: Namespace) -> None:
    copy = pickle.loads(pickle.dumps(namespace))
    assert copy == namespace
    assert copy.object_key("x") == namespace.object_key("x")


GOOD_DIGEST = "ab" + "0" * 62


def test_a_well_formed_key_is_parsed() -> None:
    key = f"v1/m-0123456789abcdef/int8/ab/{GOOD_DIGEST}"
    assert parse_key(key) == ParsedKey("m", "0123456789abcdef", "int8", GOOD_DIGEST)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "v1",
        f"v2/m-0123456789abcdef/int8/ab/{GOOD_DIGEST}",
        f"/v1/m-0123456789abcdef/int8/ab/{GOOD_DIGEST}",
        f"v1/m-0123456789abcdef/int8/ab/{GOOD_DIGEST}/",
        f"v1/m-0123456789abcdef/int8/ab/{GOOD_DIGEST}\n",
        f"v1/m-0123456789abcdef/int8/ac/{GOOD_DIGEST}",
        f"v1/m-0123456789abcdef/int8/AB/{GOOD_DIGEST.upper()}",
        f"v1/m-0123456789abcdef/int8/ab/{GOOD_DIGEST[:-1]}",
        f"v1/m-0123456789abcdef/complex64/ab/{GOOD_DIGEST}",
        f"v1/m-0123456789abcde/int8/ab/{GOOD_DIGEST}",
        f"v1/-0123456789abcdef/int8/ab/{GOOD_DIGEST}",
        f"v1/../m-0123456789abcdef/int8/ab/{GOOD_DIGEST}",
        f"v1/{'m' * 65}-0123456789abcdef/int8/ab/{GOOD_DIGEST}",
        f"v1/m-0123456789abcdef//int8/ab/{GOOD_DIGEST}",
        f"v1/é-0123456789abcdef/int8/ab/{GOOD_DIGEST}",
        f"v1/m-\u0660123456789abcdef/int8/ab/{GOOD_DIGEST}",
        "v1/m-0123456789abcdef/namespace.json",
        "v1/m-0123456789abcdef/control.json",
    ],
)
def test_foreign_keys_are_refused(key: str) -> None:
    with pytest.raises(InvalidKeyError):
        parse_key(key)


@pytest.mark.parametrize(
    "identifier",
    [
        "chatcmpl-0a1b2c-image-0",
        "renderer0-mm-17-image-0",
        "renderer0-mm-17-video-3",
        "cmpl-1-audio-12",
        "x-vision_chunk-0",
        "adapter:renderer0-mm-17-image-0",
        "request\nwith a line break-image-0",
    ],
)
def test_request_local_identifiers_are_recognised(identifier: str) -> None:
    assert is_request_local(identifier)


@pytest.mark.parametrize(
    "identifier",
    ["", "a" * 64, str(uuid.UUID(int=7)), "photo-1", "-image-0", "x-image-", "x-image-0-large"],
)
def test_content_hashes_and_client_names_are_not_request_local(identifier: str) -> None:
    assert not is_request_local(identifier)


@pytest.mark.parametrize("digits", [64, 128])
@pytest.mark.parametrize("adapter", ["", "lora:", "a:b:", "line\nbreak:"])
def test_hashes_of_vllm_look_like_content_hashes(digits: int, adapter: str) -> None:
    assert looks_like_content_hash(adapter + ("0123456789abcdef" * 8)[:digits])


@pytest.mark.parametrize(
    "identifier",
    [
        "",
        "photo-1",
        str(uuid.UUID(int=7)),
        uuid.UUID(int=7).hex,
        "a" * 63,
        "a" * 65,
        "a" * 40,
        "a" * 96,
        "A" * 64,
        "g" * 64,
        "a" * 64 + "\n",
        "a" * 64 + ":photo",
        "x" + "a" * 64,
        ":" + "a" * 64,
        "sha256-" + "a" * 64,
        "renderer0-mm-17-image-0",
        "\u0660" * 64,
    ],
)
def test_names_chosen_by_clients_do_not_look_like_content_hashes(identifier: str) -> None:
    assert not looks_like_content_hash(identifier)
