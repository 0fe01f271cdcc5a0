"""How the command speaks: tables for people, one JSON object a line for programs, exit codes.

Results go to standard output, notes and prompts to standard error, progress to whichever of the two
is a terminal. Text that comes from
a bucket is never trusted: identifiers are chosen by clients, so control characters and markup are
shown, not obeyed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import textwrap
from enum import IntEnum
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.progress import Task

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class ExitCode(IntEnum):
    """Exit codes of every command; part of the interface."""

    OK = 0
    FINDING = 1
    """Done, and something was found: a failed check, a bad, absent or undeleted object."""
    USAGE = 2
    """Nothing was done: wrong arguments or settings."""
    REMOTE = 3
    """The store could not be used."""
    NOTHING = 4
    """Done, and nothing of what was asked for came about: every entry of a job failed."""


class _Console(Console):
    """Leaves it to the command what a reader means that has gone."""

    def on_broken_pipe(self) -> None:
        raise


class Output:
    """Writes results in the form that was asked for.

    Attributes:
        json: whether a program reads the results.
    """

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self._out = _Console(highlight=False)
        self._err = _Console(stderr=True, highlight=False)

    def record(self, fields: Mapping[str, object]) -> None:
        """One result for programs, as one line of ASCII JSON."""
        sys.stdout.write(json.dumps(dict(fields), default=str) + "\n")

    def line(self, text: str, *, style: str = "") -> None:
        """One line for people, never wrapped, so that keys can be copied.

        One it stays whatever the text holds: a name with an end of line in it would else say
        what the command never said.
        """
        if not self._out.is_terminal:  # a long listing into a file or pipe
            sys.stdout.write(f"{printable(text)}\n")
            return
        self._out.print(Text(printable(text), style=style), soft_wrap=True)

    def paragraph(self, lead: str, text: str, *, style: str = "") -> None:
        """Text for people, wrapped at the terminal's width, in a column beside its `lead`."""
        wrapped = textwrap.wrap(
            printable(text),
            width=max(40, self._out.width),
            initial_indent=lead,
            subsequent_indent=" " * len(lead),
        )
        self._out.print(Text("\n".join(wrapped), style=style), soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table for people; cells fold at the terminal's width, numbers stand right."""
        heading = Text(printable(title), style="table.title")
        table = Table(title=heading, title_justify="left", box=None, pad_edge=False)
        for index, column in enumerate(columns):
            numeric = bool(rows) and all(isinstance(row[index], int) for row in rows)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(cell if isinstance(cell, Text) else _cell(cell) for cell in row))
        self._out.print(table)

    def note(self, text: str) -> None:
        """Something to know beside the result."""
        self._err.print(Text(printable(text)), soft_wrap=True)

    def show_cursor(self) -> None:
        """Give a terminal its cursor back, for a command that ends in the midst of a bar."""
        for console in (self._out, self._err):
            console.show_cursor()

    def error(self, error: Exception) -> None:
        """Why the command ends."""
        if self.json:
            self.record({"error": type(error).__name__, "message": str(error)})
        else:
            lines = "\n".join(map(printable, str(error).split("\n")))
            self._err.print(Text(f"ec-s3: {lines}", style="red"), soft_wrap=True)

    def confirm(self, question: str, *, expected: str) -> bool:
        """Whether a person at a terminal typed exactly what was expected."""
        if self.json or sys.stdin is None or not sys.stdin.isatty():  # None: it was closed
            return False
        self.note(question)
        self._err.print("> ", end="")
        with _interruptible():
            typed = sys.stdin.readline().strip()
        return typed.replace(",", "") == expected  # the question groups its digits

    @contextlib.contextmanager
    def progress(self, label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """A bar, or a count while the total is unknown; yields what advances it."""
        columns = [SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn()]
        if total is not None:
            columns[2:2] = [BarColumn()]
            columns += [_RateColumn(), TimeRemainingColumn()]
        # Lines printed meanwhile must go through the console that draws the bar.
        console = self._out if self._out.is_terminal else self._err
        quiet = self.json or not console.is_terminal
        with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
            task = bar.add_task(label, total=total)
            # A bar that nobody sees still costs more than an object of a listing.
            yield (lambda _: None) if quiet else (lambda steps: bar.advance(task, steps))


class _RateColumn(ProgressColumn):
    """Steps a second of late, nothing before the second one."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.3g}/s")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends a wait for a person at once: an event loop's handler waits for the loop."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def printable(text: str) -> str:
    """The text, as one line, with everything that a terminal would obey written out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def counted(number: int, noun: str) -> str:
    """`1 object`, `2 objects`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def human_bytes(nbytes: float) -> str:
    """A size such as `1.5 GiB`; exact powers without decimals."""
    power = 0
    while nbytes >= 1024 and power < len(_UNITS) - 1:
        nbytes, power = nbytes / 1024, power + 1
    digits = 0 if power == 0 or nbytes == int(nbytes) else 1
    return f"{nbytes:.{digits}f} {_UNITS[power]}"


def human_seconds(seconds: float) -> str:
    """A duration such as `250 ms`, `2 s`, `3.5 h` or `12 d`."""
    for limit, scale, unit in ((1.0, 1e3, "ms"), (120.0, 1, "s"), (7200.0, 1 / 60, "min")):
        if abs(seconds) < limit:
            return f"{seconds * scale:.3g} {unit}"
    hours = seconds / 3600
    return f"{hours:.3g} h" if abs(hours) < 48 else f"{hours / 24:.0f} d"


def _cell(value: object) -> Text:
    return Text(f"{value:,}" if isinstance(value, int) else printable(str(value)))
