"""What servers do otherwise than S3, as data: which tests show it, and why.

Both directions are checked: a test that fails without being named here is a failure, and so is one
that is named here and passes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One deviation of one server.

    Attributes:
        kind: of server.
        tests: regular expression for their ids, searched from the module's name on.
        reason: for the table; what the server does, and what it costs.
    """

    kind: str
    tests: str
    reason: str


DEVIATIONS = (
    Deviation(
        kind="juicefs",
        tests=r"test_store\.py::.*::test_(put_if_absent_leaves_the_first|of_sixteen)_writer",
        reason="`If-None-Match` of a PUT is ignored, as by MinIO before 2024: the last writer wins",
    ),
    Deviation(
        kind="juicefs",
        tests=r"test_store\.py::.*::test_put_if_match_replaces_only_that_version",
        reason="`If-Match` of a PUT is ignored: a repair may replace another repair",
    ),
    Deviation(
        kind="swift",
        tests=r"test_store\.py::.*::test_of_sixteen_writers",
        reason="conditions of a PUT are refused (501): of writers at the same moment the last wins",
    ),
)


def deviation(kind: str, test_id: str) -> Deviation | None:
    """The deviation that explains a failure of a test with this server, if any."""
    for known in DEVIATIONS:
        if known.kind == kind and re.search(known.tests, test_id):
            return known
    return None
