"""Encoder cache for vLLM on S3-compatible object storage.

The names below are the public face; each is imported on first use, so `import ec_s3` stays light
(neither torch nor an SDK nor vLLM is loaded).
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ec_s3.blocking import ECCacheEngine
    from ec_s3.config import ECConfig
    from ec_s3.engine import EncoderCache
    from ec_s3.errors import ECS3Error
    from ec_s3.ingest import upload_items
    from ec_s3.intake import UploadReport
    from ec_s3.keys import Namespace
    from ec_s3.types import TensorSpec

_HOMES = {
    "ECCacheEngine": "ec_s3.blocking",
    "ECConfig": "ec_s3.config",
    "ECS3Error": "ec_s3.errors",
    "EncoderCache": "ec_s3.engine",
    "Namespace": "ec_s3.keys",
    "TensorSpec": "ec_s3.types",
    "UploadReport": "ec_s3.intake",
    "upload_items": "ec_s3.ingest",
}

__all__ = [
    "ECCacheEngine",
    "ECConfig",
    "ECS3Error",
    "EncoderCache",
    "Namespace",
    "TensorSpec",
    "UploadReport",
    "__version__",
    "upload_items",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ec_s3' has no attribute {name!r}")
    return getattr(import_module(home), name)
