"""The bench and the table of the fault matrix; one for the whole session."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from matrix_bench import LAYOUTS, ROLES, Bench
from matrix_table import Cell, column, from_json, markdown, merged, to_json

from ec_s3.testing.traffic import RecordedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ROOT = Path(__file__).parents[2]
_JSON = _ROOT / "build" / "faults" / "matrix.json"
_COLUMNS = [column(role, layout) for layout in LAYOUTS for role in ROLES]
_CELLS = pytest.StashKey[list[Cell]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-table", metavar="FILE", help="write the fault matrix as Markdown")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_CELLS] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The reference and the engines."""
    with RecordedServer() as server:
        bench = Bench(server, tmp_path_factory.mktemp("matrix"))
        try:
            yield bench
        finally:
            bench.close()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Records a cell of the table around what happens in it."""

    @contextmanager
    def around(failure: str, name: str) -> Iterator[dict[str, Any]]:
        figures: dict[str, Any] = {}
        begun = time.monotonic()
        problem = ""
        try:
            yield figures
        except BaseException as error:
            problem = f"{type(error).__name__}: {str(error)[:300]}"
            raise
        finally:
            note = problem or figures.pop("note", "")
            figures.pop("note", None)
            request.config.stash[_CELLS].append(
                Cell(
                    failure=failure,
                    column=name,
                    ok=not problem,
                    note=note,
                    seconds=round(time.monotonic() - begun, 2),
                    **figures,
                )
            )

    return around


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    cells = config.stash[_CELLS]
    if not cells:
        return
    terminalreporter.section("fault matrix")
    terminalreporter.write_line(markdown(cells, _COLUMNS))
    if config.getoption("keyword"):  # a part: the rest is as it was
        cells = merged(from_json(_JSON), cells)
    to_json(cells, _JSON)
    terminalreporter.write_line(f"all figures: {_JSON}")
    target = config.getoption("--fault-table", None)  # unknown unless this folder was asked for
    if target:
        Path(target).write_text(_PAGE + markdown(cells, _COLUMNS))
        terminalreporter.write_line(f"written to {target}")


_PAGE = """\
# Fault matrix

Written by `make faults`; do not edit. Every cell runs real vLLM (on a CPU, with a tiny Qwen2-VL)
and sends a mixed load while something is broken: text, stored, new and repeated pictures, two
pictures in one request, and a picture named without its pixels. `ok` means: every request that
carries its media was answered with the right tokens, a request without media rightly or with an
error of its own, none later than its deadline plus 1 s beyond plain model time, the engine lived,
and once the failure was over the encoder was spared again. Columns are the connector's role and
how vLLM lays out its processes: all in one, engine and worker separate, or two tensor-parallel
ranks. An encode-only producer generates no tokens; what it wrote is compared instead, at the end.
What requests see, and where to look, is on the page about
[failure modes](../explanation/failure-modes.md).

Not in the matrix, but in the other tests: pinning that fails (a CPU pins nothing), a writer killed
within a file of a disk tier, what hostile clients send, and weights that change in place.

"""
