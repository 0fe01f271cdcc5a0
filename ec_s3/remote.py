"""Opens the stores that a configuration names.

Runs wherever an engine or a tool starts; opening connects to nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ec_s3.directory import DirectoryStore
from ec_s3.errors import ConfigError
from ec_s3.keys import KEY_VERSION
from ec_s3.url import DirectoryLocation, S3Location

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
    """The disk tier of this engine, None when `config.local_disk` is unset.

    Raises:
        ConfigError: the shared store lies in the same folder.
    """
    if config.local_disk is None:
        return None
    location, folder = config.location(), Path(config.local_disk)
    if (
        isinstance(location, DirectoryLocation)
        and folder.resolve() == Path(location.path).resolve()
    ):
        raise ConfigError(
            f"local_disk={folder} is also what url names: what the tier has no room for would be "
            "removed from the shared store; choose another folder"
        )
    return DirectoryStore(
        folder,
        max_bytes=config.max_local_disk_size,
        exclusive=True,
        prefix=f"v{KEY_VERSION}/",  # whatever else a user keeps there is his
    )
