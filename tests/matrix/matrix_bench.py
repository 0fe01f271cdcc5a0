"""What the fault matrix runs on: reference answers, engines, loads and their checks."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ec_s3 import wire
from ec_s3.testing import vllm_process
from ec_s3.testing.census import census
from ec_s3.testing.faults import FaultServer
from ec_s3.testing.lab import Lab

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from ec_s3.testing.census import Census
    from ec_s3.testing.traffic import RecordedServer
    from ec_s3.testing.vllm_process import VLLMProcess

MODEL = "qwen2-vl"
FETCH_SECONDS = 1.0
METADATA_SECONDS = 1.5
GRACE_SECONDS = 1.0
RECOVERY_SECONDS = 45.0
SETTINGS = {
    "max_local_cpu_size": "16MiB",
    "fetch_timeout": FETCH_SECONDS,
    "metadata_timeout": METADATA_SECONDS,
    "connect_timeout": "1s",
    "read_timeout": "1s",
    "negative_ttl": "0.2s",
}
_LLM = {
    "max_num_seqs": 16,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 256,  # and so the size of vLLM's own encoder cache: 16 pictures
}
CAP = 1 << 20
GRID = {"image_grid_thw": [1, 8, 8]}
_EDGE = 112  # 8 x 8 patches, 16 rows
_CELLS = 6

LAYOUTS: Mapping[str, dict[str, Any]] = {
    "one process": {"multiprocessing": False},
    "separate": {"multiprocessing": True},
    "TP=2": {"multiprocessing": True, "tensor_parallel_size": 2},
}
ROLES = ("ec_both", "ec_producer", "ec_consumer")


def draw_picture(path: Path) -> Path:
    """A picture of its own for every file name: coarse patches of random colours."""
    from PIL import Image

    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        colours = random.Random(path.name).randbytes(3 * _CELLS * _CELLS)
        patches = Image.frombytes("RGB", (_CELLS, _CELLS), colours)
        patches.resize((_EDGE, _EDGE), Image.Resampling.NEAREST).save(path)
    return path


@dataclass(frozen=True, slots=True)
class Item:
    """A picture with its encoder output as a clean run made it."""

    name: str
    path: Path
    key: str
    identifier: str
    body: bytes = field(repr=False)

    @property
    def media(self) -> dict[str, Any]:
        return vllm_process.image(self.path)

    @property
    def bare(self) -> dict[str, Any]:
        """The same without its pixels."""
        return vllm_process.known_image(self.identifier, GRID)


class Reference:
    """An engine of its own on a clean prefix, which meets every prompt for the first time."""

    prefix = "reference"

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab = lab
        self._folder = folder
        self._items: dict[str, Item] = {}
        self._tokens: dict[str, tuple[int, ...]] = {}
        self._process: VLLMProcess | None = None

    @property
    def process(self) -> VLLMProcess:
        if self._process is None:
            self._process = self._lab.start(MODEL, prefix=self.prefix)
        return self._process

    def item(self, name: str) -> Item:
        """A picture, encoded by the reference on first use."""
        if name not in self._items:
            path = draw_picture(self._folder / f"{name}.png")
            answer = self._ask([vllm_process.image(path)], "what is this?")
            key = self._lab.wait_for_uploads(self.prefix, len(self._items) + 1)[-1]
            body = self._lab.read(key)
            header, _ = wire.decode(body, max_tensor_bytes=CAP)
            relative = key.removeprefix(f"{self.prefix}/")
            self._items[name] = Item(name, path, relative, header.identifier, body)
            self._tokens[_question([vllm_process.image(path)], "what is this?", 8)] = answer
        return self._items[name]

    def by_key(self, key: str) -> Item | None:
        """The picture whose object has a key, None when the reference does not know it."""
        return next((item for item in self._items.values() if item.key == key), None)

    def tokens(self, media: list[dict[str, Any]], text: str, max_tokens: int) -> tuple[int, ...]:
        """The right answer; its pictures must have been asked for with `item` before."""
        question = _question(media, text, max_tokens)
        if question not in self._tokens:
            self._tokens[question] = self._ask(media, text, max_tokens)
        return self._tokens[question]

    def _ask(self, media: list[dict[str, Any]], text: str, max_tokens: int = 8) -> tuple[int, ...]:
        prompt = vllm_process.prompt(*media, text=text, max_tokens=max_tokens)
        outcome = self.process.load([prompt])["outcomes"][0]
        assert outcome["finish_reason"] in ("length", "stop"), outcome
        return tuple(outcome["token_ids"])


def _question(media: list[dict[str, Any]], text: str, max_tokens: int) -> str:
    return "|".join([*(str(m["path"]) for m in media), text, str(max_tokens)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of a load, and what its answer may be.

    Attributes:
        kind: `text`, `media` or `bare` (a picture without its pixels, which may fail singly).
    """

    kind: str
    prompt: dict[str, Any]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load showed: complaints, seconds by kind of request, and encoded pictures."""

    wrong: list[str]
    seconds: dict[str, float]
    encoded: int
    reasons: list[str]


class Engine:
    """One engine of the matrix behind its own fault server and prefix."""

    def __init__(
        self, lab: Lab, reference: Reference, *, role: str, layout: str, **settings: object
    ) -> None:
        self.role = role
        self.layout = layout
        self.prefix = f"{role}-{layout}-{time.monotonic_ns()}".replace(" ", "-").replace("=", "")
        self.lab = lab
        self.reference = reference
        self.proxy = FaultServer(lab.server.url)
        self.proxy.__enter__()
        self.damaged: set[str] = set()
        self.base: dict[str, float] = {}
        self.census: Census | None = None
        self._settings = {**SETTINGS, **settings}
        self._process: VLLMProcess | None = None
        self._serial = 0

    @property
    def loads(self) -> bool:
        return self.role != "ec_producer"

    @property
    def saves(self) -> bool:
        return self.role != "ec_consumer"

    @property
    def process(self) -> VLLMProcess:
        """The engine's process, started on first use and again when it has died."""
        if self._process is None:
            self._process = self.lab.start(
                MODEL,
                prefix=self.prefix,
                role=self.role,
                endpoint=self.proxy.url,
                settings=self._settings,
                llm=_LLM,
                **LAYOUTS[self.layout],
            )
        return self._process

    @property
    def started(self) -> bool:
        return self._process is not None

    def close(self) -> None:
        """Kill what is left; a clean end is a cell of its own."""
        self.forget()
        self.proxy.__exit__(None, None, None)

    def forget(self) -> None:
        """The process has died or is no longer wanted."""
        if self._process is not None:
            self._process.kill()
        self._process = None

    # -- objects ---------------------------------------------------------------------------

    def key(self, item: Item) -> str:
        return f"{self.prefix}/{item.key}"

    def store(self, *items: Item) -> None:
        """Put the reference's objects into this engine's prefix."""
        for item in items:
            self.lab.replace(self.key(item), item.body)

    def damage(self, item: Item, body: bytes | None) -> None:
        """Put something else there, or nothing."""
        self.damaged.add(self.key(item))
        self.lab.replace(self.key(item), body)

    def wait_stored(self, *items: Item, seconds: float = 30.0) -> list[str]:
        """Wait until the pictures are in the bucket; the names of those that are not."""
        deadline = time.monotonic() + seconds
        while True:
            present = self.lab.server.items(self.prefix)
            missing = [item.name for item in items if self.key(item) not in present]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(0.1)

    # -- loads -----------------------------------------------------------------------------

    def ask(self, *items: Item, text: str = "what is this?", max_tokens: int = 8) -> Ask:
        """A request with pictures, or with text alone."""
        media = [item.media for item in items]
        tokens = self.reference.tokens(media, text, max_tokens)
        if not self.loads:  # an encode-only engine generates nothing
            tokens = ()
        prompt = vllm_process.prompt(*media, text=text, max_tokens=max_tokens)
        return Ask(kind="media" if items else "text", prompt=prompt, tokens=tokens)

    def ask_bare(self, item: Item) -> Ask:
        """A request that names its picture only."""
        tokens = self.reference.tokens([item.media], "what is this?", 8)
        prompt = vllm_process.prompt(item.bare, max_tokens=8)
        return Ask(kind="bare", prompt=prompt, tokens=tokens)

    def run(self, asks: Iterable[Ask], *, timed: bool = True) -> Loaded:
        """Send a load; compare every answer, and its time with the deadline of its kind."""
        asks = list(asks)
        result = self.process.load([ask.prompt for ask in asks])
        wrong: list[str] = []
        seconds: dict[str, float] = {}
        for ask, outcome in zip(asks, result["outcomes"], strict=True):
            reason, took = outcome["finish_reason"], outcome["seconds"]
            seconds[ask.kind] = max(took, seconds.get(ask.kind, 0.0))
            if reason == "abort" and "abort_after" in ask.prompt:
                continue
            if reason == "error" and ask.kind == "bare":
                continue
            if tuple(outcome["token_ids"]) != ask.tokens or reason not in ("length", "stop"):
                names = [str(m["path"] or m["uuid"]) for m in ask.prompt["media"]]
                wrong.append(f"{ask.kind} {names}: {outcome} instead of {ask.tokens}")
        if timed and self.base:
            wrong += self._late(seconds)
        reasons = [outcome["finish_reason"] for outcome in result["outcomes"]]
        return Loaded(wrong, seconds, result["encoder_items"], reasons)

    def lateness(self, seconds: Mapping[str, float]) -> float:
        """Worst time beyond plain model time and deadline; below 0 when all were in time."""
        limits = {"text": 0.0, "media": FETCH_SECONDS, "bare": METADATA_SECONDS}
        return max(
            took - self.base.get(kind, self.base.get("media", 0.0)) - limits[kind]
            for kind, took in seconds.items()
        )

    def _late(self, seconds: Mapping[str, float]) -> list[str]:
        late = self.lateness(seconds)
        return [f"late by {late:.2f} s: {dict(seconds)}"] if late > GRACE_SECONDS else []

    def recover(self, label: str) -> tuple[float, list[str]]:
        """Ask for one stored picture after another until the encoder is not needed."""
        begun = time.monotonic()
        for number in range(1000):
            item = self.reference.item(f"again-{self._serial}")
            self._serial += 1
            self.store(item)
            loaded = self.run([self.ask(item)], timed=False)
            if loaded.wrong:
                return 0.0, loaded.wrong
            took = time.monotonic() - begun
            if loaded.encoded == 0:
                return took, []
            if took > RECOVERY_SECONDS:
                break
            time.sleep(min(0.2 * (number + 1), 2.0))
        return took, [f"no hit within {RECOVERY_SECONDS:.0f} s after {label} was over"]

    # -- state -----------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Sums over labels other than the first of ours, freshly reported."""
        for pause in (1.1, 0.0):  # the connector reports once a second, in a step
            self.process.load([vllm_process.prompt(text="hello", max_tokens=2)])
            time.sleep(pause)
        values: dict[str, float] = {}
        for series, value in self.process.metrics().items():
            name, _, labels = series.partition("{")
            state = labels.partition('state="')[2].partition('"')[0]
            if name.startswith("vllm:ec_s3_") and not name.endswith("_created"):
                short = name.removeprefix("vllm:ec_s3_") + (f" {state}" if state else "")
                values[short] = values.get(short, 0.0) + value
        return values

    def count(self) -> Census:
        """What its processes hold while it has no connection to the bucket."""
        self.proxy.refuse()
        self.proxy.accept()
        time.sleep(0.5)
        return census(self.process.pid)


class Bench:
    """Everything of one session; at most one engine of the matrix lives at a time."""

    def __init__(self, server: RecordedServer, folder: Path) -> None:
        self.lab = Lab(server, folder)
        self.reference = Reference(self.lab, folder / "drawn")
        self._engine: Engine | None = None

    def engine(self, role: str, layout: str) -> Engine:
        """The matrix's engine of a role and layout."""
        engine = self._engine
        if engine is None or (engine.role, engine.layout) != (role, layout):
            self.close_engine()
            engine = Engine(self.lab, self.reference, role=role, layout=layout)
            self._engine = engine
        return engine

    def close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def close(self) -> None:
        self.close_engine()
        self.lab.__exit__()
