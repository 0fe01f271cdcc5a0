"""What holds for every module, read from its files; neither Terraform nor a provider is needed."""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING

import pytest
from terraform_files import RULES, TERRAFORM, names_are_known, newest_names

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_modules_keep_the_rule(rule: Callable[[Path], None]) -> None:
    rule(TERRAFORM)


def test_the_newest_providers_know_every_name() -> None:
    names_are_known(TERRAFORM, newest_names())


def test_a_misspelt_name_is_found() -> None:
    schema = newest_names()
    schema["aws_s3_bucket"].remove("force_destroy")
    with pytest.raises(AssertionError, match="unknown name force_destroy"):
        names_are_known(TERRAFORM, schema)


def test_the_readme_lists_the_inputs_and_outputs() -> None:
    page = runpy.run_path(str(TERRAFORM.parent / "tools/terraform_readme.py"))["page"]
    text = (TERRAFORM / "README.md").read_text()
    assert page(text) == text, "run python tools/terraform_readme.py"
