"""Store profile."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from ec_s3 import probe
from ec_s3.cli.app import app
from ec_s3.profile import KnownProfile, Support, known_profiles, nearest
from ec_s3.url import S3Location, S3Options, parse_url

if TYPE_CHECKING:
    from ec_s3.testing.servers import RealServer

pytestmark = [pytest.mark.interop, pytest.mark.smoke]

MEASURED = {known.kind: known for known in known_profiles() if known.kind}
KINDS = (*MEASURED, "ceph-https")


def known_of(server: RealServer) -> KnownProfile:
    return MEASURED[server.kind.removesuffix("-https")]


@pytest.mark.parametrize("real_server", KINDS, indirect=True)
async def test_the_store_does_what_its_known_profile_says(
    real_server: RealServer, real_bucket: str
) -> None:
    location = parse_url(real_server.url(real_bucket, "some/prefix"))
    assert isinstance(location, S3Location)
    ca = real_server.ca_bundle if real_server.endpoint.startswith("https") else None
    options = S3Options(ca_bundle=str(ca) if ca else None)
    report = await probe.ask(location, options, folder="doctor/x", every_key=True)
    known = known_of(real_server)
    seen = {name: report.seen[name].support for name in known.supports}
    assert seen == known.supports, report.seen
    assert nearest(report.headers, "127.0.0.1", report.seen) is known
    for name, said in known.places.items():
        assert report.seen[name].detail == said
    left = real_server.client().list_objects_v2(Bucket=real_bucket)
    assert not left.get("Contents")
    assert report.leftovers == ()


@pytest.mark.parametrize("real_server", KINDS, indirect=True)
def test_doctor_finds_nothing_wrong_and_names_the_server(
    real_server: RealServer, real_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if real_server.endpoint.startswith("https"):
        monkeypatch.setenv("EC_S3_CA_BUNDLE", str(real_server.ca_bundle))
    arguments = ["--json", "--url", real_server.url(real_bucket, "p"), "doctor"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["profile"]["known"]["name"] == known_of(real_server).name
    assert report["profile"]["differences"] == {}
    unknown = [c for c in report["profile"]["capabilities"] if c["support"] == Support.UNKNOWN]
    assert {c["name"] for c in unknown} <= {"virtual_host"}
    assert not real_server.client().list_objects_v2(Bucket=real_bucket).get("Contents")
