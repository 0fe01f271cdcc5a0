"""A job that would not be found by a server is stopped before its first upload, with the reason."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from ec_s3.config import ECConfig
from ec_s3.errors import ConfigError
from ec_s3.keys import Namespace
from ec_s3.metric_table import METRICS
from ec_s3.prewarm import expect
from ec_s3.prewarm.expect import FIELDS, Expected, check, compare, fields_of, read_expected
from ec_s3.s3 import S3Store
from ec_s3.url import S3Location

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ec_s3.testing.moto import S3Server

SERVER = Namespace(
    model="org/model",
    dtype="bfloat16",
    revision="main",
    encoder_config="e1",
    quantization="",
    weight_version="1",
    adapter="a1",
    hash_scheme="h1",
    salt="tenant one",
)
FACTS: dict[str, object] = {
    "model_argument": "org/model",
    "dtype": "bfloat16",
    "mm_processor_kwargs": {"max_pixels": 1000},
    "media_io_kwargs": {"video": {"num_frames": 8}},
    "vllm": "0.32.0",
}


def told_by_manifest(namespace: Namespace = SERVER) -> Expected:
    return Expected(source="its manifest", fields=fields_of(namespace.manifest(FACTS)))


@pytest.mark.parametrize("server", ["manifest", "metrics"])
@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model", "org/other"),
        ("revision", "v2"),
        ("dtype", "float16"),
        ("quantization", "fp8"),
        ("weight_version", "2"),
        ("adapter", "a2"),
        ("encoder_config", "e2"),
        ("hash_scheme", "h2"),
    ],
)
def test_field_of_the_namespace_that_differs_is_named_with_both_values(
    server: str, field: str, other: str
) -> None:
    expected = told_by_manifest() if server == "manifest" else told_by_metrics()
    job = replace(SERVER, **{field: other})
    with pytest.raises(ConfigError) as refusal:
        check(expected, job, FACTS)
    (line,) = told(refusal.value)
    theirs = json.dumps(getattr(SERVER, field)) if getattr(SERVER, field) else "nothing"
    assert line.startswith(f"{field}: server {theirs}, job {json.dumps(other)}")


@pytest.mark.parametrize("server", ["manifest", "metrics"])
@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model_argument", "/mnt/model"),
        ("mm_processor_kwargs", {"max_pixels": 2000}),
        ("mm_processor_kwargs", {}),
        ("media_io_kwargs", {"video": {"num_frames": 16}}),
    ],
)
def test_setting_that_only_identifiers_depend_on_is_named_with_both_values(
    server: str, field: str, other: object
) -> None:
    expected = told_by_manifest() if server == "manifest" else told_by_metrics()
    with pytest.raises(ConfigError) as refusal:
        check(expected, SERVER, {**FACTS, field: other})
    (line,) = told(refusal.value)
    theirs, ours = json.dumps(FACTS[field]), json.dumps(other) if other else "nothing"
    assert line.startswith(f"{field}: server {theirs}, job {ours}")


def test_salt_that_differs_is_only_said_to_differ() -> None:
    with pytest.raises(ConfigError) as refusal:
        check(told_by_manifest(), replace(SERVER, salt="tenant two"), FACTS)
    assert told(refusal.value) == ["salt: differs"]
    assert "tenant" not in str(refusal.value)


def test_all_differences_are_told_at_once_and_vllms_versions_beside_them() -> None:
    job = replace(SERVER, revision="v2", hash_scheme="h2")
    with pytest.raises(ConfigError) as refusal:
        check(told_by_manifest(), job, {**FACTS, "vllm": "0.33.0"})
    revision, scheme, versions = told(refusal.value)
    assert revision.startswith("revision:")
    assert scheme.startswith("hash_scheme:")
    assert versions == '(vLLM: server "0.32.0", job "0.33.0")'


def test_jobs_that_agree_pass_whatever_their_vllm_is() -> None:
    for expected in (told_by_manifest(), told_by_metrics()):
        assert compare(expected, SERVER, {**FACTS, "vllm": "0.33.0"}) == []
        check(expected, SERVER, {**FACTS, "vllm": "0.33.0"})


def test_settings_left_out_and_settings_that_are_empty_are_the_same() -> None:
    theirs = Expected(source="server", fields={"media_io_kwargs": None, "quantization": ""})
    assert compare(theirs, SERVER, {**FACTS, "media_io_kwargs": {}}) == []


def test_what_an_older_server_does_not_tell_is_not_compared() -> None:
    older = Expected(source="server", fields={"model": "org/model"})
    assert compare(older, replace(SERVER, revision="v2"), FACTS) == []


async def test_manifest_is_read_from_a_file_and_from_a_bucket(
    tmp_path: Path, s3_server: S3Server, bucket: str
) -> None:
    body = SERVER.manifest(FACTS)
    (tmp_path / "namespace.json").write_bytes(body)
    location = S3Location(bucket, "p", endpoint=s3_server.url, region="us-east-1")
    store = S3Store(location)
    await store.put(SERVER.manifest_key, [body])
    await store.aclose()
    query = f"endpoint={s3_server.url}&region=us-east-1"
    key = f"s3://{bucket}/p/{SERVER.manifest_key}"
    config = ECConfig(url=f"s3://{bucket}/elsewhere?{query}")
    sources = [
        (str(tmp_path / "namespace.json"), ECConfig()),
        (f"file://{tmp_path}/namespace.json", ECConfig()),
        (f"{key}?{query}", ECConfig()),
        (key, config),  # its endpoint is the job's
    ]
    for source, with_config in sources:
        expected = await read_expected(source, with_config)
        assert compare(expected, SERVER, FACTS) == []
        assert [d.field for d in compare(expected, replace(SERVER, adapter=""), FACTS)] == [
            "adapter"
        ]
        assert set(FIELDS) <= set(expected.fields)


async def test_server_is_asked_for_its_metrics(serve: Callable[[str], str]) -> None:
    url = serve(page())
    for source in (url, f"{url}/", f"{url}/v1", f"{url}/metrics"):
        expected = await read_expected(source, ECConfig())
        assert compare(expected, SERVER, FACTS) == []
        assert set(FIELDS) <= set(expected.fields)
    job = replace(SERVER, weight_version="2")
    assert [d.field for d in compare(expected, job, FACTS)] == ["weight_version"]


async def test_label_values_come_back_as_they_were(serve: Callable[[str], str]) -> None:
    odd = replace(SERVER, model='a"b\\c\nd}', revision="x=1,y")
    url = serve(page(odd))
    assert compare(await read_expected(url, ECConfig()), odd, FACTS) == []


@pytest.mark.parametrize(
    "source",
    ["/no/such/file", "http://127.0.0.1:1", "{url}", "{folder}/empty.json", "{folder}/list.json"],
)
async def test_source_that_tells_nothing_is_an_error_that_names_it(
    source: str, tmp_path: Path, serve: Callable[[str], str]
) -> None:
    (tmp_path / "empty.json").touch()
    (tmp_path / "list.json").write_text("[1]")
    named = source.format(url=serve("# a server without ec_s3\n"), folder=tmp_path)
    with pytest.raises(ConfigError, match="does not tell its namespace") as refusal:
        await read_expected(named, ECConfig())
    assert named in str(refusal.value)


async def test_object_that_is_not_there_is_an_error(s3_server: S3Server, bucket: str) -> None:
    url = f"s3://{bucket}/namespace.json?endpoint={s3_server.url}&region=us-east-1"
    with pytest.raises(ConfigError, match="there is no such object"):
        await read_expected(url, ECConfig())


async def test_source_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*_: object) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(expect, "_read_object", never)
    monkeypatch.setattr(expect, "SECONDS", 0.01)
    with pytest.raises(ConfigError, match="no answer"):
        await read_expected("s3://bucket/namespace.json", ECConfig())


def told(refusal: ConfigError) -> list[str]:
    first, *lines = str(refusal).splitlines()
    assert first.endswith("so nothing was uploaded:")
    return [line.strip() for line in lines]


def told_by_metrics() -> Expected:
    return Expected(source="its metrics", fields=expect._fields_of_page(page()))


def page(namespace: Namespace = SERVER) -> str:
    """What vLLM's server shows, as Prometheus writes it."""
    import prometheus_client

    fields = {"namespace": namespace.id, **fields_of(namespace.manifest(FACTS))}
    registry = prometheus_client.CollectorRegistry()
    gauge = prometheus_client.Gauge(
        "vllm:ec_s3_namespace_info",
        "",
        ["model_name", "engine", *METRICS["namespace_info"].labels],
        registry=registry,
    )
    texts = [
        value if isinstance(value := fields[name], str) else json.dumps(value)
        for name in METRICS["namespace_info"].labels
    ]
    gauge.labels("tiny", "0", *texts).set(1)
    return prometheus_client.generate_latest(registry).decode()


@pytest.fixture
def serve() -> Iterator[Callable[[str], str]]:
    """Starts an HTTP server that has one page, at `/metrics`; returns its URL."""
    running: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start(text: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path == "/metrics"
                self.send_response(200 if found else 404)
                self.end_headers()
                self.wfile.write(text.encode() if found else b"")

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()
