"""Signing keys, and what a keyring makes of headers."""

from __future__ import annotations

import hashlib
import hmac
import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from ec_s3.errors import ConfigError, FrameChecksumError, FrameMismatchError, FrameUnsignedError
from ec_s3.header import digest, pack_header, read_header
from ec_s3.signing import Keyring, parse_keys
from ec_s3.types import Expectation, ItemMeta, MissReason, TensorSpec
from ec_s3.wire import decode, encode

if TYPE_CHECKING:
    from collections.abc import Mapping

A, B, C = (f"{name}:{digit * 64}" for name, digit in zip("abc", "123", strict=True))
CAP = 1 << 30


def ring(*keys: str) -> Keyring:
    return parse_keys("\n".join(keys))


def signed(
    keyring: Keyring | None,
    identifier: str = "item",
    data: bytes = b"abc",
    placeholder: Mapping[Any, object] | None = None,
) -> bytes:
    frame = encode(
        TensorSpec("uint8", (len(data),)),
        [memoryview(data)],
        identifier=identifier,
        namespace="n",
        meta=ItemMeta(0.5, placeholder or {}, input_digest="5a" * 32),
        created=1.0,
        keyring=keyring,
    )
    return b"".join(frame.parts)


def fields_of(obj: bytes) -> dict[str, Any]:
    length = int.from_bytes(obj[20:24], "little")
    fields: dict[str, Any] = json.loads(obj[24 : 24 + length].decode())
    return fields


class TestKeys:
    def test_the_first_signs_and_all_are_accepted(self) -> None:
        keyring = ring(B, A)
        assert (keyring.signer, keyring.ids) == ("b", ("b", "a"))
        mac = ring(A).sign(b"message")
        assert keyring.accepts(b"message", key_id="a", mac=mac)

    @pytest.mark.parametrize(
        "text", [f"{A},{B}", f"{A}\n{B}\n", f"\n# of June\n  {A} ,\r\n#{C}\n\n{B}", f" {A} , {B} "]
    )
    def test_come_on_lines_or_between_commas(self, text: str) -> None:
        assert parse_keys(text).ids == ("a", "b")

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "# nothing",
            "hunter2" * 10,
            "a:" + "1" * 62,
            "a:" + "1" * 65,
            "a:" + "x" * 64,
            ":" + "1" * 64,
            "1" * 64,
            "a b:" + "1" * 64,
            "a" * 65 + ":" + "1" * 64,
            A + ":" + "1" * 64,
            A + "\ufffd",
        ],
    )
    def test_of_another_form_are_refused_without_being_shown(self, text: str) -> None:
        with pytest.raises(ConfigError, match="openssl rand -hex 32") as caught:
            parse_keys(text)
        assert "1111" not in str(caught.value)
        assert "hunter2" not in str(caught.value)

    def test_two_of_one_id_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="two keys are called a") as caught:
            parse_keys(f"{A},a:{'2' * 64}")
        assert "2222" not in str(caught.value)

    def test_are_not_in_any_text_of_the_keyring(self) -> None:
        keyring = ring(A, B)
        assert f"{keyring} {keyring!r}" == "Keyring(a, b) Keyring(a, b)"

    def test_travel_to_another_process(self) -> None:
        keyring = pickle.loads(pickle.dumps(ring(A, B)))
        assert keyring.ids == ("a", "b")
        assert decode(signed(ring(B)), max_tensor_bytes=CAP, keyring=keyring)[1] == b"abc"


class TestHeaders:
    def test_signed_ones_come_back_as_they_were(self) -> None:
        header, tensor = decode(signed(ring(A)), max_tensor_bytes=CAP, keyring=ring(A))
        assert (header.key_id, header.identifier, bytes(tensor)) == ("a", "item", b"abc")
        assert header.meta == ItemMeta(0.5, {}, input_digest="5a" * 32)

    def test_mac_is_the_documented_one(self) -> None:
        obj = signed(ring(A), placeholder={"grid": [1, 2.5], "name": "\u00fc"})
        fields = fields_of(obj)
        text = json.dumps(
            {**fields, "mac": None}, sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        message = b"ec_s3 object header, format 1\n" + text.encode()
        assert fields["mac"] == hmac.digest(bytes.fromhex("1" * 64), message, hashlib.sha256).hex()

    def test_readers_without_keys_take_signed_ones(self) -> None:
        assert decode(signed(ring(A)), max_tensor_bytes=CAP)[1] == b"abc"

    @pytest.mark.parametrize("writer", [None, ring(C)])
    def test_unsigned_and_of_an_unknown_key_are_refused(self, writer: Keyring | None) -> None:
        with pytest.raises(FrameUnsignedError) as caught:
            decode(signed(writer), max_tensor_bytes=CAP, keyring=ring(A, B))
        assert MissReason(caught.value.reason) is MissReason.UNSIGNED

    def test_of_another_key_under_an_accepted_id_are_refused(self) -> None:
        with pytest.raises(FrameUnsignedError):
            decode(signed(ring("a:" + "9" * 64)), max_tensor_bytes=CAP, keyring=ring(A))

    def test_old_key_is_accepted_while_it_is_listed(self) -> None:
        old = signed(ring(A))
        assert decode(old, max_tensor_bytes=CAP, keyring=ring(B, A))[1] == b"abc"
        with pytest.raises(FrameUnsignedError):
            decode(old, max_tensor_bytes=CAP, keyring=ring(B))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("identifier", "other"),
            ("namespace", "m"),
            ("created", 2.0),
            ("encode_seconds", None),
            ("placeholder", {"grid": [9]}),
            ("input_digest", None),
            ("input_digest", "00" * 32),
            ("chunks", [[12, "00" * 16]]),
            ("writer", "ec_s3/0"),
            ("key_id", "b"),
            ("key_id", None),
            ("mac", None),
            ("mac", ""),
            ("mac", "0" * 64),
            ("mac", "\u00e9" * 64),
        ],
    )
    def test_changed_in_any_field_are_refused(self, name: str, value: object) -> None:
        head = pack_header({**fields_of(signed(ring(A))), name: value})
        with pytest.raises(FrameUnsignedError):
            read_header(head, max_tensor_bytes=CAP, keyring=ring(A, B))

    def test_mac_in_capitals_is_another_mac(self) -> None:
        fields = fields_of(signed(ring(A)))
        head = pack_header({**fields, "mac": fields["mac"].upper()})
        with pytest.raises(FrameUnsignedError):
            read_header(head, max_tensor_bytes=CAP, keyring=ring(A))

    def test_number_out_of_range_is_no_way_round(self) -> None:
        fields = fields_of(signed(ring(A), placeholder={"x": 1}))
        head = pack_header(fields)
        text = head[24:-16].replace(b'{"x":1}', b'{"x":1e999}')
        length = len(text).to_bytes(4, "little")
        skipped = (32 + len(text)).to_bytes(4, "little")
        body = head[:4] + skipped + head[8:20] + length + text
        with pytest.raises(ValueError, match="no JSON"):
            read_header(body + digest(body), max_tensor_bytes=CAP, keyring=ring(A))

    def test_with_names_that_are_numbers_verify_as_a_reader_gets_them(self) -> None:
        """Sorted as numbers 2 comes before 10, sorted as the texts of JSON after it."""
        obj = signed(ring(A), placeholder={10: "x", 2: "y", 3: (1, 2)})
        header, _ = decode(obj, max_tensor_bytes=CAP, keyring=ring(A))
        assert header.meta.placeholder == {"10": "x", "2": "y", "3": [1, 2]}

    def test_on_the_body_of_another_item_are_refused(self) -> None:
        mine, theirs = (
            signed(ring(A), name, data) for name, data in (("a", b"abc"), ("b", b"xyz"))
        )
        sizes = [read_header(obj, max_tensor_bytes=CAP).header_bytes for obj in (mine, theirs)]
        spliced = mine[: sizes[0]] + theirs[sizes[1] :]
        with pytest.raises(FrameChecksumError):
            decode(spliced, max_tensor_bytes=CAP, keyring=ring(A))

    def test_of_another_item_are_refused_by_name(self) -> None:
        header, _ = decode(signed(ring(A), "other"), max_tensor_bytes=CAP, keyring=ring(A))
        with pytest.raises(FrameMismatchError):
            header.check(identifier="item", namespace="n", expect=Expectation())
