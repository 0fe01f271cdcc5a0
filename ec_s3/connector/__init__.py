"""The vLLM EC connector; the only part of ec_s3 that imports vLLM.

Name this module in `ec_connector_module_path`, or let the plugin register the class. Importing it
loads nothing heavy: vLLM imports it in the scheduler, in each worker and in the API process.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ec_s3.connector.shell import ECS3Connector

__all__ = ["ECS3Connector"]


def __getattr__(name: str) -> object:
    if name != "ECS3Connector":
        raise AttributeError(f"module 'ec_s3.connector' has no attribute {name!r}")
    from ec_s3.connector.shell import ECS3Connector

    return ECS3Connector
