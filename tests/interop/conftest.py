"""Fixtures of the tests against real S3 servers, and the table that they fill.

How a test module here joins in:

* It carries `pytestmark = pytest.mark.interop`; what `make interop-smoke` runs as well also carries
  `pytest.mark.smoke` (that run leaves out the kinds that it has no time for by itself).
* A test that takes `real_server` runs with every kind; `parametrize("real_server", [...],
  indirect=True)` picks some. `real_servers("ceph")` gives one by name, `real_bucket` a bucket of
  the test's own, `shared_bucket` one for the session. `AWS_*` of `real_server` are set for the time
  of the test.
* A server of the test's own (to be killed, or with shortened days) comes from
  `ec_s3.testing.servers.running(kind, tmp_path, ...)`, after
  `ec_s3.testing.servers.fixtures.require(kind)`.
* Its row in the table is the first line of the module's docstring, without the full stop: keep
  it to a few words. `pytest.mark.interop(scenario="...")` on a test or class gives it another.
* Its column is the kind: the parameter of `real_server`, a parameter `kind`, or else that of
  `pytest.mark.interop(kind="...")`.
* What a server does otherwise is data: `interop_deviations.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from interop_deviations import deviation
from interop_table import Outcome, Record, markdown

from ec_s3.testing.servers import KINDS, RealServer
from ec_s3.testing.servers.fixtures import real_bucket, real_server, real_servers

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["real_bucket", "real_server", "real_servers"]

_HERE = Path(__file__).parent
_RECORD = _HERE.parents[1] / "build" / "interop" / "record.json"
_NO_SERVER = "(none)"
_OUTCOMES = pytest.StashKey[list[Outcome]]()
_VERSIONS = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--interop-kinds", metavar="KIND,...", help="only these kinds of server")
    parser.addoption("--interop-table", metavar="FILE", help="write the table as Markdown")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_OUTCOMES] = []
    config.stash[_VERSIONS] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark deviations, and leave out kinds that this run is not about."""
    wanted = config.getoption("--interop-kinds", None)
    left: list[pytest.Item] = []
    for item in list(items):
        if _HERE not in item.path.parents:
            continue
        kind = _kind(item)
        if wanted and kind not in (*wanted.split(","), _NO_SERVER):
            left.append(item)
        elif known := deviation(kind, item.nodeid):
            item.add_marker(pytest.mark.xfail(strict=True, reason=known.reason))
    if left:
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note the test's outcome for the table, and show what its server said when it fails."""
    report = yield
    if _HERE not in item.path.parents:
        return report
    server = getattr(item, "funcargs", {}).get("real_server")
    if isinstance(server, RealServer):
        versions = item.config.stash[_VERSIONS]
        if server.kind not in versions:
            versions[server.kind] = server.version
        if report.failed:
            report.sections.append((f"logs of {server.kind}", server.log_tail()))
    if report.when == "call" or report.outcome != "passed":
        verdict, reason = _verdict(report)
        item.config.stash[_OUTCOMES].append(
            Outcome(
                test=item.nodeid,
                kind=_kind(item),
                scenario=_scenario(item),
                verdict=verdict,
                reason=reason,
            )
        )
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    outcomes = config.stash.get(_OUTCOMES, [])
    if not outcomes:
        return
    versions = config.stash[_VERSIONS]
    record = Record(outcomes, versions)
    terminalreporter.section("store x scenario")
    terminalreporter.write_line(markdown(record, KINDS))
    target = config.getoption("--interop-table", None)
    if target:
        if config.getoption("keyword") or config.getoption("--interop-kinds"):
            record = Record.load(_RECORD).updated(record)  # a part: the rest is as it was
        record.save(_RECORD)
        Path(target).write_text(_PAGE + markdown(record, KINDS), encoding="utf-8")
        terminalreporter.write_line(f"written to {target}")


def _kind(item: pytest.Item) -> str:
    values = item.callspec.params if isinstance(item, pytest.Function) and _has_spec(item) else {}
    told = next((m.kwargs["kind"] for m in item.iter_markers("interop") if "kind" in m.kwargs), "")
    return str(values.get("real_server") or values.get("kind") or told or _NO_SERVER)


def _has_spec(item: pytest.Item) -> bool:
    return hasattr(item, "callspec")


def _scenario(item: pytest.Item) -> str:
    for mark in item.iter_markers("interop"):
        if "scenario" in mark.kwargs:
            return str(mark.kwargs["scenario"])
    module = item.getparent(pytest.Module)
    text = (module.obj.__doc__ if module is not None else "") or item.path.stem
    return str(text).strip().partition("\n")[0].rstrip(".")


def _verdict(report: pytest.TestReport) -> tuple[str, str]:
    if hasattr(report, "wasxfail") and report.outcome == "skipped":
        return "deviates", str(report.wasxfail).removeprefix("reason: ")
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return "skipped", report.longrepr[2].removeprefix("Skipped: ")
    return report.outcome, ""


_PAGE = """\
# Servers

Written by `make interop`; do not edit. Every kind of server runs for real, on loopback; columns are
servers, rows are what was tried with them, numbers are tests. `deviates` is a test that fails
because the server does otherwise than S3: the note says how, and what it costs. Were it to pass, or
another to fail, the run would fail. Servers that nobody can run on a machine are in
[store profiles](store-profiles.md); how to test against your own is in
[test your own stack](../how-to/test-your-own-stack.md).

`ceph` is Ceph's radosgw over http, `ceph-https` the same over https with a certificate authority of
its own, `juicefs` the JuiceFS gateway, whose front end is MinIO's of 2021, `swift` OpenStack Swift
with `s3api`, and `moto` a mock.

"""


@pytest.fixture(autouse=True)
def server_environment(
    isolated_aws: object, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys, region and CA of the test's server, where it has one."""
    if "real_server" in request.fixturenames:
        server: RealServer = request.getfixturevalue("real_server")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def shared_bucket(real_server: RealServer) -> str:
    """One bucket of each server, for tests that keep to a prefix of their own."""
    return real_server.new_bucket()
