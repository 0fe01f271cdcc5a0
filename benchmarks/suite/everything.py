"""`make bench`: every benchmark of this folder, one after the other, then the summary page.

    PYTHONPATH=benchmarks python -m suite.everything [--quick] [--activations FILE] [NAME ...]

One that fails or takes too long is reported at the end, and the others still run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from suite import setup
from suite.page import publish
from suite.report import ROOT, out_folder

LIMIT_SECONDS = 900
"""The last resort against one that hangs; each says in its first lines how long it takes."""

PAGE = ROOT / "docs" / "reference" / "benchmarks.md"


def benchmarks(names: list[str]) -> list[Path]:
    """The scripts, all or those named."""
    found = sorted((ROOT / "benchmarks").glob("[a-z]*.py"))
    unknown = set(names) - {path.stem for path in found}
    if unknown:
        raise SystemExit(f"no such benchmark: {', '.join(sorted(unknown))}")
    return [path for path in found if not names or path.stem in names]


def takes_quick(script: Path) -> bool:
    """Whether a script has the option `--quick`."""
    text = script.read_text(encoding="utf-8")
    return '"--quick"' in text or "options(" in text


def run(script: Path, *, quick: bool, activations: Path | None) -> str:
    """Run one; returns what went wrong, empty when nothing did."""
    command = [sys.executable, str(script), *(["--quick"] if quick and takes_quick(script) else [])]
    environment = dict(os.environ)
    if activations is not None:
        environment["BENCH_ACTIVATIONS"] = str(activations.absolute())
    print(f"== {script.stem}", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        status = process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # so that it ends its drivers and removes its files
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        return f"not done after {LIMIT_SECONDS} s"
    print(f"== {script.stem}: {time.monotonic() - started:.0f} s", flush=True)
    return f"exit status {status}" if status else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="benchmarks to run (default: all)")
    parser.add_argument("--quick", action="store_true", help="shortened runs")
    parser.add_argument("--activations", type=Path, help="recorded activations; see README.md")
    args = parser.parse_args()
    scripts = benchmarks(args.names)
    setup.install_lmcache()
    wrong = {s.stem: run(s, quick=args.quick, activations=args.activations) for s in scripts}
    # Shortened runs must not replace figures that somebody relies on.
    page = out_folder() / "benchmarks.md" if args.quick else PAGE
    publish(page)
    print("wrote", page)
    for name, reason in wrong.items():
        if reason:
            print(f"FAILED {name}: {reason}")
    sys.exit(any(wrong.values()))


if __name__ == "__main__":
    main()
