"""The documentation as tests read it: pages, fenced blocks, headings, links; and our log lines."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>\S.*\S) -->")
"""The line before a block that cannot run in a test."""

GAP = "\0"
"""Stands for what a log line or an error fills in."""

_FENCE = re.compile(r"(?P<indent>\s*)```(?P<language>\w*)")
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?P<target>[^)\s]+)\)")
_SHOUTED = {"warning", "error", "exception", "critical"}
_FILLED_IN = re.compile(r"%[-+#0-9.]*[sdrfgx]")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its page, line, language, text without the indent, and why it is not run."""

    page: str
    line: int
    language: str
    text: str
    not_run: str


@cache
def pages() -> dict[str, str]:
    """Every page that readers see, by its path from the root."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(paths)}


def blocks() -> Iterator[Block]:
    """All fenced blocks of all pages, in order."""
    for page, text in pages().items():
        start, fence, last, body = 0, None, "", list[str]()
        for number, line in enumerate(text.splitlines(), 1):
            if fence is None:
                fence, start, body = _FENCE.match(line), number, []
                if fence is None and line.strip():
                    last = line
            elif line.strip() == "```":
                marker = NOT_RUN.search(last)
                reason = marker["reason"] if marker else ""
                yield Block(page, start, fence["language"], "\n".join(body) + "\n", reason)
                fence, last = None, ""
            else:
                body.append(line.removeprefix(fence["indent"]))
        assert fence is None, f"{page}:{start}: the block has no end"


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^\s*```.*?^\s*```\s*$", "", pages()[page], flags=re.DOTALL | re.MULTILINE)


def headings(page: str) -> list[str]:
    """The texts of a page's headings, as written."""
    return re.findall(r"^#+ +(.+?)\s*$", prose(page), re.MULTILINE)


def anchors(page: str) -> set[str]:
    """Anchors of a page's headings, as mkdocs and GitHub make them."""
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings(page))
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def links(page: str) -> list[str]:
    """Targets of a page's links to files and headings of this repository."""
    found = _LINK.findall(prose(page))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


# -- what the package says -------------------------------------------------------------------


@cache
def _modules() -> dict[Path, ast.Module]:
    paths = sorted((ROOT / "ec_s3").rglob("*.py"))
    return {path: ast.parse(path.read_text(), str(path)) for path in paths}


def _text(node: ast.AST | None) -> str | None:
    """A constant or formatted string, with gaps for what is filled in; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _FILLED_IN.sub(GAP, node.value).replace("%%", "%")
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or GAP for part in node.values)
    return None


@cache
def texts() -> set[str]:
    """Every string of the package but docstrings: what an error or a log line can say."""
    found = set()
    for module in _modules().values():
        docstrings = {id(n.value) for n in ast.walk(module) if isinstance(n, ast.Expr)}
        nodes = (node for node in ast.walk(module) if id(node) not in docstrings)
        found |= {text for node in nodes if (text := _text(node))}
    return found


@cache
def warnings() -> dict[str, str]:
    """Messages of all log lines of level WARNING or above, and of a level known at run time.

    Returns:
        Where each is logged, by the message.
    """
    found: dict[str, str] = {}
    for path, module in _modules().items():
        for function in (n for n in ast.walk(module) if isinstance(n, _FUNCTIONS)):
            for call in (n for n in ast.walk(function) if isinstance(n, ast.Call)):
                message = _logged(call)
                if message is None:
                    continue
                where = f"{path.relative_to(ROOT)}:{call.lineno}"
                said = [_text(message)] if _text(message) else _told(message, function, module)
                assert said, f"{where}: the message is neither a constant nor handed in as one"
                found |= {text: where for text in said if text}
    return found


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _logged(call: ast.Call) -> ast.expr | None:
    """The message of a call to a logger that a test is to know, None for other calls."""
    match call.func:
        case ast.Attribute(value=ast.Name(id="logger" | "_log" | "logging"), attr=level):
            if level in _SHOUTED:
                return call.args[0]
            return call.args[1] if level == "log" else None
    return None


def _told(
    message: ast.expr, function: ast.FunctionDef | ast.AsyncFunctionDef, module: ast.Module
) -> list[str | None]:
    """What a message that is no constant can be: a field's values, or a parameter's."""
    if isinstance(message, ast.Attribute):
        calls = [n for tree in _modules().values() for n in ast.walk(tree)]
        words = [k for n in calls if isinstance(n, ast.Call) for k in n.keywords]
        return [_text(word.value) for word in words if word.arg == message.attr]
    if not isinstance(message, ast.Name):
        return []
    names = [argument.arg for argument in function.args.args if argument.arg != "self"]
    if message.id not in names:
        return []
    place = names.index(message.id)
    return [
        _text(call.args[place])
        for call in ast.walk(module)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == function.name
        and len(call.args) > place
    ]


def documents(heading: str, message: str) -> bool:
    """Whether a heading names a message, or whole words of one.

    Capitals and `...` in the heading stand for what is filled in.
    """
    words = re.split(rf"{GAP}", message)
    if sum(map(len, words)) < 8:  # hardly more than what is filled in
        return False
    if re.fullmatch(".*".join(map(re.escape, words)), heading):
        return True
    fixed = re.split(r"\.\.\.|\b[A-Z][A-Z_]+\b", heading)
    pattern = ".*".join(map(re.escape, fixed))
    return re.search(rf"(?<!\w){pattern}(?!\w)", message) is not None
