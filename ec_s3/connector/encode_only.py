"""vLLM's configuration for a job that only encodes, from the command line of a server.

What identifiers and namespace depend on stays as the server has it; what only matters to a server
(its language model's parallelism, drafter, KV transfer) is left out. Runs once per process, before
anything else of vLLM: it sets environment variables that vLLM reads when it is imported.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, NoReturn

from ec_s3.config import ECConfig
from ec_s3.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ec_s3.prewarm.encoding import EncoderSettings

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and connector run in this process
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output is the caller's
}

_DEFAULTS: Mapping[str, object] = {
    "max_uploads": 16,  # nothing here is waiting for an answer
}

_FIXED: Mapping[str, object] = {
    "engine": "thread",  # its uploads are asked about, one by one
    "persist_client_uuids": True,  # whoever runs the job has chosen them
    "positive_ttl": 24 * 3600.0,  # what was written is remembered until it is asked about
    "local_disk": None,  # the servers' of this host
}

_OF_SERVERS: Mapping[str, object] = {
    "data_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "kv_transfer_config": None,
    "speculative_config": None,
    # Too small for anything: it would take a second medium with the same uuid for the first. With
    # none at all there are no content hashes, and in shared memory inputs cannot be digested.
    "mm_processor_cache_gb": 1e-6,
    "mm_processor_cache_type": "lru",
}


def encode_only_config(settings: EncoderSettings) -> tuple[Any, ECConfig]:
    """The configurations of vLLM and of its connector; loads no weights.

    Raises:
        ConfigError: vLLM is not installed, or refuses the options, or they make nothing that could
            be stored.
    """
    os.environ.update(_ENVIRONMENT)
    try:
        from vllm.config import ECTransferConfig
        from vllm.usage.usage_lib import UsageContext
    except ImportError as error:
        raise ConfigError(f"vLLM is not installed here: {error}") from error
    if settings.workdir is not None:
        _log_to(settings.workdir / "vllm.log")
    arguments = _parse(["--model", settings.model, *settings.arguments])
    given = arguments.ec_transfer_config
    theirs = dict(given.ec_connector_extra_config) if given is not None else {}
    extra = {**_DEFAULTS, **theirs, **settings.connector, **_FIXED}
    config = ECConfig.from_mapping(extra)
    if config.url is None:
        raise ConfigError("url is not set: name the bucket that outputs go to")
    arguments.ec_transfer_config = ECTransferConfig(
        ec_connector="ECS3Connector",
        ec_connector_module_path="ec_s3.connector",
        ec_role="ec_producer",
        ec_connector_extra_config=extra,
    )
    for name, value in _OF_SERVERS.items():
        setattr(arguments, name, value)
    try:
        vllm_config = arguments.create_engine_config(UsageContext.LLM_CLASS)
    except (ValueError, TypeError, OSError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"vLLM cannot be started with these options: {error}") from error
    _check(vllm_config, config)
    return vllm_config, config


def _parse(command: Sequence[str]) -> Any:
    """The arguments of vLLM's engine, as its server reads them."""
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is untyped at this border
        def error(self, message: str) -> NoReturn:
            raise ConfigError(
                f"vLLM's options: {message}; those of its engine are understood, not those of its "
                "HTTP server"
            )

    parser = AsyncEngineArgs.add_cli_args(Parser(prog="vllm"))
    try:
        return EngineArgs.from_cli_args(parser.parse_args(list(command)))
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"vLLM's options: {error}") from error


def _check(vllm_config: Any, config: ECConfig) -> None:
    if vllm_config.model_config.is_encoder_decoder:
        raise ConfigError("encoder outputs of models with a decoder of their own are not cached")
    lora = vllm_config.lora_config
    tower = bool(lora is not None and lora.enable_tower_connector_lora)
    if tower and lora.default_mm_loras and not config.adapter:
        raise ConfigError(
            "an adapter changes the encoder's outputs, and its name does not tell its content; set "
            "`adapter` to a fingerprint of it, here and in every server"
        )


def _log_to(path: Path) -> None:
    """Let vLLM's log go to a file, and that of the connector with it."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("vllm").handlers = [handler]
