from __future__ import annotations

import pytest

from ec_s3.errors import ConfigError, InvalidKeyError
from ec_s3.url import DirectoryLocation, S3Location, S3Options, check_key, is_key, parse_url


@pytest.mark.parametrize(
    ("spelling", "prefix"),
    [
        ("", ""),
        ("/", ""),
        ("/p", "p"),
        ("/p/", "p"),
        ("//p//q/", "p/q"),
        ("/p%2Fq", "p/q"),
        ("/a/b/c", "a/b/c"),
    ],
)
def test_every_spelling_of_a_prefix_means_the_same(spelling: str, prefix: str) -> None:
    location = parse_url(f"s3://bucket{spelling}")
    assert location == S3Location("bucket", prefix=prefix)
    key = S3Location("bucket", prefix=spelling.replace("%2F", "/")).object_key("v1/k")
    assert key == (f"{prefix}/v1/k" if prefix else "v1/k")
    assert "//" not in key
    assert not key.startswith("/")


def test_parameters_and_their_aliases() -> None:
    location = parse_url(
        "s3://b.c/p?endpoint=https%3A%2F%2Fs3.example:9000%2F&region=eu-central-1"
        "&addressing=virtual&profile=ops"
    )
    assert location == S3Location(
        "b.c", "p", "https://s3.example:9000", "eu-central-1", "virtual", "ops"
    )
    assert parse_url("s3://b?endpoint_override=http://h:1&use_path_style=true") == S3Location(
        "b", endpoint="http://h:1", addressing="path"
    )
    virtual = parse_url("s3://b?use_path_style=False")
    assert isinstance(virtual, S3Location)
    assert virtual.addressing == "virtual"


@pytest.mark.parametrize(
    ("location", "style"),
    [
        (S3Location("bucket"), "auto"),
        (S3Location("dotted.bucket"), "path"),
        (S3Location("bucket", endpoint="http://127.0.0.1:9000"), "path"),
        (S3Location("bucket", endpoint="https://s3.example"), "path"),
        (S3Location("bucket", endpoint="https://s3.example", addressing="virtual"), "virtual"),
        (S3Location("bucket", addressing="path"), "path"),
    ],
)
def test_auto_addressing_takes_path_style_where_host_names_fail(
    location: S3Location, style: str
) -> None:
    assert location.style == style


def test_file_urls_name_a_directory() -> None:
    assert parse_url("file:///var/cache/ec%20x") == DirectoryLocation("/var/cache/ec x")
    assert parse_url("file://localhost/x") == DirectoryLocation("/x")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket/prefix",
        "gs://bucket",
        "s3://",
        "s3:///prefix",
        "s3://-bucket",
        "s3://bucket/../other",
        "s3://bucket/p q",
        "s3://bucket/" + "p" * 600,
        "s3://bucket#fragment",
        "s3://bucket?region",
        "s3://bucket?region=a&region=b",
        "s3://bucket?addressing=path&use_path_style=true",
        "s3://bucket?use_path_style=maybe",
        "s3://bucket?addressing=sideways",
        "s3://bucket?endpoint=ftp://h",
        "s3://bucket?endpoint=h:9000",
        "s3://bucket?endpoint=http://h:port",
        "s3://bucket?endpoint=http://[::1",
        "s3://[::1",
        "file://host/dir",
        "file:relative",
        "file:///dir?x=1",
    ],
)
def test_unusable_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^url: "):
        parse_url(url)


def test_an_unknown_parameter_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown parameter regoin.*region"):
        parse_url("s3://bucket?regoin=eu")


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:HUSH@bucket/p",
        "s3://HUSH@bucket/p",
        "s3://bucket?endpoint=https://user:HUSH@host",
        "s3://bucket?endpoint=https://host?token=HUSH",
        "s3://bucket?aws_secret_access_key=HUSH",
        "s3://bucket?session_token=HUSH",
        "s3://bucket?X-Amz-Signature=HUSH",
        "s3://bucket?password=HUSH",
        "s3://bucket?HUSH=1",
        "s3://bucket?region=AKIAIOSFODNN7EXAMPLE&profile=HUSH",
        "s3://bucket?addressing=HUSH",
        "s3://bucket/%00HUSH",
        "file:///dir?password=HUSH",
    ],
)
def test_no_secret_is_accepted_or_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert "HUSH" not in str(caught.value)
    assert "AKIA" not in str(caught.value)


def test_keys_that_could_leave_the_prefix_are_none() -> None:
    assert check_key("v1/model-0123/bfloat16/ab/abcdef") == "v1/model-0123/bfloat16/ab/abcdef"
    assert is_key("k")
    for key in ("", "/k", "k/", "a//b", "..", "a/../b", "a/.hidden", "ä", "a\nb", "k" * 1024):
        assert not is_key(key)
        with pytest.raises(InvalidKeyError):
            check_key(key)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sse": "rot13"}, "sse"),
        ({"sse": "AES256", "sse_kms_key_id": "k"}, "sse_kms_key_id"),
        ({"ca_bundle": "/ca.pem", "verify": False}, "ca_bundle"),
        ({"total_timeout": 0}, "total_timeout"),
        ({"read_timeout": float("nan")}, "read_timeout"),
        ({"max_connections": -1}, "max_connections"),
        ({"transport": "carrier pigeon"}, "s3_transport"),
    ],
)
def test_unusable_options_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}: "):
        S3Options(**options)  # type: ignore[arg-type]  # a bad value is the point


def test_options_do_not_show_keys_or_tags() -> None:
    options = S3Options(sse="aws:kms", sse_kms_key_id="HUSH", tags={"owner": "HUSH"})
    assert "HUSH" not in repr(options)
