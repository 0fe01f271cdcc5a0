from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from ec_s3 import chunks, prices, s3, transfer, uploads
from ec_s3.cli.app import app
from ec_s3.config import ECConfig
from ec_s3.directory import DirectoryStore
from ec_s3.errors import ConfigError
from ec_s3.ingest import ingest
from ec_s3.intake import Source
from ec_s3.keys import Namespace
from ec_s3.prices import Prices, read_prices
from ec_s3.types import ItemMeta

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

SPACE = Namespace(model="org/model", dtype="bfloat16")
SLOW = Namespace(model="org/slow", dtype="bfloat16")
SILENT = Namespace(model="org/silent", dtype="bfloat16")
ROUND = {
    "source": "a test",
    "as_of": "today",
    "currency": "EUR",
    "storage_gb_month": 1.0,
    "put_per_1000": 1000.0,
    "get_per_1000": 100.0,
    "transfer_gb": 2.0,
    "gpu_hour": 3600.0,
}
GB = 1 << 30


def listed(**given: float) -> Prices:
    return Prices(**{**ROUND, **given})  # type: ignore[arg-type]  # texts and numbers by name


@pytest.mark.parametrize("option", ["--reuses", "--months", "--encode-ms"])
@pytest.mark.parametrize("value", ["inf", "nan", "1e308"])
def test_a_number_that_no_bill_can_hold_is_wrong_usage(
    option: str, value: str, tmp_path: Path
) -> None:
    arguments = ["--json", "--url", f"file://{tmp_path}", "cost", option, value]
    assert CliRunner().invoke(app, arguments).exit_code == 2


class TestPrices:
    def test_each_figure_is_what_its_price_says(self) -> None:
        p = listed()
        assert p.month(3 * GB) == 3.0
        assert p.transfer(3 * GB) == 6.0
        assert p.store(1000) == pytest.approx(1.0)
        assert p.store(2 << 20) == pytest.approx(1.1)  # asked for first
        assert p.store(80 << 20) == pytest.approx(2 + 5 + 0.1)  # in five parts
        assert p.requests(1000) == pytest.approx(0.1)
        assert p.requests(20 << 20) == pytest.approx(0.3)
        assert p.encoding(2.5) == 2.5

    def test_an_item_pays_when_its_fetches_have_earned_what_it_costs(self) -> None:
        p = listed(transfer_gb=0.0)
        # 1.1 to store, 1/64 a month to keep; each fetch earns 0.6 - 0.2 (two ranges).
        uses = p.break_even(16 << 20, 0.6, months=4)
        assert uses == pytest.approx((1.1 + 4 / 64) / 0.4)

    def test_where_a_fetch_costs_more_than_the_encoder_it_never_pays(self) -> None:
        assert listed().break_even(1000, 0.05, months=1) is None

    def test_sizes_are_those_that_the_library_works_with(self) -> None:
        assert prices.RANGE_BYTES == chunks.RANGE_BYTES
        assert prices.HEAD_ABOVE == uploads.HEAD_ABOVE
        assert prices.PART_BYTES == transfer.PART_BYTES
        assert prices.MULTIPART_ABOVE == s3._MULTIPART_BYTES

    def test_shipped_prices_name_their_source_and_date(self) -> None:
        shipped = read_prices()
        assert "aws.amazon.com/s3/pricing" in shipped.source
        assert shipped.as_of.startswith("20")
        assert shipped.storage_gb_month == 0.023

    def test_a_file_replaces_what_it_holds(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text("gpu_hour: 2\n")
        mine = read_prices(path)
        assert (mine.gpu_hour, mine.storage_gb_month) == (2.0, 0.023)
        assert str(path) in mine.source

    @pytest.mark.parametrize(
        "text", ["gpu_hours: 2\n", "gpu_hour: -1\n", "gpu_hour: much\n", "- 1\n", "a: [\n"]
    )
    def test_a_file_that_holds_anything_else_is_refused(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match="prices"):
            read_prices(path)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_prices(tmp_path / "none.yaml")


class Bucket:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, space: Namespace, count: int, seconds: float | None) -> None:
        async def write() -> None:
            store = DirectoryStore(self.folder)
            meta = ItemMeta(encode_seconds=seconds)
            items = [
                Source(str(n), 4096, lambda: torch.randn(64, 32).bfloat16(), meta)
                for n in range(count)
            ]
            await ingest(store, items, ECConfig(), space)
            await store.aclose()

        asyncio.run(write())

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["--url", f"file://{self.folder}", *arguments])

    def records(self, *arguments: str) -> list[dict[str, Any]]:
        result = self.run("--json", "cost", *arguments)
        assert result.exit_code == 0, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


@pytest.fixture
def round_prices(tmp_path: Path) -> str:
    path = tmp_path / "prices.yaml"
    path.write_text(json.dumps(ROUND))
    return str(path)


class TestCommand:
    def test_each_model_has_its_bill(self, bucket: Bucket, round_prices: str) -> None:
        bucket.add(SPACE, 3, 0.5)
        bucket.add(SLOW, 2, 4.0)
        *bills, end = bucket.records("--prices", round_prices, "--reuses", "10")
        found = {bill["namespace"]: bill for bill in bills}
        fast, slow = found[SPACE.id], found[SLOW.id]
        assert (fast["objects"], fast["sampled"], fast["encode_seconds"]) == (3, 3, 0.5)
        assert fast["raw_bytes"] == 3 * 4096
        assert fast["gpu_seconds_saved"] == pytest.approx(15.0)
        assert fast["saved"] == pytest.approx(15.0)
        assert fast["requests"] == pytest.approx(30 * 0.1)
        assert fast["writing"] == pytest.approx(3.0)
        assert fast["storage"] == pytest.approx(fast["stored_bytes"] / GB)
        assert slow["break_even"] < fast["break_even"]
        assert end["total"]["objects"] == 5
        assert end["total"]["saved"] == pytest.approx(15.0 + 80.0)
        assert end["prices"]["currency"] == "EUR"
        assert end["assumptions"]["reuses"] == 10

    def test_the_table_explains_each_line(self, bucket: Bucket, round_prices: str) -> None:
        bucket.add(SPACE, 3, 0.5)
        result = bucket.run("cost", "--prices", round_prices)
        assert result.exit_code == 0
        for lead in ("storage", "requests", "transfer", "writing", "saved", "pays after", "prices"):
            assert f"\n{lead}" in result.stdout
        assert "a test" in result.stdout

    def test_an_unknown_encode_time_can_be_given(self, bucket: Bucket, round_prices: str) -> None:
        bucket.add(SILENT, 2, None)
        bill, _ = bucket.records("--prices", round_prices)
        assert (bill["encode_seconds"], bill["saved"], bill["break_even"]) == (None, None, None)
        assert "--encode-ms" in bucket.run("cost").stderr
        bill, _ = bucket.records("--prices", round_prices, "--encode-ms", "2000")
        assert bill["saved"] == pytest.approx(4.0)
        assert bill["pays"] is True

    def test_what_never_pays_is_said(self, bucket: Bucket, round_prices: str) -> None:
        bucket.add(SPACE, 2, 0.01)
        bill, _ = bucket.records("--prices", round_prices)
        assert (bill["pays"], bill["break_even"]) == (False, None)
        assert "never" in bucket.run("cost", "--prices", round_prices).stdout

    def test_a_sample_of_headers_is_enough(self, bucket: Bucket) -> None:
        bucket.add(SPACE, 30, 0.5)
        bill, _ = bucket.records("--sample", "4")
        assert (bill["objects"], bill["sampled"], bill["encode_seconds"]) == (30, 4, 0.5)

    def test_a_damaged_object_is_left_out_of_the_sample(self, bucket: Bucket) -> None:
        bucket.add(SPACE, 2, 0.5)
        path = bucket.folder / SPACE.object_key("0")
        path.write_bytes(b"damaged")
        bill, _ = bucket.records()
        assert (bill["objects"], bill["sampled"]) == (2, 1)

    def test_an_empty_store_costs_nothing(self, bucket: Bucket) -> None:
        (end,) = bucket.records()
        assert end["total"]["objects"] == 0
        assert bucket.run("cost").exit_code == 0

    def test_bad_prices_are_wrong_usage(self, bucket: Bucket, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text("gpu_hours: 2\n")
        result = bucket.run("cost", "--prices", str(path))
        assert result.exit_code == 2
        assert "gpu_hours" in result.stderr
