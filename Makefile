# ec_s3: `make demo` or `make test` on a fresh machine does all the set-up by itself.
#
#   make demo     a cold and a warm vLLM process on one embedded S3 bucket; "demo: OK" at the end
#   make example-disaggregated  one server encodes, another answers, over HTTP
#   make test     every test but the slow ones, real vLLM included
#   make lint     ruff, mypy, import-linter, file length
#   make bench    the benchmarks against peers and limits; writes docs/reference/benchmarks.md
#   make faults   every failure x role x layout with real vLLM; writes docs/reference/fault-matrix.md
#   make soak     real vLLM under random faults for MINUTES=20
#   make versions  what depends on vLLM, under its other VERSIONS
#   make docs     the documentation     make wheel-check  the wheel in an empty environment
#   make clean    removes what builds and tests left (not the .venv)
#
# Settings: VENV=dir  PYTHON=python3.11  JOBS=n (xdist workers)  ARGS="..." (for the main command)
#           TORCH_INDEX=url  further package index for torch, e.g. one with CPU builds of it

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

ROOT := $(patsubst %/,%,$(dir $(abspath $(lastword $(MAKEFILE_LIST)))))
VENV ?= $(ROOT)/.venv
JOBS ?= 2
MINUTES ?= 20
VERSIONS ?= 0.30.0 0.31.0 0.33.0
ARGS ?=
# Child processes (make, tests, vLLM workers) take the virtual environment's programs first.
BIN := $(if $(filter /%,$(VENV)),$(VENV),$(ROOT)/$(VENV))/bin
RUN := cd "$(ROOT)" && PATH="$(BIN):$$PATH"
MAX_LINES := 400

export PYTHON TORCH_INDEX

.PHONY: help setup demo example-disaggregated test test-fast test-e2e lint bench faults soak versions docs wheel-check clean

help:
	@sed -n '1,/^$$/s/^#//p' "$(ROOT)/Makefile"

setup:
	@"$(ROOT)/tools/setup_env.sh" "$(VENV)"

demo: setup
	@$(RUN) ec-s3 demo $(ARGS)

example-disaggregated: setup
	@$(RUN) python examples/disaggregated/demo.py $(ARGS)

# Two pytest runs: vLLM needs both cores and much memory, so it never shares them with xdist.
test: setup
	@$(MAKE) --no-print-directory -f "$(ROOT)/Makefile" test-fast
	@$(MAKE) --no-print-directory -f "$(ROOT)/Makefile" test-e2e

test-fast: setup
	@$(RUN) pytest -n $(JOBS) -m "not slow and not e2e and not gpu" $(ARGS)

test-e2e: setup
	@$(RUN) REQUIRE_VLLM=1 pytest -p no:randomly -m "e2e and not slow and not gpu" $(ARGS)

lint: setup
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@$(RUN) lint-imports --no-cache
	@$(RUN) find ec_s3 -name '*.py' -exec wc -l {} + | \
	  awk '$$2 != "total" && $$1 > $(MAX_LINES) { print $$2 ": " $$1 " lines, over $(MAX_LINES)"; bad = 1 } \
	       END { exit bad }'

# ARGS="--quick" for 3 minutes instead of 25; ARGS="bucket host" for some; see benchmarks/README.md.
bench: setup
	@$(RUN) PYTHONPATH=benchmarks python -m suite.everything $(ARGS)

# The matrix starts a dozen engines, one after the other; ARGS="-k separate" picks some.
faults: setup
	@$(RUN) REQUIRE_VLLM=1 pytest -p no:randomly -m "not gpu" tests/matrix \
	  --fault-table docs/reference/fault-matrix.md $(ARGS)

soak: setup
	@$(RUN) PYTHONPATH=tests/matrix python tests/matrix/soak.py --minutes $(MINUTES) $(ARGS)

versions: setup
	@$(RUN) VENV="$(VENV)" tools/test_versions.sh $(VERSIONS)

docs: setup
	@$(RUN) mkdocs build --strict $(ARGS)

wheel-check:
	@"$(ROOT)/tools/check_wheel.sh"

clean:
	@cd "$(ROOT)" && rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
