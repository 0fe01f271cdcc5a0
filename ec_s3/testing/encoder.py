"""An encoder for prewarm jobs that needs no vLLM: it looks at media, and makes tensors up.

Everything but vLLM is real: items go through an engine of their own into the bucket that its
settings name. Called from one thread at a time. Identifiers follow vLLM's habits: a hash of the
content and of the processor's settings, a client's uuid in its place, an EXIF ImageID before both.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ec_s3.blocking import ECCacheEngine
from ec_s3.config import ECConfig
from ec_s3.prewarm.encoding import Failed, Identified
from ec_s3.types import DTYPE_BYTES, ItemMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ec_s3.keys import Namespace
    from ec_s3.prewarm.encoding import MediaItem

WIDTH = 16
_FLUSH_SECONDS = 60.0
_HOST_BYTES = 64 << 20


class PlayedEncoder:
    """An `ec_s3.prewarm.encoding.Encoder`.

    Args:
        settings: of the engine that uploads, as `ECConfig` takes them.
        namespace: where its outputs go; of float32.
        facts: for `namespace.json`.
        rows: rows of an item's tensor.
        on_encode: called with each batch before it is encoded.

    Attributes:
        encoded: identifiers in the order in which they were encoded.
        closed: whether it was.
    """

    def __init__(
        self,
        settings: Mapping[str, object],
        namespace: Namespace,
        *,
        facts: Mapping[str, object] | None = None,
        rows: int = 4,
        on_encode: Callable[[Sequence[Identified]], object] = lambda _: None,
    ) -> None:
        config = ECConfig.from_mapping({"max_local_cpu_size": _HOST_BYTES, **settings})
        self.namespace = namespace
        self.facts: Mapping[str, object] = facts or {}
        self.encoded: list[str] = []
        self.closed = False
        self._rows = rows
        self._on_encode = on_encode
        self._engine = ECCacheEngine(config, namespace, facts=self.facts)

    def identify(
        self, items: Sequence[MediaItem], data: Sequence[bytes | Path]
    ) -> list[Identified | Failed]:
        return [self._identify(item, source) for item, source in zip(items, data, strict=True)]

    def _identify(self, item: MediaItem, source: bytes | Path) -> Identified | Failed:
        content = source.read_bytes() if isinstance(source, Path) else source
        try:
            identity = _look_at(content) if item.modality == "image" else content
        except (OSError, ValueError, SyntaxError) as error:  # as Pillow fails
            return Failed(item=item, reason=f"{item.modality} cannot be decoded: {error}")
        settings = json.dumps(dict(item.processor), sort_keys=True).encode()
        name = hashlib.sha256(identity + b"\0" + settings).hexdigest()
        return Identified(
            item=item,
            identifier=item.uuid or name,
            num_embeds=self._rows,
            nbytes=self._rows * WIDTH * DTYPE_BYTES["float32"],
            input_digest=hashlib.sha256(content + b"\0" + settings).hexdigest(),
        )

    def encode(self, items: Sequence[Identified]) -> list[Identified | Failed]:
        self._on_encode(items)
        for item in items:
            seed = int.from_bytes(hashlib.sha256(item.identifier.encode()).digest()[:4])
            tensor = torch.randn(
                item.num_embeds, WIDTH, generator=torch.Generator().manual_seed(seed)
            )
            meta = ItemMeta(encode_seconds=0.01, input_digest=item.input_digest)
            self._engine.put(item.identifier, tensor, meta=meta)
            self.encoded.append(item.identifier)
        self._engine.flush(_FLUSH_SECONDS)
        there = self._engine.contains_many([item.identifier for item in items])
        return [
            item
            if there[item.identifier]
            else Failed(item=item.item, reason="its upload did not arrive", blameless=True)
            for item in items
        ]

    def close(self) -> None:
        self.closed = True
        self._engine.close()


def _look_at(content: bytes) -> bytes:
    """What identifies a picture; raises for what is none."""
    from PIL import ExifTags, Image

    with Image.open(io.BytesIO(content)) as picture:
        picture.load()
        try:
            named = picture.getexif().get(ExifTags.Base.ImageID)
        except (OSError, ValueError, SyntaxError, struct.error):
            named = None  # broken EXIF is no broken picture
    return content if named is None else str(named).encode()
