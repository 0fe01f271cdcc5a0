"""The table store x scenario: what every test said, as Markdown, and as JSON between runs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one test said about one server.

    Attributes:
        test: its id.
        kind: of server; the column.
        scenario: the row.
        verdict: `passed`, `failed`, `deviates` or `skipped`.
        reason: for the last two.
    """

    test: str
    kind: str
    scenario: str
    verdict: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of all tests and servers.

    Attributes:
        outcomes: in order of the tests.
        versions: of the servers, by kind.
    """

    outcomes: Sequence[Outcome]
    versions: Mapping[str, str]

    def updated(self, later: Record) -> Record:
        """This one with what a later run said instead, or as well."""
        outcomes = {outcome.test: outcome for outcome in (*self.outcomes, *later.outcomes)}
        return Record(list(outcomes.values()), {**self.versions, **later.versions})

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read it; empty where there is none."""
        if not path.exists():
            return cls([], {})
        told = json.loads(path.read_text(encoding="utf-8"))
        return cls([Outcome(**row) for row in told["outcomes"]], told["versions"])


def markdown(record: Record, kinds: Sequence[str]) -> str:
    """The grid, and below it the reason of every deviation and of what did not run."""
    outcomes = record.outcomes
    there = [kind for kind in kinds if any(outcome.kind == kind for outcome in outcomes)]
    there += sorted({outcome.kind for outcome in outcomes} - set(kinds))
    notes: list[str] = []
    versions = (record.versions.get(kind, "-").replace("+", " +") for kind in there)
    lines = [
        _row("Scenario", *(f"`{kind}`" for kind in there)),
        _row(*["---"] * (len(there) + 1)),
        _row("version", *versions),
    ]
    for scenario in sorted({outcome.scenario for outcome in outcomes}):
        told = [outcome for outcome in outcomes if outcome.scenario == scenario]
        cells = (
            _cell([outcome for outcome in told if outcome.kind == kind], notes) for kind in there
        )
        lines.append(_row(scenario, *cells))
    if notes:
        lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, start=1))]
    return "\n".join(lines) + "\n"


def _cell(outcomes: Sequence[Outcome], notes: list[str]) -> str:
    """One cell; its notes are numbered in the order in which cells need them."""
    if not outcomes:
        return "-"
    count = _counted(outcome.verdict for outcome in outcomes)
    words = []
    if failed := count.get("failed"):
        words.append(f"**{failed} FAILED**")
    if passed := count.get("passed"):
        words.append(f"pass ({passed})")
    if deviates := count.get("deviates"):
        words.append(f"deviates ({deviates})")
    if skipped := count.get("skipped"):
        words.append("not run" if skipped == len(outcomes) else f"not run ({skipped})")
    reasons = dict.fromkeys(outcome.reason for outcome in outcomes if outcome.reason)
    notes.extend(reason for reason in reasons if reason not in notes)
    return ", ".join(words) + "".join(f", note {notes.index(reason) + 1}" for reason in reasons)


def _counted(verdicts: Iterable[str]) -> dict[str, int]:
    count: dict[str, int] = {}
    for verdict in verdicts:
        count[verdict] = count.get(verdict, 0) + 1
    return count


def _row(*fields: str) -> str:
    return "| " + " | ".join(field.replace("|", "/").replace("\n", " ") for field in fields) + " |"
