"""A catalogue that was prewarmed by real vLLM is not encoded again by another one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ec_s3.cli.output import ExitCode
from ec_s3.keys import parse_key
from ec_s3.testing.prewarm_jobs import end_job, make_catalogue, sent, start_job

if TYPE_CHECKING:
    from pathlib import Path

    from ec_s3.testing.lab import Lab


def test_prewarmed_catalogue_is_never_encoded_again(lab: Lab, tmp_path: Path) -> None:
    catalogue = make_catalogue(tmp_path, 20)
    job = start_job(
        url=lab.server.location("prewarmed"),
        model=lab.model("qwen2-vl"),
        media=catalogue.manifest,
        workdir=tmp_path,
        name="job",
    )
    code = end_job(job)
    log = (tmp_path / "job.log").read_text(encoding="utf-8")
    assert code == ExitCode.FINDING, log
    report = json.loads((tmp_path / "job.json").read_text(encoding="utf-8"))
    assert (report["encoded"], report["failed"]) == (20, catalogue.broken)
    assert report["index_items"] == 20
    keys = lab.server.items("prewarmed")
    assert len(keys) == 20
    assert {parse_key(key.removeprefix("prewarmed/")).namespace for key in keys} == {
        report["namespace"]
    }

    server = lab.start("qwen2-vl", prefix="prewarmed")
    answers = [lab.ask_with(server, sent(path)) for path in catalogue.pictures[::4]]
    assert [answer.encoded for answer in answers] == [0] * 5
    assert {answer.finish_reason for answer in answers} <= {"stop", "length"}
