"""What a client may send: the request fails or is answered rightly, and the engine lives."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from ec_s3.testing.traffic import is_item
from ec_s3.testing.vllm_server import chat_body, known_picture, picture, text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ec_s3.testing.lab import Lab
    from ec_s3.testing.vllm_server import VLLMServer

PREFIX = "http"
GRID = {"image_grid_thw": [1, 16, 16]}
PATHS = ("../../x", "/etc/passwd", "a/../../../b\0c", "x" * 10_000, "", " ", "\ud83d\ude00")

_unheard_of = itertools.count()


@pytest.fixture(
    scope="module",
    params=["ec_consumer", pytest.param("ec_both", marks=pytest.mark.slow)],
)
def server(
    request: pytest.FixtureRequest, lab: Lab, split: dict[str, VLLMServer]
) -> Iterator[VLLMServer]:
    """A server that takes requests without media."""
    if request.param in split:
        yield split[request.param]
        return
    with lab.serve(
        prefix=PREFIX,
        role=request.param,
        settings={"metadata_timeout": "10s"},
        arguments=("--enable-scale-out",),
    ) as started:
        yield started.wait()


def reference(server: VLLMServer, file: Path) -> tuple[int, ...]:
    """The answer to a picture under a name that nobody knows."""
    part = picture(file, uuid=f"never-heard-of-{next(_unheard_of)}")
    return server.chat([part, text()]).tokens


def noise(folder: Path, *, size: Path | None = None) -> Path:
    """A picture that nobody has seen, as large as another."""
    edges = (56, 56)
    if size is not None:
        with Image.open(size) as picture:
            edges = picture.size
    file = folder / f"{next(_unheard_of)}.png"
    Image.effect_noise(edges, 100).save(file)
    return file


def test_unknown_item_without_media_fails_alone_and_with_an_error(
    server: VLLMServer, lab: Lab
) -> None:
    lost = [known_picture(name, GRID) for name in ("no-such-item", "../../x", "0" * 64)]
    with ThreadPoolExecutor() as pool:
        failing = [pool.submit(server.chat, [part, text()]) for part in lost]
        beside = server.chat([text()])
        waited_for = [future.done() for future in failing]
        replies = [future.result() for future in failing]
    assert beside.status == 200
    assert waited_for == [False, False, False], "text goes on while they wait"
    for reply in replies:
        assert reply.status == 500
        assert reply.body["error"]["type"] == "InternalServerError"
    assert server.alive
    after = server.chat([picture(lab.pictures["china-0"]), text()])
    assert after.tokens == reference(server, lab.pictures["china-0"])


def test_item_without_media_and_layout_is_refused(server: VLLMServer) -> None:
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": None, "uuid": "no-such-item"},
        {"type": "image_embeds", "image_embeds": None, "uuid": "no-such-item"},
        known_picture("no-such-item", {}),
        known_picture("no-such-item", {"image_grid_thw": "junk"}),
        known_picture("no-such-item", {"image_grid_thw": [1, 16, 16], "pixel_values": [1]}),
    ]
    for part in parts:
        reply = server.chat([part, text()])
        assert 400 <= reply.status < 600, part
        assert reply.body["error"]["message"]
    assert server.chat([text()]).status == 200


def test_identifier_that_is_a_path_is_only_a_name(
    server: VLLMServer, lab: Lab, split: dict[str, VLLMServer]
) -> None:
    file = lab.pictures["china-1"]
    expected = reference(server, file)
    for name in PATHS:
        split["ec_producer"].chat([picture(file, uuid=name), text()])
        assert server.chat([picture(file, uuid=name), text()]).tokens == expected, name
    objects = {request.key for request in lab.server.served("") if request.method == "PUT"}
    assert all(is_item(key) or key.endswith("/namespace.json") for key in objects if key)


@pytest.mark.parametrize("other", ["flower-0", "china-2"], ids=["same size", "other size"])
def test_name_used_for_another_picture_changes_no_answer(
    server: VLLMServer, lab: Lab, split: dict[str, VLLMServer], other: str
) -> None:
    first, second = lab.pictures["china-0"], lab.pictures[other]
    expected = reference(server, second)
    assert expected != reference(server, first)
    name = f"name-used-twice-{other}"
    split["ec_producer"].chat([picture(first, uuid=name), text()])
    assert server.chat([picture(second, uuid=name), text()]).tokens == expected


@pytest.mark.parametrize("other", ["flower-1", "hopper-2"], ids=["same size", "other size"])
def test_picture_stored_under_the_content_hash_of_another_changes_no_answer(
    server: VLLMServer, lab: Lab, split: dict[str, VLLMServer], other: str, tmp_path: Path
) -> None:
    victim = noise(tmp_path, size=lab.pictures["flower-1"])
    expected = reference(server, victim)
    rendered = server.post("/v1/chat/completions/render", chat_body([picture(victim), text()]))
    (identifier,) = rendered.body["features"]["mm_hashes"]["image"]
    split["ec_producer"].chat([picture(lab.pictures[other], uuid=identifier), text()])
    lab.stored(PREFIX, identifier)
    before = server.encoded
    assert server.chat([picture(victim), text()]).tokens == expected
    assert server.encoded - before == 1


def test_request_that_opts_out_is_neither_stored_nor_published(
    lab: Lab, split: dict[str, VLLMServer], tmp_path: Path
) -> None:
    producer = split["ec_producer"]
    before = len(lab.server.items(PREFIX))
    kept_out = [picture(noise(tmp_path)), text()]
    assert producer.chat(kept_out, ec_transfer_params={"store": False}).transfer is None
    published = producer.chat([picture(noise(tmp_path)), text()]).transfer
    assert published is not None
    (identifier,) = published
    lab.stored(PREFIX, identifier)
    assert len(lab.server.items(PREFIX)) == before + 1


def test_malformed_transfer_params_change_no_answer(server: VLLMServer, lab: Lab) -> None:
    file = lab.pictures["flower-3"]
    expected = reference(server, file)
    body = chat_body([picture(file), text()])
    junk: list[Any] = [
        *({}, {"store": None}, {"store": "no"}, {"store": [[[]]]}, {"store": {"store": False}}),
        *({"a": 1, "b": [None]}, {"x" * 100_000: "y" * 1_000_000}, {"image": {"peer_host": 1}}),
        {"0" * 64: {"item_indices": [-1], "metadata": {"image_grid_thw": "x"}, "modality": 1}},
    ]
    for params in junk:
        reply = server.post("/v1/chat/completions", {**body, "ec_transfer_params": params})
        assert (reply.status, reply.tokens) == (200, expected), str(params)[:80]
    wrong: list[Any] = [[], "x", 1, True, float("nan"), [{"store": False}]]
    for params in wrong:
        reply = server.post("/v1/chat/completions", {**body, "ec_transfer_params": params})
        assert reply.status == 400, params
    assert server.chat([picture(file), text()]).tokens == expected


@pytest.mark.slow
def test_items_without_a_name_of_their_own_are_not_stored(lab: Lab) -> None:
    prefix = "local"
    with lab.serve(
        prefix=prefix,
        role="ec_both",
        arguments=("--mm-processor-cache-gb", "0", "--no-enable-prefix-caching"),
    ) as server:
        server.wait()
        expected = {name: reference(server, lab.pictures[name]) for name in ("china-0", "flower-0")}
        before = server.encoded
        answers = [
            (name, server.chat([picture(lab.pictures[name]), text()]).tokens)
            for name in ("china-0", "flower-0", "china-0")
        ]
        assert answers == [(name, expected[name]) for name, _ in answers]
        assert server.encoded - before == 3
        assert server.stop() == 0
    assert lab.server.items(prefix) == {}
