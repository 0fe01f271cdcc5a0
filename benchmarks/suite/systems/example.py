"""vLLM's own ECExampleConnector: one safetensors file per item in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.example_connector import (
    ECExampleConnector,
    ECExampleConnectorMetadata,
    MMMeta,
)

from suite.systems.base import ThreadSystem


class Bare(ECExampleConnector):  # type: ignore[misc]  # vLLM is untyped at this border
    """The connector without a vLLM configuration: only its folder, and the role of a producer."""

    def __init__(self, folder: str) -> None:
        self._storage_path = folder
        self._mm_datas_need_loads: dict[str, int] = {}

    @property
    def is_producer(self) -> bool:
        return True


class Example(ThreadSystem):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        Path(settings["folder"]).mkdir(parents=True, exist_ok=True)
        self._folder = settings["folder"]

    def put(self, item: tuple[str, Any]) -> bool:
        name, tensor = item
        Bare(self._folder).save_caches({name: tensor}, name)
        return True

    def get(self, name: str) -> Any:
        # One connector per call: its metadata is a field, and callers are threads here.
        connector, caches = Bare(self._folder), dict[str, Any]()
        if not connector.has_cache_item(name):
            return None
        metadata = ECExampleConnectorMetadata()
        metadata.add_mm_data(MMMeta(name, self.shape[0]))
        connector.bind_connector_metadata(metadata)
        connector.start_load_caches(caches)
        return caches[name].clone()  # it is a mapping of the file, not read yet

    def contains(self, name: str) -> bool:
        return bool(Bare(self._folder).has_cache_item(name))


SYSTEMS = {"example": Example}
