"""What a store is asked, and what is made of its answers."""

from __future__ import annotations

import base64
import zlib
from typing import TYPE_CHECKING

import pytest

from ec_s3 import probe, questions
from ec_s3.errors import RemoteError
from ec_s3.profile import BY_NAME, CAPABILITIES, Support
from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.url import S3Location, S3Options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ec_s3.probe import Report
    from ec_s3.profile import Seen
    from ec_s3.testing.moto import S3Server

HONOURED, IGNORED, REFUSED = Support.HONOURED, Support.IGNORED, Support.REFUSED
UNKNOWN = Support.UNKNOWN


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultServer]:
    with FaultServer(s3_server.url) as made:
        yield made


async def ask(proxy: FaultServer, bucket: str, *, writable: bool = True, **more: bool) -> Report:
    location = S3Location(bucket, "p", endpoint=proxy.url)
    return await probe.ask(location, S3Options(), folder="doctor/x", writable=writable, **more)


async def test_everything_is_asked_and_nothing_is_left_behind(
    proxy: FaultServer, bucket: str, s3_server: S3Server
) -> None:
    report = await ask(proxy, bucket, every_key=True)
    assert report.seen.keys() == BY_NAME.keys()
    assert report.leftovers == ()
    client = s3_server.client()
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
    assert not client.list_multipart_uploads(Bucket=bucket).get("Uploads")
    client.close()


async def test_keys_that_the_library_never_makes_are_sent_only_where_that_is_asked_for(
    proxy: FaultServer, bucket: str
) -> None:
    report = await ask(proxy, bucket)
    assert report.seen.keys() == {c.name for c in CAPABILITIES if c.asked}
    paths = [request.path.partition("?")[0] for request in proxy.log]
    assert not [path for path in paths if "//" in path]
    assert max(len(part) for path in paths for part in path.split("/")) <= 81
    keys = {path for path in paths if "/doctor/x/" in path}
    assert not [key for key in keys if any(other.startswith(f"{key}/") for other in keys)]


async def test_where_nothing_may_be_written_it_only_reads(
    proxy: FaultServer, bucket: str, s3_server: S3Server
) -> None:
    client = s3_server.client()
    client.put_object(Bucket=bucket, Key="p/there", Body=b"0123456789")
    client.close()
    report = await ask(proxy, bucket, writable=False)
    assert {request.method for request in proxy.log} <= {"GET", "HEAD"}
    assert report.seen["range"].support is HONOURED
    assert report.seen["conditional_get"].support is HONOURED
    assert "conditional_put" not in report.seen


async def test_an_empty_store_that_may_only_be_read_tells_little(
    proxy: FaultServer, bucket: str
) -> None:
    report = await ask(proxy, bucket, writable=False)
    assert report.seen["range"].support is UNKNOWN


@pytest.mark.parametrize(
    ("fault", "name", "support", "detail"),
    [
        (Fault(header="(?i)if-none-match: \\*", status=501), "conditional_put", REFUSED, "501"),
        (Fault(header="(?i)if-match", status=400), "conditional_replace", REFUSED, "InvalidReq"),
        (Fault(header='(?i)if-match: "', status=412), "conditional_replace", HONOURED, "quotes"),
        (Fault(header="(?i)if-match", status=412), "conditional_replace", REFUSED, "412"),
        (Fault(path="uploads", status=501), "multipart", REFUSED, "NotImplemented"),
        (Fault(header="(?i)x-amz-trailer", status=411), "checksum_trailer", REFUSED, "411"),
        (Fault(header="(?i)checksum-crc32:", status=400), "checksum_header", REFUSED, "400"),
        (
            Fault(method="PUT", header="(?i)transfer-encoding", path="lengthless", status=411),
            "unknown_length",
            REFUSED,
            "411",
        ),
        (Fault(path="delete$", status=400), "delete_batch", REFUSED, "400"),
        (Fault(header="(?i)x-amz-tagging", status=501), "tagging", REFUSED, "501"),
        (Fault(header="(?i)x-amz-tagging", status=403), "tagging", UNKNOWN, "denied"),
        (Fault(header="(?i)range: bytes", status=501), "range", REFUSED, "501"),
        (Fault(method="PUT", path="s{81}", status=400), "own_keys", REFUSED, "400"),
        (Fault(header="(?i)if-match", status=503), "conditional_replace", UNKNOWN, "503"),
        (
            Fault(method="GET", header="(?i)if-none-match", status=501),
            "conditional_get",
            REFUSED,
            "501",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_refusal_is_told_from_a_failure_and_from_a_missing_right(
    proxy: FaultServer, bucket: str, fault: Fault, name: str, support: Support, detail: str
) -> None:
    proxy.add(fault)
    seen = (await ask(proxy, bucket)).seen[name]
    assert seen.support is support
    assert detail in seen.detail


async def test_a_question_without_an_answer_stays_open_and_keeps_nothing_else_up(
    proxy: FaultServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "QUESTION_SECONDS", 5.0)
    proxy.add(Fault(method="PUT", path="tagged", hang=True))
    report = await ask(proxy, bucket)
    assert report.seen["tagging"].support is UNKNOWN
    assert "no answer" in report.seen["tagging"].detail
    assert report.seen["conditional_put"].support is HONOURED


async def test_a_probe_that_cannot_be_removed_is_named(proxy: FaultServer, bucket: str) -> None:
    proxy.add(Fault(method="DELETE", path="tagged", status=403))
    assert (await ask(proxy, bucket)).leftovers == ("p/doctor/x/tagged",)


async def test_the_region_of_the_bucket_is_what_the_store_says(
    proxy: FaultServer, bucket: str
) -> None:
    report = await ask(proxy, bucket)
    assert report.configured_region == "us-east-1"
    assert report.region in ("", "us-east-1")


class Played:
    """A prober on a store that takes everything, and does something else with it.

    Attributes:
        body: what a GET brings.
        client: this very object, with the SDK's verbs.
    """

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.client = self

    def target(self, name: str = "") -> dict[str, str]:
        return {"Bucket": "b", "Key": name}

    async def put(self, name: str, **more: object) -> None:
        """Taken, whatever it says."""

    async def delete_objects(self, **more: object) -> None:
        """Taken, and nothing is deleted."""

    async def head_object(self, **more: object) -> dict[str, str]:
        return {"ETag": '"e"'}

    async def get_object(self, **more: object) -> dict[str, object]:
        return {"Body": PlayedBody(self.body), "ChecksumCRC32": WHOLE_CRC32, "ContentRange": "x"}

    async def get_object_tagging(self, **more: object) -> dict[str, list[str]]:
        return {"TagSet": []}


class PlayedBody:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read(self) -> bytes:
        return self._body

    def close(self) -> None:
        pass


WHOLE_CRC32 = base64.b64encode(zlib.crc32(questions.BODY).to_bytes(4, "big")).decode()


@pytest.mark.parametrize(
    ("body", "name", "detail"),
    [
        (questions.BODY, "conditional_put", ""),
        (questions.BODY, "conditional_get", "sent again"),
        (questions.BODY, "range", "other bytes"),
        (questions.BODY[2:7], "range_checksum", "whole object"),
        (questions.BODY, "checksum_header", "wrong checksum"),
        (questions.BODY, "checksum_trailer", "not kept"),
        (b"29\r\n" + questions.BODY, "checksum_trailer", "framing"),
        (questions.BODY, "delete_batch", "still there"),
        (questions.BODY, "tagging", ""),
    ],
)
async def test_what_is_taken_and_not_kept_to_is_ignored(
    body: bytes, name: str, detail: str
) -> None:
    question = next(asked for names, asked in questions.WRITING.items() if name in names)
    found: dict[str, Seen] = {}
    await question(Played(body), found)  # type: ignore[arg-type]  # plays what is used of it
    assert found[name].support is IGNORED
    assert detail in found[name].detail


async def test_a_bucket_that_does_not_exist_is_an_error(proxy: FaultServer) -> None:
    with pytest.raises(RemoteError, match="NoSuchBucket"):
        await ask(proxy, "no-such-bucket")
    assert proxy.count("PUT") == 0
