"""Opens the stores that a configuration names.

Runs wherever an engine or a tool starts; opening connects to nothing. Knows no tier and no key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ec_s3.directory import DirectoryStore
from ec_s3.url import S3Location

if TYPE_CHECKING:
    from ec_s3.config import ECConfig
    from ec_s3.store import Store


def open_store(config: ECConfig) -> Store | None:
    """The shared store that `config.url` names, None when it is unset.

    Raises:
        ConfigError: the settings contradict each other.
    """
    location = config.location()
    if location is None:
        return None
    if isinstance(location, S3Location):
        from ec_s3.s3 import S3Store  # the SDK takes a third of a second to import

        return S3Store(location, config.s3_options())
    return DirectoryStore(location.path)


def open_disk(config: ECConfig) -> Store | None:
    """The disk tier of this engine, None when `config.local_disk` is unset."""
    if config.local_disk is None:
        return None
    return DirectoryStore(config.local_disk, max_bytes=config.max_local_disk_size, exclusive=True)
