"""Where entries come from, and what becomes of media that cannot be read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from unlistable import make_unlistable

from ec_s3.errors import ConfigError, RemoteUnavailableError
from ec_s3.prewarm.buckets import MAX_MEDIA_BYTES, MediaBuckets, MediaError
from ec_s3.prewarm.encoding import MediaItem
from ec_s3.prewarm.manifest import BadEntry
from ec_s3.prewarm.media import Media, MediaReader, Source
from ec_s3.prewarm.pace import Pace
from ec_s3.prewarm.shard import Shard
from ec_s3.url import S3Location, S3Options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from ec_s3.prewarm.manifest import Entry
    from ec_s3.testing.moto import S3Server


@pytest.fixture
async def buckets(s3_server: S3Server) -> AsyncIterator[MediaBuckets]:
    template = S3Location("any", endpoint=s3_server.url, region="us-east-1")
    found = MediaBuckets(template, S3Options(), Pace(retry_seconds=0))
    yield found
    await found.aclose()


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


async def entries(source: Source, *, size: int = 2) -> list[Entry]:
    found = []
    async for batch in source.batches(size):
        assert 1 <= len(batch) <= size
        found += batch
    return found


async def names(media: str, buckets: MediaBuckets, scratch: Path) -> tuple[int | None, list[str]]:
    source = Source(media, buckets=buckets, scratch=scratch)
    total = await source.open()
    return total, [entry.uri for entry in await entries(source)]


async def read(
    source: Source, buckets: MediaBuckets, given: Sequence[Entry], scratch: Path
) -> list[Media | BadEntry]:
    return await MediaReader(source, buckets).read(given, scratch)


async def test_folder_is_walked_in_order_without_hidden_files(
    tmp_path: Path, buckets: MediaBuckets, scratch: Path
) -> None:
    folder = tmp_path / "media"
    for name in ("b.png", "a.jpg", "sub/c.mp4", "sub/.hidden.png", ".git/d.png", "notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    source = Source(str(folder), buckets=buckets, scratch=scratch)
    assert await source.open() == 4
    found = await entries(source)
    assert [entry.uri.removeprefix(f"{folder}/") for entry in found] == [
        *("a.jpg", "b.png", "notes.txt", "sub/c.mp4")
    ]
    assert [entry.line for entry in found] == [1, 2, 3, 4]
    assert isinstance(found[2], BadEntry)  # a file that is no media is told, not left out


async def test_folder_that_cannot_be_listed_is_not_left_out_in_silence(
    tmp_path: Path, buckets: MediaBuckets, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "media" / "sub").mkdir(parents=True)
    (tmp_path / "media" / "a.png").touch()
    make_unlistable(monkeypatch, "sub")
    with pytest.raises(PermissionError):
        await names(str(tmp_path / "media"), buckets, scratch)


async def test_pattern_and_single_file_are_media(
    tmp_path: Path, buckets: MediaBuckets, scratch: Path
) -> None:
    for name in ("a.png", "b.png", "c.jpg"):
        (tmp_path / name).write_bytes(b"x")
    total, found = await names(f"{tmp_path}/*.png", buckets, scratch)
    assert (total, sorted(found)) == (2, [str(tmp_path / "a.png"), str(tmp_path / "b.png")])
    assert await names(f"{tmp_path}/c.jpg", buckets, scratch) == (1, [str(tmp_path / "c.jpg")])


async def test_relative_paths_are_relative_to_their_manifest(
    tmp_path: Path, buckets: MediaBuckets, scratch: Path
) -> None:
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").write_bytes(b"picture")
    manifest = tmp_path / "list.csv"
    manifest.write_text(
        f"uri\nmedia/a.png\n{tmp_path}/media/a.png\nfile://{tmp_path}/media/a.png\n"
    )
    source = Source(str(manifest), buckets=buckets, scratch=scratch)
    assert await source.open() == 3
    results = await read(source, buckets, await entries(source), scratch)
    assert [one.path.read_bytes() for one in results if isinstance(one, Media)] == [b"picture"] * 3


@pytest.mark.parametrize("media", ["nowhere", "nowhere/*.png", "empty.jsonl", "."])
async def test_nothing_to_encode_is_an_error(
    tmp_path: Path, buckets: MediaBuckets, scratch: Path, media: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "empty.jsonl").touch()
    path = tmp_path / "empty" if media == "." else tmp_path / "folder" / media
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="media="):
        await names(str(path), buckets, scratch)


async def test_shares_of_a_folder_do_not_depend_on_where_it_is(
    tmp_path: Path, buckets: MediaBuckets, scratch: Path
) -> None:
    shares = []
    for place in ("here", "there"):
        folder = tmp_path / place
        folder.mkdir()
        for number in range(20):
            (folder / f"{number}.png").touch()
        source = Source(str(folder), buckets=buckets, scratch=scratch, shard=Shard(1, 2))
        total = await source.open()
        found = [entry.uri.removeprefix(f"{folder}/") for entry in await entries(source)]
        assert total == len(found)
        shares.append(found)
    assert shares[0] == shares[1]
    assert 0 < len(shares[0]) < 20


async def test_media_that_cannot_be_read_are_told_and_the_others_read(
    tmp_path: Path, buckets: MediaBuckets, scratch: Path
) -> None:
    (tmp_path / "good.png").write_bytes(b"x")
    (tmp_path / "empty.png").touch()
    (tmp_path / "folder.png").mkdir()
    uris = ("good.png", "empty.png", "folder.png", "absent.png", "a" * 300 + ".png")
    given = [MediaItem(line=n, uri=uri, modality="image") for n, uri in enumerate(uris, start=1)]
    source = Source(str(tmp_path / "list.csv"), buckets=buckets, scratch=scratch)
    first, *others = await read(source, buckets, given, scratch)
    assert isinstance(first, Media)
    assert (first.path, first.nbytes) == (tmp_path / "good.png", 1)
    reasons = [other.reason for other in others if isinstance(other, BadEntry)]
    for reason, word in zip(reasons, ("empty", "regular", "No such file", "long"), strict=True):
        assert word in reason


async def test_bucket_of_any_keys_is_listed_and_read(
    s3_server: S3Server, buckets: MediaBuckets, bucket: str, scratch: Path
) -> None:
    keys = ("cats/a b.jpg", "cats/ü/c.png", "cats/.d.png", "catsuit.png", "cats/empty.png", "cats/")
    client = s3_server.client()
    for key in keys:
        body = b"" if key.endswith(("empty.png", "/")) else key.encode()
        client.put_object(Bucket=bucket, Key=key, Body=body)
    client.close()
    source = Source(f"s3://{bucket}/cats", buckets=buckets, scratch=scratch)
    assert await source.open() is None
    found = await entries(source)
    assert {entry.uri.removeprefix(f"s3://{bucket}/") for entry in found} == {
        *("cats/a b.jpg", "cats/ü/c.png", "cats/.d.png", "cats/empty.png")
    }
    results = await read(source, buckets, found, scratch)
    for entry, result in zip(found, results, strict=True):
        if entry.uri.endswith("empty.png"):
            assert isinstance(result, BadEntry)
            assert "empty" in result.reason
        else:
            assert isinstance(result, Media)
            key = entry.uri.removeprefix(f"s3://{bucket}/")
            assert result.path.read_bytes() == key.encode()
            assert result.nbytes == len(key.encode())


async def test_large_object_is_read_in_pieces(
    s3_server: S3Server,
    buckets: MediaBuckets,
    bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ec_s3.prewarm.buckets.PIECE_BYTES", 1000)
    body = os.urandom(3500)
    client = s3_server.client()
    client.put_object(Bucket=bucket, Key="a.mp4", Body=body)
    client.close()
    assert await buckets.fetch(f"s3://{bucket}/a.mp4", tmp_path / "a") == 3500
    assert (tmp_path / "a").read_bytes() == body
    assert s3_server.count("GET", f"/{bucket}/a.mp4") == 4


async def test_objects_that_cannot_be_read_are_told_one_by_one(
    s3_server: S3Server, buckets: MediaBuckets, bucket: str, scratch: Path
) -> None:
    client = s3_server.client()
    client.put_object(Bucket=bucket, Key="a.png", Body=b"x")
    client.close()
    uris = (f"s3://{bucket}/absent.png", "s3://no-such-bucket-here/a.png", "s3://B_/x.png")
    given = [
        MediaItem(line=n, uri=uri, modality="image")
        for n, uri in enumerate((*uris, f"s3://{bucket}/a.png"), start=1)
    ]
    source = Source("list.csv", buckets=buckets, scratch=scratch)
    *failed, good = await read(source, buckets, given, scratch)
    assert isinstance(good, Media)
    for entry, uri in zip(failed, uris, strict=True):
        assert isinstance(entry, BadEntry)
        assert entry.uri == uri
        assert entry.reason != "not read"


async def test_manifest_may_lie_in_a_bucket(
    s3_server: S3Server, buckets: MediaBuckets, bucket: str, scratch: Path
) -> None:
    client = s3_server.client()
    client.put_object(Bucket=bucket, Key="list.jsonl", Body=b'{"uri": "s3://b/a.png"}\n{}\n')
    client.close()
    total, found = await names(f"s3://{bucket}/list.jsonl", buckets, scratch)
    assert (total, found) == (2, ["s3://b/a.png", ""])
    with pytest.raises(ConfigError, match="no such object"):
        await names(f"s3://{bucket}/other.jsonl", buckets, scratch)


async def test_nothing_below_a_prefix_is_an_error_for_every_share(
    buckets: MediaBuckets, bucket: str, scratch: Path
) -> None:
    for shard in (Shard(), Shard(1, 2)):
        source = Source(f"s3://{bucket}/typo", buckets=buckets, scratch=scratch, shard=shard)
        assert await source.open() is None
        with pytest.raises(ConfigError, match="typo"):
            await entries(source)


async def test_names_that_no_file_or_object_can_have_are_told(
    tmp_path: Path, buckets: MediaBuckets, bucket: str, scratch: Path
) -> None:
    (tmp_path / "~nobody-here.png").write_bytes(b"x")
    uris = ("~nobody-here.png", "~nobody-here/a.png", "\ud800.png", f"s3://{bucket}/\ud800.png")
    given = [MediaItem(line=n, uri=uri, modality="image") for n, uri in enumerate(uris, start=1)]
    source = Source(str(tmp_path / "list.csv"), buckets=buckets, scratch=scratch)
    first, *others = await read(source, buckets, given, scratch)
    assert isinstance(first, Media)
    assert all(isinstance(other, BadEntry) and other.reason != "not read" for other in others)


async def test_pattern_below_nobodys_home_is_an_error(buckets: MediaBuckets, scratch: Path) -> None:
    with pytest.raises(ConfigError, match="nobody-here"):
        await names("~nobody-here/*.png", buckets, scratch)


async def test_file_that_is_too_large_is_not_read(
    tmp_path: Path, buckets: MediaBuckets, scratch: Path
) -> None:
    with (tmp_path / "large.mp4").open("wb") as file:
        file.truncate(MAX_MEDIA_BYTES + 1)  # a hole, without blocks
    given = [MediaItem(line=1, uri="large.mp4", modality="video")]
    source = Source(str(tmp_path / "list.csv"), buckets=buckets, scratch=scratch)
    (result,) = await read(source, buckets, given, scratch)
    assert isinstance(result, BadEntry)
    assert f"more than {MAX_MEDIA_BYTES}" in result.reason


async def test_relative_paths_of_a_manifest_in_a_bucket_are_keys_beside_it(
    s3_server: S3Server, buckets: MediaBuckets, bucket: str, scratch: Path
) -> None:
    client = s3_server.client()
    for key in ("shop/a b.png", "shop/sub/c.png", "d.png"):
        client.put_object(Bucket=bucket, Key=key, Body=key.encode())
    uris = ("a b.png", "./sub/c.png", "../d.png", "absent.png")
    body = "uri\n" + "\n".join(uris)
    client.put_object(Bucket=bucket, Key="shop/list.csv", Body=body.encode())
    client.close()
    source = Source(f"s3://{bucket}/shop/list.csv", buckets=buckets, scratch=scratch)
    assert await source.open() == 4
    *found, absent = await read(source, buckets, await entries(source, size=4), scratch)
    assert [one.path.read_bytes() for one in found if isinstance(one, Media)] == [
        *(b"shop/a b.png", b"shop/sub/c.png", b"d.png")
    ]
    assert isinstance(absent, BadEntry)
    assert "no such object" in absent.reason


class Buckets(MediaBuckets):
    """Answers for no object but these."""

    def __init__(self, *there: str) -> None:
        super().__init__(None, S3Options(), Pace())
        self._there = there
        self.asked = 0

    async def fetch(self, uri: str, target: Path) -> int:
        self.asked += 1
        if uri in self._there:
            return 1
        error = MediaError("no answer")
        error.away = RemoteUnavailableError("no answer", operation="get")
        raise error


def many(count: int) -> list[MediaItem]:
    uris = [f"s3://media/{number}.png" for number in range(count)]
    return [MediaItem(line=n, uri=uri, modality="image") for n, uri in enumerate(uris, start=1)]


async def test_media_bucket_that_is_away_ends_the_job_rather_than_every_entry(
    scratch: Path,
) -> None:
    buckets = Buckets()
    source = Source("list.csv", buckets=buckets, scratch=scratch)
    with pytest.raises(RemoteUnavailableError):
        await read(source, buckets, many(100), scratch)
    assert buckets.asked < 20


async def test_objects_that_a_bucket_cannot_read_are_told_beside_those_that_it_can(
    scratch: Path,
) -> None:
    buckets = Buckets(*(f"s3://media/{number}.png" for number in range(0, 100, 3)))
    source = Source("list.csv", buckets=buckets, scratch=scratch)
    results = await read(source, buckets, many(100), scratch)
    assert sum(isinstance(result, Media) for result in results) == 34


async def test_object_that_gives_no_answer_says_so(scratch: Path) -> None:
    template = S3Location("any", endpoint="http://127.0.0.1:9", region="us-east-1")
    buckets = MediaBuckets(template, S3Options(), Pace(retry_seconds=0))
    with pytest.raises(MediaError) as caught:
        await buckets.fetch("s3://media/a.png", scratch / "a")
    assert isinstance(caught.value.away, RemoteUnavailableError)
    with pytest.raises(RemoteUnavailableError):
        await Source("s3://media/list.csv", buckets=buckets, scratch=scratch).open()
    await buckets.aclose()
