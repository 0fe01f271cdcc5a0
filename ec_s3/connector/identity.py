"""What makes two vLLM engines' encoder outputs interchangeable: a Namespace from a VllmConfig.

Reads configuration only; runs once per process.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ec_s3.config import ECConfig
from ec_s3.keys import Namespace
from ec_s3.metric_table import NAMESPACE_LABELS
from ec_s3.tensors import dtype_name

_IRRELEVANT = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
)
"""Of the configuration of a model and of its parts: where it lies, and who wrote it."""

_LANGUAGE_MODEL = "text_config"
_LANGUAGE_FIELDS = ("hidden_size",)
"""Of the language model's own part: its width, which an encoder's output is projected to. A tensor
of another width ends an engine that loads it."""

_MM_FIELDS = ("video_pruning_rate", "mm_encoder_attn_dtype")
"""Of vLLM's multimodal settings: what changes an encoder's output without changing the item."""

_PLACE = "device"
"""Of the processor's settings: where it runs. vLLM sets it for engines that only encode."""


def namespace_of(vllm_config: Any, config: ECConfig) -> Namespace:
    """The namespace of an engine.

    Raises:
        ConfigError: the model has no usable identity.
    """
    model = vllm_config.model_config
    return Namespace(
        model=config.model or str(model.model),
        dtype=dtype_name(model.dtype),
        revision=config.revision or str(model.revision or ""),
        encoder_config=encoder_fingerprint(vllm_config),
        quantization=str(model.quantization or ""),
        weight_version=config.weight_version,
        adapter=config.adapter,
        hash_scheme=hash_scheme(getattr(model, "multimodal_config", None)),
        salt=config.salt.get_secret_value() if config.salt is not None else "",
    )


def encoder_fingerprint(vllm_config: Any) -> str:
    """Hash of all configuration that shapes an encoder's output, 16 hex digits."""
    model = vllm_config.model_config
    fields: dict[str, object] = _relevant(model.hf_config.to_dict())
    multimodal = getattr(model, "multimodal_config", None)
    for name in _MM_FIELDS:
        fields[f"vllm:{name}"] = str(getattr(multimodal, name, None))
    settings = processor_settings(multimodal)
    if settings:
        fields["vllm:mm_processor_kwargs"] = settings
    load_format = str(getattr(vllm_config.load_config, "load_format", ""))
    if load_format == "dummy":  # weights made up from a seed
        fields["vllm:weights"] = f"dummy:{model.seed}"
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def processor_settings(multimodal: Any) -> dict[str, Any]:
    """The processor's settings as an engine was started with them.

    vLLM's identifiers carry what a request sets of them, but not these.
    """
    return _without_place(getattr(multimodal, "mm_processor_kwargs", None) or {})


def _without_place(settings: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in settings.items():
        kept = _without_place(value) if isinstance(value, dict) else value
        if name != _PLACE and (kept or not value):
            found[name] = kept
    return found


def hash_scheme(multimodal: Any) -> str:
    """What vLLM's hasher makes of a fixed item, 16 hex digits.

    It changes with the algorithm and with the way in which content is fed to it (as between vLLM
    0.30 and 0.31), so that no identifier of one scheme is ever taken for one of another.
    """
    from PIL import Image
    from vllm.multimodal.hasher import MultiModalHasher

    image = Image.new("RGB", (2, 1), (1, 2, 3))
    probe = {"model_id": "ec_s3", "image": image, "kwargs": {"a": [1]}}
    algorithm = getattr(multimodal, "mm_hasher_algorithm", None)
    arguments = () if algorithm is None else (algorithm,)
    return str(MultiModalHasher.hash_kwargs(*arguments, **probe))[:16]


def _relevant(fields: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what does not matter, its parts' configurations included."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name == _LANGUAGE_MODEL and isinstance(value, dict):
            found[name] = {field: value.get(field) for field in _LANGUAGE_FIELDS}
        elif name not in _IRRELEVANT:
            found[name] = _relevant(value) if isinstance(value, dict) else value
    return found


def facts_of(vllm_config: Any) -> dict[str, object]:
    """What identifiers and keys depend on but the namespace does not tell in plain text.

    For people who read the manifest, and for jobs that must agree with a server.
    """
    import vllm

    model = vllm_config.model_config
    multimodal = getattr(model, "multimodal_config", None)
    facts = {
        "model_argument": str(model.model),
        "dtype": dtype_name(model.dtype),
        "mm_processor_kwargs": processor_settings(multimodal),
        "media_io_kwargs": getattr(multimodal, "media_io_kwargs", None) or {},
        "vllm": str(vllm.__version__),
    }
    readable: dict[str, object] = json.loads(json.dumps(facts, default=str))
    return readable


def namespace_labels(vllm_config: Any) -> tuple[str, ...]:
    """The labels of the metric `namespace_info` of an engine, in the table's order.

    Raises:
        ConfigError: the engine's settings or its model cannot be used.
    """
    extra = vllm_config.ec_transfer_config.ec_connector_extra_config
    namespace = namespace_of(vllm_config, ECConfig.from_mapping(extra))
    told = json.loads(namespace.manifest(facts_of(vllm_config)))
    values = {"namespace": namespace.id, **told["extra"], **told["namespace"]}
    return tuple(_label(values.get(name, "")) for name in NAMESPACE_LABELS)


def _label(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
