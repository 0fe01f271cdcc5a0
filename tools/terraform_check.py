"""`make terraform-check`: every check of `terraform/` that can run here; says which cannot.

Works on copies, so that nothing is left in the checkout. Checkov has an environment of its own
below `build/`: it brings a fork of the HCL parser under the name of the one that the tests use.
Ends with 1 where a check failed. `TF_PLUGINS` names a folder with providers, for machines that
reach no registry; a folder `tf-plugins` near the root directory is found by itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = (".", "modules/policies", "modules/eks-identity", "modules/express", "modules/minio")
EXAMPLES = tuple(f"examples/{name}" for name in ("minimal", "eks", "express", "minio", "complete"))
CHECKOV = "checkov==3.3.30"  # pinned: new releases bring new checks

DEADLINE = 1800  # seconds for one command; the slowest takes some minutes

OK, FAILED, LEFT_OUT = "ok", "FAILED", "not run"


@dataclass
class Report:
    """What was checked, in order: name, outcome and remark."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, name: str, outcome: str, remark: str = "") -> None:
        """Note an outcome, and show it."""
        self.rows.append((name, outcome, remark))
        sys.stdout.write(f"terraform-check: {outcome:8}{name}{': ' if remark else ''}{remark}\n")
        sys.stdout.flush()

    def close(self) -> int:
        """Print all of it once more, and return the exit code."""
        sys.stdout.write("\nWhat ran, and what could not:\n")
        for name, outcome, remark in self.rows:
            sys.stdout.write(f"  {outcome:8}{name}{f' ({remark})' if remark else ''}\n")
        failed = sum(outcome == FAILED for _, outcome, _ in self.rows)
        left_out = sum(outcome == LEFT_OUT for _, outcome, _ in self.rows)
        passed = len(self.rows) - failed - left_out
        sys.stdout.write(f"terraform-check: {passed} ok, {failed} failed, {left_out} not run\n")
        return 1 if failed else 0


def plugins() -> Path | None:
    """The folder with providers; None leaves it to the registry."""
    named = os.environ.get("TF_PLUGINS")
    found = [Path(named)] if named else sorted(Path("/").glob("tf-plugins"))
    if not found:
        found = sorted(Path("/").glob("*/tf-plugins"))
    return found[0] if found else None


class Checks:
    """The checks, one after the other.

    Attributes:
        report: what came of them.
    """

    def __init__(self, terraform: str, folder: Path) -> None:
        self.report = Report()
        self._terraform = terraform
        self._copy = folder / "terraform"
        self._plugins = plugins()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TF_", "AWS_"))}
        self._env = {**kept, "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1"}
        self._env["TERRAFORM"] = terraform
        if self._plugins:
            self._env["TF_PLUGINS"] = str(self._plugins)
        shutil.copytree(
            ROOT / "terraform", self._copy, ignore=shutil.ignore_patterns(".terraform*")
        )

    def run(self) -> int:
        """All of them; returns the exit code."""
        fmt = [self._terraform, "fmt", "-check", "-recursive", "-diff"]
        self._check("fmt", [*fmt, "terraform", "tests/terraform"], ROOT)
        reached = {where: self._init(where) for where in (*MODULES, *EXAMPLES)}
        for where, reason in reached.items():
            if reason:
                self.report.add(f"validate {where}", LEFT_OUT, reason)
            else:
                command = [self._terraform, "validate", "-no-color"]
                self._check(f"init, validate {where}", command, self._copy / where)
        for where in MODULES:
            if not list((self._copy / where).glob("tests/*.tftest.hcl")):
                continue
            if reached[where]:
                self.report.add(f"test {where}", LEFT_OUT, reached[where])
            else:
                command = [self._terraform, "test", "-no-color"]
                self._check(f"test {where}", command, self._copy / where)
        self._pytest("invariants, names of newest providers, mutations", "not terraform", "")
        if reached["."]:
            self.report.add("statements changed one by one", LEFT_OUT, reached["."])
        else:
            self._pytest("statements changed one by one", "terraform", "statement_mutations")
        self._pytest("policies as rendered, against recorded requests", "terraform", "rendered")
        if reached["."]:
            self.report.add("apply, use, destroy", LEFT_OUT, reached["."])
        else:
            self._pytest("apply, plan, use by the library, destroy (moto)", "terraform", "applied")
        for name in ("metrics, access logs, endpoints", "Pod Identity", "directory bucket"):
            self.report.add(f"apply of {name}", LEFT_OUT, "moto lacks them; see the tests above")
        self.report.add("apply on AWS", LEFT_OUT, "needs an account, which no check has")
        self._checkov()
        return self.report.close()

    def _run(self, command: list[str], where: Path) -> tuple[bool, str]:
        try:
            done = subprocess.run(  # noqa: S603  # commands of this file's own
                command,
                cwd=where,
                env=self._env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=DEADLINE,
            )
        except subprocess.TimeoutExpired:
            return False, f"{command[0]}: not done after {DEADLINE} seconds\n"
        return not done.returncode, done.stdout

    def _check(self, name: str, command: list[str], where: Path) -> None:
        passed, output = self._run(command, where)
        self.report.add(name, OK if passed else FAILED)
        if not passed:
            sys.stdout.write(output)

    def _init(self, where: str) -> str:
        """Why a module's providers cannot be had; empty where they can."""
        command = [self._terraform, "init", "-input=false", "-no-color"]
        if self._plugins:
            command.append(f"-plugin-dir={self._plugins}")
        passed, output = self._run(command, self._copy / where)
        if passed:
            return ""
        if "provider" not in output:
            sys.stdout.write(output)
            self.report.add(f"init {where}", FAILED)
            return "its init failed"
        provider = "aminueza/minio" if where.endswith("minio") else "hashicorp/aws"
        source = self._plugins or "the registry"
        return f"provider {provider} cannot be had from {source}"

    def _pytest(self, name: str, marked: str, chosen: str) -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-m", marked]
        command += ["-o", "faulthandler_timeout=600"]  # the provider waits minutes by itself
        files = f"tests/terraform/test_{chosen}.py" if chosen else "tests/terraform"
        self._check(name, [*command, files], ROOT)

    def _checkov(self) -> None:
        folder = ROOT / "build" / CHECKOV.replace("==", "-")
        program = folder / "bin" / "checkov"
        if not program.exists():
            venv.create(folder, clear=True, with_pip=True)
            pip = [str(folder / "bin/python"), "-m", "pip", "-q", "install", CHECKOV]
            if not self._run(pip, ROOT)[0]:
                shutil.rmtree(folder)
                self.report.add("checkov", LEFT_OUT, f"{CHECKOV} cannot be installed")
                return
        # -I: the user's PYTHONPATH is not for this environment.
        python = [str(folder / "bin/python"), "-I", str(program)]
        command = [*python, "-d", ".", "--config-file", ".checkov.yaml"]
        self._check("checkov", command, self._copy)


def main() -> int:
    """Find Terraform and run the checks."""
    terraform = shutil.which(os.environ.get("TERRAFORM", "terraform"))
    if terraform is None:
        sys.stderr.write(
            "terraform-check: no terraform found; install Terraform 1.9 or later, or name it by "
            "TERRAFORM=/path/to/terraform\n"
        )
        return 1
    with tempfile.TemporaryDirectory() as folder:
        return Checks(terraform, Path(folder)).run()


if __name__ == "__main__":
    sys.exit(main())
