"""`du`: what is counted is exact, what is estimated says so, and the picture can be read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
from cli_bucket import LAST, MILLION, OTHER, SPACE, Bucket, Listing, item, traced_peak

from ec_s3.cli.output import Output
from ec_s3.cli.usage import du
from ec_s3.cli.usage_picture import Bar, draw
from ec_s3.keys import Namespace

if TYPE_CHECKING:
    from pathlib import Path

DAY = 86_400.0
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


def test_sizes_are_added_up_by_namespace_and_age(bucket: Bucket) -> None:
    for name, days in (("a", 0), ("b", 3), ("c", 200)):
        bucket.add(name, age=days * DAY)
    bucket.add("a", OTHER, age=50 * DAY)
    bucket.describe(SPACE)
    bucket.put("v1/notes.txt", b"x")
    *records, last = bucket.records("du")
    stored = {r["namespace"]: r["stored_bytes"] for r in records}
    assert stored == {
        space.id: sum(
            (bucket.folder / key).stat().st_size
            for key in bucket.stored()
            if f"/{space.id}/" in f"/{key}"
        )
        for space in (SPACE, OTHER)
    }
    [first] = [r for r in records if r["namespace"] == SPACE.id]
    assert first["model"] == "org/model"
    assert (first["objects"], first["raw_bytes"], first["exact"]) == (3, 3 * 256, True)
    assert [group["objects"] for group in first["ages"]] == [1, 1, 0, 0, 1]
    assert [group["up_to_days"] for group in first["ages"]] == [1, 7, 30, 90, None]
    assert sum(group["stored_bytes"] for group in first["ages"]) == first["stored_bytes"]
    assert (first["newest_days"], first["oldest_days"]) == pytest.approx((0, 200), abs=0.1)
    total = last["total"]
    assert (total["objects"], total["raw_bytes"], total["foreign"]) == (4, 4 * 256, 1)


def test_people_see_two_tables_and_totals(bucket: Bucket) -> None:
    bucket.add("a")
    bucket.add("a", OTHER, age=50 * DAY)
    bucket.describe(SPACE)
    result = bucket.run("du")
    assert result.exit_code == 0
    for text in ("org/model", "Raw", "up to 1 day", "30 to 90 days", "2 objects:", "512 B raw"):
        assert text in result.stdout
    assert "estimated" not in result.stderr


def test_a_prefix_limits_what_is_counted(bucket: Bucket) -> None:
    bucket.add("a")
    bucket.add("a", OTHER)
    *records, _ = bucket.records("du", SPACE.prefix)
    assert [r["namespace"] for r in records] == [SPACE.id]


def test_raw_bytes_of_many_items_are_estimated_and_it_is_said_from_how_many(
    bucket: Bucket,
) -> None:
    for number in range(70):
        bucket.add(str(number))
    [record, _] = bucket.records("du")
    assert (record["sampled"], record["exact"]) == (64, False)
    assert record["raw_bytes"] == pytest.approx(70 * 256, rel=0.02)
    assert "headers of 64 objects" in bucket.run("du").stderr


def test_items_that_cannot_be_read_count_as_stored_only(bucket: Bucket) -> None:
    bucket.put(SPACE.object_key("broken"), b"no object of ours")
    [record, last] = bucket.records("du")
    assert (record["raw_bytes"], record["sampled"]) == (None, 0)
    assert last["total"]["raw_bytes"] is None
    assert "unknown raw" in bucket.run("du").stdout


def test_an_empty_store_holds_nothing(bucket: Bucket) -> None:
    bucket.folder.mkdir()
    [last] = bucket.records("du")
    assert last["total"]["objects"] == 0
    assert "0 objects" in bucket.run("du").stdout


async def test_a_million_objects_are_added_up_in_flat_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = Listing(MILLION, trace_at=MILLION - LAST)
    assert await du(store, Output(json=True)) == 0
    total = json.loads(capsys.readouterr().out.splitlines()[-1])["total"]
    assert (total["objects"], total["stored_bytes"]) == (MILLION, 10**9)
    assert traced_peak() < 1 << 18


class TestPicture:
    def texts(self, path: Path) -> list[str]:
        root = ElementTree.parse(path).getroot()
        return [element.text or "" for element in root.iter(f"{SVG}text")]

    def test_it_names_models_sizes_and_ages(self, bucket: Bucket, tmp_path: Path) -> None:
        bucket.add("a")
        bucket.describe(SPACE)
        bucket.add("a", OTHER, age=50 * DAY)
        path = tmp_path / "usage.svg"
        assert bucket.run("du", "--picture", str(path)).exit_code == 0
        texts = " ".join(self.texts(path))
        for text in ("org/model", OTHER.slug, "256 B raw", "up to 1 day", "over 90 days"):
            assert text in texts

    def test_every_bar_is_as_long_as_its_share(self, tmp_path: Path) -> None:
        path = tmp_path / "usage.svg"
        draw(
            [Bar("x", (300, 0, 100, 0, 0), None), Bar("y", (100, 0, 0, 0, 0), 200)], path, moment=0
        )
        root = ElementTree.parse(path).getroot()
        rows = [e for e in root.iter(f"{SVG}rect") if e.get("height") in {"22", "25"}]
        widths = [float(e.get("width", "")) for e in rows]
        assert widths == pytest.approx([300, 100, 100, 200])

    def test_what_does_not_fit_is_drawn_as_one_bar(self, tmp_path: Path) -> None:
        path = tmp_path / "usage.svg"
        draw([Bar(f"n{n}", (n, 0, 0, 0, 0), n) for n in range(40, 0, -1)], path, moment=0)
        assert "26 smaller namespaces" in self.texts(path)
        draw([], path, moment=0)
        assert "0 B stored, 1970-01-01 00:00 UTC" in self.texts(path)

    def test_names_from_the_bucket_cannot_add_markup(self, tmp_path: Path) -> None:
        path = tmp_path / "usage.svg"
        draw([Bar("<script>\x1b&", (1, 0, 0, 0, 0), None)], path, moment=0)
        assert r"<script>\x1b&" in self.texts(path)

    @pytest.mark.parametrize("name", ["usage.png", "usage"])
    def test_another_format_is_wrong_usage_before_anything_is_listed(
        self, bucket: Bucket, tmp_path: Path, name: str
    ) -> None:
        result = bucket.run("du", "--picture", str(tmp_path / name))
        assert result.exit_code == 2
        assert ".svg" in result.stderr

    def test_a_folder_that_does_not_exist_is_wrong_usage(
        self, bucket: Bucket, tmp_path: Path
    ) -> None:
        bucket.add("a")
        path = tmp_path / "no" / "usage.svg"
        assert bucket.run("du", "--picture", str(path)).exit_code == 2


def test_two_dtypes_of_a_namespace_are_two_rows(bucket: Bucket) -> None:
    half = Namespace(model=SPACE.model, dtype="float16")
    for space in (SPACE, half):
        key, body, _ = item("a", space)
        bucket.put(key, body)
    *records, _ = bucket.records("du")
    assert {r["namespace"] for r in records} == {SPACE.id, half.id}
