"""What the documentation shows runs, its links lead somewhere, and log lines are explained."""

from __future__ import annotations

import ast
import asyncio
import doctest
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from functools import cache
from inspect import CO_COROUTINE
from typing import TYPE_CHECKING, Any

import doc_pages
import prometheus_client
import pytest
import torch
import typer
import yaml
from doc_pages import GAP, ROOT, Block
from typer.testing import CliRunner

from ec_s3.blocking import ECCacheEngine
from ec_s3.cli.app import app
from ec_s3.config import ECConfig
from ec_s3.keys import Namespace
from ec_s3.metric_table import METRICS
from ec_s3.tensors import as_bytes, spec_of
from ec_s3.testing.memory import MemoryStore
from ec_s3.types import ItemMeta
from ec_s3.wire import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ec_s3.testing.moto import S3Server

TROUBLESHOOTING = "docs/troubleshooting.md"
RUNS = ("python", "console")
THEIRS = {"Encoder cache miss"}
"""Headings of log lines that are vLLM's."""

SPACE = Namespace(model="org/model", dtype="bfloat16")
BLOCKS = [block for block in doc_pages.blocks() if block.language in RUNS and not block.not_run]


# -- code ------------------------------------------------------------------------------------


def nothing(_: ExitStack) -> dict[str, Any]:
    return {}


def an_engine(stack: ExitStack) -> dict[str, Any]:
    return {"engine": stack.enter_context(ECCacheEngine(ECConfig(), SPACE))}


def a_cache(stack: ExitStack) -> dict[str, Any]:
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())
    return {"cache": an_engine(stack)["engine"]._cache}


def outputs_of_a_job(_: ExitStack) -> dict[str, Any]:
    return {"outputs": lambda: [("0" * 64, torch.ones(4, 8, dtype=torch.bfloat16))]}


def a_stored_item(_: ExitStack) -> dict[str, Any]:
    store, tensor = MemoryStore(), torch.ones(4, 8, dtype=torch.bfloat16)
    meta = ItemMeta(
        placeholder={"modality": "image", "metadata": {"image_grid_thw": [1, 4, 4]}},
    )
    frame = encode(
        spec_of(tensor),
        [as_bytes(tensor)],
        identifier="f" * 64,
        namespace=SPACE.id,
        meta=meta,
        created=1.0,
    )
    asyncio.run(store.put(SPACE.object_key("f" * 64), frame.parts))
    return {"store": store, "NS": SPACE.id, "ID": "f" * 64}


def three_pictures(stack: ExitStack) -> dict[str, Any]:
    """What a server has left in the bucket."""
    config = ECConfig(url="s3://bucket/prefix", max_local_cpu_size="64MiB")
    engine = stack.enter_context(ECCacheEngine(config, SPACE))
    for digit in "abc":
        engine.put(digit * 64, torch.ones(4, 8, dtype=torch.bfloat16))
    assert engine.flush(timeout=20).complete
    return {}


SETTINGS: dict[str, Callable[[ExitStack], dict[str, Any]]] = {
    "docs/how-to/disaggregated.md": a_stored_item,
    "docs/how-to/monitoring.md": a_cache,
    "docs/how-to/upload.md": outputs_of_a_job,
    "docs/how-to/weight-updates.md": an_engine,
    "docs/how-to/explain-a-miss.md": three_pictures,
}
"""What the text of a page takes for given: names that its blocks use, things in the bucket."""


@pytest.fixture
def shop(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bucket of the documentation, `s3://bucket`, empty."""
    client = s3_server.client()
    client.create_bucket(Bucket="bucket")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.url)
    monkeypatch.setenv("EC_S3_URL", "s3://bucket/prefix")
    monkeypatch.setenv("EC_S3_MAX_LOCAL_CPU_SIZE", "64MiB")
    monkeypatch.setenv("COLUMNS", "120")
    yield
    for found in client.list_objects_v2(Bucket="bucket").get("Contents", []):
        client.delete_object(Bucket="bucket", Key=found["Key"])
    client.delete_bucket(Bucket="bucket")
    client.close()


def run_python(block: Block, names: dict[str, Any]) -> None:
    code = compile(
        "\n" * block.line + block.text,
        str(ROOT / block.page),
        "exec",
        flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
    )
    if code.co_flags & CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)


def run_console(block: Block) -> None:
    """Lines that begin with `$` are commands; what follows is their output, `...` for any."""
    parts = re.split(r"^\$ (.+)\n", block.text, flags=re.MULTILINE)
    assert not parts[0], f"{block.page}:{block.line}: a console block begins with a command"
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for command, expected in zip(parts[1::2], parts[2::2], strict=True):
        program, *arguments = shlex.split(command, comments=True)
        assert program == "ec-s3", command
        ended = CliRunner().invoke(app, arguments)
        assert ended.exit_code == 0, f"{command}: {ended.output}"
        if expected.strip():
            assert doctest.OutputChecker().check_output(expected, ended.stdout, flags), (
                f"{block.page}:{block.line}: {command}\n{ended.stdout}"
            )


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}))
@pytest.mark.usefixtures("shop")
def test_blocks_of_a_page_run_in_their_order(page: str) -> None:
    with ExitStack() as stack:
        names = {"__name__": "__main__", **SETTINGS.get(page, nothing)(stack)}
        for block in (block for block in BLOCKS if block.page == page):
            if block.language == "console":
                run_console(block)
            else:
                run_python(block, names)


def test_the_store_of_the_page_passes_the_suite_of_the_page(tmp_path: Path) -> None:
    page = "docs/contributing/add-a-store.md"
    store, _, suite = (block.text for block in BLOCKS if block.page == page)
    (tmp_path / "test_page.py").write_text(f"from __future__ import annotations\n{store}\n{suite}")
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert int(ran.stdout.split(" passed")[0].split()[-1]) > 40


def test_settings_are_for_pages_that_have_blocks() -> None:
    assert SETTINGS.keys() <= {block.page for block in BLOCKS}


def test_blocks_say_what_they_are() -> None:
    known = {*RUNS, "shell", "bash", "text", "json", "yaml", "csv", "mermaid", "hcl", "promql"}
    strange = [
        f"{block.page}:{block.line}"
        for block in doc_pages.blocks()
        if block.language not in known and block.language
    ]
    assert not strange


def test_manifests_and_settings_can_be_read() -> None:
    for block in doc_pages.blocks():
        if block.language == "yaml":
            assert all(yaml.safe_load_all(block.text)), f"{block.page}:{block.line}"


def test_what_is_not_run_is_code() -> None:
    marked = [block for block in doc_pages.blocks() if block.not_run]
    assert all(block.language in RUNS for block in marked)
    found = (doc_pages.NOT_RUN.findall(doc_pages.prose(page)) for page in doc_pages.pages())
    markers = sum(map(len, found))
    assert markers == len(marked), "a marker stands right before its block"


# -- commands --------------------------------------------------------------------------------


_CALL = re.compile(
    r"(?:\$ |- |run: |kubectl .* -- |[A-Z0-9_]+=\S+ )*ec-s3 (?P<rest>.+?)(?: \|\| code=\$\?)?$"
)
"""A line that calls `ec-s3`, in a shell, a pod or a pipeline's step."""


def shell_commands() -> Iterator[tuple[str, list[str]]]:
    """Every call of `ec-s3` in the pages' shell blocks and manifests, and where it stands."""
    for block in doc_pages.blocks():
        if block.language not in ("shell", "bash", "console", "yaml"):
            continue
        text = re.sub(r"\\\n\s*", " ", block.text)
        for line in text.splitlines():
            found = _CALL.match(line.strip())
            if found:
                words = shlex.split(found["rest"], comments=True)
                yield f"{block.page}:{block.line}", words


@cache
def program() -> Any:
    return typer.main.get_command(app)


@pytest.mark.parametrize(("where", "words"), list(shell_commands()))
def test_commands_and_options_exist(where: str, words: list[str]) -> None:
    command = program()
    for word in words:
        if word in ("--", "|", ">", ";", "&&"):
            break
        if word.startswith("--"):
            name = word.partition("=")[0]
            known = {opt for p in command.params for opt in (*p.opts, *p.secondary_opts)}
            assert name in known | {"--help"}, f"{where}: {name}"
        elif word in getattr(command, "commands", {}):
            command = command.commands[word]
    assert not getattr(command, "commands", None) or "--version" in words, f"{where}: {words}"


def pipeline_steps() -> Iterator[str]:
    """What the workflow of the page runs with `prewarm` in it."""
    page = "docs/how-to/prewarm-in-ci.md"
    texts = (b.text for b in doc_pages.blocks() if b.page == page and b.language == "yaml")
    workflow = next(found for found in map(yaml.safe_load, texts) if "jobs" in found)
    steps = workflow["jobs"]["prewarm"]["steps"]
    return (step["run"] for step in steps if "prewarm" in step.get("run", ""))


@pytest.mark.parametrize("script", list(pipeline_steps()))
def test_the_pipeline_goes_on_after_what_its_table_lets_pass(script: str, tmp_path: Path) -> None:
    """One picture that cannot be encoded keeps the others from nobody."""
    stub = tmp_path / "ec-s3"
    stub.write_text("#!/bin/sh\nexit $CODE\n")
    stub.chmod(0o755)
    ended = {
        code: subprocess.run(
            ["/bin/sh", "-e", "-c", script],  # as a job in a container runs its steps
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "CODE": str(code)},
            check=False,
        ).returncode
        for code in range(5)
    }
    assert ended == {0: 0, 1: 0, 2: 2, 3: 3, 4: 4}


@pytest.mark.parametrize("page", sorted(doc_pages.pages()))
def test_commands_named_in_the_text_exist(page: str) -> None:
    named = re.findall(r"`ec-s3 ([a-z]+)", doc_pages.prose(page))
    assert set(named) <= set(program().commands)


# -- metrics ---------------------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted(doc_pages.pages()))
def test_metrics_and_their_labels_exist(page: str) -> None:
    found = re.findall(r'`([a-z_]+)\{([a-z]+)(?:="([a-z0-9_]+)")?\}', doc_pages.prose(page))
    for name, label, value in found:
        labels = METRICS[name].labels
        assert label in labels, f"{name}{{{label}}}"
        assert not value or value in labels[label], f"{name}{{{label}={value}}}"


# -- links -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted(doc_pages.pages()))
def test_links_lead_to_pages_and_headings(page: str) -> None:
    for target in doc_pages.links(page):
        path, _, anchor = target.partition("#")
        there = (ROOT / page).parent / path if path else ROOT / page
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            assert anchor in doc_pages.anchors(str(there.resolve().relative_to(ROOT))), target


@pytest.mark.parametrize("page", sorted(doc_pages.pages()))
def test_files_and_make_targets_that_are_named_exist(page: str) -> None:
    named = set(re.findall(r"`(\.?\w[\w.-]*(?:/[\w.-]+)+/?)`", doc_pages.prose(page)))
    ours = {path for path in named if (ROOT / path.split("/")[0]).exists()}
    made = {path for path in ours if path.startswith("build/")}  # by the commands on the pages
    assert not {path for path in ours - made if not (ROOT / path).exists()}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z-]+)", doc_pages.prose(page))) <= set(targets)


# -- architecture ----------------------------------------------------------------------------


def test_every_module_is_on_the_map() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = next(c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    modules = {name for layer in layers["layers"] for name in re.findall(r"ec_s3\.(\w+)", layer)}
    table = doc_pages.pages()["docs/contributing/architecture.md"].partition("## Modules")[2]
    assert modules == set(re.findall(r"`(\w+)/?`", table.partition("## Seams")[0])) & modules


# -- log lines -------------------------------------------------------------------------------


def readable(message: str) -> str:
    return message.replace(GAP, "...")


def quoted_headings() -> list[str]:
    """What the headings of the troubleshooting page quote."""
    quotes = (re.findall(r"`([^`]+)`", text) for text in doc_pages.headings(TROUBLESHOOTING))
    return [quote for found in quotes for quote in found]


@pytest.mark.parametrize(("message", "where"), sorted(doc_pages.warnings().items()), ids=readable)
def test_every_warning_has_a_heading(message: str, where: str) -> None:
    found = [heading for heading in quoted_headings() if doc_pages.documents(heading, message)]
    assert found, f"{where}: {readable(message)!r} is in no heading of {TROUBLESHOOTING}"


@pytest.mark.parametrize("heading", quoted_headings())
def test_every_heading_is_of_something_that_is_said(heading: str) -> None:
    said = any(doc_pages.documents(heading, text) for text in doc_pages.texts())
    assert said or heading in THEIRS


def test_warnings_are_found_however_they_are_written() -> None:
    found = doc_pages.warnings()
    assert "the bucket answers again" in found  # a constant
    assert f"an upload is given up: {GAP}" in found  # handed to a method
    assert f"the index in the bucket is not used: {GAP}" in found  # a field of a description
    assert f"an operator has switched the encoder cache {GAP}" in found  # its level is a variable


@pytest.mark.parametrize(
    ("heading", "message", "fits"),
    [
        ("a request failed: REASON", f"a request failed: {GAP}{GAP}", True),
        ("a request failed", f"a request failed: {GAP}", True),
        ("control.json ...; what was said", f"{GAP}; what was said", True),
        ("a request fail", f"a request failed: {GAP}", False),
        ("another request failed: REASON", f"a request failed: {GAP}", False),
        ("anything", GAP, False),
    ],
)
def test_headings_name_messages(heading: str, message: str, *, fits: bool) -> None:
    assert doc_pages.documents(heading, message) is fits


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert built.returncode == 0, built.stderr
