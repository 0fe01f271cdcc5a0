#!/usr/bin/env bash
# test_versions.sh VERSION...: the tests that depend on vLLM, under other versions of it.
# Each gets an overlay (see vllm_overlay.sh) in build/vllm-VERSION, which is kept. Then run: the
# connector's border tests, vLLM's V2 wrapper, and a cold and a warm process on one bucket.
#   VENV  the environment of `make setup` (default: .venv)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-.venv}
case $venv in /*) ;; *) venv=$root/$venv ;; esac
export VENV=$venv VLLM_TARGET_DEVICE=cpu REQUIRE_VLLM=1
cd "$root"

border=(
  tests/connector/test_vllm_signatures.py
  tests/connector/test_shell.py
  tests/connector/test_v2_runner.py
  tests/connector/test_modalities.py
  tests/connector/test_encoder.py
)
warm="tests/e2e/test_warm_bucket.py::test_second_process_answers_from_the_bucket_alone"

for version in "$@"; do
  overlay=$root/build/vllm-$version
  "$root/tools/vllm_overlay.sh" "$version" "$overlay"
  left_out=()
  case $version in
    # 0.30 asks connectors for no statistics, and its loaders of videos are others.
    0.30.*) left_out=(-k "not stats and not film and not prometheus") ;;
  esac
  printf '== vLLM %s\n' "$version"
  PYTHONPATH=$overlay "$venv/bin/python" -m pytest -q -p no:randomly -p no:cacheprovider \
    "${left_out[@]}" "${border[@]}"
  PYTHONPATH=$overlay "$venv/bin/python" -m pytest -q -p no:randomly -p no:cacheprovider \
    "$warm[llava-float32]"
done
