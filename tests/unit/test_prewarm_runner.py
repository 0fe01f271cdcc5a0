"""A prewarm job against a real folder as the bucket, with an encoder that makes tensors up."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from ec_s3 import control
from ec_s3.directory import DirectoryStore
from ec_s3.errors import ConfigError, ECS3Error, RemoteThrottledError, RemoteUnavailableError
from ec_s3.index import read_index, tag_of
from ec_s3.keys import Namespace, identifier_digest, parse_key
from ec_s3.prewarm.buckets import MediaBuckets
from ec_s3.prewarm.encoding import Encoder, Failed, Identified, MediaItem
from ec_s3.prewarm.media import MediaReader, Source
from ec_s3.prewarm.pace import Pace
from ec_s3.prewarm.report import Outcome
from ec_s3.prewarm.runner import Hooks, Job, Listeners, Mode
from ec_s3.prewarm.shard import Shard
from ec_s3.prewarm.target import Target
from ec_s3.testing.encoder import PlayedEncoder
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import ItemMeta, ObjectInfo, TensorSpec
from ec_s3.url import S3Options
from ec_s3.wire import encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from ec_s3.prewarm.manifest import BadEntry
    from ec_s3.prewarm.report import Report
    from ec_s3.store import Store

SPACE = Namespace(model="org/model", dtype="float32")


def picture(seed: int, **save: Any) -> bytes:
    body = io.BytesIO()
    Image.new("RGB", (8, 8), (seed % 256, seed // 256, 7)).save(body, "PNG", **save)
    return body.getvalue()


class Bench:
    """Media, a bucket, and jobs between them."""

    def __init__(self, root: Path) -> None:
        self.media = root / "media"
        self.bucket = root / "bucket"
        self.scratch = root / "scratch"
        for folder in (self.media, self.bucket, self.scratch):
            folder.mkdir()
        self.failed: list[BadEntry] = []
        self.advanced = 0
        self.encoders: list[PlayedEncoder] = []
        self.on_encode: Callable[[Sequence[Identified]], object] = lambda _: None
        self.pace = Pace(retry_seconds=0)
        self.encoder_type: type[PlayedEncoder] = PlayedEncoder

    def add(self, count: int) -> None:
        for number in range(count):
            (self.media / f"{number:03}.png").write_bytes(picture(number))

    def objects(self) -> dict[str, bytes]:
        """Key -> body of every item in the bucket."""
        files = [path for path in self.bucket.rglob("*") if path.is_file()]
        keys = {str(path.relative_to(self.bucket)): path for path in files}
        return {key: path.read_bytes() for key, path in keys.items() if len(Path(key).name) == 64}

    @property
    def encoded(self) -> list[str]:
        return [identifier for encoder in self.encoders for identifier in encoder.encoded]

    def open_encoder(self) -> PlayedEncoder:
        settings = {"url": f"file://{self.bucket}"}
        encoder = self.encoder_type(settings, SPACE, on_encode=self.on_encode)
        self.encoders.append(encoder)
        return encoder

    async def job(
        self,
        media: Path | None = None,
        *,
        mode: Mode | None = None,
        shard: Shard | None = None,
        store: Store | None = None,
    ) -> Job:
        store = store or DirectoryStore(self.bucket)
        buckets = MediaBuckets(None, S3Options(), self.pace)
        source = Source(
            str(media or self.media), buckets=buckets, scratch=self.scratch, shard=shard
        )
        await source.open()

        async def open_target(encoder: Encoder) -> Target:
            target = Target(store, encoder.namespace, pace=self.pace, keyring=None)
            await target.open()
            return target

        return Job(
            source,
            reader=MediaReader(source, buckets),
            pace=self.pace,
            mode=mode or Mode(batch_size=4),
            hooks=Hooks(open_encoder=self.open_encoder, open_target=open_target),
            scratch=self.scratch,
        )

    @property
    def listeners(self) -> Listeners:
        return Listeners(failed=self.failed.append, advance=self._advance)

    async def run(self, media: Path | None = None, **how: Any) -> Report:
        return await (await self.job(media, **how)).run(self.listeners)

    def _advance(self, count: int) -> None:
        self.advanced += count


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_every_item_is_encoded_once_and_found_again(bench: Bench) -> None:
    bench.add(10)
    first = await bench.run()
    assert (first.tally.encoded, first.tally.present, first.outcome) == (10, 0, Outcome.ALL)
    assert first.namespace == SPACE.id
    assert len(bench.objects()) == 10
    second = await bench.run()
    assert (second.tally.encoded, second.tally.present) == (0, 10)
    assert len(bench.encoded) == 10
    assert bench.advanced == 20
    assert all(encoder.closed for encoder in bench.encoders)
    assert not list(bench.scratch.iterdir())


async def test_bad_media_are_told_and_the_others_done(bench: Bench) -> None:
    bench.add(97)
    broken_exif = picture(200, exif=b"Exif\0\0not a TIFF header at all")
    (bench.media / "exif.png").write_bytes(broken_exif)
    large = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(large, "PNG")
    (bench.media / "truncated.png").write_bytes(large.getvalue()[:2000])
    (bench.media / "empty.png").touch()
    (bench.media / "text.png").write_text("no picture")
    report = await bench.run(mode=Mode(batch_size=16))
    assert report.outcome is Outcome.SOME
    assert report.tally.encoded == 98
    assert sorted(Path(entry.uri).name for entry in bench.failed) == [
        *("empty.png", "text.png", "truncated.png")
    ]
    assert all(entry.reason and entry.line for entry in bench.failed)
    assert bench.advanced == report.tally.entries == 101


async def test_nothing_usable_never_starts_vllm(bench: Bench) -> None:
    (bench.media / "empty.png").touch()
    (bench.media / "notes.txt").write_text("x")
    report = await bench.run()
    assert report.outcome is Outcome.NONE
    assert report.tally.failed == 2
    assert not bench.encoders


async def test_same_bytes_under_two_names_are_encoded_once(bench: Bench) -> None:
    for name in ("a.png", "b.png", "c.png", "d.png", "e.png"):
        (bench.media / name).write_bytes(picture(1))
    report = await bench.run()
    assert (report.tally.encoded, report.tally.duplicates, report.tally.present) == (1, 3, 1)
    assert report.outcome is Outcome.ALL
    assert len(bench.encoded) == 1


@pytest.mark.parametrize("batch_size", [1, 8])
async def test_two_pictures_of_one_exif_id_are_never_taken_for_each_other(
    bench: Bench, batch_size: int
) -> None:
    for number in (1, 2):
        exif = Image.Exif()
        exif[0x800D] = "one and the same"  # ImageID
        (bench.media / f"{number}.png").write_bytes(picture(number, exif=exif))
    report = await bench.run(mode=Mode(batch_size=batch_size))
    assert (report.tally.encoded, report.tally.failed) == (1, 1)
    (failure,) = bench.failed
    assert failure.uri.endswith("2.png")
    assert "taken" in failure.reason
    assert "EXIF" in failure.reason


async def test_one_uuid_for_two_media_is_never_taken_for_both(bench: Bench) -> None:
    bench.add(2)
    manifest = bench.media / "list.jsonl"
    rows = [{"uri": f"{number:03}.png", "uuid": "a" * 64} for number in range(2)]
    manifest.write_text("\n".join(map(json.dumps, rows)))
    report = await bench.run(manifest)
    assert (report.tally.encoded, report.tally.failed) == (1, 1)
    assert (bench.failed[0].line, "uuid" in bench.failed[0].reason) == (2, True)


async def test_settings_of_the_processor_make_another_item(bench: Bench) -> None:
    bench.add(1)
    manifest = bench.media / "list.jsonl"
    rows = [{"uri": "000.png"}, {"uri": "000.png", "processor": {"max_pixels": 9}}]
    manifest.write_text("\n".join(map(json.dumps, rows)))
    assert (await bench.run(manifest)).tally.encoded == 2


async def test_two_shards_make_the_objects_of_one_run(bench: Bench, tmp_path: Path) -> None:
    bench.add(24)
    await bench.run()
    (tmp_path / "other").mkdir()
    other = Bench(tmp_path / "other")
    other.media = bench.media
    done = [
        (await other.run(shard=Shard(index, 2), mode=Mode(4, index=False))).tally.encoded
        for index in range(2)
    ]
    assert sum(done) == 24
    assert min(done) > 0
    assert other.objects().keys() == bench.objects().keys()


async def test_index_tells_all_that_the_namespace_holds(bench: Bench) -> None:
    bench.add(5)
    report = await bench.run()
    assert report.index is not None
    assert report.index[0] == 5
    name = SPACE.prefix.rpartition("/")[2]
    body = (bench.bucket / SPACE.index_key).read_bytes()
    index = read_index(body, namespace=name, now=time.time(), keyring=None)
    assert all(tag_of(parse_key(key).digest) in index for key in bench.objects())


async def test_without_an_index_none_is_written(bench: Bench) -> None:
    bench.add(1)
    report = await bench.run(mode=Mode(4, index=False))
    assert report.index is None
    assert not (bench.bucket / SPACE.index_key).exists()


async def test_dry_run_counts_and_writes_nothing(bench: Bench) -> None:
    bench.add(6)
    await bench.run()
    before = {path: path.stat().st_mtime_ns for path in bench.bucket.rglob("*")}
    for number in range(6, 10):
        (bench.media / f"{number:03}.png").write_bytes(picture(number))
    (bench.media / "empty.png").touch()
    report = await bench.run(mode=Mode(4, dry_run=True))
    tally = report.tally
    assert (tally.missing, tally.present, tally.failed, tally.encoded) == (4, 6, 1, 0)
    assert tally.output_bytes == 4 * 4 * 16 * 4
    assert tally.known_items == 6
    assert {path: path.stat().st_mtime_ns for path in bench.bucket.rglob("*")} == before


async def test_dry_run_counts_what_a_run_would_encode_once(bench: Bench) -> None:
    for number in range(12):
        (bench.media / f"{number:02}.png").write_bytes(picture(number % 2))
    dry = await bench.run(mode=Mode(4, dry_run=True))
    real = await bench.run(mode=Mode(4))
    assert dry.tally.missing == real.tally.encoded == 2
    assert dry.tally.output_bytes == real.tally.output_bytes
    assert (dry.tally.duplicates, dry.tally.present) == (
        real.tally.duplicates,
        real.tally.present,
    )


class Mortal(PlayedEncoder):
    """Ends for good in its second batch."""

    def encode(self, items: Sequence[Identified]) -> list[Identified | Failed]:
        if self.encoded:
            raise ECS3Error("vLLM has failed")
        return super().encode(items)


async def test_end_of_vllm_is_reported_with_the_entries_that_it_was_encoding(bench: Bench) -> None:
    bench.add(12)
    bench.encoder_type = Mortal
    report = await bench.run()
    assert (report.tally.encoded, report.outcome) == (4, Outcome.SOME)
    assert not report.unreachable
    assert "vLLM has failed; it was encoding the entries of lines 5, 6, 7, 8" in report.stopped


class Unlucky(PlayedEncoder):
    """Of each batch the uploads of these items do not arrive."""

    unlucky: frozenset[str] = frozenset()

    def encode(self, items: Sequence[Identified]) -> list[Identified | Failed]:
        lucky = [item for item in items if Path(item.item.uri).name not in self.unlucky]
        done = {result.item.uri: result for result in super().encode(lucky)}
        lost = [Failed(item=item.item, reason="no luck", blameless=True) for item in items]
        return [done.get(item.item.uri, lost[at]) for at, item in enumerate(items)]


async def test_item_whose_upload_failed_is_told_and_done_by_the_next_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.add(6)
    bench.encoder_type = Unlucky
    monkeypatch.setattr(Unlucky, "unlucky", frozenset({"002.png"}))
    report = await bench.run()
    assert (report.tally.encoded, report.tally.failed) == (5, 1)
    assert bench.failed[0].reason == "no luck"
    bench.encoder_type = PlayedEncoder
    again = await bench.run()
    assert (again.tally.encoded, again.tally.present, again.outcome) == (1, 5, Outcome.ALL)


async def test_job_gives_up_when_batch_after_batch_cannot_be_uploaded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.add(40)
    names = frozenset(f"{number:03}.png" for number in range(40))
    bench.encoder_type = Unlucky
    monkeypatch.setattr(Unlucky, "unlucky", names)
    report = await bench.run()
    assert report.tally.entries == 12
    assert "no luck" in report.stopped
    assert report.outcome is Outcome.NONE


async def test_job_that_is_told_to_stop_ends_after_its_batch(bench: Bench) -> None:
    bench.add(40)
    job = await bench.job()
    bench.on_encode = lambda _: job.stop("told to stop")
    report = await job.run(bench.listeners)
    assert (report.tally.encoded, report.stopped) == (4, "told to stop")
    assert (report.outcome, report.index) == (Outcome.SOME, None)


async def test_media_of_the_next_batch_are_read_while_one_is_encoded(bench: Bench) -> None:
    bench.add(8)
    seen = []

    def look(_: Sequence[Identified]) -> None:
        deadline = time.monotonic() + 30
        while len(list(bench.scratch.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(len(list(bench.scratch.iterdir())))
        bench.on_encode = lambda _: None

    bench.on_encode = lambda items: look(items) if not seen else None
    await bench.run()
    assert seen == [2]


async def test_held_entries_do_not_grow_with_the_manifest(bench: Bench) -> None:
    bench.add(1)
    manifest = bench.media / "list.jsonl"
    manifest.write_text('{"uri": "000.png"}\n' * 5000)
    alive = []

    def count(_: Sequence[Identified]) -> None:
        import gc

        alive.append(sum(type(one) is MediaItem for one in gc.get_objects()))

    bench.on_encode = count
    report = await bench.run(manifest, mode=Mode(batch_size=50))
    assert report.tally.entries == 5000
    assert max(alive) <= 3 * 50


async def test_pictures_of_the_same_bytes_and_another_shape_are_two_items(bench: Bench) -> None:
    for name, size in (("wide.ppm", (30, 15)), ("high.ppm", (15, 30))):
        Image.new("RGB", size, (1, 2, 3)).save(bench.media / name)
    assert (await bench.run()).tally.encoded == 2


class BusyStore(DirectoryStore):
    """A bucket that asks for a slower pace at first."""

    refusals = 8

    async def get(self, *args: Any, **how: Any) -> Any:
        if self.refusals:
            self.refusals -= 1
            raise RemoteThrottledError("slow down", operation="get")
        return await super().get(*args, **how)


async def test_bucket_that_throttles_slows_the_job_and_fails_nothing(bench: Bench) -> None:
    bench.add(12)
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += seconds

    clock = [0.0]
    bench.pace = Pace(clock=lambda: clock[0], sleep=sleep)
    report = await bench.run(store=BusyStore(bench.bucket))
    assert (report.tally.encoded, report.outcome) == (12, Outcome.ALL)
    assert report.retries == 8
    assert max(pauses) > 1


class DeadStore(MemoryStore):
    """A bucket that answers no look."""

    async def get(self, *args: Any, **how: Any) -> Any:
        if self.calls.get("get"):
            raise RemoteUnavailableError("it is gone", operation="get")
        return await super().get(*args, **how)


async def test_bucket_that_cannot_be_read_ends_the_job_with_a_report(bench: Bench) -> None:
    bench.add(3)
    report = await bench.run(store=DeadStore())
    assert report.unreachable
    assert "it is gone" in report.stopped
    assert not bench.encoded
    assert bench.encoders[0].closed


async def test_encoder_that_does_not_fit_ends_the_job_before_the_first_upload(
    bench: Bench,
) -> None:
    bench.add(3)
    job = await bench.job()

    async def refuse(_: object) -> Target:
        raise ConfigError("dtype: server float16, job float32")

    job._hooks = replace(job._hooks, open_target=refuse)
    with pytest.raises(ConfigError, match="dtype"):
        await job.run(bench.listeners)
    assert not bench.objects()
    assert bench.encoders[0].closed


async def test_switched_off_cache_is_not_filled(bench: Bench) -> None:
    bench.add(1)
    store = DirectoryStore(bench.bucket)
    await control.edit(store, SPACE.control_key, lambda now: replace(now, enabled=False))
    with pytest.raises(ConfigError, match="switched off"):
        await bench.run(store=store)


async def test_deleted_items_are_not_brought_back(bench: Bench) -> None:
    bench.add(2)
    await bench.run()
    key = min(bench.objects())
    (bench.bucket / key).unlink()
    store = DirectoryStore(bench.bucket)
    digest = parse_key(key).digest
    until = time.time() + 3600
    await control.edit(
        store,
        SPACE.control_key,
        lambda now: now.with_deleted([digest], until=until, now=time.time()),
    )
    report = await bench.run(store=store)
    assert (report.tally.present, report.tally.failed) == (1, 1)
    assert "deleted by an operator" in bench.failed[0].reason
    assert key not in bench.objects()


async def test_damaged_object_is_told_and_not_taken_for_the_item(bench: Bench) -> None:
    bench.add(1)
    await bench.run()
    (key,) = bench.objects()
    path = bench.bucket / key
    path.write_bytes(path.read_bytes()[:40])
    report = await bench.run()
    assert report.outcome is Outcome.NONE
    assert "unusable object" in bench.failed[0].reason
    assert key in bench.failed[0].reason


async def test_existence_is_asked_in_parallel(bench: Bench) -> None:
    store = MemoryStore()
    target = Target(store, SPACE, pace=Pace(), keyring=None)
    running = highest = 0
    real = store.get

    async def get(*args: Any, **how: Any) -> Any:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        try:
            return await real(*args, **how)
        finally:
            running -= 1

    store.get = get  # type: ignore[method-assign]  # counts what runs at a time
    item = MediaItem(line=1, uri="a.png", modality="image")
    await target.look(
        [Identified(item=item, identifier=str(number), num_embeds=4) for number in range(100)]
    )
    assert highest > 16
    assert store.calls["get"] == 100


async def test_object_of_other_rows_is_no_such_item(bench: Bench) -> None:
    bench.add(1)
    await bench.run()
    (identifier,) = bench.encoded
    assert SPACE.digest_key(identifier_digest(identifier)) in bench.objects()
    target = Target(DirectoryStore(bench.bucket), SPACE, pace=Pace(), keyring=None)
    item = MediaItem(line=1, uri="a.png", modality="image")
    (look,) = await target.look([Identified(item=item, identifier=identifier, num_embeds=5)])
    assert "4 rows" in look.reason


async def test_object_of_another_dtype_than_its_folder_is_no_such_item() -> None:
    store = MemoryStore()
    frame = encode(
        TensorSpec("uint8", (4, 2)),
        [memoryview(bytes(8))],
        identifier="a",
        namespace=SPACE.id,
        meta=ItemMeta(),
        created=1.0,
    )
    await store.put(SPACE.object_key("a"), frame.parts)
    target = Target(store, SPACE, pace=Pace(), keyring=None)
    item = MediaItem(line=1, uri="a.png", modality="image")
    (look,) = await target.look([Identified(item=item, identifier="a", num_embeds=4)])
    assert "unusable object" in look.reason


_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_prewarm_runner as play

bench = play.Bench.__new__(play.Bench)
root = Path(sys.argv[1])
bench.media, bench.bucket, bench.scratch = root / "media", root / "bucket", root / "scratch"
bench.failed, bench.advanced, bench.encoders = [], 0, []
bench.pace = play.Pace(retry_seconds=0)
batches = []

def kill_in_the_third(items):
    batches.append(items)
    if len(batches) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

bench.on_encode = kill_in_the_third
bench.encoder_type = play.PlayedEncoder
asyncio.run(bench.run())
"""


def test_killed_job_goes_on_where_it_was_and_repeats_at_most_a_batch(bench: Bench) -> None:
    bench.add(20)
    command = [sys.executable, "-c", _KILLED, str(bench.media.parent), str(Path(__file__).parent)]
    ended = subprocess.run(command, check=False, timeout=100, env=os.environ, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    left = len(bench.objects())
    assert left == 8
    report = asyncio.run(bench.run())
    assert (report.tally.encoded, report.tally.present, report.outcome) == (12, 8, Outcome.ALL)
    assert len(bench.objects()) == 20


class NeverStarting(PlayedEncoder):
    """vLLM does not start."""

    def encode(self, items: Sequence[Identified]) -> list[Identified | Failed]:
        raise ECS3Error("vLLM did not start")


async def test_job_that_was_stopped_before_anything_was_done_has_done_nothing(bench: Bench) -> None:
    bench.add(3)
    bench.encoder_type = NeverStarting
    report = await bench.run()
    assert (report.tally.encoded, report.tally.failed) == (0, 0)
    assert "vLLM did not start" in report.stopped
    assert report.outcome is Outcome.NONE


class GoneInTheSecond(PlayedEncoder):
    """vLLM ends in the second batch, and cannot be started again."""

    def encode(self, items: Sequence[Identified]) -> list[Identified | Failed]:
        if self.encoded:
            raise ConfigError("vLLM did not start: no memory on the device")
        return super().encode(items)


async def test_vllm_that_cannot_be_started_again_is_reported_with_what_was_done(
    bench: Bench,
) -> None:
    bench.add(12)
    bench.encoder_type = GoneInTheSecond
    report = await bench.run()
    assert (report.tally.encoded, report.outcome) == (4, Outcome.SOME)
    assert "no memory on the device; it was encoding the entries of lines 5" in report.stopped


class Indigestible(PlayedEncoder):
    """The encoder dies of some entries, whatever the bucket does."""

    def encode(self, items: Sequence[Identified]) -> list[Identified | Failed]:
        good = [one for one in items if "bad" not in one.item.uri]
        done = {one.item.line: one for one in super().encode(good)}
        return [
            done.get(one.item.line, Failed(item=one.item, reason="it died of it")) for one in items
        ]


async def test_media_that_fail_in_every_run_do_not_keep_it_from_what_is_new(bench: Bench) -> None:
    bench.add(20)
    for number in (0, 5, 9, 13):
        (bench.media / f"{number:03}.png").rename(bench.media / f"{number:03}-bad.png")
    bench.encoder_type = Indigestible
    first = await bench.run()
    assert (first.tally.encoded, first.tally.failed) == (16, 4)
    (bench.media / "new.png").write_bytes(picture(900))
    again = await bench.run()
    assert (again.stopped, again.tally.present) == ("", 16)
    assert (again.tally.encoded, again.tally.failed) == (1, 4)


async def test_further_entries_of_an_item_that_failed_have_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.add(1)
    (bench.media / "001.png").write_bytes(picture(0))
    bench.encoder_type = Unlucky
    monkeypatch.setattr(Unlucky, "unlucky", frozenset({"000.png"}))
    report = await bench.run()
    assert (report.tally.failed, report.tally.duplicates) == (2, 0)
    assert report.outcome is Outcome.NONE
    assert [(entry.line, entry.reason) for entry in bench.failed] == [
        (1, "no luck"),
        (2, "no luck"),
    ]
    assert bench.advanced == 2


async def test_disk_that_is_full_ends_the_job_with_a_report(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.add(12)

    def full(_: object) -> None:
        def refuse(**_: object) -> str:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("tempfile.mkdtemp", refuse)

    bench.on_encode = full
    report = await bench.run()
    assert "No space left on device" in report.stopped
    assert 0 < report.tally.encoded < 12


async def test_job_that_is_told_to_stop_as_it_lists_the_bucket_stops_at_once(bench: Bench) -> None:
    bench.add(3)
    listing = asyncio.Event()

    class Endless(DirectoryStore):
        async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
            listing.set()
            await asyncio.Event().wait()
            yield ObjectInfo(prefix, 0)

    job = await bench.job(store=Endless(bench.bucket))
    running = asyncio.create_task(job.run(bench.listeners))
    await listing.wait()
    job.stop("told to stop")
    report = await asyncio.wait_for(running, 30)
    assert (report.tally.encoded, report.index, report.stopped) == (3, None, "told to stop")


class Sounding(PlayedEncoder):
    """Every entry has a second output; of the first run it never arrives."""

    silent = True

    def identify(
        self, items: Sequence[MediaItem], data: Sequence[bytes | Path]
    ) -> list[Identified | Failed]:
        return [
            replace(one, others=(f"{one.identifier}-sound",))
            if isinstance(one, Identified)
            else one
            for one in super().identify(items, data)
        ]

    def encode(self, items: Sequence[Identified]) -> list[Identified | Failed]:
        super().encode(items)
        if self.silent:
            return [Failed(item=one.item, reason="its sound did not arrive") for one in items]
        super().encode([replace(one, identifier=one.others[0]) for one in items])
        return list(items)


async def test_entry_of_two_outputs_is_only_there_with_both(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.add(2)
    bench.encoder_type = Sounding
    first = await bench.run()
    assert (first.tally.failed, len(bench.objects())) == (2, 2)
    monkeypatch.setattr(Sounding, "silent", False)
    again = await bench.run()
    assert (again.tally.encoded, again.tally.present, len(bench.objects())) == (2, 0, 4)
    assert (await bench.run()).tally.present == 2


async def test_job_that_is_told_to_stop_does_not_wait_for_media(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.add(12)
    job = await bench.job()
    read, do, batches, waiting = job._reader.read, job._do, iter(range(9)), asyncio.Event()

    async def endless(*arguments: Any) -> list[Any]:
        if next(batches) == 1:
            await asyncio.Event().wait()
        return await read(*arguments)

    async def done(batch: Any) -> None:
        await do(batch)
        asyncio.get_running_loop().call_soon(waiting.set)  # by then it waits for the next one

    monkeypatch.setattr(job._reader, "read", endless)
    monkeypatch.setattr(job, "_do", done)
    running = asyncio.create_task(job.run(bench.listeners))
    await waiting.wait()
    job.stop("told to stop")
    report = await asyncio.wait_for(running, 30)
    assert (report.tally.encoded, report.stopped) == (4, "told to stop")
    assert report.outcome is Outcome.SOME
