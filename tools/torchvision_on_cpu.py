"""Let the torchvision of PyPI, built for CUDA, be imported beside a CPU build of torch.

vLLM's image models import torchvision's Python transforms. Its compiled operators need the CUDA
libraries and do not load; the import then fails where torchvision registers fake kernels for
`nms` and `qnms`, since nobody declared them. This module declares the two schemas just before
torchvision is imported. The transforms work; the operators themselves stay unavailable.

`tools/setup_env.sh` copies this file into site-packages with a .pth line that imports it, so it
runs at every start of the interpreter and must stay free of imports that cost time.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

_DECLARED: list[object] = []


class DeclareOperators(MetaPathFinder):
    """Finds nothing; being asked for torchvision is the signal to declare its operators."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Declare the schemas once, before the import system finds torchvision itself."""
        del path, target
        if fullname != "torchvision" or _DECLARED:
            return
        torch: Any = import_module("torch")
        if torch.version.cuda is None:
            library = torch.library.Library("torchvision", "FRAGMENT")
            arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(f"nms{arguments}")
            library.define(f"qnms{arguments}")
            _DECLARED.append(library)  # the declaration lasts as long as this object


sys.meta_path.insert(0, DeclareOperators())
