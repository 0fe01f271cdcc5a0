from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ec_s3 import errors
from ec_s3.cli.app import app
from ec_s3.cli.reference import PAGES, write
from ec_s3.config import ECConfig
from ec_s3.metric_table import METRICS

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", PAGES)
def test_page_in_the_repository_is_what_the_code_says(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    expected = (tmp_path / name).read_text(encoding="utf-8")
    found = (REFERENCE / name).read_text(encoding="utf-8")
    assert found == expected, "run: python -m ec_s3.cli.reference docs/reference"


def test_every_setting_is_on_the_page() -> None:
    page = PAGES["configuration.md"]()
    missing = [name for name in ECConfig.model_fields if f"| `{name}` |" not in page]
    assert missing == []


def test_every_metric_is_on_the_page() -> None:
    page = PAGES["metrics.md"]()
    assert [name for name in METRICS if f"| `{name}` |" not in page] == []


def test_every_error_is_in_the_tree_and_in_the_table() -> None:
    page = PAGES["errors.md"]()
    names = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    ]
    assert names
    assert [name for name in names if page.count(name) < 2] == []


def test_every_command_and_option_is_on_the_page() -> None:
    page = PAGES["cli.md"]()
    group: Any = get_command(app)
    commands = dict(group.commands)
    for name, inner in commands.pop("control").commands.items():
        commands[f"control {name}"] = inner
    assert "control show" in commands
    for name, command in commands.items():
        assert f"## {name}\n" in page
        for parameter in (*group.params, *command.params):
            shown = [parameter.metavar] if parameter.metavar else parameter.opts
            assert all(f"`{text}`" in page for text in shown)
