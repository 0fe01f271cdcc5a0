"""Any number of pictures, no two alike: pieces of real photographs, and made-up ones.

Deterministic; writes files and nothing else. Needs Pillow and NumPy.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from ec_s3.testing.photographs import photographs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_EDGE = 112


def make_pictures(folder: Path, number: int) -> list[Path]:
    """Write pictures as JPEG and PNG files, every other one out of a photograph; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    real, made = _pieces(), _made_up()
    paths = []
    for at in range(number):
        picture = next(real if at % 2 == 0 else made)
        path = folder / f"{at:04}.{'jpg' if at % 4 == 0 else 'png'}"
        picture.save(path)
        paths.append(path)
    return paths


def _pieces() -> Iterator[Image.Image]:
    """Squares out of the photographs, each from another place."""
    files = list(photographs().values())
    for at in count():
        with Image.open(files[at % len(files)]) as photograph:
            width, height = (edge - _EDGE for edge in photograph.size)
            left, top = 37 * at % width, 53 * at % height
            box = (left, top, left + _EDGE, top + _EDGE)
            yield photograph.convert("RGB").crop(box)


def _made_up() -> Iterator[Image.Image]:
    """Waves of colour, each of its own."""
    for at in count(1):
        rows, columns = np.mgrid[0:_EDGE, 0:_EDGE] / _EDGE
        waves = [np.sin(at * rows + k * columns * 7 + k) for k in range(3)]
        yield Image.fromarray((127 * (np.stack(waves, axis=2) + 1)).astype(np.uint8))
