#!/usr/bin/env bash
# check_wheel.sh: build the wheel, install it into an empty virtual environment, and run the
# command and the unit tests from a folder that does not hold the sources.
#   PYTHON       interpreter (default: python3)      TORCH_INDEX  further package index for torch
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
with=(--constraint "$root/requirements/constraints.txt")

"${PYTHON:-python3}" -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip -qq --disable-pip-version-check)
"${pip[@]}" wheel --no-deps --wheel-dir "$work/dist" "$root"
"${pip[@]}" install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "${with[@]}" \
  --requirement "$root/requirements/torch.txt"
wheel=$(echo "$work"/dist/*.whl)
"${pip[@]}" install "${with[@]}" "$wheel[test]"

mkdir "$work/elsewhere"
cp -r "$root"/{tests,docs,pyproject.toml,README.md,mkdocs.yml} "$work/elsewhere/"
cd "$work/elsewhere"
"$work/venv/bin/ec-s3" doctor --help >/dev/null
"$work/venv/bin/python" - <<'PY'
import sys

import ec_s3

heavy = {"torch", "vllm", "aiobotocore", "typer"} & sys.modules.keys()
assert not heavy, f"import ec_s3 loads {heavy}"
assert "elsewhere" not in ec_s3.__file__, ec_s3.__file__
print("installed:", ec_s3.__version__)
PY
"$work/venv/bin/python" -m pytest -q -n 2 -m "not slow and not gpu" tests/unit
