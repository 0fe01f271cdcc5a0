"""Makes of a manifest's entry what vLLM's scheduler is given: the way of a server, step by step.

The media are decoded, named and processed by vLLM's own code, and with the settings that its HTTP
server would use, so that the identifier is the server's. Runs on the caller's thread, which must
not have an event loop; vLLM's own threads decode. Needs no device, loads no weights and calls no
encoder.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ec_s3.connector.binding import digest_of
from ec_s3.errors import ConfigError
from ec_s3.keys import is_request_local

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ec_s3.prewarm.encoding import MediaItem

logger = logging.getLogger(__name__)

DECODED_AT_ONCE = 8
"""Entries that are decoded side by side; as many are held in memory uncompressed."""

_DECODERS = {
    "image": "Pillow",
    "video": "OpenCV (pip install opencv-python-headless)",
    "audio": "soundfile or PyAV (pip install 'vllm[audio]')",
}
"""What vLLM decodes media with unless it is told otherwise; an installation may lack it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One encoder output that an entry leads to.

    Attributes:
        rows: of the output.
        input_digest: what the encoder will be given, see `binding`; empty when unknown.
    """

    identifier: str
    modality: str
    rows: int
    input_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that is ready for vLLM's engine.

    Attributes:
        engine_input: vLLM's own description of the prompt, inputs of the encoder included.
        lora: the adapter, None for none.
        features: the outputs, in the order of the prompt; one but for a video with its sound.
    """

    engine_input: Any
    lora: Any
    features: tuple[Feature, ...]


class Preparer:
    """Prepares requests with one medium each; one thread at a time.

    Args:
        vllm_config: of the engine that will encode.

    Raises:
        ConfigError: a vLLM whose way of a request into the engine is another one.
    """

    def __init__(self, vllm_config: Any) -> None:
        from vllm import SamplingParams

        try:
            from vllm.multimodal.media.connector import merge_media_io_kwargs
            from vllm.renderers import renderer_from_config
            from vllm.renderers.inputs.preprocess import parse_model_prompt
            from vllm.v1.engine.input_processor import InputProcessor

            self._parse_messages = _chat_module().parse_chat_messages_async
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"this vLLM is not one of those that can prewarm: {error}") from error
        self._parse_prompt = parse_model_prompt
        self._vllm_config = vllm_config
        self._model = vllm_config.model_config
        # As a server merges them, where a request brings none of its own.
        given = self._model.get_multimodal_config().media_io_kwargs
        self._media_io = merge_media_io_kwargs(given, None)
        self._renderer = renderer_from_config(vllm_config)
        self._processor = InputProcessor(vllm_config, self._renderer)
        self._params = SamplingParams(max_tokens=1, temperature=0.0)

    def prepare(
        self, entries: Sequence[tuple[MediaItem, bytes | Path]]
    ) -> list[Prepared | Exception]:
        """Prepare the requests for these entries.

        Returns:
            One result an entry, in their order: for media that cannot be used, or are too large for
            the model, what vLLM, the model's processor or a decoder have raised.
        """
        results: list[Prepared | Exception] = []
        for start in range(0, len(entries), DECODED_AT_ONCE):
            some = entries[start : start + DECODED_AT_ONCE]
            decoded = asyncio.run(self._decode(some))
            results += [
                one if isinstance(one, Exception) else self._prepare(item, one)
                for (item, _), one in zip(some, decoded, strict=True)
            ]
        return results

    async def _decode(self, entries: Sequence[tuple[MediaItem, bytes | Path]]) -> list[Any]:
        return await asyncio.gather(*(self._decode_one(*entry) for entry in entries))

    async def _decode_one(self, item: MediaItem, media: bytes | Path) -> Any:
        """An entry's media and names, as vLLM takes them out of a message; or an exception."""
        try:
            body = media if isinstance(media, bytes) else await asyncio.to_thread(media.read_bytes)
            _, data, uuids = await self._parse_messages(
                [{"role": "user", "content": [_part(item, body)]}],
                self._model,
                content_format="string",
                media_io_kwargs=self._media_io,
                mm_processor_kwargs=dict(item.processor) or None,
            )
        except ImportError:
            logger.debug("line %d has no decoder", item.line, exc_info=True)
            missing = f"vLLM decodes {item.modality} with {_DECODERS[item.modality]}"
            return ValueError(f"{missing}, which is not installed here")
        except Exception as error:  # the border to decoders: one bad entry of many
            logger.debug("line %d cannot be decoded", item.line, exc_info=True)
            return error
        return data, uuids

    def _prepare(self, item: MediaItem, decoded: tuple[Any, Any]) -> Prepared | Exception:
        try:
            engine_input = self._render(item, *decoded)
            lora = self._lora(engine_input)
            request = self._processor.process_inputs(
                "prepared", engine_input, self._params, ("generate",), lora_request=lora
            )
            features = tuple(_feature(feature) for feature in request.mm_features or ())
        except Exception as error:  # the border to processors: as above
            logger.debug("line %d cannot be processed", item.line, exc_info=True)
            return error
        if not features:
            return ValueError("the model makes nothing of it that is encoded")
        return Prepared(engine_input=engine_input, lora=lora, features=features)

    def close(self) -> None:
        """End vLLM's threads."""
        self._renderer.shutdown()

    def _render(self, item: MediaItem, data: Any, uuids: Any) -> Any:
        counts = {modality: len(items) for modality, items in data.items()}
        prompt = {
            "prompt": self._renderer.get_mm_processor().dummy_inputs.get_dummy_text(counts),
            "multi_modal_data": data,
            "multi_modal_uuids": uuids,
        }
        extras: dict[str, Any] = {"media_io_kwargs": self._media_io or {}}
        if item.processor:
            extras["mm_processor_kwargs"] = dict(item.processor)
        (engine_input,) = self._renderer.render_cmpl(
            [self._parse_prompt(self._model, prompt)],
            prompt_extras=extras,
            skip_mm_cache=True,  # that cache would send only a name for what it knows
        )
        return engine_input

    def _lora(self, engine_input: Any) -> Any:
        """The adapter that a server would choose for the modality."""
        config = self._vllm_config.lora_config
        adapters = dict(getattr(config, "default_mm_loras", None) or {})
        chosen = sorted(adapters.keys() & engine_input["mm_placeholders"].keys())
        if len(chosen) != 1:
            return None
        from vllm.lora.request import LoRARequest

        (modality,) = chosen
        return LoRARequest(modality, sorted(adapters).index(modality) + 1, adapters[modality])


def _chat_module() -> Any:
    try:
        return import_module("vllm.renderers.chat_utils")
    except ModuleNotFoundError:  # before 0.32
        return import_module("vllm.entrypoints.chat_utils")


def _part(item: MediaItem, media: bytes) -> dict[str, Any]:
    """The entry as a part of a chat message, its media inline."""
    kind = f"{item.modality}_url"
    data = base64.b64encode(media).decode()
    part: dict[str, Any] = {
        "type": kind,
        kind: {"url": f"data:application/octet-stream;base64,{data}"},
    }
    return part if item.uuid is None else {**part, "uuid": item.uuid}


def _feature(feature: Any) -> Feature:
    identifier = str(feature.identifier)
    if is_request_local(identifier):
        raise ValueError(f"its identifier {identifier!r} has the form of a request's own names")
    rows = int(feature.mm_position.get_num_embeds())
    if not rows:
        raise ValueError("its encoder output is empty")
    try:
        digest = digest_of(feature.data)
    except ValueError:  # it can be encoded all the same
        digest = ""
    return Feature(
        identifier=identifier, modality=str(feature.modality), rows=rows, input_digest=digest
    )
