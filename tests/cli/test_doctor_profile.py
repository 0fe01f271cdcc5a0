"""`ec-s3 doctor` about the store: its profile, what gaps cost, and nothing is left behind."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from ec_s3.cli.app import app
from ec_s3.cli.doctor_profile import Profile, verdict
from ec_s3.config import ECConfig
from ec_s3.probe import Report
from ec_s3.profile import CAPABILITIES, Seen, Support, known_profiles
from ec_s3.testing.faults import Fault, FaultServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ec_s3.testing.moto import S3Server

HONOURED, IGNORED, REFUSED = Support.HONOURED, Support.IGNORED, Support.REFUSED


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultServer]:
    with FaultServer(s3_server.url) as made:
        yield made


def examined(proxy: FaultServer, bucket: str, *, code: int = 0) -> dict[str, Any]:
    url = f"s3://{bucket}/p?endpoint={proxy.url}"
    result = CliRunner().invoke(app, ["--json", "--url", url, "doctor"])
    assert result.exit_code == code, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def check_of(report: dict[str, Any]) -> dict[str, Any]:
    return next(check for check in report["checks"] if check["check"] == "profile")


def support_of(report: dict[str, Any], name: str) -> str:
    rows: list[dict[str, str]] = report["profile"]["capabilities"]
    return next(row["support"] for row in rows if row["name"] == name)


def written(proxy: FaultServer) -> set[str]:
    """Keys that were to be written, without the folder of probes."""
    paths = [request.path.partition("?")[0] for request in proxy.log if request.method == "PUT"]
    return {path.split("/doctor/", 1)[1].partition("/")[2] for path in paths}


def test_a_program_reads_what_the_store_does_and_which_server_it_is_like(
    proxy: FaultServer, bucket: str
) -> None:
    report = examined(proxy, bucket)
    profile = report["profile"]
    assert profile["known"]["name"] == "moto"
    assert profile["known"]["source"] == "measured"
    assert profile["differences"] == {}
    assert [row["name"] for row in profile["capabilities"]] == [
        capability.name for capability in CAPABILITIES if capability.asked
    ]
    assert support_of(report, "checksum_header") == IGNORED
    assert check_of(report)["status"] == "ok"


def test_people_read_the_table_the_cost_and_the_difference(
    proxy: FaultServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    proxy.add(Fault(method="PUT", header="(?i)if-none-match", status=501))
    url = f"s3://{bucket}/p?endpoint={proxy.url}"
    result = CliRunner().invoke(app, ["--url", url, "doctor"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "1 gap at a cost" in text
    assert "a HEAD before each PUT" in text
    assert "conditional_put: refused here, honoured in moto" in text
    assert "but for conditional_put" in text


def test_a_known_gap_says_what_is_known_and_what_was_seen(proxy: FaultServer, bucket: str) -> None:
    proxy.add(Fault(path="delete$", status=400))
    report = examined(proxy, bucket)
    assert report["profile"]["differences"] == {
        "delete_batch": {"known": "honoured", "seen": "refused"},
        "delete_batch_md5": {"known": "honoured", "seen": "refused"},
    }
    assert check_of(report)["status"] == "ok"  # costs nothing here


def test_where_deleting_is_denied_only_the_one_probe_is_written(
    proxy: FaultServer, bucket: str
) -> None:
    proxy.add(Fault(method="DELETE", status=403))
    report = examined(proxy, bucket)
    assert written(proxy) == {""}
    assert support_of(report, "tagging") == Support.UNKNOWN
    assert support_of(report, "range") == HONOURED
    # Seen in the answers to what the other checks wrote.
    assert support_of(report, "conditional_put") == HONOURED


def test_a_server_that_may_not_delete_is_well_and_leaves_next_to_nothing(
    proxy: FaultServer, bucket: str, s3_server: S3Server
) -> None:
    """The roles `writer` and `prewarm`: their pipelines go on, and nothing piles up."""
    proxy.add(Fault(method="DELETE", status=403))
    checks = {check["check"]: check for check in examined(proxy, bucket)["checks"]}
    assert checks["delete"]["status"] == "note"
    assert "s3:DeleteObject" in checks["delete"]["detail"]
    assert "maintainer" in checks["delete"]["remedy"]
    client = s3_server.client()
    [left] = client.list_objects_v2(Bucket=bucket)["Contents"]
    client.close()
    assert left["Size"] <= 1024


def test_a_deletion_that_fails_otherwise_is_a_failure(proxy: FaultServer, bucket: str) -> None:
    proxy.add(Fault(method="DELETE", status=403, code="InvalidAccessKeyId"))
    checks = {check["check"]: check for check in examined(proxy, bucket, code=1)["checks"]}
    assert checks["delete"]["status"] == "failed"


def test_where_writing_is_denied_no_more_is_tried(proxy: FaultServer, bucket: str) -> None:
    proxy.add(Fault(method="PUT", status=403))
    report = examined(proxy, bucket, code=1)
    assert written(proxy) == {""}
    assert support_of(report, "path_style") == HONOURED
    assert support_of(report, "conditional_put") == Support.UNKNOWN


def test_a_probe_that_stays_behind_is_a_failure_that_names_it(
    proxy: FaultServer, bucket: str
) -> None:
    proxy.add(Fault(method="DELETE", path="tagged", status=403))
    check = check_of(examined(proxy, bucket, code=1))
    assert check["status"] == "failed"
    assert "tagged" in check["detail"]


def test_a_folder_has_no_gaps(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--json", "--url", f"file://{tmp_path}", "doctor"])
    report = json.loads(result.stdout)
    assert check_of(report)["status"] == "ok"
    assert report["profile"] is None


class TestVerdict:
    @staticmethod
    def profile(config: ECConfig | None = None, region: str = "", **supports: Support) -> Profile:
        seen = {name: Seen(support) for name, support in supports.items()}
        report = Report(seen=seen, region=region, configured_region="us-east-1")
        return Profile(report, None, config or ECConfig())

    def test_a_gap_without_a_cost_is_no_note(self) -> None:
        assert verdict(self.profile(checksum_header=IGNORED))[0] == "ok"
        assert verdict(self.profile(conditional_put=IGNORED))[0] == "note"

    def test_lost_tags_cost_only_who_sets_some(self) -> None:
        tagged = ECConfig.from_mapping({"tags": "team=ml"})
        assert verdict(self.profile(tagging=REFUSED))[0] == "ok"
        assert verdict(self.profile(tagged, tagging=REFUSED))[0] == "note"

    def test_a_bucket_in_another_region_is_noted_with_what_to_do(self) -> None:
        status, detail = verdict(self.profile(region="eu-west-1"))
        assert status == "note"
        assert "set region in url" in detail
        assert verdict(self.profile(region="us-east-1"))[0] == "ok"

    def test_what_is_not_measured_is_said_to_be_documented(self) -> None:
        known = {profile.name: profile for profile in known_profiles()}
        report = Report()
        assert "documented" in verdict(Profile(report, known["r2"], ECConfig()))[1]
        assert "measured on" in verdict(Profile(report, known["ceph"], ECConfig()))[1]
