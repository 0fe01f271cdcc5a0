"""Each part of each policy statement is changed once in a copy, and an assertion notices.

A change that the rules on the parsed files miss is given to the module's own `terraform test`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from terraform_files import MODULES, RULES, TERRAFORM
from terraform_runs import Workspace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.terraform, pytest.mark.timeout(300)]

_SID = re.compile(r"^ *Sid +=(.*)$", re.MULTILINE)
_PART = re.compile(r"^ *(Effect|Principal|Action|Resource|Condition) += ", re.MULTILINE)
_CLOSING = {"{": "}", "[": "]", "(": ")"}
OTHERS = {
    "Principal": '{ AWS = "arn:aws:iam::210987654321:root" }',
    "Action": '["s3:Nothing"]',
    "Resource": '"elsewhere"',
    "Condition": "{}",
}


@dataclass(frozen=True)
class Change:
    """Text of a file that is replaced."""

    file: str
    name: str
    start: int
    end: int
    new: str


def _end(text: str, start: int) -> int:
    """Where the value that begins at `start` ends: with its brackets, or with its line."""
    open_brackets: list[str] = []
    for place in range(start, len(text)):
        letter = text[place]
        if letter in _CLOSING:
            open_brackets.append(_CLOSING[letter])
        elif open_brackets and letter == open_brackets[-1]:
            open_brackets.pop()
        elif not open_brackets and letter in "#\n}":
            return len(text[:place].rstrip())
    raise AssertionError("a value that does not end")


def _beginning(text: str, inside: int) -> int:
    """The brace around a place."""
    depth = 0
    for place in range(inside - 1, -1, -1):
        if text[place] == "}":
            depth += 1
        elif text[place] == "{":
            if not depth:
                return place
            depth -= 1
    raise AssertionError("a statement without a beginning")


def changes() -> Iterator[Change]:
    """Of every statement in every module: each part replaced, and the whole emptied."""
    for folder in MODULES:
        for path in sorted((TERRAFORM / folder).glob("*.tf")):
            text, file = path.read_text(), str(path.relative_to(TERRAFORM))
            module = folder.rpartition("/")[2].replace(".", "root")
            inside: list[range] = []
            for sid in _SID.finditer(text):
                start = _beginning(text, sid.start())
                end = start + 1
                while text[start:end].count("{") > text[start:end].count("}"):
                    end += 1
                label = re.sub(r"\W+", "", sid[1].split("#")[0].split("$")[0])
                name = f"{module}-{label}"
                inside.append(range(start, end))
                yield Change(file, f"{name}-emptied", start, end, "{}")
                found = list(_PART.finditer(text, start, end))
                assert {part[1] for part in found} >= {"Effect", "Action"}, name
                for part in found:
                    stop = _end(text, part.end())
                    value = text[part.end() : stop]
                    other = "Allow" if "Deny" in value else "Deny"
                    new = f'"{other}"' if part[1] == "Effect" else OTHERS[part[1]]
                    yield Change(file, f"{name}-{part[1]}", part.end(), stop, new)
            for condition in re.finditer("Condition += ", text):  # merged with a statement
                if not any(condition.start() in one for one in inside):
                    stop = _end(text, condition.end())
                    name = f"{module}-merged-Condition"
                    yield Change(file, name, condition.end(), stop, OTHERS["Condition"])


CHANGES = list(changes())


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("statements"))
    for module in {str((TERRAFORM / change.file).parent) for change in CHANGES}:
        made.init("terraform" + module.removeprefix(str(TERRAFORM)))
    return made


def noticed_by_a_rule(root: Path) -> bool:
    for rule in RULES:
        try:
            rule(root)
        except (AssertionError, KeyError, ValueError):
            return True
    return False


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_a_changed_statement_is_noticed(workspace: Workspace, change: Change) -> None:
    path = workspace.folder / "terraform" / change.file
    before = path.read_text()
    changed = before[: change.start] + change.new + before[change.end :]
    assert changed != before
    try:
        path.write_text(changed)
        if not noticed_by_a_rule(workspace.folder / "terraform"):
            output = workspace.fails(str(path.parent.relative_to(workspace.folder)), "test")
            assert re.search(r'run "\w+"\.\.\. fail', output), output  # and no slip of the change
    finally:
        path.write_text(before)


def test_statements_of_every_module_are_changed() -> None:
    text = "".join(path.read_text() for path in sorted(TERRAFORM.rglob("*.tf")))
    written = len(_SID.findall(text))
    assert written == sum(change.name.endswith("-emptied") for change in CHANGES)
    assert len(re.findall("^ *Effect ", text, re.MULTILINE)) == written, "one has no name"
    assert len({change.name for change in CHANGES}) == len(CHANGES)
