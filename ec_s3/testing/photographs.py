"""Real photographs that come with Python packages, so that tests and the demo need no network.

Used read-only, from where their packages installed them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ec_s3.errors import ConfigError

_PHOTOGRAPHS = {
    "china": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "hopper": ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
}


def photographs() -> dict[str, Path]:
    """Name -> file of every photograph.

    Raises:
        ConfigError: a package that ships one is not installed, or no longer ships it.
    """
    found = {}
    for name, (package, inside) in _PHOTOGRAPHS.items():
        spec = find_spec(package)
        origin = spec.origin if spec is not None else None
        path = None if origin is None else Path(origin).parent / inside
        if path is None or not path.is_file():
            raise ConfigError(
                f"the photograph {name!r} comes with {package}, which is not there: "
                "install ec-s3[test]"
            )
        found[name] = path
    return found
