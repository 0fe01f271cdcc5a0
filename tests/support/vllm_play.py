"""Stand-ins for vLLM's objects, as far as the scheduler part looks at them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ec_s3.connector.holds import Holds
from ec_s3.connector.link import Answer
from ec_s3.connector.media import Classifier, Rules
from ec_s3.connector.scheduler import Scheduler
from ec_s3.connector.state import Setup
from ec_s3.metrics import Stats
from ec_s3.testing.fake_port import FakePort
from ec_s3.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 8
DTYPE = "float32"


def spec(rows: int, *, width: int = WIDTH, dtype: str = DTYPE) -> TensorSpec:
    return TensorSpec(dtype, (rows, width))


@dataclass
class Position:
    offset: int
    length: int
    rows: int

    def get_num_embeds(self) -> int:
        return self.rows


@dataclass
class Feature:
    identifier: str
    mm_position: Position
    data: dict[str, Any] | None
    modality: str = "image"


def feature(
    identifier: str = "a", *, offset: int = 0, rows: int = 4, media: bool = True, **more: Any
) -> Feature:
    data = {"image_grid_thw": SimpleNamespace(data=[1, 2, 2])}
    if media:
        data["pixel_values"] = SimpleNamespace(data=[0.0])
    return Feature(identifier, Position(offset, more.pop("length", rows), rows), data, **more)


@dataclass
class Request:
    request_id: str
    mm_features: list[Feature]
    cache_salt: str | None = None
    lora_request: Any = None
    ec_transfer_params: Any = None
    num_computed_tokens: int = 0


@dataclass
class Output:
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    free_encoder_mm_hashes: list[str] = field(default_factory=list)
    total_num_scheduled_tokens: int = 1


@dataclass
class Hub:
    address: str = "hub"
    ready: bool = True


class Digest:
    """A binding whose digest a test gives; known at once to be unknown otherwise."""

    def __init__(self, digest: str | None = "") -> None:
        self.digest = digest
        self._waiting: list[Callable[[str], None]] = []

    def on_done(self, callback: Callable[[str], None]) -> None:
        if self.digest is None:
            self._waiting.append(callback)
        else:
            callback(self.digest)

    def done(self, digest: str) -> None:
        self.digest = digest
        for callback in self._waiting:
            callback(digest)


class Play:
    """A scheduler part with a fake port, hub and clock.

    Attributes:
        digests: what the inputs of an item are digested to, by the inputs' `id`.
    """

    def __init__(
        self,
        *,
        role: str = "both",
        ranks: int = 1,
        rules: dict[str, Any] | None = None,
        **setup: Any,
    ) -> None:
        self.digests: dict[int, Digest] = {}
        self.now = 0.0
        self.pauses: list[float] = []
        self.port = FakePort()
        self.hub = Hub()
        self.stats = Stats()
        fields: dict[str, Any] = {
            "producer": role != "consumer",
            "consumer": role != "producer",
            "dtype": DTYPE,
            "widths": {} if role == "consumer" else {"image": WIDTH},
            "window": 64,
            "ranks": ranks,
            "fetch_timeout": 2.0,
            "metadata_timeout": 30.0,
            "max_deferred": 16,
        }
        self.setup = Setup(**{**fields, **setup})
        self.holds = Holds(self.setup, self.port)
        self.scheduler = Scheduler(
            self.setup,
            port=self.port,
            holds=self.holds,
            hub=self.hub,
            classifier=Classifier(
                Rules(
                    metadata_fields=lambda _: {"image_grid_thw"},
                    **{"salted": True, "client_names": True, **(rules or {})},
                )
            ),
            bind=lambda inputs: self.digests.setdefault(id(inputs), Digest()),  # type: ignore[arg-type, return-value]  # quacks like a Binding
            stats=self.stats,
            nonce="nonce",
            clock=lambda: self.now,
            pause=self.pauses.append,
        )

    def request(self, *features: Feature, name: str = "r", salt: str | None = None) -> Request:
        return Request(name, list(features), salt)

    def only_want(self) -> int:
        (ticket,) = self.port.wants
        return ticket

    def encode(self, request: Request, index: int = 0) -> Any:
        """A step in which vLLM encodes one item."""
        self.scheduler.allocated(request, index)
        return self.scheduler.build_meta(
            Output(scheduled_encoder_inputs={request.request_id: [index]})
        )

    def save_of_first(self) -> Any:
        """The order to save `a`, which a request encoded that has ended; vLLM has evicted it."""
        first = self.request(feature(), name="first")
        self.scheduler.ensure(first, 0)
        self.port.absent(self.only_want())
        self.scheduler.ensure(first, 0)
        (order,) = self.encode(first).saves
        self.scheduler.finished(first)
        self.idle(tokens=1, free_encoder_mm_hashes=["a"])
        return order

    def load(self, request: Request, index: int = 0) -> Any:
        """A step in which vLLM loads one item after a yes."""
        assert self.scheduler.has(request.mm_features[index].identifier)
        self.scheduler.allocated(request, index)
        return self.scheduler.build_meta(Output())

    def load_of(self, request: Request, index: int = 0) -> Any:
        """The loads of a step whose yes has been heard already."""
        self.scheduler.allocated(request, index)
        return self.scheduler.build_meta(Output()).loads

    def idle(self, *, tokens: int = 0, **more: Any) -> Any:
        return self.scheduler.build_meta(Output(total_num_scheduled_tokens=tokens, **more))

    def loaded(self, transfer: int, rank: int = 0) -> None:
        self.holds.on_answer(Answer(rank, "loaded", transfer, done=True))

    def saved(self, ticket: int, *, done: bool = True) -> None:
        self.holds.on_answer(Answer(0, "saved", ticket, done=done))

    @property
    def held(self) -> int:
        return len(self.holds)
