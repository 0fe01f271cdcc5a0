"""A folder that may not be listed, also by root, whom no permissions keep from it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def make_unlistable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let every listing of a folder whose path ends so fail."""
    scandir = os.scandir

    def denied(path: str) -> object:
        if str(path).endswith(name):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
