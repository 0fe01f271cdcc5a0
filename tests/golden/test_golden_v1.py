"""Objects and keys written by the first release, as files: every later release must read them.

The files under `v1/` are never rewritten. `write_golden` made them; a new format version gets a
folder, a test and a function of its own.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ec_s3.keys import Namespace, parse_key
from ec_s3.types import Expectation, ItemMeta, TensorSpec
from ec_s3.wire import Header, decode, encode

FOLDER = Path(__file__).parent / "v1"
CAP = 16 << 20
CREATED = 1_750_000_000.25


@dataclass(frozen=True, slots=True)
class Case:
    spec: TensorSpec
    identifier: str
    meta: ItemMeta = field(default_factory=ItemMeta)
    period: int = 1 << 30
    """Bytes after which the content repeats; keeps the file of a large tensor small."""

    def tensor(self) -> bytes:
        nbytes = self.spec.nbytes
        block = hashlib.shake_256(self.identifier.encode("utf-8", "surrogatepass")).digest(
            min(nbytes, self.period)
        )
        return (block * (nbytes // len(block) + 1))[:nbytes] if block else b""


CASES = {
    "bfloat16": Case(
        TensorSpec("bfloat16", (24, 32)),
        "0123456789abcdef" * 4,
        ItemMeta(encode_seconds=0.125, placeholder={"image_grid_thw": [1, 4, 24]}),
    ),
    "bfloat16_two_chunks": Case(
        TensorSpec("bfloat16", (300, 2048)), "two chunks", ItemMeta(encode_seconds=2.0), period=4096
    ),
    "bfloat16_no_rows": Case(TensorSpec("bfloat16", (0, 4096)), ""),
    "float16": Case(TensorSpec("float16", (3, 5, 7)), "../../x?y#z"),
    "float32": Case(TensorSpec("float32", (16, 9)), "картинка 🖼 \ud800\x00"),
    "float64_scalar": Case(TensorSpec("float64", ()), "scalar"),
    "float8_e4m3fn": Case(TensorSpec("float8_e4m3fn", (33, 3)), "fp8"),
    "int64": Case(TensorSpec("int64", (2, 2, 2, 2, 2, 1, 1, 1)), "rank 8", period=16),
    "bool": Case(TensorSpec("bool", (0,)), "adapter:hash"),
}

SPACES = {
    "plain": Namespace(model="org/model"),
    "path": Namespace(model="/models/org/Model-7B/"),
    "half": Namespace(model="org/model", dtype="float16"),
    "revision": Namespace(model="org/model", revision="main", quantization="fp8"),
    "tenant": Namespace(model="org/model", salt="tenant-1", weight_version="step 1200"),
    "odd": Namespace(model="模型/名\ud800", encoder_config="c0ffee", adapter="ad" * 20),
}
IDENTIFIERS = ["", "a" * 64, "../../x", "é", "\ud83d\ude00", "\U0001f600", "x" * 10_000]


def write(name: str) -> tuple[bytes, Header]:
    case = CASES[name]
    data = memoryview(case.tensor())
    frame = encode(
        case.spec,
        [data[:33], data[33:]],
        identifier=case.identifier,
        namespace=SPACES["plain"].id,
        meta=case.meta,
        created=CREATED,
    )
    return b"".join(frame.parts), frame.header


def describe(header: Header, tensor: bytes | bytearray) -> dict[str, Any]:
    """What a record holds of an object; independent of zstd's release."""
    return {
        "identifier": header.identifier,
        "namespace": header.namespace,
        "dtype": header.spec.dtype,
        "shape": list(header.spec.shape),
        "layout": header.layout.value,
        "chunks": len(header.chunks),
        "created": header.created,
        "encode_seconds": header.meta.encode_seconds,
        "placeholder": dict(header.meta.placeholder),
        "tensor_sha256": hashlib.sha256(tensor).hexdigest(),
    }


def key_records() -> dict[str, dict[str, str]]:
    """Keys by namespace and (escaped) identifier."""
    return {
        name: {
            "manifest": space.manifest_key,
            "control": space.control_key,
            "id": space.id,
            **{ascii(i[:100]): space.object_key(i) for i in IDENTIFIERS},
        }
        for name, space in SPACES.items()
    }


def write_golden(folder: Path) -> None:
    """Write all files of a version into a new folder."""
    folder.mkdir(parents=True)
    records = {}
    for name in CASES:
        obj, header = write(name)
        (folder / f"{name}.ecs3").write_bytes(obj)
        records[name] = {
            **describe(header, CASES[name].tensor()),
            "writer": header.writer,
            "object_sha256": hashlib.sha256(obj).hexdigest(),
        }
    for file, content in (("objects.json", records), ("keys.json", key_records())):
        (folder / file).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", "ascii")


def recorded(file: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / file).read_text("ascii"))
    return content


def test_every_recorded_object_is_still_here_and_unchanged() -> None:
    records = recorded("objects.json")
    assert {p.stem for p in FOLDER.glob("*.ecs3")} == records.keys() == CASES.keys()
    for name, record in records.items():
        stored = (FOLDER / f"{name}.ecs3").read_bytes()
        assert hashlib.sha256(stored).hexdigest() == record["object_sha256"]


@pytest.mark.parametrize("name", CASES)
def test_todays_reader_reads_objects_of_the_first_release(name: str) -> None:
    record = recorded("objects.json")[name]
    header, tensor = decode((FOLDER / f"{name}.ecs3").read_bytes(), max_tensor_bytes=CAP)
    expected = {k: v for k, v in record.items() if k not in {"writer", "object_sha256"}}
    assert describe(header, tensor) == expected
    assert header.writer == record["writer"]
    assert tensor == CASES[name].tensor()
    header.check(
        identifier=CASES[name].identifier,
        namespace="org-model-" + SPACES["plain"].fingerprint + "/bfloat16",
        expect=Expectation(dtype=record["dtype"]),
    )


def test_todays_keys_are_those_of_the_first_release() -> None:
    assert key_records() == recorded("keys.json")


def test_recorded_keys_are_distinct_and_parse() -> None:
    keys = [
        key
        for space in recorded("keys.json").values()
        for name, key in space.items()
        if name not in {"manifest", "control", "id"}
    ]
    assert len(set(keys)) == len(keys) == len(SPACES) * len(IDENTIFIERS)
    for key in keys:
        parse_key(key)


def test_todays_writer_still_writes_this_version(tmp_path: Path) -> None:
    write_golden(tmp_path / "v1")
    unstable = {"writer", "object_sha256"}  # a new release, or a new zstd, may change these
    written = json.loads((tmp_path / "v1" / "objects.json").read_text("ascii"))
    for name, record in recorded("objects.json").items():
        assert {k: v for k, v in written[name].items() if k not in unstable} == {
            k: v for k, v in record.items() if k not in unstable
        }
    for name in CASES:
        stored = (tmp_path / "v1" / f"{name}.ecs3").read_bytes()
        assert decode(stored, max_tensor_bytes=CAP)[1] == CASES[name].tensor()
