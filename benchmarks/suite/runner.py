"""Cells x systems: what all scripts share that let systems take turns.

A script has a table of contenders and says what its cells are. `Benchmark` opens the contenders,
lets them take turns in every cell, keeps their medians as rows, judges, and writes the report and
its pictures. Contenders run in processes of their own (`suite.client`); nothing is measured here.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from suite import setup
from suite.client import Client, Clients
from suite.measure import Cell, digits, speedup, take_turns
from suite.plots import bars
from suite.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from suite.server import ByteServer

MOST_ROUNDS = 15
JUDGED_ROUNDS, OTHER_ROUNDS, QUICK_ROUNDS = 5, 3, 3
"""Fewest rounds of a cell: that a target is judged by, of any other, and of any in a short run."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A system and what it is opened with, beyond what all get."""

    system: str
    settings: Mapping[str, Any] = field(default_factory=dict)


OURS, DIRECT, BLOCKING = "ec_s3", "ec_s3 direct", "ec_s3 blocking"
LMCACHE, RAW = "LMCache", "raw"
STORED, TENSOR = "raw HTTP, stored bytes", "raw HTTP, tensor bytes"
"""Raw gets of what ec_s3 stores, and of the tensor as it is."""

BUCKET: dict[str, Contender] = {
    OURS: Contender("ec_s3"),
    DIRECT: Contender("ec_s3", {"config": {"s3_transport": "direct"}}),
    BLOCKING: Contender("ec_s3_blocking"),
    LMCACHE: Contender("lmcache"),
    "aiobotocore": Contender("aiobotocore"),
    "boto3": Contender("boto3"),
}
"""The systems that use a bucket."""

RAW_HTTP = Contender("raw_http")


class Benchmark:
    """One script's run.

    Args:
        name: of the report's file and of its pictures.
        title: of its section.
        notes: what a reader needs to judge the figures.
        description: of the script, for `--help`.
        seconds: how long the rounds of one cell should take; few rounds that matter are more.

    Attributes:
        args: the options.
        report: what was found so far.
        seconds: may be changed between cells.
    """

    def __init__(
        self, name: str, *, title: str, notes: Sequence[str], description: str, seconds: float
    ) -> None:
        self.args = setup.options(description)
        self.report = Report(title=title, notes=list(notes), quick=self.args.quick)
        self.seconds = seconds
        self._name = name
        if not self.args.no_lmcache:
            setup.install_lmcache()

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The shapes to measure, smallest first."""
        return setup.shapes(self.args)

    @contextmanager
    def contenders(
        self,
        table: Mapping[str, Contender],
        shape: tuple[int, int],
        *,
        memory: int,
        kind: str = "activations",
        server: ByteServer | None = None,
        without: Collection[str] = (),
    ) -> Iterator[Clients]:
        """Open those of a table, with `memory` bytes of host tier each; closed at the end."""
        stage = setup.Stage.set_up(
            shape, kind, server=server, source=self.args.activations, memory=memory
        )
        with stage:
            opened = [
                Client(who.system, stage.settings | dict(who.settings), label=label)
                for label, who in table.items()
                if label not in without
                and not (self.args.no_lmcache and who.system.startswith("lmcache"))
            ]
            with Clients(*opened) as clients:
                yield clients

    def cell(
        self,
        about: Mapping[str, Any],
        labels: Sequence[str],
        run: Callable[[str], dict[str, Any]],
        *,
        count: int | Mapping[str, int],
        columns: Callable[[Cell], dict[str, Any]],
        nbytes: int = 0,
        judged: bool = True,
    ) -> dict[str, Cell]:
        """Let contenders take turns under one load; adds one row for each of them.

        Args:
            about: the columns that say what the load is.
            labels: who takes part.
            run: has one of them do its round.
            count: operations in one round; by label where they differ.
            columns: the measured columns of a row.
            nbytes: tensor bytes of one operation.
            judged: whether a target depends on it.
        """
        least = QUICK_ROUNDS if self.args.quick else JUDGED_ROUNDS if judged else OTHER_ROUNDS
        answers = take_turns(
            labels,
            run,
            least=least,
            most=least if self.args.quick else MOST_ROUNDS,
            seconds=self.seconds,
        )
        cells = {}
        for label in labels:
            n = count if isinstance(count, int) else count[label]
            cells[label] = Cell.of(answers[label], nbytes=n * nbytes, count=n)
            self.report.rows.append({**about, "system": label, **columns(cells[label])})
        self.report.show()
        return cells

    def compare(
        self,
        text: str,
        cells: Mapping[str, Cell],
        other: str,
        *,
        limit: float,
        ours: str = OURS,
        cause: str = "",
    ) -> None:
        """Add a target: ours so many times as fast as another, by rounds that belong together.

        Args:
            text: the promise.
            cells: of one load.
            other: whom ours is compared with; absent where it did not take part.
            limit: of the ratio.
            ours: who is judged.
            cause: what limits the ratio; said when the limit is missed.
        """
        if other not in cells:
            return
        found = speedup(cells[ours], cells[other])
        parts = [f"quartiles {digits(found.low)} to {digits(found.high)}"]
        if ours == OURS and DIRECT in cells:
            direct = speedup(cells[DIRECT], cells[other]).median
            parts.append(f"{digits(direct)} with `s3_transport=direct`")
        if cause and not found.median >= limit:
            parts.append(cause)
        self.report.at_least(text, value=found.median, limit=limit, note="; ".join(parts))

    def picture(
        self,
        suffix: str,
        rows: Sequence[dict[str, Any]],
        *,
        panels: tuple[str, ...],
        group: str,
        value: str,
        title: str,
        log: bool = False,
    ) -> None:
        """Draw rows, see `plots.bars`; `suffix` is what tells it from the report's others."""
        unit = "MB/s of tensor bytes" if value == "MB/s" else value
        name = f"{self._name}{suffix}"
        bars(
            name,
            [row for row in rows if row.get(value) is not None],
            panels=panels,
            group=group,
            value=value,
            label=unit,
            title=title,
            log=log,
        )

    def end(self) -> None:
        """Write the report, and print its targets."""
        self.report.write(self._name)
        self.report.show_targets()


class Shelf:
    """Items in the bucket, each as every system stores it.

    Attributes:
        names: of the items.
        wire: bytes of an item as ec_s3 stores it.
    """

    def __init__(self, clients: Clients, server: ByteServer, names: Sequence[str]) -> None:
        self._clients = clients
        self.names = list(names)
        self._paths: dict[str, list[str]] = {}
        # The SDKs keep the tensor's plain bytes under the same name, and so does LMCache under
        # its own; ec_s3's variants share their objects.
        for label in (OURS, LMCACHE, "boto3"):
            if label in clients.all:
                clients[label].measure("durable", self.names, 4)
                self._paths[label] = list(clients[label].ask(do="paths", names=self.names).values())
        self.wire: int = server.control()["sizes"][self._paths[OURS][0]]

    def get(self, label: str, *, callers: int, count: int) -> dict[str, Any]:
        """One round of cold gets; the raw ones get what ec_s3, or the SDKs, stored."""
        if label in (STORED, TENSOR):
            paths = self._paths[OURS if label == STORED else "boto3"]
            return self._clients[RAW].measure("get", paths[:count], callers)
        self._clients[label].ask(do="forget")
        return self._clients[label].measure("get", self.names[:count], callers)

    def stored(self, label: str, nbytes: int) -> int:
        """Bytes on the wire for an item of `nbytes`."""
        return self.wire if label == STORED or label.startswith(OURS) else nbytes
