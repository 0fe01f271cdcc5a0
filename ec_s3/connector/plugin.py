"""Entry point of `vllm.general_plugins`: makes `ECS3Connector` known by name.

vLLM calls it in every process, possibly more than once; it must stay cheap and idempotent.
"""

from __future__ import annotations

import logging

NAME = "ECS3Connector"
MODULE = "ec_s3.connector"

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the connector with vLLM's factory; does nothing when it is known already."""
    try:
        from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    except ImportError:
        # Before 0.11 there is no EC connector at all; the plugin must not stop such a vLLM.
        logger.warning("this vLLM has no EC connectors; ec_s3 needs 0.30 or newer")
        return
    try:
        ECConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        logger.debug("%s is registered already", NAME)
