"""A job's encoder names items as a server does, and no bad one among them stops the others."""

from __future__ import annotations

import asyncio
import base64
import inspect
import io
import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING, Any

import pytest

from ec_s3.errors import ConfigError, ECS3Error
from ec_s3.keys import looks_like_content_hash
from ec_s3.pages import PAGE_BYTES
from ec_s3.prewarm.encoding import EncoderSettings, Failed, Identified, MediaItem
from ec_s3.prewarm.expect import Expected, compare, fields_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ec_s3.connector.encoder import VllmEncoder, _Loss
    from ec_s3.connector.preparing import Prepared

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM's own, as it starts

ARGUMENTS = ("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager")
BACKGROUND = '{"image": {"rgba_background_color": [0, 0, 0]}}'


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    """What a job sets for its vLLM does not outlive these tests."""
    if not os.environ.get("REQUIRE_VLLM"):
        pytest.importorskip("vllm", exc_type=ImportError)
    from ec_s3.connector.encode_only import _ENVIRONMENT

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**_ENVIRONMENT, "HF_HUB_OFFLINE": "1"}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, environment: None) -> str:
    from ec_s3.testing.tiny_models import make_qwen2_vl

    return str(make_qwen2_vl(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def opened(model: str) -> Iterator[Callable[..., VllmEncoder]]:
    """Opens the encoder of a job with further options; each is opened once."""
    from ec_s3.connector.encoder import open_encoder

    encoders: dict[tuple[str, ...], VllmEncoder] = {}

    def open_with(*arguments: str) -> VllmEncoder:
        if arguments not in encoders:
            encoders[arguments] = open_encoder(settings(model, *arguments))
        return encoders[arguments]

    yield open_with
    for encoder in encoders.values():
        encoder.close()


def settings(folder: str, *arguments: str, **connector: object) -> EncoderSettings:
    return EncoderSettings(
        model=folder,
        arguments=(*ARGUMENTS, *arguments),
        connector={"url": "file:///nowhere", "max_local_cpu_size": "1MiB", **connector},
    )


def picture(width: int = 60, height: int = 60, *, mode: str = "RGB", shade: int = 40) -> bytes:
    from PIL import Image

    image = Image.new(mode, (width, height))
    image.putdata([(x * 3 % 256, shade, x % 251, 128)[: len(mode)] for x in range(width * height)])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def entry(line: int = 1, **fields: Any) -> MediaItem:
    return MediaItem(**{"line": line, "uri": f"{line}.png", "modality": "image", **fields})


def named(encoder: VllmEncoder, media: bytes, **fields: Any) -> str:
    (found,) = encoder.identify([entry(**fields)], [media])
    assert isinstance(found, Identified), found
    return found.identifier


def server_config(model: str, *arguments: str) -> Any:
    """The configuration of a server with these options."""
    from vllm.usage.usage_lib import UsageContext

    from ec_s3.connector.encode_only import _parse

    command = ["--model", model, *ARGUMENTS, *arguments]
    return _parse(command).create_engine_config(UsageContext.OPENAI_API_SERVER)


def server_name(config: Any, media: bytes, *, uuid: str | None = None, **request: Any) -> str:
    """What vLLM's HTTP server calls a picture in a chat."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers import renderer_from_config
    from vllm.renderers.online_renderer import OnlineRenderer

    url = f"data:image/png;base64,{base64.b64encode(media).decode()}"
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    if uuid is not None:
        part["uuid"] = uuid
    content = [part, {"type": "text", "text": "what is this?"}]
    asked = ChatCompletionRequest(
        model="tiny", messages=[{"role": "user", "content": content}], **request
    )
    renderer = renderer_from_config(config)
    newer = "trust_request_mm_kwargs" in inspect.signature(OnlineRenderer).parameters
    online = OnlineRenderer(
        config.model_config,
        renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        **({"trust_request_mm_kwargs": True} if newer else {}),  # 0.30 always does
    )
    try:
        _, (rendered,) = asyncio.run(
            online.preprocess_chat(asked, asked.messages, None, "auto", None)
        )
    finally:
        renderer.shutdown()
    ((name,),) = rendered["mm_hashes"].values()
    return str(name)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--media-io-kwargs", BACKGROUND),
        ("--mm-processor-kwargs", '{"max_pixels": 12544}'),
        ("--mm-hasher-algorithm", "sha256"),
        ("--mm-processor-cache-gb", "0"),
        ("--mm-processor-cache-type", "shm"),
        ("--limit-mm-per-prompt", '{"image": 2}'),
    ],
    ids=lambda options: options[0] if options else "defaults",
)
def test_identifier_is_the_one_of_a_server_with_the_same_options(
    opened: Callable[..., VllmEncoder], model: str, arguments: tuple[str, ...], mode: str
) -> None:
    media = picture(mode=mode)
    found = named(opened(*arguments), media)
    assert found == server_name(server_config(model, *arguments), media)
    assert looks_like_content_hash(found)


@pytest.mark.parametrize("tower", [False, True])
def test_identifier_under_the_adapter_of_a_modality_is_the_one_of_its_servers(
    model: str, *, tower: bool
) -> None:
    """An adapter on the encoder is part of the name; one on the language model is not."""
    from ec_s3.connector.encoder import open_encoder

    options = ["--enable-lora", "--default-mm-loras", '{"image": "/adapters/a", "video": "/b"}']
    options += ["--enable-tower-connector-lora"] if tower else []
    encoder = open_encoder(settings(model, *options, adapter="f00" if tower else ""))
    try:
        found = named(encoder, picture())
    finally:
        encoder.close()
    content = server_name(server_config(model, *options), picture())
    assert found == (f"image:{content}" if tower else content)


@pytest.mark.parametrize(
    "fields",
    [
        {"uuid": "picture of the week"},
        {"processor": {"max_pixels": 12544}},
        {"uuid": "picture of the week", "processor": {"max_pixels": 12544}},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_identifier_of_an_entry_with_its_own_fields_is_the_one_of_such_a_request(
    opened: Callable[..., VllmEncoder], model: str, fields: dict[str, Any]
) -> None:
    media = picture()
    request = {"mm_processor_kwargs": fields["processor"]} if "processor" in fields else {}
    expected = server_name(server_config(model), media, uuid=fields.get("uuid"), **request)
    assert named(opened(), media, **fields) == expected
    assert (expected == fields.get("uuid")) == ("processor" not in fields)
    assert expected != named(opened(), media)


def test_file_is_named_like_its_bytes_and_tells_what_its_output_will_be(
    opened: Callable[..., VllmEncoder], tmp_path: Path
) -> None:
    file = tmp_path / "picture"
    file.write_bytes(picture(112, 56))
    by_path, by_bytes = opened().identify([entry(1), entry(2)], [file, file.read_bytes()])
    assert isinstance(by_path, Identified)
    assert isinstance(by_bytes, Identified)
    assert by_path == replace(by_bytes, item=by_path.item)
    assert (by_path.num_embeds, by_path.nbytes) == (8, 8 * 64 * 4)
    assert len(by_path.input_digest) == 64


def test_one_bad_entry_fails_alone_and_says_why(
    opened: Callable[..., VllmEncoder], tmp_path: Path
) -> None:
    whole = picture(224, 224)
    bad: list[tuple[bytes | Path, dict[str, Any], str]] = [
        (b"", {}, "image"),
        (whole[: len(whole) // 2], {}, "image"),
        (b"once upon a time", {}, "image"),
        (tmp_path / "missing.png", {}, "No such file"),
        (whole, {"modality": "audio"}, ""),
        (b"no film", {"modality": "video"}, ""),
        (whole, {"uuid": "request-image-0"}, "request's own names"),
    ]
    items, data = [entry(0)], [whole]
    for line, (media, fields, _) in enumerate(bad, start=1):
        items += [entry(line, **fields), entry(line + 100)]
        data += [media, picture(shade=line)]  # type: ignore[list-item]  # bytes or a path
    results = opened().identify(items, data)
    assert [result.item for result in results] == items
    failed, fine = results[1::2], results[0::2]
    names = {result.identifier for result in fine if isinstance(result, Identified)}
    assert len(names) == len(fine)
    for result, (_, _, reason) in zip(failed, bad, strict=True):
        assert isinstance(result, Failed)
        assert reason in result.reason
        assert result.reason
        assert "\n" not in result.reason
        assert "0x" not in result.reason
        assert len(result.reason) < 600


@pytest.mark.parametrize(
    ("modality", "decoder"), [("audio", "soundfile"), ("video", "opencv-python-headless")]
)
def test_media_that_nothing_here_decodes_fail_with_what_to_install(
    opened: Callable[..., VllmEncoder],
    monkeypatch: pytest.MonkeyPatch,
    modality: str,
    decoder: str,
) -> None:
    async def absent(*_: object, **__: object) -> None:
        raise PackageNotFoundError("vllm")  # as a vLLM of another distribution's name says it

    monkeypatch.setattr(opened()._preparer, "_parse_messages", absent)
    (result,) = opened().identify([entry(modality=modality)], [b"media"])
    assert isinstance(result, Failed)
    assert f"vLLM decodes {modality} with" in result.reason
    assert decoder in result.reason


def test_picture_of_more_rows_than_the_model_has_room_for_fails_alone(
    opened: Callable[..., VllmEncoder],
) -> None:
    encoder = opened("--max-model-len", "32")
    large, small = encoder.identify([entry(1), entry(2)], [picture(224, 224), picture(56, 56)])
    assert isinstance(large, Failed)
    assert isinstance(small, Identified)
    assert "32" in large.reason


def test_pictures_with_one_exif_imageid_keep_names_of_their_own(
    opened: Callable[..., VllmEncoder],
) -> None:
    """vLLM#51899: whoever makes a file chooses that field."""
    from PIL import Image

    def tagged(shade: int) -> bytes:
        image = Image.new("RGB", (60, 60), (shade, 0, 0))
        exif = image.getexif()
        exif[0x800D] = "7b8e9a10-0000-4000-8000-000000000001"
        file = io.BytesIO()
        image.save(file, "JPEG", exif=exif)
        return file.getvalue()

    first, second = opened().identify([entry(1), entry(2)], [tagged(10), tagged(200)])
    assert isinstance(first, Identified)
    assert isinstance(second, Identified)
    assert first.identifier != second.identifier
    assert first.input_digest != second.input_digest


def test_pictures_of_the_same_bytes_in_other_shapes_have_names_of_their_own(
    opened: Callable[..., VllmEncoder],
) -> None:
    """dynamo#8340: 30 x 150 pixels and 150 x 30 shared an embedding."""
    assert named(opened(), picture(30, 150)) != named(opened(), picture(150, 30))


def test_one_uuid_for_two_media_shows_in_what_they_are_made_of(
    opened: Callable[..., VllmEncoder],
) -> None:
    """vLLM#55547: one name, two contents."""
    items = [entry(1, uuid="logo"), entry(2, uuid="logo")]
    first, second = opened().identify(items, [picture(shade=1), picture(shade=2)])
    assert isinstance(first, Identified)
    assert isinstance(second, Identified)
    assert first.identifier == second.identifier == "logo"
    assert first.input_digest != second.input_digest


def test_film_is_named_and_processed_like_a_picture(model: str) -> None:
    import numpy as np
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, VideoLoader

    from ec_s3.connector.encoder import open_encoder

    @VIDEO_LOADER_REGISTRY.register("ec_s3-test")
    class Loader(VideoLoader):  # type: ignore[misc]  # no decoder of films is installed here
        @classmethod
        def load_bytes(cls, data: bytes, num_frames: int = -1, **_: Any) -> Any:
            frames = np.frombuffer(data, np.uint8).reshape(-1, 56, 56, 3)
            count = len(frames)
            return frames, {
                "total_num_frames": count,
                "fps": 1.0,
                "duration": float(count),
                "video_backend": "ec_s3-test",
                "frames_indices": list(range(count)),
                "do_sample_frames": False,
            }

    options = ("--media-io-kwargs", '{"video": {"video_backend": "ec_s3-test"}}')
    encoder = open_encoder(settings(model, *options))
    try:
        film = bytes(range(256)) * (4 * 56 * 56 * 3 // 256)
        items = [entry(1, modality="video"), entry(2, modality="video"), entry(3)]
        first, other, still = encoder.identify(items, [film, film[::-1], picture()])
    finally:
        encoder.close()
    assert isinstance(first, Identified), first
    assert isinstance(other, Identified), other
    assert isinstance(still, Identified), still
    assert first.num_embeds == 8  # 4 frames, 2 at a time, 4 rows each
    assert len({first.identifier, other.identifier, still.identifier}) == 3


# -- what a job has in common with a server ----------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "connector", "differing"),
    [
        ((), {}, []),
        (("--revision", "v2"), {}, ["revision"]),
        (("--dtype", "bfloat16"), {}, ["dtype"]),
        (("--media-io-kwargs", BACKGROUND), {}, ["media_io_kwargs"]),
        (("--mm-hasher-algorithm", "sha512"), {}, ["hash_scheme"]),
        (
            ("--mm-processor-kwargs", '{"max_pixels": 12544}'),
            {},
            ["encoder_config", "mm_processor_kwargs"],
        ),
        ((), {"adapter": "f00"}, ["adapter"]),
        ((), {"weight_version": "2"}, ["weight_version"]),
        ((), {"model": "org/model"}, ["model"]),
        ((), {"salt": "tenant"}, ["salt"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_option_that_outputs_or_names_depend_on_differs_by_its_name(
    model: str, arguments: tuple[str, ...], connector: dict[str, object], differing: list[str]
) -> None:
    """Against a server with the defaults: what `--expect` tells before the first upload."""
    from ec_s3.config import ECConfig
    from ec_s3.connector.encode_only import encode_only_config
    from ec_s3.connector.identity import facts_of, namespace_of

    server = server_config(model)
    manifest = namespace_of(server, ECConfig()).manifest(facts_of(server))
    expected = Expected(source="server", fields=fields_of(manifest))
    job, config = encode_only_config(settings(model, *arguments, **connector))
    found = compare(expected, namespace_of(job, config), facts_of(job))
    assert [difference.field for difference in found] == differing


def test_model_under_another_path_differs_by_its_argument_even_with_one_name_for_both(
    model: str, tmp_path: Path
) -> None:
    """The name makes keys; the path, as it was given, makes identifiers."""
    from ec_s3.config import ECConfig
    from ec_s3.connector.encode_only import encode_only_config
    from ec_s3.connector.identity import facts_of, namespace_of

    (tmp_path / "copy").symlink_to(model)
    shared = ECConfig(model="org/model")
    server = server_config(model)
    manifest = namespace_of(server, shared).manifest(facts_of(server))
    job, config = encode_only_config(settings(str(tmp_path / "copy"), model="org/model"))
    assert namespace_of(job, config) == namespace_of(server, shared)
    found = compare(
        Expected(source="server", fields=fields_of(manifest)),
        namespace_of(job, config),
        facts_of(job),
    )
    assert [difference.field for difference in found] == ["model_argument"]


def test_settings_of_the_processor_are_in_no_identifier_and_so_in_the_namespace(
    opened: Callable[..., VllmEncoder],
) -> None:
    """vLLM hashes those of a request, not those that an engine was started with."""
    media = picture(224, 224)
    plain, smaller = opened(), opened("--mm-processor-kwargs", '{"max_pixels": 12544}')
    assert named(plain, media) == named(smaller, media)
    assert plain.namespace.prefix != smaller.namespace.prefix


def test_server_tells_prometheus_what_a_job_compares(model: str) -> None:
    import prometheus_client

    from ec_s3.connector.encode_only import encode_only_config
    from ec_s3.connector.identity import facts_of, namespace_of
    from ec_s3.connector.stats import ECS3PromMetrics
    from ec_s3.prewarm.expect import _fields_of_page

    job, config = encode_only_config(
        settings(model, "--media-io-kwargs", BACKGROUND, salt="tenant", adapter="f00")
    )
    registry = prometheus_client.CollectorRegistry()

    def made(kind: Any) -> Any:
        return lambda **more: kind(registry=registry, **more)

    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    names, values = ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]}
    ECS3PromMetrics(job, {kind: made(kind) for kind in kinds}, names, values)  # type: ignore[arg-type]  # lists of text
    page = prometheus_client.generate_latest(registry).decode()
    fields = _fields_of_page(page)
    namespace = namespace_of(job, config)
    assert fields["namespace"] == namespace.id
    assert compare(Expected(source="x", fields=fields), namespace, facts_of(job)) == []
    assert "tenant" not in page


def test_job_takes_a_servers_own_connector_options_for_its_own(model: str) -> None:
    from ec_s3.connector.encode_only import encode_only_config

    transfer = (
        '{"ec_connector": "ECS3Connector", "ec_role": "ec_both", "ec_connector_extra_config": '
        '{"url": "file:///servers", "adapter": "f00", "local_disk": "/disk", "max_uploads": 2}}'
    )
    job, config = encode_only_config(
        EncoderSettings(
            model=model,
            arguments=(*ARGUMENTS, "--ec-transfer-config", transfer),
            connector={"weight_version": "2"},
        )
    )
    assert (config.url, config.adapter, config.weight_version) == ("file:///servers", "f00", "2")
    assert (config.max_uploads, config.local_disk, config.engine) == (2, None, "thread")
    assert job.ec_transfer_config.ec_role == "ec_producer"
    assert job.model_config.multimodal_config.mm_encoder_only


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "8000"), "--port"),
        (("--dtype", "float3"), "dtype"),
        (("--revision",), "expected one argument"),
        (("--mm-processor-kwargs", "{"), "mm-processor-kwargs"),
        (("--tensor-parallel-size", "-1"), "tensor_parallel_size"),
        (
            (
                *("--enable-lora", "--enable-tower-connector-lora"),
                *("--default-mm-loras", '{"image": "/adapters/a"}'),
            ),
            "adapter",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_options_that_cannot_be_used_are_refused_by_name(
    model: str, arguments: tuple[str, ...], message: str
) -> None:
    from ec_s3.connector.encode_only import encode_only_config

    with pytest.raises(ConfigError, match=message):
        encode_only_config(settings(model, *arguments))


def test_model_or_bucket_that_is_not_there_is_refused(model: str) -> None:
    from ec_s3.connector.encode_only import encode_only_config

    with pytest.raises(ConfigError, match="/no/such/model"):
        encode_only_config(settings("/no/such/model"))
    with pytest.raises(ConfigError, match="url"):
        encode_only_config(EncoderSettings(model=model, arguments=ARGUMENTS))


def test_model_with_a_decoder_of_its_own_is_refused(tmp_path: Path, environment: None) -> None:
    from ec_s3.connector.encode_only import encode_only_config
    from ec_s3.testing.tiny_sound_models import make_whisper

    whisper = str(make_whisper(tmp_path / "whisper"))
    with pytest.raises(ConfigError, match="not cached"):
        encode_only_config(
            EncoderSettings(model=whisper, connector={"url": "file:///x"}, arguments=ARGUMENTS[:2])
        )


# -- waves -----------------------------------------------------------------------------------------


class Engine:
    """In place of vLLM with its weights; fails for good at certain items."""

    def __init__(
        self, room: int = 1 << 24, reasons: dict[str, str] | None = None, deadly: Sequence[str] = ()
    ) -> None:
        self.room = room
        self.waves: list[list[str]] = []
        self.closed = False
        self._reasons = reasons or {}
        self._deadly = set(deadly)

    def run(self, wave: Sequence[Prepared]) -> list[_Loss | None]:
        from ec_s3.connector.encoder import _EngineFailedError, _Loss

        assert not self.closed
        names = [prepared.features[0].identifier for prepared in wave]
        self.waves.append(names)
        if not self._deadly.isdisjoint(names):
            raise _EngineFailedError("vLLM has failed: out of memory")
        reasons = [self._reasons.get(name) for name in names]
        return [_Loss(reason, blameless=True) if reason else None for reason in reasons]

    def close(self) -> None:
        self.closed = True


def four(encoder: VllmEncoder) -> list[Identified]:
    items = [entry(line, uuid=f"item {line}") for line in range(4)]
    found = encoder.identify(items, [picture(56, 56, shade=line) for line in range(4)])
    assert all(isinstance(one, Identified) and one.nbytes == 1024 for one in found)
    return [one for one in found if isinstance(one, Identified)]


def test_outputs_under_way_fill_half_of_the_host_memory_at_most(
    opened: Callable[..., VllmEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = opened()
    engine = Engine(room=2 * 3 * PAGE_BYTES)
    monkeypatch.setattr(encoder, "_engine", engine)
    found = four(encoder)
    assert encoder.encode(found) == found
    assert engine.waves == [["item 0", "item 1", "item 2"], ["item 3"]]


def test_output_larger_than_the_memory_has_a_wave_of_its_own(
    opened: Callable[..., VllmEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = opened()
    engine = Engine(room=1)
    monkeypatch.setattr(encoder, "_engine", engine)
    encoder.encode(four(encoder)[:2])
    assert engine.waves == [["item 0"], ["item 1"]]


def test_what_is_not_in_the_bucket_has_failed_with_its_reason_and_the_others_have_not(
    opened: Callable[..., VllmEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = opened()
    monkeypatch.setattr(encoder, "_engine", Engine(reasons={"item 2": "no room"}))
    found = four(encoder)
    results = encoder.encode(found)
    assert results[:2] + results[3:] == found[:2] + found[3:]
    assert results[2] == Failed(item=found[2].item, reason="no room", blameless=True)


def test_entry_that_vllm_dies_of_is_found_and_the_others_are_encoded(
    opened: Callable[..., VllmEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = opened()
    engines = starting(encoder, monkeypatch, deadly=["item 2"])
    found = four(encoder)
    results = encoder.encode(found)
    assert [type(result) for result in results] == [Identified, Identified, Failed, Identified]
    assert isinstance(results[2], Failed)
    assert "out of memory" in results[2].reason
    # All of them, the first half, the second one; and then one after the other.
    sizes = [[len(wave) for wave in engine.waves] for engine in engines]
    assert sizes == [[4], [2, 2], [1], [1]]
    assert [engine.closed for engine in engines] == [True, True, True, False]


def test_vllm_that_dies_of_everything_ends_the_job(
    opened: Callable[..., VllmEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = opened()
    engines = starting(encoder, monkeypatch, deadly=[f"item {line}" for line in range(4)])
    assert all(isinstance(result, Failed) for result in encoder.encode(four(encoder)))
    with pytest.raises(ECS3Error, match="out of memory"):
        encoder.encode(four(encoder))
    assert all(engine.closed for engine in engines)


def starting(
    encoder: VllmEncoder, monkeypatch: pytest.MonkeyPatch, *, deadly: Sequence[str]
) -> list[Engine]:
    """What is started in place of vLLM from now on, one engine after the other."""
    engines: list[Engine] = []

    def start(_: object) -> Engine:
        engines.append(Engine(deadly=deadly))
        return engines[-1]

    monkeypatch.setattr("ec_s3.connector.encoder._Engine", start)
    monkeypatch.setattr(encoder, "_engine", None)
    monkeypatch.setattr(encoder, "_failures", 0)
    return engines


def test_only_what_was_identified_last_can_be_encoded_and_only_once(
    opened: Callable[..., VllmEncoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = opened()
    monkeypatch.setattr(encoder, "_engine", Engine())
    found = four(encoder)
    encoder.encode(found[:1])
    with pytest.raises(ValueError, match="not identified"):
        encoder.encode(found[:1])
    encoder.identify([], [])
    with pytest.raises(ValueError, match="not identified"):
        encoder.encode(found[1:])


def test_weights_that_cannot_be_loaded_are_an_error_of_the_settings(
    tmp_path: Path, environment: None
) -> None:
    from ec_s3.connector.encoder import open_encoder
    from ec_s3.testing.tiny_models import make_qwen2_vl

    model = make_qwen2_vl(tmp_path / "tiny")
    (model / "model.safetensors").write_bytes(b"")
    encoder = open_encoder(settings(str(model)))
    try:
        found = four(encoder)
        with pytest.raises(ConfigError, match="vLLM did not start"):
            encoder.encode(found)
    finally:
        encoder.close()
    assert issubclass(ConfigError, ECS3Error)
