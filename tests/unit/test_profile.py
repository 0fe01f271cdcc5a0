"""What is known of stores: the table, the known profiles, and what a store learns as it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ec_s3.profile import (
    BY_NAME,
    CAPABILITIES,
    Capabilities,
    KnownProfile,
    Seen,
    Support,
    condition_of,
    known_profiles,
    nearest,
)
from ec_s3.s3 import S3Store
from ec_s3.testing.faults import Fault, FaultServer
from ec_s3.testing.servers import KINDS
from ec_s3.types import PutOutcome
from ec_s3.url import S3Location, S3Options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from ec_s3.testing.moto import S3Server

HONOURED, IGNORED, REFUSED = Support.HONOURED, Support.IGNORED, Support.REFUSED


def known(name: str) -> KnownProfile:
    return next(profile for profile in known_profiles() if profile.name == name)


class TestTable:
    def test_every_gap_has_a_cost_or_a_reason_why_it_has_none(self) -> None:
        for capability in CAPABILITIES:
            costs = bool(capability.ignored or capability.refused)
            assert costs != bool(capability.free), capability.name

    def test_names_are_unique(self) -> None:
        assert len(BY_NAME) == len(CAPABILITIES)

    @pytest.mark.parametrize("support", [HONOURED, Support.UNKNOWN])
    def test_what_is_honoured_or_not_known_costs_nothing(self, support: Support) -> None:
        assert not any(capability.cost(support) for capability in CAPABILITIES)

    @pytest.mark.parametrize(
        ("condition", "in_parts", "name"),
        [
            ({}, False, ""),
            ({}, True, ""),
            ({"IfNoneMatch": "*"}, False, "conditional_put"),
            ({"IfMatch": '"e"'}, False, "conditional_replace"),
            ({"IfNoneMatch": "*"}, True, "conditional_complete"),
            ({"IfMatch": '"e"'}, True, "conditional_complete"),
        ],
    )
    def test_a_write_uses_the_capability_of_its_condition(
        self, condition: dict[str, object], in_parts: bool, name: str
    ) -> None:
        assert condition_of(condition, in_parts=in_parts) == name


class TestKnownProfiles:
    @pytest.mark.parametrize("profile", known_profiles(), ids=lambda p: p.name)
    def test_a_profile_says_where_it_is_from(self, profile: KnownProfile) -> None:
        assert profile.source in ("measured", "documentation")
        assert profile.version
        assert profile.supports
        if profile.source == "measured":
            assert profile.kind in KINDS
        else:
            assert profile.link.startswith("https://")
            assert all(place.startswith("https://") for place in profile.places.values())
        assert profile.places.keys() <= profile.supports.keys()

    def test_the_servers_that_people_run_are_among_them(self) -> None:
        names = {profile.name for profile in known_profiles()}
        services, servers = {"aws", "aws-express", "r2", "gcs"}, {"minio", "juicefs", "ceph"}
        assert services | servers | {"seaweedfs", "swift"} <= names

    @pytest.mark.parametrize(
        ("headers", "host", "name"),
        [
            ({"server": "AmazonS3"}, "proxy.example", "aws"),
            ({}, "s3.eu-central-1.amazonaws.com", "aws"),
            ({}, "bucket.s3.eu-central-1.amazonaws.com", "aws"),
            ({}, "s3express-use1-az4.us-east-1.amazonaws.com", "aws-express"),
            ({}, "account.r2.cloudflarestorage.com", "r2"),
            ({"server": "UploadServer"}, "storage.googleapis.com", "gcs"),
            ({"server": "SeaweedFS 8000GB 4.48"}, "127.0.0.1", "seaweedfs"),
            ({"x-amz-request-id": "tx00000df941dd6-006b0db23a-100f-default"}, "h", "ceph"),
            ({"x-openstack-request-id": "tx53ba96c3628-006b0de925"}, "h", "swift"),
        ],
    )
    def test_a_server_is_recognised_from_outside(
        self, headers: dict[str, str], host: str, name: str
    ) -> None:
        found = nearest(headers, host, {})
        assert found is not None
        assert found.name == name

    def test_an_unknown_server_is_like_none(self) -> None:
        assert nearest({"server": "nginx"}, "s3.example", {}) is None

    def test_of_several_alike_the_one_that_does_most_alike_is_taken(self) -> None:
        old = {"conditional_put": Seen(IGNORED), "delete_batch": Seen(REFUSED)}
        new = {"conditional_put": Seen(HONOURED), "delete_batch": Seen(HONOURED)}
        between = {"conditional_put": Seen(HONOURED), "delete_batch": Seen(REFUSED)}
        for seen, name in ((old, "juicefs"), (new, "minio"), (between, "minio-2024")):
            found = nearest({"server": "MinIO"}, "localhost", seen)
            assert found is not None
            assert found.name == name

    def test_what_is_not_known_is_no_difference(self) -> None:
        seen = {
            "conditional_put": Seen(IGNORED),
            "conditional_replace": Seen(Support.UNKNOWN, "denied"),
            "path_style": Seen(HONOURED),
        }
        assert known("ceph").differences(seen) == {"conditional_put": (HONOURED, IGNORED)}


class TestLearning:
    def test_nothing_is_known_before_an_answer(self) -> None:
        capabilities = Capabilities()
        assert capabilities["conditional_put"] is Support.UNKNOWN
        assert not capabilities.refuses("conditional_put")
        assert not capabilities.refuses("")

    def test_only_the_first_time_is_news(self) -> None:
        capabilities = Capabilities()
        assert capabilities.learn("multipart", REFUSED)
        assert not capabilities.learn("multipart", REFUSED)
        assert capabilities.learn("multipart", HONOURED)

    def test_a_snapshot_does_not_change(self) -> None:
        capabilities = Capabilities()
        before = capabilities.snapshot()
        capabilities.learn("multipart", REFUSED)
        assert before == {}
        assert capabilities.snapshot() == {"multipart": REFUSED}

    def test_what_does_not_exist_cannot_be_learned(self) -> None:
        with pytest.raises(KeyError):
            Capabilities().learn("telepathy", HONOURED)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultServer]:
    with FaultServer(s3_server.url) as made:
        yield made


class TestAStoreLearns:
    @pytest.fixture
    async def store(self, proxy: FaultServer, bucket: str) -> AsyncIterator[S3Store]:
        made = S3Store(S3Location(bucket, "p", endpoint=proxy.url), S3Options())
        yield made
        await made.aclose()

    async def test_from_a_condition_that_failed(self, store: S3Store) -> None:
        await store.put("a/k", [b"1"])
        assert store.capabilities.snapshot() == {}
        assert await store.put("a/k", [b"2"]) is PutOutcome.EXISTS
        assert store.capabilities["conditional_put"] is HONOURED

    async def test_from_a_refusal_and_asks_no_more(
        self, store: S3Store, proxy: FaultServer
    ) -> None:
        proxy.add(Fault(method="PUT", header="(?i)if-none-match", status=501))
        assert await store.put("a/k", [b"1"]) is PutOutcome.WRITTEN
        assert store.capabilities["conditional_put"] is REFUSED
        assert await store.put("a/other", [b"1"]) is PutOutcome.WRITTEN
        assert sum(bool(request.header("if-none-match")) for request in proxy.log) == 1

    async def test_each_condition_by_itself(self, store: S3Store, proxy: FaultServer) -> None:
        await store.put("a/k", [b"1"])
        info = await store.head("a/k")
        assert info is not None
        proxy.add(Fault(method="PUT", header="(?i)if-match", status=501))
        replaced = await store.put("a/k", [b"2"], if_match=info.etag)
        assert replaced is PutOutcome.WRITTEN
        assert store.capabilities["conditional_replace"] is REFUSED
        assert await store.put("a/k", [b"3"]) is PutOutcome.EXISTS
        assert store.capabilities["conditional_put"] is HONOURED

    async def test_to_read_what_is_new_without_a_condition(
        self, store: S3Store, proxy: FaultServer
    ) -> None:
        await store.put("a/k", [b"body"])
        info = await store.head("a/k")
        assert info is not None
        proxy.add(Fault(method="GET", header="(?i)if-none-match", status=501))

        async def read() -> bytes:
            found = await store.get(
                "a/k", into=lambda n: memoryview(bytearray(n)), if_none_match=info.etag
            )
            assert found is not None
            return bytes(found.body)

        assert await read() == b"body"
        assert store.capabilities["conditional_get"] is REFUSED
        proxy.clear_log()
        assert await read() == b"body"
        assert proxy.count("GET") == 1
