"""The Ray pipeline on a local Ray of two workers; `make ray-test` runs it."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from ec_s3.errors import ConfigError, ECS3Error
from ec_s3.keys import Namespace
from ec_s3.prewarm.encoding import EncoderSettings
from ec_s3.prewarm.ray import Cluster, Worker, pipeline
from ec_s3.testing.encoder import PlayedEncoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ec_s3.prewarm.encoding import Encoder, Failed, Identified, MediaItem

SPACE = Namespace(model="org/model", dtype="float32")
PICTURES = 24


def start(settings: EncoderSettings) -> PlayedEncoder:
    return PlayedEncoder(settings.connector, SPACE)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    names = [f"{number}.png" for number in range(PICTURES)]
    for number, name in enumerate(names):
        body = io.BytesIO()
        Image.new("RGB", (4, 4), (number, 1, 2)).save(body, "PNG")
        (tmp_path / name).write_bytes(body.getvalue())
    path = tmp_path / "list.jsonl"
    rows = [json.dumps({"uri": name}) for name in [*names, "absent.png"]]
    path.write_text("\n".join(rows))
    return path


def settings(manifest: Path) -> EncoderSettings:
    url = f"file://{manifest.parent}/bucket"
    return EncoderSettings(model="org/model", connector={"url": url}, batch_size=4)


def objects(manifest: Path) -> list[str]:
    files = (manifest.parent / "bucket").rglob("*")
    return sorted(path.name for path in files if len(path.name) == 64)


def summed(rows: list[dict[str, Any]], name: str) -> int:
    return sum(row[name] for row in rows)


_STARTED: list[PlayedEncoder] = []


def remembered(settings: EncoderSettings) -> PlayedEncoder:
    _STARTED.append(start(settings))
    return _STARTED[-1]


@pytest.fixture(autouse=True)
def ended_workers() -> Iterator[None]:
    """A worker's encoder lives as long as its process, which here has other tests to do."""
    yield
    while _STARTED:
        _STARTED.pop().close()


def worker(manifest: Path, *, shares: int = 4) -> Worker:
    return Worker(
        media=str(manifest),
        settings=settings(manifest),
        shares=shares,
        max_requests=None,
        start=remembered,
    )


def test_worker_keeps_its_encoder_from_share_to_share(manifest: Path) -> None:
    one = worker(manifest)
    rows = [one({"id": index}) for index in range(4)]
    kept = one._encoder
    assert summed(rows, "encoded") == PICTURES == len(objects(manifest))
    again = [one({"id": index}) for index in range(4)]
    assert (summed(again, "encoded"), summed(again, "present")) == (0, PICTURES)
    assert one._encoder is kept
    failures = [entry for row in rows for entry in json.loads(row["failures"])]
    assert [(entry["uri"], entry["line"]) for entry in failures] == [("absent.png", 25)]


class Broken(PlayedEncoder):
    """Its process is gone for good."""

    broken = False

    def identify(
        self, items: Sequence[MediaItem], data: Sequence[bytes | Path]
    ) -> list[Identified | Failed]:
        if self.broken:
            raise ECS3Error("the encoder's process has died 16 times in a row")
        return super().identify(items, data)


def test_worker_whose_encoder_is_gone_starts_another_for_the_next_share(manifest: Path) -> None:
    started: list[Broken] = []

    def begin(settings: EncoderSettings) -> Broken:
        started.append(Broken(settings.connector, SPACE))
        _STARTED.append(started[-1])
        return started[-1]

    one = Worker(
        media=str(manifest), settings=settings(manifest), shares=4, max_requests=None, start=begin
    )
    one({"id": 0})
    started[0].broken = True
    assert "16 times" in one({"id": 1})["stopped"]
    assert started[0].closed
    assert one({"id": 2})["stopped"] == ""
    assert len(started) == 2


def test_encoder_of_a_worker_writes_into_the_bucket_of_its_job(
    manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(manifest)
    monkeypatch.setenv("EC_S3_URL", str(given.connector["url"]))
    one = Worker(
        media=str(manifest),
        settings=replace(given, connector={}),
        shares=1,
        max_requests=None,
        start=remembered,
    )
    seen: list[EncoderSettings] = []
    start_it = one._start

    def begin(settings: EncoderSettings) -> Encoder:
        seen.append(settings)
        return start_it(settings)

    one._start = begin
    one({"id": 0})
    assert seen[0].connector["url"] == given.connector["url"]


def test_without_ray_it_says_what_to_install(
    manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ec-s3\[ray\]"):
        pipeline(str(manifest), settings(manifest), Cluster(workers=1))


@pytest.fixture
def local_ray() -> Iterator[None]:
    """A Ray on this machine; skipped without Ray, unless REQUIRE_RAY forbids that."""
    if find_spec("ray") is None:
        if os.environ.get("REQUIRE_RAY"):
            pytest.fail("Ray is not installed, and REQUIRE_RAY is set; run `make ray-test`")
        pytest.skip("Ray is not installed")
    import ray

    ray.init(num_cpus=3, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # Ray's own are many
def test_two_workers_of_a_cluster_do_what_one_job_does(manifest: Path, local_ray: None) -> None:
    cluster = Cluster(workers=2, gpus=0, shares=6)
    rows = pipeline(str(manifest), settings(manifest), cluster, start=start).take_all()
    assert sorted(row["share"] for row in rows) == list(range(6))
    assert (summed(rows, "encoded"), summed(rows, "failed")) == (PICTURES, 1)
    assert {row["stopped"] for row in rows} == {""}
    made = objects(manifest)
    assert len(made) == PICTURES
    again = pipeline(str(manifest), settings(manifest), cluster, start=start).take_all()
    assert (summed(again, "encoded"), summed(again, "present")) == (0, PICTURES)
    assert objects(manifest) == made
    shutil.rmtree(manifest.parent / "bucket")
    worker(manifest, shares=1)({"id": 0})
    assert objects(manifest) == made
